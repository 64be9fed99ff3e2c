"""Attention over packed sequences: causal within each span, with the windows and soft caps of the model families.

Registered with transformers as a separate attention implementation. Models pass by keyword what they need in addition
to queries, keys and values; keywords that this implementation does not know are rejected, never ignored.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlhf.errors import ConfigError

PACKED_ATTENTION = "rlhf_packed"
FLASH_HEAD_SIZE = 256  # the widest head that the variable-length kernel supports

# Keywords without effect here: models pass them for other implementations, or for the cache.
IGNORED = frozenset(
    {
        *("is_causal", "use_cache", "past_key_values", "cache_position", "position_ids", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_type"),
        *("num_items_in_batch", "labels", "input_ids", "inputs_embeds", "shared_kv_states"),
    }
)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    attended: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each span of a packed row: q ``[1, heads, T, d]``, k and v ``[1, kv_heads, T, d]``.

    A span's last token attends to all of the span's keys, the token before it to one fewer, and so on; with
    ``sliding_window`` W, only to the last W of these, itself included. ``softcap`` c bounds the scores:
    ``c tanh(s / c)`` (Gemma 2, arXiv 2408.00118, section 2). CUDA: one variable-length kernel; soft caps and heads that
    it does not support run span by span, as on CPU. Returns ``[1, T, heads, d_v]``, as transformers expects.

    Raises ConfigError if the model needs anything else.
    """
    assert attention_mask is None, "transformers makes no mask for an implementation that it has none for"
    assert dropout == 0, "dropout is switched off at load"
    _refuse_unknown(module, kwargs)
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ConfigError(
            f"model.path: {type(module).__name__} is not told where packed sequences begin; use a model of another "
            "family (docs/models.md)"
        )
    if attended is not None:  # gradients of a prompt's copies are summed in float32
        key, value = (t.float().index_select(2, attended).to(t.dtype) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    same_width = query.shape[-1] == value.shape[-1]
    if query.is_cuda and softcap is None and same_width and query.shape[-1] <= FLASH_HEAD_SIZE:
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _variable_length(query, key, value, *lengths, scale=scale, window=sliding_window)[None], None
    pieces = []
    for (a, b), (c, d) in zip(_slices(cu_seq_lens_q), _slices(cu_seq_lens_k), strict=True):
        span = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
        if softcap is None:
            pieces.append(_plain(*span, scale=scale, window=sliding_window))
        else:  # recomputed in the backward pass: whole score matrices of all spans would not fit
            pieces.append(checkpoint(_soft_capped, *span, scale, sliding_window, softcap, use_reentrant=False))
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    unknown = [name for name, value in kwargs.items() if value is not None and name not in IGNORED]
    if unknown or not getattr(module, "is_causal", True):
        what = f"an attention with {', '.join(unknown)}" if unknown else "an attention that is not causal"
        raise ConfigError(
            f"model.path: {type(module).__name__} uses {what}, which packed training does not know; use a model of "
            "another family (docs/models.md)"
        )


def _variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    key_borders: Tensor,
    max_length: int,
    max_keys: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """``[T, heads, d]``: all spans in one kernel (FlashAttention-2, arXiv 2307.08691).

    torch's own operator rather than ``torch.nn.attention.varlen``, which in 2.11 knows no grouped queries: every
    key-value head would be copied for each of its queries. Causal: nothing to the right, aligned at the spans' ends.
    """
    output, *_ = torch.ops.aten._flash_attention_forward(
        *(t[0].transpose(0, 1) for t in (query, key, value)),
        borders,
        key_borders,
        max_length,
        max_keys,
        0.0,  # dropout
        False,  # causal by its window, whatever the numbers of queries and keys
        False,  # no debugging mask
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return output


def _plain(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None) -> Tensor:
    """One span with torch's attention: ``[1, heads, n, d_v]``."""
    num_tokens, num_keys = query.shape[2], key.shape[2]
    whole = num_tokens == num_keys and (window is None or window >= num_keys)
    mask = None if whole else visible(num_tokens, num_keys, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=whole, scale=scale, enable_gqa=True)


def _soft_capped(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float) -> Tensor:
    """One span with bounded scores, for which torch has no kernel. The softmax runs in float32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * scale / softcap)
    scores = scores.masked_fill(~visible(query.shape[2], key.shape[2], window, query.device), -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def visible(num_tokens: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [num_tokens, num_keys]: which keys each token of a span sees; the last token is at the last key."""
    keys = torch.arange(num_keys, device=device)
    own = keys[num_keys - num_tokens :, None]
    seen = keys <= own
    return seen if window is None else seen & (keys > own - window)


def _slices(borders: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(borders.tolist()))


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
