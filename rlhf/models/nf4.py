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
        return _linear(input, self.weight, self.bias, self.out_features)


# Operators of their own, because torch.compile would otherwise see that forward and backward make the same dense
# weight, and keep that in between: 15 GB at 7B.


@torch.library.custom_op("rlhf::nf4_linear", mutates_args=())
def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """``x W' + b``, which keeps ``W`` in four bits for its backward, and has a gradient for ``x`` alone."""
    return nn.functional.linear(x, _dense(packed, torch.Size((num_outputs, x.shape[-1])), x.dtype), bias)


@torch.library.custom_op("rlhf::nf4_linear_gradient", mutates_args=())
def _linear_gradient(gradient: Tensor, packed: Tensor, num_inputs: int) -> Tensor:
    """``gradient W``."""
    return gradient @ _dense(packed, torch.Size((gradient.shape[-1], num_inputs)), gradient.dtype)


@_linear.register_fake
def _(x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


@_linear_gradient.register_fake
def _(gradient: Tensor, packed: Tensor, num_inputs: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], num_inputs)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, int], output: Tensor) -> None:
    x, packed, *_ = inputs
    ctx.save_for_backward(packed)
    ctx.num_inputs = x.shape[-1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (packed,) = ctx.saved_tensors
    return _linear_gradient(gradient, packed, ctx.num_inputs), None, None, None


_linear.register_autograd(_backward, setup_context=_keep)


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
