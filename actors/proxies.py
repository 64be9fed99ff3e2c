"""The driver's roles, played by groups of Ray actors."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import Any, Generic, TypeVar

import ray
from torch import Tensor

from actors.group import ActorGroup, Call, Deadline, Member
from rlhf.batch import Rollout, TrainBatch
from rlhf.checkpoint import Written
from rlhf.config import TimeoutConfig
from rlhf.errors import RoleLostError
from rlhf.rewards import ENVIRONMENT_NAME
from rlhf.rewards.total import Scores
from rlhf.shares import Plan, Planner

T = TypeVar("T")
MAX_LOSSES = 3  # of a role's replicas in a row, none of which had answered
Given = dict[str, list[float]]
"""One actor's scores for a group of completions: a list for each reward function or model, by name."""


class LearnerGroup:
    """The ranks of a model in training; every call is collective over them."""

    def __init__(self, group: ActorGroup, timeouts: TimeoutConfig) -> None:
        self._group, self._timeouts = group, timeouts

    @cached_property
    def _planner(self) -> Planner:
        """Rank 0's: it knows what the ranks have decided, and the model's shape."""
        return (
            self._group.first()
            .call(
                "planner",
                deadline=Deadline(self._timeouts.score_s, "timeouts.score_s"),
                doing="naming what its micro-batches hold",
                fold=lambda answers: answers[0],
            )
            .result()
        )

    def score(self, batch: TrainBatch) -> Call[Tensor]:
        """float32 [N] in the batch's own order."""
        return self._score("score", batch)

    def score_reference(self, batch: TrainBatch) -> Call[Tensor]:
        """float32 [N] in the batch's own order."""
        return self._score("score_reference", batch)

    def update(self, batch: TrainBatch, step: int) -> Call[dict[str, float]]:
        """The metrics of training step ``step``, counted from 0. If the optimiser steps need scores that the batch
        lacks, waits for them first."""
        if self._planner.needs_scores(batch):
            batch = self._planner.with_scores(batch, self._score("score_with_entropy", batch).result())
        return self._send(
            "update",
            self._planner.plan_update(batch, step),
            deadline=Deadline(self._timeouts.update_s, "timeouts.update_s"),
            doing="updating",
            fold=lambda answers: answers[0],
        )

    def _score(self, method: str, batch: TrainBatch) -> Call[Tensor]:
        plan = self._planner.plan_scoring(batch)
        deadline = Deadline(self._timeouts.score_s, "timeouts.score_s")
        return self._send(method, plan, deadline=deadline, doing="scoring a batch", fold=plan.merge)

    def _send(
        self, method: str, plan: Plan, *, deadline: Deadline, doing: str, fold: Callable[[list[Any]], Any]
    ) -> Call[Any]:
        """Calls every rank with its own share. Each is stored, then dropped here, before the next is built."""
        shares = [(ray.put(plan.share(rank)),) for rank in range(len(self._group.members))]
        return self._group.call_each(method, shares, deadline=deadline, doing=doing, fold=fold)

    def save(self, directory: str) -> None:
        """Every rank begins to write its part of a checkpoint."""
        self._checkpoint("save", directory, "saving a checkpoint")

    def finish_save(self, *, wait: bool) -> Call[Written | None]:
        """What all ranks have written of it; None if one of them is not done, for which ``wait`` waits."""
        deadline = Deadline(self._timeouts.checkpoint_s, "timeouts.checkpoint_s")
        return self._group.call(
            "finish_save", wait, deadline=deadline, doing="writing a checkpoint", fold=Written.together
        )

    def load(self, directory: str) -> None:
        """Every rank reads its part of a checkpoint."""
        self._checkpoint("load", directory, "loading a checkpoint")

    def save_model(self, directory: str) -> None:
        """Writes a Hugging Face directory."""
        self._checkpoint("save_model", directory, "saving the model")

    def _checkpoint(self, method: str, directory: str, doing: str) -> None:
        deadline = Deadline(self._timeouts.checkpoint_s, "timeouts.checkpoint_s")
        self._group.call(method, directory, deadline=deadline, doing=doing).result()


Revive = Callable[[Member, RoleLostError], None]
"""Puts another actor in the place of a group's member that has died; raises if it cannot."""


def give_up(lost: Member, error: RoleLostError) -> None:
    """Nobody takes its place."""
    raise error


class Replicas:
    """Interchangeable actors; a call's items are divided among them. They take turns, because many calls bring a
    single item. They have no state: one that dies is replaced, and scores again what it had not answered."""

    def __init__(self, group: ActorGroup, timeouts: TimeoutConfig, doing: str, revive: Revive = give_up) -> None:
        self._group, self._doing, self._revive = group, doing, revive
        self._turn = self._losses = 0  # losses: in a row, without an answer from anybody
        self._deadline = Deadline(timeouts.score_s, "timeouts.score_s")

    @property
    def count(self) -> int:
        """How many actors there are."""
        return len(self._group.members)

    def score(self, items: Sequence[Any]) -> "ReplicaCall":
        """One answer per item, in order."""
        shares = divide(items, self.count)
        call = ReplicaCall(self, [((self._turn + i) % self.count, share) for i, share in enumerate(shares)])
        self._turn += len(shares)
        return call

    def send(self, rank: int, share: Sequence[Any]) -> tuple[Member, Call[list[Any]]]:
        """Has the actor at this rank score a share."""
        member = self._group.members[rank]
        call = ActorGroup([member]).call_each(
            "score", [(share,)], deadline=self._deadline, doing=self._doing, fold=lambda answers: answers[0]
        )
        return member, call

    def answer(self, rank: int, share: Sequence[Any], sent: tuple[Member, Call[list[Any]]]) -> list[Any]:
        """Waits for a share. Raises RoleLostError if one actor after the other dies without any having answered."""
        while True:
            member, call = sent
            try:
                answer = call.result()
            except RoleLostError as error:
                if self._group.members[rank] is member:
                    self._losses += 1
                    if self._losses > MAX_LOSSES:
                        raise
                    self._revive(member, error)
                sent = self.send(rank, share)
            else:
                self._losses = 0
                return answer


class ReplicaCall:
    """Shares that replicas are scoring."""

    def __init__(self, replicas: Replicas, shares: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """``shares``: (rank, items) of each."""
        self._replicas = replicas
        self._sent = [(rank, share, replicas.send(rank, share)) for rank, share in shares]

    def result(self) -> list[Any]:
        """One answer per item, in order. Waits for all of them."""
        return self._answer

    @cached_property
    def _answer(self) -> list[Any]:
        return list(chain.from_iterable(self._replicas.answer(*sent) for sent in self._sent))


def divide(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """At most ``count`` contiguous slices of about equal length; none is empty."""
    bounds = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds) if b > a]


class RewardGroup:
    """Reward-function workers and reward-model replicas; both see every completion but those of failed episodes."""

    def __init__(self, scorers: Sequence[Replicas], weights: dict[str, float]) -> None:
        """``weights``: the weight in the sum of every reward function and model, and of the environment, by name."""
        self._scorers, self._weights = scorers, weights

    def score_groups(self, groups: Sequence[Sequence[Rollout]]) -> "JointCall[list[Scores]]":
        """One Scores per group, in order."""
        ran = [[rollout for rollout in group if not rollout.failed] for group in groups]

        def fold(answers: list[list[Given]]) -> list[Scores]:
            of_groups = zip(*answers, strict=True) if answers else repeat(())
            return [
                self._scores(group, next(of_groups) if any_ran else ())
                for group, any_ran in zip(groups, ran, strict=True)
            ]

        return JointCall([scorer.score([group for group in ran if group]) for scorer in self._scorers], fold)

    def score(self, rollouts: Sequence[Rollout]) -> "JointCall[Scores]":
        """The scores of completions that form no groups."""
        ran = [rollout for rollout in rollouts if not rollout.failed]

        def fold(answers: list[list[Given]]) -> Scores:
            return self._scores(rollouts, [concat(parts) for parts in answers if parts])

        return JointCall([scorer.score(divide(ran, scorer.count)) for scorer in self._scorers], fold)

    def _scores(self, rollouts: Sequence[Rollout], given: Sequence[Given]) -> Scores:
        """Combines what functions and models gave the same completions, and their environment."""
        rows = [row for row, rollout in enumerate(rollouts) if not rollout.failed]
        scores = {name: [math.nan] * len(rollouts) for name in self._weights}
        by_name = {name: values for one in given for name, values in one.items()}
        if ENVIRONMENT_NAME in scores:
            by_name[ENVIRONMENT_NAME] = [environment_reward(rollouts[row]) for row in rows]
        for name, values in by_name.items():
            for row, value in zip(rows, values, strict=True):
                scores[name][row] = value
        return Scores(scores, self._weights)


def environment_reward(rollout: Rollout) -> float:
    """What an episode's environment gave in all: for its turns, and at its end."""
    assert rollout.episode is not None
    return sum(rollout.episode.turn_rewards) + rollout.episode.reward


def concat(parts: Sequence[Given]) -> Given:
    """Joins what one scorer's replicas gave their shares, in order."""
    return {name: list(chain.from_iterable(part[name] for part in parts)) for name in parts[0]}


class JointCall(Generic[T]):
    """Several calls about the same completions, submitted at once; their answers are folded into one."""

    def __init__(self, calls: Sequence[ReplicaCall], fold: Callable[[list[list[Given]]], T]) -> None:
        self._calls, self._fold = calls, fold

    def result(self) -> T:
        """Waits for all of them."""
        return self._answer

    @cached_property
    def _answer(self) -> T:
        return self._fold([call.result() for call in self._calls])
