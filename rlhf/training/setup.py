"""What an Engine is made of: the process group, DeepSpeed's settings, the optimiser and its schedule."""

import math
from typing import Any

import torch
from torch import nn

from rlhf.config import LearnerConfig, OptimizerConfig, require
from rlhf.models.packed import PackedModel


def init_distributed(device: torch.device, timeout_s: float) -> None:
    """Joins the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe: NCCL on GPU, gloo on CPU."""
    from datetime import timedelta

    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # An op for tensor-parallel inference, which is not used here; building it takes most of a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False, timeout=timedelta(seconds=timeout_s)
    )


def deepspeed_config(config: LearnerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed JSON for a learner. We own the accumulation boundary: any number of backwards, then one step.

    Raises ConfigError if DeepSpeed cannot sum gradients as requested.
    """
    assert config.zero_stage is not None, "the memory plan, or else the actor, has decided it"
    low_precision = dtype == torch.bfloat16
    float32_sums = low_precision and config.float32_gradients
    require(
        not float32_sums or config.can_sum_in_float32,
        f"{config.KEY}.float32_gradients=true: DeepSpeed cannot with a bfloat16 model, {config.KEY}.zero_stage="
        f"{config.zero_stage} and offload={config.offload}; use float32_gradients=null, zero_stage=3, or 1 or 2 with "
        "offload=none or idle",
    )
    to_host = {"device": "cpu", "pin_memory": True}
    offload = {"offload_optimizer": to_host} if config.cpu_optimizer else {}
    if config.offload == "all":
        offload["offload_param"] = to_host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # immediate_grad_update: at stage 1 no second, bfloat16 copy of float32 gradients waits for the step
        "bf16": {"enabled": low_precision, "check_grad_overflow": True, "immediate_grad_update": True},
        # Stage 3 would round buffers to bfloat16 on creation: rotary frequencies, so every angle would be wrong.
        "data_types": {"keep_in_fp32_modules": ["*"]} | ({"grad_accum_dtype": "fp32"} if float32_sums else {}),
        # Stage 1 sends the sums, once a step: in bfloat16 they would be rounded at the very end. Stages 2 and 3 send
        # each micro-batch's gradient before it is added, in bfloat16, as it was computed.
        **({"communication_data_type": "fp32"} if float32_sums and config.zero_stage == 1 else {}),
        "gradient_clipping": config.optimizer.max_grad_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "stage3_param_persistence_threshold": 0,
            # DeepSpeed's linear layer keeps no gathered weight for its backward. A compiled layer keeps none anyway,
            # and traced with it would lose the gradient of its attention.
            "memory_efficient_linear": not config.compile,
            "contiguous_gradients": True,
            **offload,
        },
    }


def gather_by_layer(model: PackedModel) -> dict[str, int]:
    """Makes whole decoder layers the unit in which ZeRO-3 gathers: while one computes, the next one is gathered.

    Returns what DeepSpeed must know for it.
    """
    from deepspeed.utils import set_z3_leaf_module

    layers: Any = model.layers
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return {"stage3_prefetch_bucket_size": max(sum(p.ds_numel for p in layer.parameters()) for layer in layers)}


def make_optimizer(parameters: list[nn.Parameter], config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019): torch's fused one; DeepSpeed's CPU one if the state is offloaded."""
    settings = config.optimizer
    kwargs: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": tuple(settings.betas),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if config.cpu_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, **kwargs)
    return torch.optim.AdamW(parameters, fused=True, **kwargs)


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The learning-rate factor at optimiser step ``step`` (from 0): linear warm-up, then the schedule down to 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
