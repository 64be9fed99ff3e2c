"""A scalar reward model learns from preference pairs, on the same engine as the policy and the critic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.batch import TrainBatch
from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.config import RewardTrainingConfig
from rlhf.engine import Engine
from rlhf.learner import PackedLearner, Part
from rlhf.packing import Unit
from rlhf.preferences import Pair, epoch_batches, pair_batch
from rlhf.roles import Metrics, Trained
from rlhf.tracking import Tracker


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
    """The reward model's preference loss. Its batches are those of ``rlhf.preferences.pair_batch``."""

    def __init__(self, engine: Engine, *, center_coef: float) -> None:
        super().__init__(engine)
        self._center_coef = center_coef

    def score(self, batch: TrainBatch) -> Part:
        """This rank's share of the scores under the current weights."""
        return self._score(batch, lambda output: output)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimiser step over the pairs of ``batch``."""
        return self._optimise([batch], lambda _: self._loss)

    def _units(self, batch: TrainBatch) -> list[Unit]:
        return pair_units(batch.sequence_lengths.tolist())

    def _loss(self, scores: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.margins is not None and batch.loss_weights is not None
        margins, weights = batch.margins.to(scores.device), batch.loss_weights.to(scores.device)
        return preference_loss(scores, margins, weights, center_coef=self._center_coef)


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


def count_steps(config: RewardTrainingConfig, pairs: Sequence[Pair]) -> int:
    """Optimiser steps of all epochs."""
    return config.num_epochs * math.ceil(len(pairs) / config.batch_pairs)


@dataclass
class RewardTraining:
    """One run over preference pairs. ``step`` counts finished optimiser steps, and says where in the data it is."""

    config: RewardTrainingConfig
    learner: Trained
    pairs: Sequence[Pair]
    held_out: Sequence[Pair]
    tracker: Tracker
    checkpoints: CheckpointStore
    step: int = 0
    stop_requested: bool = False
    evaluations: dict[int, Metrics] = field(default_factory=dict)

    def run(self) -> None:
        """Trains to the last step, or to the end of the step in which ``stop_requested`` is set."""
        self.resume()
        if self.step not in self.evaluations:
            self.evaluate()
        num_steps = count_steps(self.config, self.pairs)
        for pairs in self.batches()[self.step :]:
            if self.stop_requested:
                break
            with self.tracker.phase("update"):
                metrics = self.learner.update(pair_batch(pairs)).result()
            self.step += 1
            self.tracker.log_step(self.step, metrics, num_tokens=sum(pair.num_tokens for pair in pairs))
            if self.is_due(self.config.eval_every_steps) or self.step == num_steps:
                self.evaluate()
            if self.is_due(self.config.checkpoint.every_steps):
                self.save()
        if self.step not in self.checkpoints.steps():
            self.save()

    def batches(self) -> list[list[Pair]]:
        """The pairs of every step, from the first epoch on."""
        config = self.config
        return [
            batch
            for epoch in range(config.num_epochs)
            for batch in epoch_batches(
                self.pairs, config.batch_pairs, epoch=epoch, seed=config.seed, shuffle=config.data.shuffle
            )
        ]

    def evaluate(self) -> None:
        """Loss, accuracy and margin of the held-out pairs."""
        if not self.held_out:
            return
        with self.tracker.phase("evaluate"):
            batch = pair_batch(self.held_out)
            scores = self.learner.score(batch).result()
        self.evaluations[self.step] = evaluate_pairs(scores, batch, center_coef=self.config.center_coef)
        self.tracker.log_eval(self.step, self.evaluations[self.step])

    def save(self) -> None:
        """One checkpoint of everything, whole or absent."""
        state: dict[str, Any] = {
            "step": self.step,
            "tracker": self.tracker.state_dict(),
            "evaluations": {str(step): metrics for step, metrics in self.evaluations.items()},
        }
        with self.tracker.phase("checkpoint"), self.checkpoints.writing(self.step, state) as directory:
            self.learner.save(str(directory / "learner"))

    def resume(self) -> None:
        """Goes on from the checkpoint that ``checkpoint.resume`` names, if there is one."""
        if (directory := self.checkpoints.find(self.config.checkpoint.resume)) is None:
            return
        state = read_state(directory)
        self.step = state["step"]
        self.tracker.load_state_dict(state["tracker"])
        self.evaluations = {int(step): metrics for step, metrics in state["evaluations"].items()}
        self.learner.load(str(directory / "learner"))

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0
