"""What flows through the loop: prompts, rollouts, and the packed tensors of a training step.

Two layouts, neither padded, for S sequences with N completion tokens in total:

* per sequence ``[S]``, in group order: completions of one prompt are neighbours;
* per completion token ``[N]``: the completions concatenated, delimited by ``completion_lengths [S]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.errors import SamplingError


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised.

    ``id`` is unique over a run (epoch included), so a rollout can be traced to its row. ``messages`` is the chat if the
    prompt is one, else None; ``text`` is what was tokenised. ``columns`` holds the row's other columns for rewards.
    """

    id: int
    token_ids: list[int]
    text: str
    messages: list[dict[str, str]] | None = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """What a rollout in an environment is beyond one completion: several turns, and what was observed between them."""

    sampled: np.ndarray
    turn_lengths: list[int]
    turn_rewards: list[float]
    reward: float
    status: str
    messages: list[dict[str, Any]]
    notes: dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    ``versions`` int32 ``[len(token_ids)]``: the weight version each token was sampled from. ``logprobs`` float32, same
    length, is the sampler's own log-probability of each token (temperature included), or None if not requested.
    ``finish_reason``: 'stop' (end of sequence or a stop string) or 'length' (truncated).
    """

    prompt: Prompt
    sample_index: int  # within the group
    token_ids: list[int]
    versions: np.ndarray
    finish_reason: str
    logprobs: np.ndarray | None = None
    episode: Episode | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class TrainBatch:
    """The packed tensors of one training step. Optional ones are None until the loop fills them in."""

    tokens: Tensor  # int64 [T]: each sequence's prompt, then its completion
    prompt_lengths: Tensor  # int64 [S]
    completion_lengths: Tensor  # int64 [S]
    truncated: Tensor  # bool [S]
    versions: Tensor  # int32 [N]
    rewards: Tensor | None = None  # float32 [S], NaN where none was given
    advantages: Tensor | None = None  # float32 [N]
    returns: Tensor | None = None  # float32 [N]
    values: Tensor | None = None  # float32 [N], from the critic before the update
    old_logprobs: Tensor | None = None  # float32 [N], from the learner before the update
    ref_logprobs: Tensor | None = None  # float32 [N]
    rollout_logprobs: Tensor | None = None  # float32 [N], from the sampler; NaN where not requested
    compared: Tensor | None = None  # bool [N]: tokens whose rollout_logprobs are checked against the learner's
    loss_weights: Tensor | None = None  # float32 [N]: each token's weight in its optimiser step's loss, 0 if masked
    entropy_mask: Tensor | None = None  # bool [N]: tokens with enough entropy to be trained on; None: all
    margins: Tensor | None = None  # float32 [S]: of preference pairs (reward models only), the same for both of a pair

    def with_(self, **tensors: Tensor | None) -> "TrainBatch":
        """A copy with some tensors filled in."""
        return replace(self, **tensors)

    def to(self, device: torch.device) -> "TrainBatch":
        """The batch, moved by ``to_device``."""
        tensors = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return replace(self, **{name: to_device(t, device) for name, t in tensors.items() if t is not None})

    @property
    def abstained(self) -> Tensor:
        """bool [S]: completions that were given no reward; baselines and losses exclude them."""
        return torch.zeros_like(self.truncated) if self.rewards is None else self.rewards.isnan()

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_completion_tokens(self) -> int:
        return int(self.completion_lengths.sum())

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 [S]: prompt plus completion."""
        return self.prompt_lengths + self.completion_lengths

    def prompt_runs(self) -> list[range]:
        """Maximal runs of neighbouring sequences with the same prompt; together they cover all sequences."""
        starts = torch.cumsum(self.sequence_lengths, 0) - self.sequence_lengths
        lengths, tokens = self.prompt_lengths.tolist(), self.tokens.numpy()  # slicing a tensor takes much longer
        prompts = [tokens[a : a + n] for a, n in zip(starts.tolist(), lengths, strict=True)]
        new = [i for i in range(1, len(prompts)) if prompts[i - 1].tobytes() != prompts[i].tobytes()]
        return [range(a, b) for a, b in pairwise([0, *new, len(prompts)])]

    def select(self, indices: Sequence[int]) -> "TrainBatch":
        """The sub-batch of these sequences, in this order."""
        index = torch.as_tensor(list(indices), dtype=torch.long)
        pick_token = _token_picker(self.sequence_lengths, index)
        pick_completion = _token_picker(self.completion_lengths, index)
        picked: dict[str, Tensor | None] = {}
        for spec in fields(self):
            tensor = getattr(self, spec.name)
            if tensor is None:
                picked[spec.name] = None
            elif spec.name == "tokens":
                picked[spec.name] = tensor[pick_token]
            elif spec.name in PER_SEQUENCE:
                picked[spec.name] = tensor[index]
            else:
                picked[spec.name] = tensor[pick_completion]
        return TrainBatch(**picked)  # type: ignore[arg-type]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device: to a GPU through pinned memory, or the host would wait for all queued work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


PER_SEQUENCE = frozenset({"prompt_lengths", "completion_lengths", "truncated", "rewards", "margins"})


def _token_picker(lengths: Tensor, index: Tensor) -> Tensor:
    """int64: positions in the packed layout of the tokens of sequences ``index``, in that order."""
    starts = torch.cumsum(lengths, 0) - lengths
    picked_lengths = lengths[index]
    picked_starts = torch.cumsum(picked_lengths, 0) - picked_lengths
    within = torch.arange(int(picked_lengths.sum())) - picked_starts.repeat_interleave(picked_lengths)
    return starts[index].repeat_interleave(picked_lengths) + within


def pack(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Packs finished rollouts, in the order given (groups must be contiguous for grouped algorithms).

    Raises SamplingError if a sampler's log-probability is not finite.
    """
    assert rollouts, "an empty batch cannot be trained on"
    assert all(r.token_ids for r in rollouts), "a completion holds at least one token"
    for rollout in rollouts:
        if rollout.logprobs is not None and not np.isfinite(rollout.logprobs).all():
            raise SamplingError(
                f"prompt {rollout.prompt.id}, completion {rollout.sample_index}: vLLM's log-probabilities are not all "
                "finite, so neither are its logits; check rollout.engine_args and the model's weights"
            )
    logprobs = [np.full(len(r.token_ids), np.nan, np.float32) if r.logprobs is None else r.logprobs for r in rollouts]
    any_logprobs = any(r.logprobs is not None for r in rollouts)
    tokens = chain.from_iterable(ids for r in rollouts for ids in (r.prompt.token_ids, r.token_ids))
    return TrainBatch(
        tokens=torch.from_numpy(np.fromiter(tokens, np.int64)),
        prompt_lengths=torch.tensor([len(r.prompt.token_ids) for r in rollouts], dtype=torch.long),
        completion_lengths=torch.tensor([len(r.token_ids) for r in rollouts], dtype=torch.long),
        truncated=torch.tensor([r.truncated for r in rollouts]),
        versions=torch.from_numpy(np.concatenate([r.versions for r in rollouts])),
        rollout_logprobs=torch.from_numpy(np.concatenate(logprobs)) if any_logprobs else None,
    )


def last_token_batch(sequences: Sequence[list[int]]) -> TrainBatch:
    """Packs whole sequences so that a ScalarModel scores each one at its last token.

    A scalar is read at the position BEFORE each completion token, so one token is appended to each sequence; its value
    is never used.
    """
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.long)
    ones = torch.ones_like(lengths)
    return TrainBatch(
        tokens=torch.tensor([t for s in sequences for t in (*s, s[-1])], dtype=torch.long),
        prompt_lengths=lengths,
        completion_lengths=ones,
        truncated=torch.zeros(len(sequences), dtype=torch.bool),
        versions=torch.zeros(len(sequences), dtype=torch.int32),
    )


def completion_mask(lengths: Tensor) -> Tensor:
    """bool [S, max length]: True at the tokens of a layout padded on the right."""
    return torch.arange(int(lengths.max()), device=lengths.device)[None] < lengths[:, None]


def pad(flat: Tensor, lengths: Tensor) -> Tensor:
    """[N] packed -> [S, max length], zeros on the right."""
    mask = completion_mask(lengths)
    padded = flat.new_zeros(mask.shape)
    padded[mask] = flat
    return padded


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """[S, max length] -> [N] packed; the inverse of ``pad``."""
    return padded[completion_mask(lengths)]


def merge_scores(batch: TrainBatch, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """float32 [N, ...] from ``parts``: (sequence indices, their completion tokens' scores), each sequence once."""
    order = [i for indices, _ in parts for i in indices]
    assert sorted(order) == list(range(batch.num_sequences)), "parts must cover every sequence exactly once"
    scores = torch.cat([part for indices, part in parts if indices])
    merged = torch.empty_like(scores)
    merged[_token_picker(batch.completion_lengths, torch.tensor(order))] = scores
    return merged
