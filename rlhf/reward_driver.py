"""The loop of a reward-model run: epochs of preference pairs, evaluations, checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.algorithms.preference import evaluate_pairs
from rlhf.checks.nonfinite import take_skip_report
from rlhf.data.preferences import Pair, epoch_batches, pair_batch
from rlhf.reward_config import RewardTrainingConfig
from rlhf.roles import Metrics, Trained
from rlhf.run import Run


def count_steps(config: RewardTrainingConfig, pairs: Sequence[Pair]) -> int:
    """Optimiser steps of all epochs."""
    return config.num_epochs * math.ceil(len(pairs) / config.batch_pairs)


@dataclass(kw_only=True)
class RewardTraining(Run[RewardTrainingConfig]):
    """A reward model learns from preference pairs. ``step`` is also the run's position in the data."""

    learner: Trained
    pairs: Sequence[Pair]

    def run(self) -> None:
        """Trains to the last step, or to the end of the step in which ``stop_requested`` is set.

        Raises NonFiniteError as configured in ``checks``.
        """
        self.resume()
        if not self.evaluations:
            self.evaluate()
        num_steps = count_steps(self.config, self.pairs)
        for pairs in self.batches()[self.step :]:
            if self.stop_requested:
                break
            with self.tracker.phase("update"):
                metrics = self.learner.update(pair_batch(pairs), self.step).result()
            nonfinite = take_skip_report(metrics, "reward model")
            metrics |= self.skipped.record(self.step + 1, nonfinite, self.tracker.note)
            self.step += 1
            metrics |= self.memory()
            self.tracker.log_step(self.step, metrics, num_tokens=sum(pair.num_tokens for pair in pairs))
            if self.is_due(self.config.eval_every_steps) or self.step == num_steps:
                self.evaluate()
            self.save_if_due()
        self.save_at_end()

    def batches(self) -> list[list[Pair]]:
        """The pairs of every step, over all epochs."""
        config = self.config
        return [
            batch
            for epoch in range(config.num_epochs)
            for batch in epoch_batches(
                self.pairs, config.batch_pairs, epoch=epoch, seed=config.seed, shuffle=config.data.shuffle
            )
        ]

    def measure(self, held_out: Sequence[Pair]) -> Metrics:
        """Loss, accuracy and margin of held-out pairs."""
        batch = pair_batch(held_out)
        scores = self.learner.score(batch).result()
        return evaluate_pairs(scores, batch, center_coef=self.config.center_coef)

    def trained(self) -> dict[str, Trained]:
        return {"learner": self.learner}
