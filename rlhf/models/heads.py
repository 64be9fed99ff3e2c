"""Heads over hidden states: an LM head that gives log-probabilities in chunks, and a scalar one in float32.

Logits are as wide as the vocabulary, so they exist for only a few hundred tokens at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.models.families import LogitShape


def _shaped(logits: Tensor, shape: LogitShape, temperature: float) -> tuple[Tensor, Tensor | None]:
    """The softmax's input for an LM head's output, float32; and the soft cap's derivative there, None without a cap."""
    z = logits.float() * shape.scale
    if shape.softcap is None:
        return z / temperature, None
    bounded = torch.tanh(z / shape.softcap)
    return shape.softcap * bounded / temperature, 1 - bounded.square()


def _score_chunk(
    logits: Tensor, targets: Tensor, shape: LogitShape, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] -> log-probability of the targets, entropy, and log normaliser, float32 [n]."""
    z, _ = _shaped(logits, shape, temperature)
    norm = z.logsumexp(-1)
    entropy = norm - ((z - norm[:, None]).exp() * z).sum(-1)
    return z.gather(-1, targets[:, None])[:, 0] - norm, entropy, norm


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    norm: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    shape: LogitShape,
    temperature: float,
) -> Tensor:
    """The gradient for a chunk's logits [n, V], in their dtype.

    With ``p = softmax(z)``: ``d logp_t / dz = onehot(t) - p`` and ``dH / dz = -p (log p + H)``.
    """
    z, derivative = _shaped(logits, shape, temperature)
    log_p = z - norm[:, None]
    at_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    own = torch.where(at_target, grad_logprobs[:, None], 0.0)
    rest = grad_logprobs[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    gradient = (own - log_p.exp() * rest) * (shape.scale / temperature)
    return (gradient if derivative is None else gradient * derivative).to(logits.dtype)


@functools.cache
def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU, one kernel instead of a dozen passes over vocabulary-sized tensors."""
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax at the targets, and entropy, of an LM head over hidden states, without the full logits.

    Forward keeps the hidden states, one normaliser and one entropy per token; backward recomputes each chunk's logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: LogitShape,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        score = _fused(_score_chunk, hidden.device.type)
        parts = [
            score(F.linear(hidden[part], weight, bias), targets[part], shape, temperature)
            for part in _chunks(len(hidden), chunk)
        ]
        logprobs, entropy, norm = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropy)
        ctx.shape, ctx.temperature, ctx.chunk = shape, temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norm, entropy = ctx.saved_tensors
        gradient = _fused(_logits_gradient, hidden.device.type)
        grad_hidden = torch.empty_like(hidden)
        trains_weight = ctx.needs_input_grad[1]  # not if it is frozen
        grad_weight = torch.zeros(weight.shape if trains_weight else 0, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for part in _chunks(len(hidden), ctx.chunk):
            per_token = (x[part] for x in (targets, norm, entropy, *grads))
            grad_logits = gradient(F.linear(hidden[part], weight, bias), *per_token, ctx.shape, ctx.temperature)
            grad_hidden[part] = grad_logits @ weight
            if trains_weight:
                grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype) if trains_weight else None, grad_bias, None, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


class LogprobHead(nn.Linear):
    """An LM head that gives log-probabilities instead of logits.

    It remains the module that owns the weight, so ZeRO-3's hooks gather it only while it is used.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor, shape: LogitShape, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """hidden ``[N, H]``, targets int64 ``[N]`` -> (log-probabilities, entropy), float32 ``[N]``, nats."""
        return _ChunkedLogprobs.apply(hidden, self.weight, self.bias, targets, shape, temperature, chunk)  # type: ignore[return-value]


class ScalarHead(nn.Linear):
    """A score head that computes in float32 whatever its weights' dtype: each score is a sum of thousands of terms."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H]`` -> float32 ``[..., 1]``."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())
