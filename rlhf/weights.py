"""The learner's weights, whole, a bounded bucket at a time; and checksums that prove they arrived.

ZeRO-3 keeps a shard of every parameter on every rank. A gather is collective: all ranks walk the same parameters in the
same order, and only the buckets in flight exist whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf.models import PackedModel

MODEL_PREFIX = "lm."  # PackedModel's attribute; not part of a Hugging Face name
_CHECKSUM_PERIOD = 8191  # prime, so that weights of the checksum do not align with power-of-two layouts


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's place in a bucket: raw bytes ``[offset, offset + num_bytes)``."""

    name: str
    dtype: str  # torch's name without the prefix, e.g. 'bfloat16'
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters as one flat byte buffer."""

    specs: tuple[TensorSpec, ...]
    data: Tensor  # uint8 [num_bytes]


def named_parameters(model: PackedModel) -> list[tuple[str, nn.Parameter]]:
    """Every distinct parameter with its Hugging Face name, in a fixed order; tied weights appear once."""
    return [(name.removeprefix(MODEL_PREFIX), p) for name, p in model.named_parameters()]


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def bucket_layout(model: PackedModel, bucket_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Which parameter lies where in which bucket. No bucket exceeds ``bucket_bytes`` unless one tensor does."""
    layout: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    used = 0
    for name, parameter in named_parameters(model):
        shape = _full_shape(parameter)
        num_bytes = shape.numel() * parameter.element_size()
        if current and used + num_bytes > bucket_bytes:
            layout.append(tuple(current))
            current, used = [], 0
        current.append(TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(shape), used, num_bytes))
        used += -(-num_bytes // 16) * 16  # aligned for any dtype
    layout.append(tuple(current))
    return layout


def bucket_size(specs: tuple[TensorSpec, ...]) -> int:
    """Bytes of a bucket, padding between tensors included."""
    return max(spec.offset + spec.num_bytes for spec in specs)


@torch.no_grad()
def gathered_buckets(model: PackedModel, bucket_bytes: int, *, materialise: bool) -> Iterator[Bucket | None]:
    """Yields the weights bucket by bucket. Collective over all ranks.

    Ranks with ``materialise=False`` take part in the gathers and yield None. A yielded buffer is never written again.
    """
    import deepspeed

    parameters = dict(named_parameters(model))
    for specs in bucket_layout(model, bucket_bytes):
        members = [parameters[spec.name] for spec in specs]
        with deepspeed.zero.GatheredParameters(members, modifier_rank=None):
            if not materialise:
                yield None
                continue
            data = torch.zeros(bucket_size(specs), dtype=torch.uint8, device=members[0].device)
            for spec, parameter in zip(specs, members, strict=True):
                view_bucket(data, spec).copy_(parameter.data)
        yield Bucket(specs, data)


def view_bucket(data: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor that ``spec`` describes, as a view into the bucket's bytes."""
    raw = data[spec.offset : spec.offset + spec.num_bytes]
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


def checksum(data: Tensor) -> int:
    """A position-sensitive 64-bit sum of a bucket's bytes, computed on its device.

    The bytes are read as int32 words ``w_i``; the sum is ``sum w_i * (1 + i mod 8191)``, wrapping. It notices lost,
    stale, changed and swapped words; it is not a cryptographic hash.
    """
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    rows = len(words) // _CHECKSUM_PERIOD
    factors = torch.arange(1, _CHECKSUM_PERIOD + 1, device=data.device)
    body = words[: rows * _CHECKSUM_PERIOD].view(rows, _CHECKSUM_PERIOD)
    total += (body.sum(0, dtype=torch.int64) * factors).sum()
    tail = words[rows * _CHECKSUM_PERIOD :]
    total += (tail.long() * factors[: len(tail)]).sum()
    return int(total)


def gathered_state_dict(model: PackedModel) -> dict[str, Tensor] | None:
    """The whole model on rank 0's CPU, by Hugging Face name, tied weights under each of their names; None elsewhere."""
    rank0 = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    state: dict[str, Tensor] = {}
    for bucket in gathered_buckets(model, 1 << 28, materialise=rank0):
        if bucket is not None:
            data = bucket.data.cpu()
            state |= {spec.name: view_bucket(data, spec).clone() for spec in bucket.specs}
    if not rank0:
        return None
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        short = name.removeprefix(MODEL_PREFIX)
        owner = first_name.setdefault(id(parameter), short)
        state.setdefault(short, state[owner])
    return state
