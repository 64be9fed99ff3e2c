"""What each rank of a learner gets of a batch: its own sequences, and which micro-batches they make.

Planned once for all ranks, by the process that has the whole batch. Much depends on all of it: the shuffle, each
token's weight in the loss, how many tokens count, whether prompts are shared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlhf.algorithms.losses import token_weights, top_entropy_mask, truncation_mask
from rlhf.batch import TrainBatch, merge_scores
from rlhf.config import AlgorithmConfig
from rlhf.packing import Unit, plan_micro_batches, prompt_units, split_minibatches, worth_sharing

# tensors that no plan depends on: not copied for the mini-batch that is being planned
NOT_PLANNED_BY = ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy_mask")
NOT_LEARNT_FROM = ("loss_weights", "turns", "turn_rewards")  # the steps have weights of their own; advantages the rest


@dataclass(frozen=True)
class StepShare:
    """One rank's part of an optimiser step, or of a scoring."""

    micro_batches: list[list[int]]  # indices of sequences; an empty one only keeps the ranks in step
    share_prompts: bool
    loss_weights: list[Tensor]  # float32, for each micro-batch, of its completion tokens; empty for scoring
    num_tokens: int  # with a weight other than 0, on all ranks


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch."""

    rows: TrainBatch  # every sequence that this rank ever needs, once
    steps: list[StepShare]  # their indices count in ``rows``
    num_compared: float  # tokens compared with the sampler: the mean over the optimiser steps, on all ranks

    def micro_batches(self, step: StepShare) -> list[TrainBatch | None]:
        """None where a rank only keeps in step with the others."""
        selected = [self.rows.select(indices) if indices else None for indices in step.micro_batches]
        if not step.loss_weights:
            return selected
        pairs = zip(selected, step.loss_weights, strict=True)
        return [batch.with_(loss_weights=weights) if batch is not None else None for batch, weights in pairs]


@dataclass(frozen=True)
class StepPlan:
    """An optimiser step, or a scoring, of all ranks."""

    micro_batches: list[list[list[int]]]  # of each rank: indices of sequences of the whole batch
    share_prompts: bool
    loss_weights: dict[int, np.ndarray] | None = None  # float32, of each sequence of the step
    num_tokens: int = 0

    def share(self, rank: int, place: dict[int, int]) -> StepShare:
        """``place``: of each sequence of the batch among the rank's own."""
        mine, weights = self.micro_batches[rank], []
        if self.loss_weights is not None:
            none = np.empty(0, np.float32)
            parts = [np.concatenate([none, *(self.loss_weights[i] for i in indices)]) for indices in mine]
            weights = [torch.from_numpy(part) for part in parts]
        return StepShare(
            [[place[i] for i in indices] for indices in mine], self.share_prompts, weights, self.num_tokens
        )


@dataclass(frozen=True)
class Plan:
    """Who computes what of a batch."""

    batch: TrainBatch
    steps: list[StepPlan]
    num_compared: float = 0.0

    def share(self, rank: int) -> Share:
        """Built when asked for, because all ranks' shares together take as much memory as the batch."""
        own = sorted({i for step in self.steps for indices in step.micro_batches[rank] for i in indices})
        place = {sequence: row for row, sequence in enumerate(own)}
        rows = part_of(self.batch.with_(**dict.fromkeys(NOT_LEARNT_FROM)), own)
        return Share(rows, [step.share(rank, place) for step in self.steps], self.num_compared)

    def merge(self, scores: Sequence[Tensor]) -> Tensor:
        """float32 [N, ...] in the batch's own order, from every rank's scores of its completion tokens."""
        (scoring,) = self.steps
        sequences = [[i for indices in rank for i in indices] for rank in scoring.micro_batches]
        return merge_scores(self.batch, list(zip(sequences, scores, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Spreads batches over a model's ranks and micro-batches. Subclasses say which optimiser steps a batch makes."""

    num_ranks: int
    token_budget: int  # of a micro-batch
    hidden_size: int

    def plan_scoring(self, batch: TrainBatch) -> Plan:
        """Every sequence once."""
        share_prompts = worth_sharing(batch)
        return Plan(batch, [StepPlan(self._spread(batch, share_prompts), share_prompts)])

    def plan_update(self, batch: TrainBatch, step: int) -> Plan:
        """All optimiser steps of training step ``step``, counted from 0. ``batch`` lacks no scores."""
        assert not self.needs_scores(batch), "scored before the first optimiser step"
        planned = batch.with_(**dict.fromkeys(NOT_PLANNED_BY))
        steps, num_compared = [], 0
        for members in self._steps(batch, step):
            part = part_of(planned, members)
            num_compared += 0 if part.compared is None else int(part.compared.sum())
            steps.append(self._plan_step(part, members))
        return Plan(batch, steps, num_compared / len(steps))

    def needs_scores(self, batch: TrainBatch) -> bool:
        """Whether ``with_scores`` must come before ``plan_update``."""
        return False

    def with_scores(self, batch: TrainBatch, scores: Tensor) -> TrainBatch:
        """The batch with what it lacked. ``scores`` float32 [N, 2]: log-probabilities and entropies."""
        raise NotImplementedError

    def _plan_step(self, part: TrainBatch, members: Sequence[int]) -> StepPlan:
        """``members``: the places in the whole batch of the sequences of ``part``."""
        share_prompts, weights = worth_sharing(part), self._weights(part).numpy()
        spread, ends = self._spread(part, share_prompts), [0, *part.completion_lengths.cumsum(0).tolist()]
        return StepPlan(
            [[[members[i] for i in indices] for indices in rank] for rank in spread],
            share_prompts,
            {i: weights[a:b] for i, (a, b) in zip(members, pairwise(ends), strict=True)},
            int((weights != 0).sum()),
        )

    def _spread(self, batch: TrainBatch, share_prompts: bool) -> list[list[list[int]]]:
        return plan_micro_batches(
            self._units(batch, share_prompts),
            num_ranks=self.num_ranks,
            token_budget=self.token_budget,
            hidden_size=self.hidden_size,
        )

    def _units(self, batch: TrainBatch, share_prompts: bool) -> list[Unit]:
        """Sequences that must share a micro-batch."""
        return prompt_units(
            batch, share_prompts=share_prompts, num_ranks=self.num_ranks, token_budget=self.token_budget
        )

    def _steps(self, batch: TrainBatch, training_step: int) -> Iterable[Sequence[int]]:
        """The sequences of each optimiser step, in the batch's own order."""
        raise NotImplementedError

    def _weights(self, batch: TrainBatch) -> Tensor:
        """float32 [N]: each token's weight in the loss of an optimiser step over ``batch``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BatchPlanner(Planner):
    """Epochs of mini-batches."""

    config: AlgorithmConfig
    seed: int
    max_completion_tokens: int

    def _steps(self, batch: TrainBatch, training_step: int) -> Iterable[Sequence[int]]:
        """Reshuffled for every epoch, the same way for critic and policy."""
        if self.config.steps_per_update == 1:
            yield range(batch.num_sequences)
            return
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + training_step)
        for _ in range(self.config.num_epochs):
            order = torch.randperm(batch.num_sequences, generator=shuffle).tolist()
            # sorted within each, so that sequences that share their prompt are neighbours
            yield from (sorted(part) for part in split_minibatches(order, self.config.num_minibatches))


class PolicyPlanner(BatchPlanner):
    """The policy's optimiser steps.

    With a single one the scoring policy is the sampling policy: its own forward gives the old log-probabilities, so
    none is run beforehand.
    """

    def needs_scores(self, batch: TrainBatch) -> bool:
        if self.config.top_entropy_quantile < 1 and batch.entropy_mask is None:
            return True
        return self.config.steps_per_update > 1 and batch.old_logprobs is None

    def with_scores(self, batch: TrainBatch, scores: Tensor) -> TrainBatch:
        quantile = self.config.top_entropy_quantile
        logprobs, entropy = scores.unbind(1)
        return batch.with_(
            old_logprobs=logprobs if batch.old_logprobs is None else batch.old_logprobs,
            entropy_mask=top_entropy_mask(entropy, quantile, self._counted(batch)) if quantile < 1 else None,
        )

    def _counted(self, batch: TrainBatch) -> Tensor:
        """bool [N]: the tokens that contribute to the loss."""
        counted = with_reward(batch)
        if self.config.mask_truncated_completions:
            counted = counted & truncation_mask(batch.completion_lengths, batch.truncated)
        return counted

    def _weights(self, batch: TrainBatch) -> Tensor:
        return token_weights(
            batch.completion_lengths,
            loss_type=self.config.loss_type,
            max_completion_length=self.max_completion_tokens,
            mask=self._counted(batch),
        )


class ValuePlanner(BatchPlanner):
    """The critic's optimiser steps, over the same mini-batches as the policy's."""

    def _weights(self, batch: TrainBatch) -> Tensor:
        return token_weights(batch.completion_lengths, loss_type="dapo", mask=with_reward(batch))


def part_of(batch: TrainBatch, members: Sequence[int]) -> TrainBatch:
    """The sub-batch of these sequences, which are in the batch's own order; without a copy if they are all."""
    return batch if len(members) == batch.num_sequences else batch.select(members)


def with_reward(batch: TrainBatch) -> Tensor:
    """bool [N]: tokens of completions with a reward."""
    return (~batch.abstained).repeat_interleave(batch.completion_lengths)
