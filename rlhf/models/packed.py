"""Models over packed sequences: loading, inputs, and log-probabilities in chunks.

A packed forward takes all tokens of a micro-batch as one row ``[1, T]`` without padding. Attention never crosses a
sequence border, positions restart at each, and vocabulary-sized logits exist for some hundred tokens at a time only.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf.batch import TrainBatch, to_device
from rlhf.errors import ConfigError
from rlhf.models.attention import PACKED_ATTENTION
from rlhf.models.families import Adjusted, LogitShape, load_model_config
from rlhf.packing import Unit, whole_groups


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


@dataclass(frozen=True)
class WholeSequence:
    """One sequence by itself, for a model as it was loaded (``PackedModel.as_loaded``): int64 ``[L]``."""

    tokens: Tensor


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


def _shaped(logits: Tensor, shape: LogitShape, temperature: float) -> tuple[Tensor, Tensor | None]:
    """What the softmax gets of an LM head's output, float32; and the soft cap's derivative there, None without one."""
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
    """The gradient of a chunk's logits [n, V], in their dtype.

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
    """On a GPU, one kernel for what would be a dozen passes over vocabulary-sized tensors."""
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax at the targets, and entropy, of what an LM head makes of hidden states, without whole logits.

    Forward keeps hidden states, one normaliser and one entropy per token; backward recomputes each chunk's logits.
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
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for part in _chunks(len(hidden), ctx.chunk):
            per_token = (x[part] for x in (targets, norm, entropy, *grads))
            grad_logits = gradient(F.linear(hidden[part], weight, bias), *per_token, ctx.shape, ctx.temperature)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


class LogprobHead(nn.Linear):
    """An LM head that gives log-probabilities instead of logits.

    It stays the module that owns the weight, so ZeRO-3's hooks gather it exactly while it is used.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor, shape: LogitShape, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """hidden ``[N, H]``, targets int64 ``[N]`` -> (log-probabilities, entropy), float32 ``[N]``, nats."""
        return _ChunkedLogprobs.apply(hidden, self.weight, self.bias, targets, shape, temperature, chunk)  # type: ignore[return-value]


class ScalarHead(nn.Linear):
    """A score head that computes in float32 whatever its weights are: one number is a sum over thousands."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H]`` -> float32 ``[..., 1]``."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class PackedModel(nn.Module):
    """A Hugging Face model run over packed sequences."""

    def __init__(self, lm: PreTrainedModel, original: dict[str, Any] | None = None) -> None:
        """``original``: what keys of ``lm.config`` said that were adjusted for training (``rlhf.models.families``)."""
        super().__init__()
        self.lm, self._original = lm, original or {}

    @property
    def backbone(self) -> nn.Module:
        """The model below its head."""
        return getattr(self.lm, self.lm.base_model_prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, whatever their family calls them."""
        lists = [module for module in self.backbone.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len)

    def compile_layers(self) -> None:
        """Fuses the element-wise work of each decoder layer. Not under ZeRO-3, whose hooks would cut it to pieces."""
        for layer in self.layers:
            layer.compile(dynamic=True)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """transformers' own eager attention: meanwhile the model takes a WholeSequence and gives its own logits."""
        self.lm.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.lm.set_attn_implementation(PACKED_ATTENTION)

    def _own_logits(self, sequence: WholeSequence) -> Tensor:
        """float ``[1, L, V]`` of a causal LM, ``[1, 1]`` of a classifier."""
        return self.lm(input_ids=sequence.tokens[None], use_cache=False).logits

    @contextmanager
    def original_config(self) -> Iterator[None]:
        """``lm.config`` as it was loaded: for saving."""
        adjusted = {name: getattr(self.lm.config, name) for name in self._original}
        vars(self.lm.config).update(self._original)
        try:
            yield
        finally:
            vars(self.lm.config).update(adjusted)

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """The last hidden states, ``[T, H]``."""
        output = self.backbone(
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

    def __init__(
        self, lm: PreTrainedModel, *, temperature: float, chunk_tokens: int, original: dict[str, Any] | None = None
    ) -> None:
        super().__init__(lm, original)
        self.temperature, self.chunk_tokens = temperature, chunk_tokens
        self.logit_shape = LogitShape.of(lm.config)
        head = lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ConfigError(
                f"model.path: the LM head of {type(lm).__name__} is a {type(head).__name__}; models with a linear one "
                "are supported (docs/models.md)"
            )
        head.__class__ = LogprobHead

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Same as the base class, with the LM head's plain logits."""
        head = self.lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        head.__class__ = nn.Linear
        try:
            with super().as_loaded():
                yield
        finally:
            head.__class__ = LogprobHead

    def forward(self, inputs: PackedInputs | WholeSequence) -> tuple[Tensor, Tensor] | Tensor:
        """(log-probabilities, entropy) of the completion tokens, float32 ``[N]``, nats; or the LM's own logits."""
        if isinstance(inputs, WholeSequence):
            return self._own_logits(inputs)
        hidden = self.hidden(inputs)[inputs.predictors]
        head = self.lm.get_output_embeddings()
        assert isinstance(head, LogprobHead)
        return head(hidden, inputs.targets, self.logit_shape, self.temperature, self.chunk_tokens)


class ScalarModel(PackedModel):
    """A sequence-classification model with one label: the critic, and the reward model in training."""

    def __init__(self, lm: PreTrainedModel, original: dict[str, Any] | None = None) -> None:
        super().__init__(lm, original)
        head = getattr(lm, "score", None)
        if type(head) is not nn.Linear:
            raise ConfigError(f"{type(lm).__name__} has no linear score head; use a model of another family")
        head.__class__ = ScalarHead

    def forward(self, inputs: PackedInputs | WholeSequence) -> Tensor:
        """float32 ``[N]``: the score at the position that predicts each completion token; or the model's own.

        For a critic that is the value of the state in which the token is chosen.
        """
        if isinstance(inputs, WholeSequence):
            return self._own_logits(inputs)
        head = self.lm.score
        assert isinstance(head, ScalarHead)
        return head(self.hidden(inputs)[inputs.predictors])[:, 0]


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    temperature: float,
    chunk_tokens: int,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
    key: str = "model.path",
) -> PolicyModel:
    """A causal LM for packed scoring of sequences of up to ``max_tokens`` (None: as many as it takes).

    Raises ConfigError, naming ``key``, where the family is not supported or the directory does not hold the whole LM.
    """
    adjusted = load_model_config(path, key=key, max_tokens=max_tokens, trust_remote_code=trust_remote_code)
    lm, missing = _load(AutoModelForCausalLM, path, adjusted, dtype, key, trust_remote_code)
    saved_as = [name for name in adjusted.config.architectures or () if "Classification" in name]
    if missing or saved_as:
        what = f"a {saved_as[0]}" if saved_as else "not whole"
        lacks = f", it lacks {', '.join(missing[:3])}" if missing else ""
        raise ConfigError(f"{key}={path}: {what}{lacks}; a policy has to be a causal language model")
    return PolicyModel(lm, temperature=temperature, chunk_tokens=chunk_tokens, original=adjusted.original)


def load_scalar(
    path: str,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    fresh_head: Literal["refused", "zero", "random"] = "refused",
    trust_remote_code: bool = False,
    key: str = "model.path",
) -> ScalarModel:
    """A one-label sequence classifier from a directory of that kind.

    ``fresh_head``: what a directory without a head gets, a causal LM's for example. ``zero``: a head that says 0
    everywhere, as a critic that knows nothing yet should: random values would only be noise in the first advantages
    (Huang et al. 2024, arXiv 2403.17031; OpenAI's lm-human-preferences). Raises ConfigError as ``load_policy``.
    """
    adjusted = load_model_config(path, key=key, max_tokens=max_tokens, trust_remote_code=trust_remote_code)
    adjusted.config.num_labels = 1
    lm, missing = _load(AutoModelForSequenceClassification, path, adjusted, dtype, key, trust_remote_code)
    head_missing = [name for name in missing if name.startswith("score.")]
    if set(missing) - set(head_missing) or (head_missing and fresh_head == "refused"):
        raise ConfigError(
            f"{key}={path}: not a whole sequence classifier, it lacks {', '.join(missing[:3])}; `rlhf train-reward` "
            "makes one from a language model"
        )
    model = ScalarModel(lm, adjusted.original)
    if head_missing and fresh_head == "zero":
        for name, parameter in lm.named_parameters():
            if name in head_missing:
                getattr(parameter, "ds_tensor", parameter).data.zero_()  # under ZeRO-3 this rank holds a shard
    return model


def _load(
    auto: Any, path: str, adjusted: Adjusted, dtype: torch.dtype, key: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that its directory lacks."""
    irreplaceable = ConfigError(
        f"{key}={path}: the attention of {adjusted.config.model_type} models cannot be replaced, so sequences cannot "
        "be packed; use a model of another family (docs/models.md)"
    )
    try:
        lm, loading = auto.from_pretrained(
            path,
            config=adjusted.config,
            dtype=dtype,
            attn_implementation=PACKED_ATTENTION,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args == (PACKED_ATTENTION,):  # looked up among implementations of its own
            raise irreplaceable from error
        raise
    if not lm._can_set_attn_implementation():
        raise irreplaceable
    return lm, sorted(loading["missing_keys"])
