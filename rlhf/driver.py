"""The loop. Generate, score, assign advantages, update, publish; everything else serves this page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms import Algorithm
from rlhf.batch import Prompt, TrainBatch
from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.checks.gate import DIFFERENCE, SamplingGate, compared_tokens
from rlhf.checks.nonfinite import SkippedSteps, nonfinite_tensors, take_skip_report
from rlhf.config import Config
from rlhf.rewards.total import check_abstained, combine
from rlhf.roles import Critic, Learner, Metrics, Reference, Reward, Rollouts
from rlhf.stream import Batch, GroupStream, merge_parts, sample_once
from rlhf.tracking import Roofline, Tracker, rollout_metrics


@dataclass(frozen=True)
class Roles:
    """Who does the work. Reference and critic exist only where the algorithm asks for them."""

    learner: Learner
    rollouts: Rollouts
    reward: Reward
    reference: Reference | None = None
    critic: Critic | None = None


@dataclass
class Driver:
    """One training run. ``step`` counts finished training steps and is also the version of the published weights."""

    config: Config
    roles: Roles
    algorithm: Algorithm
    stream: GroupStream
    eval_prompts: Sequence[Prompt]
    gate: SamplingGate
    tracker: Tracker
    roofline: Roofline
    checkpoints: CheckpointStore
    step: int = 0
    stop_requested: bool = False
    evaluations: dict[int, Metrics] = field(default_factory=dict)
    skipped: SkippedSteps = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.config.checks)

    def run(self) -> None:
        """Trains to ``num_steps``, or to the end of the step in which ``stop_requested`` is set."""
        self.resume()
        self.publish()
        if not self.evaluations:
            self.evaluate()
        while self.step < self.config.num_steps and not self.stop_requested:
            phase = self.tracker.phase
            with phase("generate"):
                sampled = self.stream.next_batch(self.step)
            with phase("score"):
                batch = self.score(sampled)
            with phase("advantage"):
                batch, metrics, nonfinite = self.assign_advantages(batch)
            with phase("update"):
                metrics |= self.update(batch, nonfinite)
            self.judge(metrics)
            self.step += 1
            with phase("publish"):
                metrics |= self.publish()
            self.record(sampled, batch, metrics)
            if self.is_due(self.config.eval_every_steps) or self.step == self.config.num_steps:
                self.evaluate()
            if self.is_due(self.config.checkpoint.every_steps):
                self.save()
        if not self.checkpoints.holds(self.step):
            self.save()

    def score(self, sampled: Batch) -> TrainBatch:
        """The rewards, and what the learners know of the batch: submitted at once, then awaited.

        Raises RewardError where more of the completions have no reward than ``reward.max_abstained`` allows.
        """
        roles, batch = self.roles, sampled.packed
        rewards = combine(sampled.scores, roles.reward.weights())
        check_abstained(rewards, roles.reward.weights(), self.config.reward.max_abstained)
        roles.rollouts.sleep()
        old_logprobs = roles.learner.score(batch) if self.algorithm.needs_old_logprobs else None
        values = roles.critic.score(batch) if roles.critic else None
        return batch.with_(
            compared=compared_tokens(batch, self.step),
            rewards=rewards,
            old_logprobs=old_logprobs.result() if old_logprobs else None,
            values=values.result() if values else None,
        )

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics, list[str]]:
        """The algorithm's advantages and metrics; and what is not finite in them, or in what they come from: then there
        are no metrics, and the advantages are NaN."""
        nonfinite = nonfinite_tensors(batch, "old_logprobs", "ref_logprobs", "values")
        if not nonfinite:
            done, metrics = self.algorithm.assign_advantages(batch)
            nonfinite = nonfinite_tensors(done, "advantages", "returns")
            if not nonfinite:
                return done, metrics, []
        return batch.with_(advantages=torch.full((batch.num_completion_tokens,), torch.nan)), {}, nonfinite

    def update(self, batch: TrainBatch, nonfinite: list[str]) -> Metrics:
        """Policy and critic learn side by side; the critic alone during its warm-up. From what is ``nonfinite`` nobody
        learns.

        Raises NonFiniteError as ``checks`` says.
        """
        metrics: Metrics = {}
        if not nonfinite:
            critic = self.roles.critic.update(batch, self.step) if self.roles.critic else None
            warm = self.step >= self.config.critic.warmup_steps or critic is None
            policy = self.roles.learner.update(batch, self.step) if warm else None
            metrics = {**(policy.result() if policy else {}), **(critic.result() if critic else {})}
            nonfinite = [*take_skip_report(metrics, "policy"), *take_skip_report(metrics, "critic", "critic/")]
            if policy and not nonfinite:
                self.algorithm.adapt(batch)
        return metrics | self.skipped.record(self.step + 1, nonfinite, self.tracker.note)

    def judge(self, metrics: Metrics) -> None:
        """Warns where sampler and learner disagree; raises SamplingError where they disagree too much to go on."""
        if warning := self.gate.judge(metrics, self.step):
            self.tracker.note(warning)
        if DIFFERENCE in metrics:
            self.stream.compared(self.step)

    def publish(self) -> Metrics:
        """Every live rollout worker gets the learner's weights as version ``step``, verified."""
        return self.roles.rollouts.publish(self.step)

    def evaluate(self) -> None:
        """Greedy completions of the held-out prompts; their mean reward."""
        if not self.eval_prompts:
            return
        with self.tracker.phase("evaluate"):
            rollouts = sample_once(self.eval_prompts, self.roles.rollouts)
            size = math.ceil(len(rollouts) / self.config.reward.num_replicas)
            parts = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
            scores = merge_parts(self.roles.reward.score(parts).result())
        rewards = combine(scores, self.roles.reward.weights())
        self.evaluations[self.step] = rollout_metrics(rollouts, scores, rewards, group_size=1)
        self.tracker.log_eval(self.step, self.evaluations[self.step])

    def record(self, sampled: Batch, batch: TrainBatch, metrics: Metrics) -> None:
        """One line of metrics, and a table of completions every few steps."""
        assert batch.rewards is not None and batch.advantages is not None
        rollouts, group_size = sampled.rollouts, self.config.algorithm.group_size
        metrics |= rollout_metrics(rollouts, sampled.scores, batch.rewards, group_size=group_size)
        metrics |= self.staleness(batch)
        metrics |= self.roofline.figures(
            batch,
            self.tracker.step_phases,
            step=self.step,
            generate_s=metrics["pool/busy_s"],
            num_workers=int(metrics["pool/live_workers"]),
        )
        self.tracker.log_step(self.step, metrics, num_tokens=len(batch.tokens), num_episodes=len(rollouts))
        if self.is_due(self.config.tracking.completions_every_steps):
            self.tracker.log_completions(self.step, rollouts, batch.rewards, first_of_each(batch))

    def staleness(self, batch: TrainBatch) -> Metrics:
        """By how many versions the learner was ahead of the weights that sampled each token."""
        staleness = self.step - 1 - batch.versions
        worst = int(staleness.max())
        assert worst <= self.config.rollout.max_staleness, f"a token is {worst} weight versions old"
        return {"staleness/max": worst, "staleness/mean": staleness.float().mean().item()}

    def save(self) -> None:
        """One checkpoint of everything, whole or absent."""
        with self.tracker.phase("checkpoint"), self.checkpoints.writing(self.step, self.state_dict()) as directory:
            self.roles.learner.save(str(directory / "learner"))
            if self.roles.critic:
                self.roles.critic.save(str(directory / "critic"))

    def resume(self) -> None:
        """Goes on from the checkpoint that ``checkpoint.resume`` names, if there is one."""
        if (directory := self.checkpoints.find(self.config.checkpoint.resume)) is None:
            return
        self.load_state_dict(read_state(directory))
        self.roles.learner.load(str(directory / "learner"))
        if self.roles.critic:
            self.roles.critic.load(str(directory / "critic"))

    def state_dict(self) -> dict[str, Any]:
        """Everything of the loop's own that a resumed run needs, as JSON."""
        return {
            "step": self.step,
            "stream": self.stream.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "tracker": self.tracker.state_dict(),
            "skipped": self.skipped.state_dict(),
            "evaluations": {str(step): metrics for step, metrics in self.evaluations.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.stream.load_state_dict(state["stream"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.tracker.load_state_dict(state["tracker"])
        self.skipped.load_state_dict(state["skipped"])
        self.evaluations = {int(step): metrics for step, metrics in state["evaluations"].items()}

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0


def first_of_each(batch: TrainBatch) -> Tensor:
    """float32 [S]: the advantage of each completion's first token."""
    assert batch.advantages is not None
    starts = torch.cumsum(batch.completion_lengths, 0) - batch.completion_lengths
    return batch.advantages[starts]
