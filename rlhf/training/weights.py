"""The learner's full weights, one bounded bucket at a time; and checksums that prove they arrived.

ZeRO-3 keeps a shard of every parameter on every rank. A gather is collective: all ranks walk the same parameters in the
same order, and only the current bucket exists in full.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.models.nf4 import Nf4Linear

if TYPE_CHECKING:  # vLLM's processes import this module too, and do not need transformers
    from rlhf.models.packed import PackedModel

MODEL_PREFIX = "lm."  # PackedModel's attribute; not part of Hugging Face names
BASE_LAYER = ".base_layer."  # where PEFT puts a layer that it gives an adapter
ADAPTER_SIDES = (".lora_A.", ".lora_B.")  # in the names of an adapter's two matrices, as PEFT saves them
ALIGNMENT = 16  # bytes, for every tensor in a bucket: enough for any dtype
_CHECKSUM_PERIOD = 8191  # prime, so that the checksum's factors do not align with power-of-two layouts


@dataclass(frozen=True)
class TensorSpec:
    """Rows of a tensor (usually all) and their place in a bucket: raw bytes ``[offset, offset + num_bytes)``."""

    name: str
    dtype: str  # torch's name without the prefix, e.g. 'bfloat16'
    shape: tuple[int, ...]  # of the rows in this bucket
    full_shape: tuple[int, ...]  # of the tensor
    first_row: int  # in the tensor's dimension 0
    offset: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full_shape


Layout = list[tuple[TensorSpec, ...]]
"""The tensors of each bucket."""

PlainLayout = list[list[dict[str, Any]]]
"""A Layout as lists and dicts only, which vLLM's processes can send each other."""


def to_plain(layout: Layout) -> PlainLayout:
    return [[asdict(spec) for spec in specs] for specs in layout]


def from_plain(plain: PlainLayout) -> Layout:
    """The inverse of ``to_plain``, even if tuples have become lists on the way."""
    return [tuple(_spec_from_plain(**spec) for spec in specs) for specs in plain]


def _spec_from_plain(*, shape: Sequence[int], full_shape: Sequence[int], **rest: Any) -> TensorSpec:
    return TensorSpec(shape=tuple(shape), full_shape=tuple(full_shape), **rest)


@dataclass(frozen=True)
class Weight:
    """A tensor of the model as all but the learner see it: a parameter, with its layer's adapter added to it."""

    parameter: nn.Parameter
    adapter: tuple[Tensor, Tensor, float] | None = None  # A [r, in], B [out, r], and how often their product counts
    rounded: Nf4Linear | None = None  # whose weight the parameter is, in four bits

    @property
    def shape(self) -> torch.Size:
        if self.rounded is not None:
            return self.rounded.dense_shape
        return getattr(self.parameter, "ds_shape", self.parameter.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype if self.rounded is None else self.rounded.dense_dtype

    @torch.no_grad()
    def gather(self) -> Tensor:
        """All of it, read-only, rounded once. Collective under ZeRO-3."""
        whole = gather(self.parameter) if self.rounded is None else self.rounded.dense()
        if self.adapter is None:
            return whole
        a, b, scale = self.adapter
        return torch.addmm(whole.float(), b.float(), a.float(), alpha=scale).to(whole.dtype)


def named_weights(model: "PackedModel") -> dict[str, Weight]:
    """Every distinct weight by its Hugging Face name, in a fixed order; tied ones appear once."""
    own = {id(matrix) for a, b, _ in model.adapters.values() for matrix in (a, b)}
    rounded = {id(layer.weight): layer for layer in model.modules() if isinstance(layer, Nf4Linear)}
    return {
        name.removeprefix(MODEL_PREFIX).replace(BASE_LAYER, "."): Weight(
            parameter, model.adapters.get(name), rounded.get(id(parameter))
        )
        for name, parameter in model.named_parameters()
        if id(parameter) not in own
    }


def weights_apart(model: "PackedModel") -> dict[str, Weight]:
    """Every distinct weight as it was loaded, in a fixed order, then the two matrices of every adapter."""
    weights = {name: replace(weight, adapter=None) for name, weight in named_weights(model).items()}
    for name, (*matrices, _) in model.adapters.items():
        module, _, rest = name.removeprefix(MODEL_PREFIX).rpartition(BASE_LAYER)
        weights |= {f"{module}{side}{rest}": Weight(m) for side, m in zip(ADAPTER_SIDES, matrices, strict=True)}
    return weights


def is_of_adapter(name: str) -> bool:
    """Whether a weight of ``weights_apart`` is an adapter's."""
    return any(side in name for side in ADAPTER_SIDES)


def first_adapter_bucket(layout: Layout) -> int:
    """The number of leading buckets whose weights never change; 0 if no bucket holds adapters apart."""
    return next((i for i, (spec, *_) in enumerate(layout) if is_of_adapter(spec.name)), 0)


def publish_layout(weights: Mapping[str, Weight], bucket_bytes: int) -> Layout:
    """Buckets for all weights; adapters, if they are apart, begin with one of their own."""
    parts: tuple[dict[str, Weight], ...] = ({}, {})
    for name, weight in weights.items():
        parts[is_of_adapter(name)][name] = weight
    return [bucket for part in parts for bucket in bucket_layout(part, bucket_bytes)]


def bucket_layout(weights: Mapping[str, Weight], bucket_bytes: int) -> Layout:
    """Fills every bucket: a tensor that does not fit the remaining space is split by rows over it and the next.

    No bucket exceeds ``bucket_bytes`` unless a single row does.
    """
    bucket_bytes -= bucket_bytes % ALIGNMENT
    layout: Layout = []
    current: list[TensorSpec] = []
    used = 0
    for name, weight in weights.items():
        full_shape = tuple(weight.shape)
        dtype = str(weight.dtype).removeprefix("torch.")
        num_rows = full_shape[0] if full_shape else 1
        row_bytes = torch.Size(full_shape[1:]).numel() * weight.dtype.itemsize
        first_row = 0
        while first_row < num_rows:
            fitting = (bucket_bytes - used) // row_bytes
            if fitting <= 0 and current:
                layout.append(tuple(current))
                current, used = [], 0
                continue
            rows = min(max(1, fitting), num_rows - first_row)
            shape = (rows, *full_shape[1:]) if full_shape else ()
            current.append(TensorSpec(name, dtype, shape, full_shape, first_row, used, rows * row_bytes))
            used = _aligned(used + rows * row_bytes)
            first_row += rows
    return [*layout, tuple(current)] if current else layout


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def bucket_size(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a bucket, padding included."""
    return _aligned(max(spec.offset + spec.num_bytes for spec in specs))


def view_bucket(data: Tensor, spec: TensorSpec) -> Tensor:
    """The rows that ``spec`` describes, as a view into the bucket's bytes (uint8)."""
    raw = data[spec.offset : spec.offset + spec.num_bytes]
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


@torch.no_grad()
def gather(parameter: nn.Parameter) -> Tensor:
    """The whole parameter, read-only: its own memory if this rank holds all of it. Collective under ZeRO-3.

    DeepSpeed's GatheredParameters would do, but synchronises the whole device for every gather, and rejects parameters
    that a forward has left gathered. The shards are always up to date.
    """
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter.data
    sharded: Any = parameter
    flat, num_ranks = shard.data, dist.get_world_size(sharded.ds_process_group)
    if num_ranks > 1:
        own = flat.to(parameter.device)  # it may be in host memory
        flat = torch.empty(num_ranks * len(own), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(flat, own, group=sharded.ds_process_group)
    return flat[: sharded.ds_numel].view(sharded.ds_shape)


def walk_buckets(
    weights: Mapping[str, Weight], layout: Layout
) -> Iterator[tuple[tuple[TensorSpec, ...], list[Tensor]]]:
    """Yields each bucket's specs with the rows that they describe. Collective under ZeRO-3, to the last bucket.

    The tensors are read-only, and valid until the next iteration, which frees their memory.
    """
    name, whole = "", torch.empty(0)  # a tensor split over several buckets is gathered once
    for specs in layout:
        pieces = []
        for spec in specs:
            if spec.name != name:
                name, whole = spec.name, weights[spec.name].gather()
            pieces.append(whole if spec.is_whole else whole.narrow(0, spec.first_row, spec.shape[0]))
        yield specs, pieces
        pieces.clear()  # the caller's variable still refers to the list


@torch.no_grad()
def pack_bucket(specs: Sequence[TensorSpec], pieces: Sequence[Tensor], data: Tensor) -> Tensor:
    """Copies a bucket's tensors into ``data``'s first bytes (uint8), with zeroed padding; returns those bytes."""
    foreach: Any = torch  # its functions over lists of tensors are not among its stubs
    foreach._foreach_copy_([view_bucket(data, spec) for spec in specs], list(pieces))  # a few kernels for all of them
    for spec in specs:
        end = spec.offset + spec.num_bytes
        if end % ALIGNMENT:
            data[end : _aligned(end)].zero_()
    return data[: bucket_size(specs)]


def checksum(data: Tensor) -> Tensor:
    """A position-sensitive 64-bit sum of a bucket's bytes: int64 [], on their device, without waiting for it.

    The bytes are read as int64 words ``w_i``; the sum is ``sum w_i * (1 + 2 (i mod 8191))``, wrapping. The factors are
    odd, so any change to a single word shows. It detects lost, stale, changed and swapped words; it is not a
    cryptographic hash.
    """
    words = (torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data).view(torch.int64)
    factors = _factors(data.device)
    rows = len(words) // _CHECKSUM_PERIOD
    body, tail = words[: rows * _CHECKSUM_PERIOD], words[rows * _CHECKSUM_PERIOD :]
    columns = body.view(rows, _CHECKSUM_PERIOD).sum(0)
    columns[: len(tail)] += tail
    return (columns * factors).sum()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHECKSUM_PERIOD, 2, device=device)
