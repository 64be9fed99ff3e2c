"""The driver's roles, played by groups of Ray actors."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from actors.group import ActorGroup, Call, Deadline
from rlhf.batch import Rollout, TrainBatch, merge_scores
from rlhf.config import TimeoutConfig


class ScorerGroup:
    """Ranks that share the scoring of a batch: reference, critic and learner."""

    def __init__(self, group: ActorGroup, timeouts: TimeoutConfig) -> None:
        self._group, self._timeouts = group, timeouts

    def score(self, batch: TrainBatch) -> Call[Tensor]:
        """float32 [N] in the batch's own order."""
        return self._group.call(
            "score",
            batch,
            deadline=Deadline(self._timeouts.score_s, "timeouts.score_s"),
            doing="scoring a batch",
            fold=lambda parts: merge_scores(batch, parts),
        )


class LearnerGroup(ScorerGroup):
    """The ranks of a model that learns; every call is collective over them."""

    def update(self, batch: TrainBatch) -> Call[dict[str, float]]:
        return self._group.call(
            "update",
            batch,
            deadline=Deadline(self._timeouts.update_s, "timeouts.update_s"),
            doing="updating",
            fold=lambda answers: answers[0],
        )

    def save(self, directory: str) -> None:
        self._checkpoint("save", directory, "saving a checkpoint")

    def load(self, directory: str) -> None:
        self._checkpoint("load", directory, "loading a checkpoint")

    def save_model(self, directory: str) -> None:
        self._checkpoint("save_model", directory, "saving the model")

    def _checkpoint(self, method: str, directory: str, doing: str) -> None:
        deadline = Deadline(self._timeouts.checkpoint_s, "timeouts.checkpoint_s")
        self._group.call(method, directory, deadline=deadline, doing=doing).result()


class RewardGroup:
    """Reward-function workers and reward-model replicas; each gets a share of the rollouts."""

    def __init__(
        self,
        functions: ActorGroup | None,
        models: ActorGroup | None,
        weights: dict[str, float],
        timeouts: TimeoutConfig,
    ) -> None:
        self._groups = [group for group in (functions, models) if group is not None]
        self._weights, self._timeouts = weights, timeouts
        self._turn = 0

    def weights(self) -> dict[str, float]:
        return self._weights

    def score(self, rollouts: Sequence[Rollout]) -> "JointCall":
        """Submits everything at once; members take turns, for most calls bring a single group."""
        deadline = Deadline(self._timeouts.score_s, "timeouts.score_s")
        self._turn += 1
        return JointCall(
            [
                group.rotated(self._turn).call_each(
                    "score",
                    [(share,) for share in split_groups(rollouts, len(group.members))],
                    deadline=deadline,
                    doing="giving rewards",
                    fold=concatenate_scores,
                )
                for group in self._groups
            ]
        )


class JointCall:
    """Several calls whose dictionaries join into one."""

    def __init__(self, calls: Sequence[Call[dict[str, list[float]]]]) -> None:
        self._calls = calls

    def result(self) -> dict[str, list[float]]:
        return {name: scores for call in self._calls for name, scores in call.result().items()}


def split_groups(rollouts: Sequence[Rollout], num_shares: int) -> list[list[Rollout]]:
    """Contiguous shares that never part a group (a reward function may compare its members); empty ones left out."""
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        if groups and groups[-1][0].prompt.id == rollout.prompt.id:
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    bounds = [round(i * len(groups) / num_shares) for i in range(num_shares + 1)]
    shares = [[r for group in groups[a:b] for r in group] for a, b in pairwise(bounds)]
    return [share for share in shares if share]


def concatenate_scores(parts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Joins the shares' scores in order."""
    return {name: [score for part in parts for score in part[name]] for name in parts[0]}
