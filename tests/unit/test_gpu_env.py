"""What a process is told of its GPU (whether its memory segments may grow, who sees none) and of its network."""

from pathlib import Path

import pytest
import ray

from actors.cluster import ActorCluster
from actors.process_env import gpu_env
from rlhf.planning.topology import Slot
from rlhf.recipes import load_config

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.mark.parametrize("role", ["learner", "critic", "reference", "reward_model"])
def test_expandable_segments(role: str) -> None:
    assert gpu_env(role, 4.0)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in gpu_env("rollout", 4.0)


def test_a_share_of_the_cores_for_the_compiler() -> None:
    assert gpu_env("learner", 4.0)["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    assert gpu_env("learner", 0.5)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


@pytest.mark.parametrize(
    ("slot", "hidden"),
    [
        (Slot("reward", 0, 1.0, 0.0), True),
        (Slot("shared", 0, 1.0, 0.1), False),
        (Slot("shared-0", 0, 1.0, 0.0, spans=(0, 1)), False),  # a tensor-parallel engine on the learner's GPUs
    ],
)
def test_who_asks_for_no_gpu_sees_none(slot: Slot, hidden: bool) -> None:
    cluster = object.__new__(ActorCluster)
    cluster._config, cluster.device = load_config(CONF / "grpo_tiny.yaml"), "gpu"
    env = cluster._env("reward", slot)
    assert (env.get("CUDA_VISIBLE_DEVICES") == "") == hidden


@pytest.mark.parametrize(("address", "told"), [("127.0.0.1", ["lo", "=lo", "127.0.0.1"]), ("10.0.0.1", [None] * 3)])
def test_collectives_and_vllm_stay_on_the_loopback_interface_of_a_local_run(
    monkeypatch: pytest.MonkeyPatch, address: str, told: list[str | None]
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    cluster = object.__new__(ActorCluster)
    cluster._config, cluster.device = load_config(CONF / "grpo_tiny.yaml"), "cpu"
    env = cluster._env("learner", Slot("learner", 0, 1.0, 0.0))
    assert [env.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")] == told
