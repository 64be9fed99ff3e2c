"""Trains a scalar reward model on preference pairs, with the same engine as the policy and the critic."""

from collections.abc import Sequence

from torch import Tensor

from rlhf.algorithms.preference import preference_loss
from rlhf.batch import TrainBatch
from rlhf.packing import Unit
from rlhf.training.engine import Engine
from rlhf.training.learner import PackedLearner, Part


class RewardLearner(PackedLearner):
    """The reward model's preference loss. Its batches are those of ``rlhf.data.preferences.pair_batch``."""

    def __init__(self, engine: Engine, *, center_coef: float) -> None:
        super().__init__(engine)
        self._center_coef = center_coef

    def score(self, batch: TrainBatch) -> Part:
        """This rank's share of the scores under the current weights."""
        return self._score(batch, lambda output: output)

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One optimiser step over the pairs of ``batch``; ``step`` is not used."""
        return self._optimise([batch], lambda _: self._loss)

    def _units(self, batch: TrainBatch, share_prompts: bool) -> list[Unit]:
        return pair_units(batch.sequence_lengths.tolist())

    def _loss(self, scores: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.margins is not None and batch.loss_weights is not None
        return preference_loss(scores, batch.margins, batch.loss_weights, center_coef=self._center_coef)


def pair_units(lengths: Sequence[int]) -> list[Unit]:
    """Neighbours two by two: a pair's loss needs both of its scores."""
    assert len(lengths) % 2 == 0, f"{len(lengths)} sequences are no whole number of pairs"
    return [Unit(range(i, i + 2), tuple((n, n) for n in lengths[i : i + 2])) for i in range(0, len(lengths), 2)]
