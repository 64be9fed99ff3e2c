"""From a worker's spec to vLLM's environment and engine arguments. Importing this does not import vLLM."""

from typing import Any

from actors.rollouts.engine import WorkerSpec
from rlhf.config import ADAPTER_RANKS, ALL_LINEAR, LoraConfig
from rlhf.errors import ConfigError
from rlhf.planning.memory import GIB, rollout_memory
from rlhf.planning.shapes import read_shape
from rlhf.planning.topology import Device

CPU_BATCHED_TOKENS = 2048  # per engine step


def worker_env(device: Device) -> dict[str, str]:
    """Environment of a rollout worker's process, set before vLLM is imported."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def engine_args(spec: WorkerSpec) -> dict[str, Any]:
    """vLLM's engine arguments, derived from the configuration; ``rollout.engine_args`` has the last word."""
    from actors.rollouts.vllm_executors import OneProcess, TensorParallel
    from actors.rollouts.vllm_scheduler import SCHEDULER

    config = spec.config
    args: dict[str, Any] = {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": TensorParallel if config.tensor_parallel_size > 1 else OneProcess,
        "seed": spec.seed,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "weight_transfer_config": {"backend": "rlhf"},
        "worker_extension_cls": "actors.weights.vllm_receiver.WorkerExtension",
    }
    if not config.stop:
        args["scheduler_cls"] = SCHEDULER
    if spec.adapter:
        args |= adapter_args(spec.adapter, spec)
    if spec.device == "cpu":
        args |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.cpu_kv_cache_mib << 20,
            "block_size": 32,  # the default of 128 would keep a group from sharing its prompt
            # whole prompts only: after part of one, vLLM rewinds its seeded generator, which it cannot do on a CPU
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, spec.max_model_tokens + config.max_num_seqs),
        }
    else:
        args |= {
            "dtype": "bfloat16" if spec.dtype == "auto" else spec.dtype,
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": share_of_gpu(spec),
            "enable_sleep_mode": spec.colocated,
        }
        if spec.colocated and (cache_bytes := kv_cache_bytes(spec)) is not None:
            args["kv_cache_memory_bytes"] = cache_bytes
    return args | config.engine_args


def share_of_gpu(spec: WorkerSpec) -> float:
    """Of the whole GPU's memory, what one engine takes: its part of what the run may take."""
    permitted = 1.0
    if spec.gpu_memory_gib is not None:
        from vllm.platforms import current_platform

        permitted = min(1.0, spec.gpu_memory_gib * GIB / current_platform.get_device_total_memory())
    return permitted * spec.config.gpu_memory_fraction / spec.workers_on_gpu


def adapter_args(adapter: LoraConfig, spec: WorkerSpec) -> dict[str, Any]:
    """vLLM's arguments for the one adapter that every request is sampled with."""
    from rlhf.models.linear_layers import linear_layers

    targets = [name.rpartition(".")[2] for name in adapter.target_modules]
    if ALL_LINEAR in targets:  # vLLM's own default would give the embedding and the head adapters too, and compute them
        targets = linear_layers(spec.model_path, trust_remote_code=spec.trust_remote_code)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= adapter.r),
        "lora_target_modules": targets,
        "compilation_config": {"cudagraph_specialize_lora": False},  # no request comes without it
    }


def kv_cache_bytes(spec: WorkerSpec) -> int | None:
    """The KV cache size of an engine on a shared GPU; None leaves it to vLLM, which takes all it may.

    It is no larger than the engine's sequences can fill. Several engines on one GPU start at once and could not tell
    their own memory from the others', so they need a known size: raises ConfigError if it is unknown.
    """
    from vllm.platforms import current_platform

    config, cache_bytes = spec.config, 0.0
    if (shape := read_shape(spec.model_path)) is not None:
        cache_bytes = rollout_memory(
            shape,
            budget_bytes=share_of_gpu(spec) * current_platform.get_device_total_memory(),
            tensor_parallel_size=config.tensor_parallel_size,
            element_bytes=4 if spec.dtype == "float32" else 2,
            cache_tokens=config.max_num_seqs * spec.max_model_tokens,
            adapter=spec.adapter,
        ).kv_cache
    if cache_bytes > 0:
        return int(cache_bytes)
    if spec.workers_on_gpu == 1:
        return None
    raise ConfigError(
        f"rollout.num_workers: {spec.workers_on_gpu} workers on one GPU need a model.path of a known shape and a "
        "larger rollout.gpu_memory_fraction; use one worker per GPU"
    )
