"""How fast a step could be: floating-point operations and bytes from the model's shape, against the device's peaks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.packing import Span, attention_pairs
from rlhf.planning.shapes import ModelShape


@dataclass(frozen=True)
class Peaks:
    """What a device can do: dense bf16 FLOP/s on random data, memory bytes/s, NVLink bytes/s in one direction."""

    flops: float
    bytes_per_s: float
    link_bytes_per_s: float

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes/s of a copy within the device, which reads and writes each byte."""
        return self.bytes_per_s / 2


# Measured matrix rate and copy bandwidth where noted, else the vendor's datasheet. NCCL's broadcast reached 267e9 on an
# H200's link.
DEVICE_PEAKS = {
    "NVIDIA H200": Peaks(790e12, 4.3e12, 450e9),  # the first two measured
    "NVIDIA H100": Peaks(790e12, 3.35e12, 450e9),
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 1.56e12, 300e9),
    "NVIDIA A100": Peaks(312e12, 2.0e12, 300e9),
}


def device_peaks(name: str) -> Peaks | None:
    """The peaks of a device by torch's name for it; None if not in the table."""
    return next((peaks for known, peaks in DEVICE_PEAKS.items() if name.startswith(known)), None)


def weight_bytes(shape: ModelShape, *, bytes_per_value: int = 2) -> int:
    """Bytes of all matrices: what a publish moves, except norms and biases."""
    return bytes_per_value * (shape.matrix_parameters + shape.outer_parameters(lm_head=True))


def forward_flops(shape: ModelShape, spans: Sequence[Span], num_completion_tokens: int) -> float:
    """FLOPs of one forward over packed sequences (Kaplan et al. 2020, section 2.1, with causal attention).

    2 * matrices * tokens + 2 * LM head * completion tokens + 2 * layers * attention_size * sum(length^2), the last sum
    over whole sequences; a shared prompt counts once (``rlhf.packing.Span``).
    """
    return (
        2.0 * shape.matrix_parameters * sum(new for new, _ in spans)
        + 2.0 * shape.embedding_parameters * num_completion_tokens
        + 2.0 * shape.num_layers * shape.attention_size * sum(attention_pairs(*span) for span in spans)
    )


def update_flops(shape: ModelShape, spans: Sequence[Span], num_completion_tokens: int) -> float:
    """FLOPs that a training pass needs: forward, and backward at twice that. Recomputation is overhead, not counted."""
    return 3.0 * forward_flops(shape, spans, num_completion_tokens)


def decode_bytes(
    shape: ModelShape,
    completion_lengths: Sequence[int],
    *,
    num_workers: int,
    max_num_seqs: int,
    bytes_per_value: int = 2,
) -> float:
    """The least that decoding S completions must read: the weights at every step, and every token's own context.

    A completion's first token comes from its prompt's prefill, which is compute-bound and not counted; each later one
    reads the keys and values of the completion before it. The prompt's are left out: a group's members share them, so
    the cache may serve them. Written keys and values, activations and logits are small and left out, too.

    Steps: the sequences are spread evenly over ``num_workers``, so each runs at most min(max_num_seqs, S / workers)
    at once and takes at least tokens / workers / that many steps; the worker with the longest completion takes at least
    its length. All estimates are lower bounds, so a share of the peak computed from them never flatters.
    """
    decoded = [n - 1 for n in completion_lengths]
    at_once = min(max_num_seqs, math.ceil(len(decoded) / num_workers))
    steps_each = math.ceil(sum(decoded) / num_workers / at_once)
    num_steps = max(steps_each, *decoded) + (num_workers - 1) * steps_each
    step_bytes = bytes_per_value * (shape.matrix_parameters + shape.embedding_parameters)
    token_bytes = bytes_per_value * 2 * shape.num_layers * shape.kv_size  # keys and values
    return float(num_steps * step_bytes + token_bytes * sum(n * (n + 1) // 2 for n in decoded))
