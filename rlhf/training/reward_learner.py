"""Trains a scalar reward model on preference pairs, with the same engine as the policy and the critic."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from rlhf.algorithms.preference import preference_loss
from rlhf.batch import TrainBatch
from rlhf.packing import Unit
from rlhf.shares import Planner, Share
from rlhf.training.engine import Engine
from rlhf.training.learner import PackedLearner, spread_over


class PairPlanner(Planner):
    """One optimiser step over all pairs of a batch, which brings its weights along."""

    def _steps(self, batch: TrainBatch, training_step: int) -> Iterable[Sequence[int]]:
        return [range(batch.num_sequences)]

    def _weights(self, batch: TrainBatch) -> Tensor:
        assert batch.loss_weights is not None
        return batch.loss_weights

    def _units(self, batch: TrainBatch, share_prompts: bool) -> list[Unit]:
        return pair_units(batch.sequence_lengths.tolist())


class RewardLearner(PackedLearner):
    """The reward model's preference loss. Its batches are those of ``rlhf.data.preferences.pair_batch``."""

    def __init__(self, engine: Engine, *, center_coef: float) -> None:
        super().__init__(engine)
        self._center_coef = center_coef

    @property
    def planner(self) -> Planner:
        return PairPlanner(**spread_over(self.engine))

    def score(self, share: Share) -> Tensor:
        """float32 [n]: scores under the current weights."""
        return self._score(share, lambda output: output)

    def update(self, share: Share) -> dict[str, float]:
        """One optimiser step."""
        return self._optimise(share, lambda _: self._loss)

    def _loss(self, scores: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.margins is not None and batch.loss_weights is not None
        return preference_loss(scores, batch.margins, batch.loss_weights, center_coef=self._center_coef)


def pair_units(lengths: Sequence[int]) -> list[Unit]:
    """Neighbours two by two: a pair's loss needs both of its scores."""
    assert len(lengths) % 2 == 0, f"{len(lengths)} sequences are no whole number of pairs"
    return [Unit(range(i, i + 2), tuple((n, n) for n in lengths[i : i + 2])) for i in range(0, len(lengths), 2)]
