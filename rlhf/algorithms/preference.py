"""The loss of a scalar reward model: the likelihood of preferences between two answers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.batch import TrainBatch


def preference_loss(
    scores: Tensor, margins: Tensor, weights: Tensor, *, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood of P preferences under the Bradley-Terry model, weighted.

        -log sigmoid(r_chosen - r_rejected - margin) + center_coef * (r_chosen + r_rejected)^2

    Bradley & Terry 1952, Rank Analysis of Incomplete Block Designs; Ouyang et al. 2022, arXiv 2203.02155, equation 1;
    the margin: Touvron et al. 2023, Llama 2, arXiv 2307.09288, equation 2. The likelihood depends only on differences;
    the second term keeps the scores around zero (Eisenstein et al. 2023, arXiv 2312.09244, section 2; TRL's
    center_rewards_coefficient).

    scores (with gradient), margins, weights float [2 P]: chosen, rejected, chosen, ...; margins and weights are the
    same for both of a pair, and weights, counted once per pair, sum to 1 over the whole optimiser step.

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


@torch.no_grad()
def evaluate_pairs(scores: Tensor, batch: TrainBatch, *, center_coef: float) -> dict[str, float]:
    """Loss, accuracy, margin and mean reward of held-out pairs, given their scores [2 P]."""
    assert batch.margins is not None and batch.loss_weights is not None
    loss, stats = preference_loss(scores, batch.margins, batch.loss_weights, center_coef=center_coef)
    return {"loss": loss.item(), **{name: value.item() for name, value in stats.items()}}
