"""How fast a step could be: floating-point operations and bytes from the model's shape, against the device's peaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peaks:
    """What a device can do: dense bf16 FLOP/s on random data, and memory bytes/s."""

    flops: float
    bytes_per_s: float


# Measured matrix rate and copy bandwidth where noted, else the vendor's datasheet.
DEVICE_PEAKS = {
    "NVIDIA H200": Peaks(790e12, 4.3e12),  # measured
    "NVIDIA H100": Peaks(790e12, 3.35e12),
    "NVIDIA A100": Peaks(312e12, 2.0e12),
}


def device_peaks(name: str) -> Peaks | None:
    """The peaks of a device by torch's name for it; None where nobody has looked them up."""
    return next((peaks for known, peaks in DEVICE_PEAKS.items() if name.startswith(known)), None)


@dataclass(frozen=True)
class ModelShape:
    """What FLOPs and bytes follow from."""

    num_layers: int
    hidden_size: int
    attention_size: int  # heads x head width
    kv_size: int  # key-value heads x head width
    body_parameters: int  # in the layers' matrices: every token passes through them
    head_parameters: int  # in the LM head: only completion tokens pass through it


def shape_of(config: Any) -> ModelShape:
    """The shape of a Llama-like model from its Hugging Face configuration."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = (getattr(config, "num_key_value_heads", None) or heads) * width
    per_layer = 2 * config.hidden_size * (heads * width + kv) + 3 * config.hidden_size * config.intermediate_size
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        attention_size=heads * width,
        kv_size=kv,
        body_parameters=per_layer * config.num_hidden_layers,
        head_parameters=config.vocab_size * config.hidden_size,
    )


def forward_flops(shape: ModelShape, lengths: Sequence[int], num_completion_tokens: int) -> float:
    """FLOPs of one forward over packed sequences (Kaplan et al. 2020, section 2.1, with causal attention).

    2 * body * tokens + 2 * head * completion tokens + 2 * layers * attention_size * sum(length^2)
    """
    return (
        2.0 * shape.body_parameters * sum(lengths)
        + 2.0 * shape.head_parameters * num_completion_tokens
        + 2.0 * shape.num_layers * shape.attention_size * sum(n * n for n in lengths)
    )


def update_flops(shape: ModelShape, lengths: Sequence[int], num_completion_tokens: int) -> float:
    """FLOPs that a training pass needs: forward, and backward at twice that. Recomputation is overhead, not counted."""
    return 3.0 * forward_flops(shape, lengths, num_completion_tokens)
