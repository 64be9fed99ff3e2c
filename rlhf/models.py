"""Models over packed sequences: loading, attention that respects sequence borders, and log-probabilities in chunks.

A packed forward takes all tokens of a micro-batch as one row ``[1, T]`` without padding. Attention never crosses a
sequence border, positions restart at each, and vocabulary-sized logits exist for some hundred tokens at a time only.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf.batch import TrainBatch, to_device
from rlhf.errors import ConfigError
from rlhf.packing import Unit, whole_groups

PACKED_ATTENTION = "rlhf_packed"


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on its device: spans of tokens, each attending to its own and perhaps to a prompt before it.

    T tokens, B spans, N completion tokens. A span is a whole sequence; or, where sequences share their prompt, the
    prompt, or a completion that attends to it.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], within each sequence
    borders: Tensor  # int32 [B + 1], where spans start; the last entry is T
    key_borders: Tensor  # int32 [B + 1], the same of what they attend to
    max_length: int
    max_keys: int
    predictors: Tensor  # int64 [N]: the position whose hidden state predicts each completion token
    targets: Tensor  # int64 [N]: the completion tokens themselves
    attended: Tensor | None  # int64 [K]: the tokens that the spans attend to, one span after the other; None: its own


def packed_inputs(batch: TrainBatch, device: torch.device, *, share_prompts: bool = False) -> PackedInputs:
    """The model inputs of a packed batch. ``share_prompts``: neighbours with the same prompt compute it once."""
    groups = whole_groups(batch, share_prompts=share_prompts)
    lengths, indices = batch.sequence_lengths, torch.arange(batch.num_sequences)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(len(batch.tokens)) - starts.repeat_interleave(lengths)
    is_completion = positions >= batch.prompt_lengths.repeat_interleave(lengths)
    completion = is_completion.nonzero(as_tuple=True)[0]

    # The first of a group computes the prompt. place: where each token of the whole sequences is computed.
    first = torch.tensor([group.members.start for group in groups for _ in group.members])
    own = is_completion | (first == indices).repeat_interleave(lengths)
    place = own.cumsum(0) - 1
    place[~own] = place[(starts[first].repeat_interleave(lengths) + positions)[~own]]

    spans = [span for group in groups for span in group.spans]
    num_tokens, num_keys = torch.tensor(spans).unbind(1)
    shared = len(spans) > len(groups)
    parts = [
        batch.tokens[own],
        positions[own],
        F.pad(num_tokens.cumsum(0), (1, 0)),
        F.pad(num_keys.cumsum(0), (1, 0)),
        place[completion - 1],
        batch.tokens[completion],
        _attended(batch, groups, place) if shared else place[:0],
    ]
    whole = to_device(torch.cat(parts), device)  # in one copy
    tokens, own_positions, borders, key_borders, predictors, targets, attended = whole.split([len(p) for p in parts])
    return PackedInputs(
        tokens=tokens,
        positions=own_positions,
        borders=borders.int(),
        key_borders=key_borders.int(),
        max_length=int(num_tokens.max()),
        max_keys=int(num_keys.max()),
        predictors=predictors,
        targets=targets,
        attended=attended if shared else None,
    )


def _attended(batch: TrainBatch, groups: Sequence[Unit], place: Tensor) -> Tensor:
    """What the spans attend to: a whole sequence each, and before those of a group with a shared prompt the prompt."""
    sequences = place.split(batch.sequence_lengths.tolist())
    found = []
    for group in groups:
        if len(group.members) > 1:
            found.append(sequences[group.members.start][: batch.prompt_lengths[group.members.start]])
        found += sequences[group.members.start : group.members.stop]
    return torch.cat(found)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    attended: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each span of a packed row: q ``[1, heads, T, d]``, k and v ``[1, kv_heads, T, d]``.

    A span's last token sees all that the span attends to, the token before it one less, and so on. CUDA: one
    variable-length kernel. CPU: one exact call per span (block-diagonal, and no work off the diagonal). Returns
    ``[1, T, heads, d]`` as transformers expects it.
    """
    if attended is not None:  # the gradients of a prompt's copies add up in float32
        key, value = (t.float().index_select(2, attended).to(t.dtype) for t in (key, value))
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 has no grouped queries here: every key-value head is repeated, while it is laid out anew anyway
        repeats = query.shape[1] // key.shape[1]
        q = query[0].transpose(0, 1).contiguous()
        k, v = (_repeat_heads(t[0].transpose(0, 1), repeats) for t in (key, value))
        out = varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, window_size=(-1, 0), scale=scaling
        )
        assert isinstance(out, Tensor)
        return out[None], None
    pieces = []
    for (a, b), (c, d) in zip(_slices(cu_seq_lens_q), _slices(cu_seq_lens_k), strict=True):
        whole = b - a == d - c
        mask = None if whole else torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        q, k, v = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
        pieces.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scaling, enable_gqa=True))
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _repeat_heads(packed: Tensor, repeats: int) -> Tensor:
    """[T, heads, d] -> [T, heads x repeats, d], contiguous, each head's copies side by side; one pass over memory."""
    tokens, heads, width = packed.shape
    return packed[:, :, None].expand(tokens, heads, repeats, width).reshape(tokens, heads * repeats, width).contiguous()


def _slices(borders: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(borders.tolist()))


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] -> log-probability of the targets, entropy, and log normaliser, float32 [n]."""
    z = logits.float() / temperature
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
    temperature: float,
) -> Tensor:
    """The gradient of a chunk's logits [n, V], in their dtype.

    With ``p = softmax(z)``: ``d logp_t / dz = onehot(t) - p`` and ``dH / dz = -p (log p + H)``.
    """
    log_p = logits.float() / temperature - norm[:, None]
    at_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    own = torch.where(at_target, grad_logprobs[:, None], 0.0)
    rest = grad_logprobs[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    return ((own - log_p.exp() * rest) / temperature).to(logits.dtype)


@functools.cache
def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU, one kernel for what would be a dozen passes over vocabulary-sized tensors."""
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax at the targets, and entropy, of ``hidden @ weight.T / temperature``, without whole logits.

    Forward keeps hidden states, one normaliser and one entropy per token; backward recomputes each chunk's logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        score = _fused(_score_chunk, hidden.device.type)
        parts = [score(hidden[part] @ weight.T, targets[part], temperature) for part in _chunks(len(hidden), chunk)]
        logprobs, entropy, norm = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, norm, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, norm, entropy = ctx.saved_tensors
        gradient = _fused(_logits_gradient, hidden.device.type)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(len(hidden), ctx.chunk):
            per_token = (x[part] for x in (targets, norm, entropy, *grads))
            grad_logits = gradient(hidden[part] @ weight.T, *per_token, ctx.temperature)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


class LogprobHead(nn.Linear):
    """An LM head that gives log-probabilities instead of logits.

    It stays the module that owns the weight, so ZeRO-3's hooks gather it exactly while it is used.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """hidden ``[N, H]``, targets int64 ``[N]`` -> (log-probabilities, entropy), float32 ``[N]``, nats."""
        assert self.bias is None, "LM heads with a bias are refused at load"
        return _ChunkedLogprobs.apply(hidden, self.weight, targets, temperature, chunk)  # type: ignore[return-value]


class PackedModel(nn.Module):
    """A Hugging Face model run over packed sequences."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def compile_layers(self) -> None:
        """Fuses the element-wise work of each decoder layer. Not under ZeRO-3, whose hooks would cut it to pieces."""
        for layer in getattr(self.lm, self.lm.base_model_prefix).layers:
            layer.compile(dynamic=True)

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """The last hidden states, ``[T, H]``."""
        backbone = getattr(self.lm, self.lm.base_model_prefix)
        output = backbone(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            cu_seq_lens_q=inputs.borders,
            cu_seq_lens_k=inputs.key_borders,
            max_length_q=inputs.max_length,
            max_length_k=inputs.max_keys,
            attended=inputs.attended,
        )
        return output.last_hidden_state[0]


class PolicyModel(PackedModel):
    """Scores completion tokens with their log-probabilities under the sampling temperature."""

    def __init__(self, lm: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__(lm)
        self.temperature, self.chunk_tokens = temperature, chunk_tokens
        head = lm.get_output_embeddings()
        shaped = {k: v for k in ("final_logit_softcapping", "logit_scale") if (v := getattr(lm.config, k, None))}
        if not isinstance(head, nn.Linear) or head.bias is not None or shaped:
            raise ConfigError(
                f"model.path: {type(lm).__name__} has an LM head that is not a plain linear layer "
                f"({shaped or 'bias'}); Llama-, Qwen- and Mistral-shaped models work"
            )
        head.__class__ = LogprobHead

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropy) of the completion tokens, float32 ``[N]``, nats."""
        hidden = self.hidden(inputs)[inputs.predictors]
        head = self.lm.get_output_embeddings()
        assert isinstance(head, LogprobHead)
        return head(hidden, inputs.targets, self.temperature, self.chunk_tokens)


class ScalarModel(PackedModel):
    """A sequence-classification model with one label: the critic, and the reward model in training."""

    def forward(self, inputs: PackedInputs) -> Tensor:
        """float32 ``[N]``: the score at the position that predicts each completion token.

        For a critic that is the value of the state in which the token is chosen.
        """
        head = self.lm.score
        assert isinstance(head, nn.Linear)
        return head(self.hidden(inputs)[inputs.predictors])[:, 0].float()


def load_policy(
    path: str, *, dtype: torch.dtype, temperature: float, chunk_tokens: int, trust_remote_code: bool = False
) -> PolicyModel:
    """A causal LM for packed scoring. Raises ConfigError when its LM head is not a plain linear layer."""
    lm = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code
    )
    return PolicyModel(lm, temperature=temperature, chunk_tokens=chunk_tokens)


def load_scalar(
    path: str, *, dtype: torch.dtype, zero_fresh_head: bool = False, trust_remote_code: bool = False
) -> ScalarModel:
    """A one-label sequence classifier from a directory of that kind, or with a fresh head from a causal LM's.

    ``zero_fresh_head``: a fresh head says 0 everywhere, and so does a critic that knows nothing yet: random values
    would only be noise in the first advantages (Huang et al. 2024, arXiv 2403.17031; OpenAI's lm-human-preferences).
    """
    lm, loading = AutoModelForSequenceClassification.from_pretrained(
        path,
        dtype=dtype,
        num_labels=1,
        attn_implementation=PACKED_ATTENTION,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if zero_fresh_head and any(name.startswith("score.") for name in loading["missing_keys"]):
        for parameter in lm.score.parameters():
            getattr(parameter, "ds_tensor", parameter).data.zero_()  # under ZeRO-3 this rank holds a shard
    return ScalarModel(lm)
