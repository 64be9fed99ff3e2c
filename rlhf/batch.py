"""What flows through the loop: prompts, rollouts, and the packed tensors of a training step.

Two layouts, neither padded, for S sequences with N completion tokens in total:

* per sequence ``[S]``, in group order: completions of one prompt are neighbours;
* per completion token ``[N]``: the completions concatenated, delimited by ``completion_lengths [S]``.

In an environment, a sequence's completion tokens are those that the model sampled, in all turns. What was observed
between them is in ``tokens`` alone, so that nothing per completion token can be spoilt by an observation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rlhf.errors import SamplingError


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised.

    ``id`` is unique over a run (epoch included), so a rollout can be traced to its row. ``messages`` is the chat if the
    prompt is one, else None; ``text`` is what was tokenised. ``columns`` holds the row's other columns for rewards.
    ``source`` is the name of its source in a mixture, '' if there is only one.
    """

    id: int
    token_ids: list[int]
    text: str
    messages: list[dict[str, str]] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    source: str = ""


Status = Literal["done", "length", "context", "turns", "timeout", "failed"]
"""How an episode ended: its environment returned; a reply was cut; no room was left in the context; it had all its
turns; it took too long; or its environment raised, again and again."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Episode:
    """What a rollout in an environment is beyond one completion: several turns, and what was observed between them.

    ``messages``: all after the prompt, the model's own and others'. ``notes``: columns for reward functions, beside
    the data's.
    """

    sampled: np.ndarray  # bool [len(token_ids)]: the model's own tokens; the others are observations
    turn_lengths: list[int]  # sampled tokens of each turn, in order, each at least 1
    turn_rewards: list[float]  # one per turn, 0 where the environment gave none
    reward: float  # what the environment returned, 0 if nothing; NaN: it failed, so that the episode has none at all
    status: Status
    messages: list[dict[str, Any]]
    notes: dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """One sampled completion; or an episode in an environment, in which not all tokens are sampled.

    ``versions`` int32 ``[num_sampled]``: the weight version each token was sampled from. ``logprobs`` float32, same
    length, is the sampler's own log-probability of each token (temperature included), or None if not requested.
    ``finish_reason``: 'stop' (end of sequence or a stop string) or 'length' (truncated).
    """

    prompt: Prompt
    sample_index: int  # within the group
    token_ids: list[int]  # all that follows the prompt
    versions: np.ndarray
    finish_reason: str
    logprobs: np.ndarray | None = None
    episode: Episode | None = None  # None: a single turn

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def failed(self) -> bool:
        """Whether its environment did: then it has no reward, and nothing scores it."""
        return self.episode is not None and math.isnan(self.episode.reward)

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the model sampled."""
        if self.episode is None:
            return self.token_ids
        return [token for token, own in zip(self.token_ids, self.episode.sampled, strict=True) if own]


@dataclass(frozen=True)
class TrainBatch:
    """The packed tensors of one training step. Optional ones are None until the loop fills them in."""

    tokens: Tensor  # int64 [T]: each sequence's prompt, then its completion, observations included
    prompt_lengths: Tensor  # int64 [S]
    completion_lengths: Tensor  # int64 [S], in sampled tokens
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
    sampled: Tensor | None = None  # bool [T]: the model's own tokens; None: all after the prompts
    tail_lengths: Tensor | None = None  # int64 [S]: all tokens after the prompt; None: completion_lengths
    turns: Tensor | None = None  # int32 [N]: which turn of its episode a token belongs to; None: all are one
    turn_rewards: Tensor | None = None  # float32 [N]: the environment's for a turn, at its last token

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
    def lengths_after_prompt(self) -> Tensor:
        """int64 [S]: completion, observations included."""
        return self.completion_lengths if self.tail_lengths is None else self.tail_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 [S]: prompt plus completion, observations included."""
        return self.prompt_lengths + self.lengths_after_prompt

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
            elif spec.name in PER_TOKEN:
                picked[spec.name] = tensor[pick_token]
            elif spec.name in PER_SEQUENCE:
                picked[spec.name] = tensor[index]
            else:
                picked[spec.name] = tensor[pick_completion]
        return TrainBatch(**picked)  # type: ignore[arg-type]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device: to a GPU through pinned memory, or the host would wait for all queued work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


PER_TOKEN = frozenset({"tokens", "sampled"})
PER_SEQUENCE = frozenset({"prompt_lengths", "completion_lengths", "tail_lengths", "truncated", "rewards", "margins"})


def _token_picker(lengths: Tensor, index: Tensor) -> Tensor:
    """int64: positions in the packed layout of the tokens of sequences ``index``, in that order."""
    starts = torch.cumsum(lengths, 0) - lengths
    picked_lengths = lengths[index]
    picked_starts = torch.cumsum(picked_lengths, 0) - picked_lengths
    within = torch.arange(int(picked_lengths.sum())) - picked_starts.repeat_interleave(picked_lengths)
    return starts[index].repeat_interleave(picked_lengths) + within


def pack(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Packs finished rollouts, in the order given (groups must be contiguous for grouped algorithms).

    What was observed after the last sampled token is left out: nothing depends on it. Raises SamplingError if a
    sampler's log-probability is not finite.
    """
    assert rollouts, "an empty batch cannot be trained on"
    assert all(r.num_sampled for r in rollouts), "a completion holds at least one token"
    for rollout in rollouts:
        if rollout.logprobs is not None and not np.isfinite(rollout.logprobs).all():
            raise SamplingError(
                f"prompt {rollout.prompt.id}, completion {rollout.sample_index}: vLLM's log-probabilities are not all "
                "finite, so neither are its logits; check rollout.engine_args and the model's weights"
            )
    logprobs = [np.full(r.num_sampled, np.nan, np.float32) if r.logprobs is None else r.logprobs for r in rollouts]
    any_logprobs = any(r.logprobs is not None for r in rollouts)
    tokens = chain.from_iterable(ids for r in rollouts for ids in (r.prompt.token_ids, _tail(r)))
    episodes = {} if all(r.episode is None for r in rollouts) else _episode_tensors(rollouts)
    return TrainBatch(
        tokens=torch.from_numpy(np.fromiter(tokens, np.int64)),
        prompt_lengths=torch.tensor([len(r.prompt.token_ids) for r in rollouts], dtype=torch.long),
        completion_lengths=torch.tensor([r.num_sampled for r in rollouts], dtype=torch.long),
        truncated=torch.tensor([r.truncated for r in rollouts]),
        versions=torch.from_numpy(np.concatenate([r.versions for r in rollouts])),
        rollout_logprobs=torch.from_numpy(np.concatenate(logprobs)) if any_logprobs else None,
        **episodes,
    )


def _tail(rollout: Rollout) -> list[int]:
    """What follows the prompt, up to the last sampled token."""
    if rollout.episode is None:
        return rollout.token_ids
    return rollout.token_ids[: int(rollout.episode.sampled.nonzero()[0][-1]) + 1]


def _episode_tensors(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """The tensors of a TrainBatch that only episodes have."""
    sampled, turns, rewards = [], [], []
    for rollout in rollouts:
        episode, num_tokens = rollout.episode, len(_tail(rollout))
        assert episode is not None, "episodes and single completions are never in one batch"
        assert len(episode.sampled) == len(rollout.token_ids), "each token was sampled or observed"
        assert sum(episode.turn_lengths) == episode.sampled.sum() == rollout.num_sampled, "turns are what was sampled"
        assert len(episode.turn_rewards) == len(episode.turn_lengths)
        sampled += [np.zeros(len(rollout.prompt.token_ids), bool), episode.sampled[:num_tokens]]
        turns.append(np.repeat(np.arange(len(episode.turn_lengths), dtype=np.int32), episode.turn_lengths))
        at_last = np.zeros(rollout.num_sampled, np.float32)
        at_last[np.cumsum(episode.turn_lengths) - 1] = episode.turn_rewards
        rewards.append(at_last)
    return {
        "sampled": torch.from_numpy(np.concatenate(sampled)),
        "tail_lengths": torch.tensor([len(_tail(rollout)) for rollout in rollouts], dtype=torch.long),
        "turns": torch.from_numpy(np.concatenate(turns)),
        "turn_rewards": torch.from_numpy(np.concatenate(rewards)),
    }


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
