"""The loop of a reward-model run: epochs of preference pairs, evaluations, checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.checks.nonfinite import SkippedSteps, take_skip_report
from rlhf.data.preferences import Pair, epoch_batches, pair_batch
from rlhf.reward_config import RewardTrainingConfig
from rlhf.roles import Metrics, Trained
from rlhf.tracking import Tracker
from rlhf.training.reward_learner import evaluate_pairs


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
    skipped: SkippedSteps = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.config.checks)

    def run(self) -> None:
        """Trains to the last step, or to the end of the step in which ``stop_requested`` is set.

        Raises NonFiniteError as ``checks`` says.
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
            self.tracker.log_step(self.step, metrics, num_tokens=sum(pair.num_tokens for pair in pairs))
            if self.is_due(self.config.eval_every_steps) or self.step == num_steps:
                self.evaluate()
            if self.is_due(self.config.checkpoint.every_steps):
                self.save()
        if not self.checkpoints.holds(self.step):
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
            "skipped": self.skipped.state_dict(),
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
        self.skipped.load_state_dict(state["skipped"])
        self.evaluations = {int(step): metrics for step, metrics in state["evaluations"].items()}
        self.learner.load(str(directory / "learner"))

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0
