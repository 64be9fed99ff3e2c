"""Where each weight goes in a live vLLM model: found once by watching the model's own loader, then just copied.

vLLM's ``load_weights`` costs milliseconds of Python per bucket, and its layer-wise reload moves every weight through
extra buffers. Where vLLM keeps weights as loaded (``keeps_weights_as_loaded``), both end in copies from slice to slice
that depend only on names and shapes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.training.weights import Layout, TensorSpec, view_bucket

aten = torch.ops.aten
PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

Copies = list[tuple[Tensor, Tensor]]
"""(slice of a live parameter, slice of a bucket)."""


class UnplannableError(Exception):
    """The model's loader does more than copy slices; its weights have to go through it every time."""


@dataclass(frozen=True)
class _Slice:
    """One copy that the loader made: from elements of a checkpoint's tensor to a slice of a parameter."""

    target: Tensor
    offset: int  # elements, into the tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]


class LoadPlan:
    """Every slice of every tensor of a checkpoint, and the slice of a parameter that it belongs to."""

    def __init__(self, model: nn.Module, load: Callable[[Iterable[tuple[str, Tensor]]], Any], layout: Layout) -> None:
        """Runs ``load`` on tensors without memory; the model's weights do not change.

        Raises UnplannableError if ``load`` does anything but copy slices, or leaves elements of the model unwritten.
        """
        tensors = {
            spec.name: torch.empty(spec.full_shape, dtype=getattr(torch, spec.dtype), device="meta")
            for specs in layout
            for spec in specs
        }
        recorder = _Recorder({_storage(tensor): name for name, tensor in tensors.items()})
        with torch.no_grad(), recorder:
            load(iter(tensors.items()))
        self._slices = recorder.slices
        written = recorder.written
        for name, parameter in model.named_parameters():
            if written.get(_storage(parameter), 0) != parameter.numel():
                raise UnplannableError(
                    f"{name}: the loader writes {written.get(_storage(parameter), 0)} elements of it"
                )
        for spec in (spec for specs in layout for spec in specs if not spec.is_whole):
            row_elements = torch.Size(spec.full_shape[1:]).numel()
            if any(not piece.size or piece.stride[0] != row_elements for piece in self._slices.get(spec.name, ())):
                raise UnplannableError(f"{spec.name} is cut by rows, and the loader does not take it by rows")

    def copies(self, specs: Sequence[TensorSpec], data: Tensor) -> Copies:
        """The copies to make for a bucket stored in ``data`` (uint8)."""
        return [
            copy
            for spec in specs
            for piece in self._slices.get(spec.name, ())
            if (copy := _copy_of(piece, spec, view_bucket(data, spec)))
        ]


def _copy_of(piece: _Slice, spec: TensorSpec, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """The part of a slice that falls in ``rows``, the rows that ``spec`` describes; None if no part does."""
    if spec.is_whole:
        return piece.target, rows.as_strided(piece.size, piece.stride, rows.storage_offset() + piece.offset)
    row_elements = torch.Size(spec.full_shape[1:]).numel()
    row, column = divmod(piece.offset, row_elements)
    first = max(row, spec.first_row)
    last = min(row + piece.size[0], spec.first_row + spec.shape[0])
    if first >= last:
        return None
    offset = rows.storage_offset() + (first - spec.first_row) * row_elements + column
    source = rows.as_strided((last - first, *piece.size[1:]), piece.stride, offset)
    return piece.target.narrow(0, first - row, last - first), source


class _Recorder(TorchDispatchMode):
    """Records copies from known tensors without making them; lets views pass and refuses everything else."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names  # by storage
        self.slices: dict[str, list[_Slice]] = {}
        self.written: dict[int, int] = {}  # elements by storage of the parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            target, source = args[:2]
            name = self._names.get(_storage(source))
            if name is None or target.shape != source.shape:
                raise UnplannableError("the loader transforms a weight before it copies it")
            piece = _Slice(target, source.storage_offset(), tuple(source.shape), source.stride())
            self.slices.setdefault(name, []).append(piece)
        elif func is aten.fill_.Scalar and args[1] == 0:
            (target,) = args[:1]  # padding of the vocabulary, which nothing reads
        elif func.is_view:
            return func(*args, **(kwargs or {}))
        else:
            raise UnplannableError(f"the loader uses {func}")
        self.written[_storage(target)] = self.written.get(_storage(target), 0) + target.numel()
        return target


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def keeps_weights_as_loaded(model: nn.Module) -> bool:
    """Whether vLLM on CUDA neither transforms this model's weights after loading them nor derives others from them.

    True for plain linear layers and embeddings around plain attention; False for anything else that processes its
    weights, such as quantised layers, mixtures of experts or latent attention (MLA).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            return False
        if hasattr(module, "process_weights_after_loading"):
            plain = type(module).__name__ == "Attention" and getattr(module.impl, "sinks", None) is None
            if not plain:
                return False
    return True
