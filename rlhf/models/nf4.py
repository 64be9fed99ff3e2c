"""Frozen linear layers in four bits: NF4 (QLoRA: Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes' kernels.

Rounded here, because bitsandbytes' own rounding divides differently on CPUs and GPUs, and learner, reference and
`rlhf export` must have the same base; its layer is not used either, which repacks its weight in place when it scores on
some CPUs. For the same reason scales are not rounded again ("double quantisation", off by default in transformers,
too): the mean that it subtracts depends on the number of threads.
"""

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64  # weights that share a scale, as in the paper
SCALE_BYTES = 4  # float32


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is uint8: the blocks' scales, then two weights in every byte."""

    dense_dtype: torch.dtype  # of the weight that it computes with

    @property
    def dense_shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    def dense(self) -> Tensor:
        """The weight that it computes with, ``[out, in]``."""
        return _dense(self.weight.data, self.dense_shape, self.dense_dtype)

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self.weight, self.bias, self.dense_shape, self.dense_dtype)


class _Linear(torch.autograd.Function):
    """``x W' + b`` that keeps ``W`` in four bits for its backward, and has a gradient for ``x`` alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype = shape, dtype
        return nn.functional.linear(x, _dense(weight, shape, dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient @ _dense(weight, ctx.shape, ctx.dtype), None, None, None, None


def keep_in_4_bits(model: nn.Module, device: torch.device) -> None:
    """Rounds all linear layers of a packed model but its head, one at a time; they then lie on ``device``."""
    for module in model.modules():
        if type(module) is nn.Linear:  # heads have classes of their own
            layer: Any = module
            layer.__class__, layer.dense_dtype = Nf4Linear, layer.weight.dtype
            layer.weight = nn.Parameter(_rounded(layer.weight.data.to(device)), requires_grad=False)


def _rounded(weight: Tensor) -> Tensor:
    """uint8: scales and codes of a tensor. The last block is filled up with zeros."""
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type("nf4", device=weight.device)
    bounds = (values[1:] + values[:-1]) / 2
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK).float()
    scales = blocks.abs().amax(1)
    scaled = blocks * (1.0 / scales.clamp(min=1e-38))[:, None]
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8).flatten()
    return torch.cat([scales.view(torch.uint8), (codes[::2] << 4) | codes[1::2]])


def _dense(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The tensor that ``_rounded`` has kept: ``[*shape]``."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    num_blocks = -(-shape.numel() // BLOCK)
    scales, codes = packed.split([SCALE_BYTES * num_blocks, BLOCK // 2 * num_blocks])
    state = QuantState(
        absmax=scales.view(torch.float32),
        shape=torch.Size((num_blocks, BLOCK)),
        dtype=dtype,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    return dequantize_4bit(codes[:, None], state).flatten()[: shape.numel()].view(shape)
