"""A scalar reward model learns from preference pairs, on the same engine as the policy and the critic."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.batch import TrainBatch
from rlhf.packing import Unit
from rlhf.training.engine import Engine
from rlhf.training.learner import PackedLearner, Part


def preference_loss(
    scores: Tensor, margins: Tensor, weights: Tensor, *, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood of P preferences under the Bradley-Terry model, weighted.

        -log sigmoid(r_chosen - r_rejected - margin) + center_coef * (r_chosen + r_rejected)^2

    Bradley & Terry 1952, Rank Analysis of Incomplete Block Designs; Ouyang et al. 2022, arXiv 2203.02155, equation 1;
    the margin: Touvron et al. 2023, Llama 2, arXiv 2307.09288, equation 2. The likelihood knows only differences; the
    second term keeps the scores around zero (Eisenstein et al. 2023, arXiv 2312.09244, section 2; TRL's
    center_rewards_coefficient).

    scores (with gradient), margins, weights float [2 P]: chosen, rejected, chosen, ...; margins and weights are alike
    for both of a pair, and the weights of one of each pair sum to 1 over the whole optimiser step.

    Returns (loss, stats), 0-dim tensors that add up over micro-batches and ranks to means over the pairs: ``accuracy``
    (share of pairs with r_chosen > r_rejected), ``margin`` (r_chosen - r_rejected), ``mean_reward``. TRL's names.
    """
    chosen, rejected = scores.view(-1, 2).unbind(1)
    margin, weight = margins.view(-1, 2)[:, 0], weights.view(-1, 2)[:, 0]
    gap = chosen - rejected
    loss = -F.logsigmoid(gap - margin)
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    stats = {"accuracy": (gap > 0).to(gap.dtype), "margin": gap, "mean_reward": (chosen + rejected) / 2}
    return (loss * weight).sum(), {name: (x.detach() * weight).sum() for name, x in stats.items()}


class RewardLearner(PackedLearner):
    """The reward model's preference loss. Its batches are those of ``rlhf.data.preferences.pair_batch``."""

    def __init__(self, engine: Engine, *, center_coef: float) -> None:
        super().__init__(engine)
        self._center_coef = center_coef

    def score(self, batch: TrainBatch) -> Part:
        """This rank's share of the scores under the current weights."""
        return self._score(batch, lambda output: output)

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One optimiser step over the pairs of ``batch``; ``step`` makes no difference here."""
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


@torch.no_grad()
def evaluate_pairs(scores: Tensor, batch: TrainBatch, *, center_coef: float) -> dict[str, float]:
    """Loss, accuracy, margin and mean reward of held-out pairs, given their scores [2 P]."""
    assert batch.margins is not None and batch.loss_weights is not None
    loss, stats = preference_loss(scores, batch.margins, batch.loss_weights, center_coef=center_coef)
    return {"loss": loss.item(), **{name: value.item() for name, value in stats.items()}}
