"""Environment variables of our actors' processes: what must be set before they import anything."""

import os
from pathlib import Path

from rlhf.planning.topology import Device

PROJECT_ROOT = Path(__file__).resolve().parent.parent
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
    "PYTHONWARNINGS": "ignore",
}
LOOPBACK = "127.0.0.1"  # the address of a local run's only node, which nobody outside of the machine can connect to
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": LOOPBACK}


def actor_env(run: str, role: str, device: Device, num_cpus: float) -> dict[str, str]:
    """Quiet libraries, a share of CPU threads and, on CPU, no visible GPU."""
    path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = QUIET | {"RLHF_RUN": run, "PYTHONPATH": path, "OMP_NUM_THREADS": str(max(1, int(num_cpus)))}
    if device == "cpu":
        return env | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return env | gpu_env(role, num_cpus)


def gpu_env(role: str, num_cpus: float) -> dict[str, str]:
    """What an actor on a GPU needs in its environment before torch is imported."""
    # By default torch.compile starts about one worker process per core; vLLM needs those cores.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, int(num_cpus)))}
    if role != "rollout":
        # Less fragmentation from blocks of ragged sizes. Not for engines: vLLM's sleep mode does not support it.
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env
