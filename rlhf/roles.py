"""The roles the driver talks to, as protocols. It need not know if one is a Ray actor group or a local object.

Long calls that can run concurrently return a ``Pending``; ``result()`` waits, under the role's deadline.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from rlhf.batch import Prompt, Rollout, TrainBatch
from rlhf.checkpoint import Written
from rlhf.rewards.total import Scores

T_co = TypeVar("T_co", covariant=True)
Metrics = dict[str, float]


class Pending(Protocol[T_co]):
    """A result in progress."""

    def result(self) -> T_co:
        """Waits under the role's deadline. Raises ActorError or DeadlineError, naming role, rank and node."""
        ...


class Reference(Protocol):
    """The frozen policy."""

    def score(self, batches: Sequence[TrainBatch]) -> Pending[list[Tensor]]:
        """One tensor per batch, in order, float32 [N]: log-probabilities of its completion tokens.

        Each batch is packed by itself: its numbers do not depend on the others.
        """
        ...


class Trained(Protocol):
    """A model that learns: what policy and critic have in common."""

    def score(self, batch: TrainBatch) -> Pending[Tensor]:
        """float32 [N]: log-probabilities (learner) or values (critic) of the completion tokens."""
        ...

    def update(self, batch: TrainBatch, step: int) -> Pending[Metrics]:
        """All epochs and mini-batches of training step ``step``, counted from 0: it seeds their shuffle.

        Optimiser steps whose loss or gradient is not finite are skipped: see ``rlhf.checks.nonfinite.skip_report``.
        """
        ...

    def save(self, directory: str) -> None:
        """Begins to write a resumable checkpoint: weights, optimiser, scheduler, RNG as they are now.

        If the one before is still being written, waits for that.
        """
        ...

    def finish_save(self, *, wait: bool) -> Pending[Written | None]:
        """What was written of the last ``save``, when all of it is; None if it is not yet and ``wait`` is false.

        Raises CheckpointError if it could not be written.
        """
        ...

    def load(self, directory: str) -> None:
        """Reads what ``save`` wrote."""
        ...

    def save_model(self, directory: str) -> None:
        """Writes a Hugging Face directory that ``from_pretrained`` loads."""
        ...


class Learner(Trained, Protocol):
    """The policy."""

    def score_reference(self, batch: TrainBatch) -> Pending[Tensor]:
        """float32 [N]: log-probabilities without the adapters, of a policy that has any: the reference's."""
        ...


class Critic(Trained, Protocol):
    """The value model."""


class Reward(Protocol):
    """Everything that gives a reward."""

    def score_groups(self, groups: Sequence[Sequence[Rollout]]) -> Pending[list[Scores]]:
        """The scores of each group, in order. Each group is scored by itself: no function sees two together."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> Pending[Scores]:
        """The scores of ungrouped completions, in order; the work is divided among all reward workers."""
        ...


class Rollouts(Protocol):
    """The pool of samplers. Groups finish in any order, each exactly once."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        greedy: bool = False,
        with_logprobs: Collection[int] = (),
    ) -> list[int]:
        """Queues a group of ``group_size`` completions per prompt; returns the groups' ids.

        ``with_logprobs``: positions in ``prompts`` whose groups carry the sampler's log-probabilities in any case.
        """
        ...

    def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
        """Waits until one of these groups has finished. Returns all that have, by id, with rollouts by sample index."""
        ...

    def publish(self, version: int) -> Metrics:
        """Gives every live worker the learner's weights as ``version``; returns when every serving worker has verified
        them."""
        ...

    def sleep(self) -> None:
        """Frees the device memory that a colocated learner needs, until the next ``publish``. No-op if nothing is
        shared."""
        ...


@dataclass(frozen=True)
class Roles:
    """The roles of a run. Reference and critic exist only if the algorithm needs them; a learner with adapters can be
    the reference, too."""

    learner: Learner
    rollouts: Rollouts
    reward: Reward
    reference: Reference | None = None
    critic: Critic | None = None
