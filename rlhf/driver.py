"""The loop: generate, score, assign advantages, update, publish. Everything else serves this page."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms import Algorithm
from rlhf.batch import Prompt, TrainBatch
from rlhf.checks.gate import DIFFERENCE, SamplingGate, compared_tokens
from rlhf.checks.nonfinite import nonfinite_tensors, take_skip_report
from rlhf.config import Config
from rlhf.evaluation import evaluate
from rlhf.roles import Metrics, Roles, Trained
from rlhf.run import Run, Stateful
from rlhf.stream import Batch, GroupStream
from rlhf.tracking import Roofline, rollout_metrics, source_metrics


@dataclass(kw_only=True)
class Driver(Run[Config]):
    """Reinforcement learning. ``step`` is also the version of the published weights."""

    roles: Roles
    algorithm: Algorithm
    stream: GroupStream
    gate: SamplingGate
    roofline: Roofline

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
            with phase("reward"):
                rewards = self.rewards(sampled)
            with phase("reference"):
                ref_logprobs = sampled.ref_logprobs
            with phase("score"):
                batch = self.score(sampled.packed.with_(rewards=rewards, ref_logprobs=ref_logprobs))
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
            self.save_if_due()
        self.save_at_end()

    def rewards(self, sampled: Batch) -> Tensor:
        """float32 [S], NaN where none was given. Raises RewardError if ``reward.max_abstained`` is exceeded."""
        sampled.scores.check_abstained(self.config.reward.max_abstained)
        return sampled.scores.rewards

    def score(self, batch: TrainBatch) -> TrainBatch:
        """Adds the policy's log-probabilities and the critic's values before the update, computed concurrently; and the
        reference's, if it is the policy without its adapters."""
        roles = self.roles
        roles.rollouts.sleep()
        old_logprobs = roles.learner.score(batch) if self.algorithm.needs_old_logprobs else None
        values = roles.critic.score(batch) if roles.critic else None
        ref_logprobs = roles.learner.score_reference(batch) if self.config.base_is_reference else None
        return batch.with_(
            compared=compared_tokens(batch, self.step),
            old_logprobs=old_logprobs.result() if old_logprobs else None,
            values=values.result() if values else None,
            ref_logprobs=ref_logprobs.result() if ref_logprobs else batch.ref_logprobs,
        )

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics, list[str]]:
        """The algorithm's advantages and metrics, and what is not finite in the advantages or their inputs. If anything
        is not, the advantages are NaN and there are no metrics."""
        nonfinite = nonfinite_tensors(batch, "old_logprobs", "ref_logprobs", "values")
        if not nonfinite:
            done, metrics = self.algorithm.assign_advantages(batch)
            nonfinite = nonfinite_tensors(done, "advantages", "returns")
            if not nonfinite:
                return done, metrics, []
        return batch.with_(advantages=torch.full((batch.num_completion_tokens,), torch.nan)), {}, nonfinite

    def update(self, batch: TrainBatch, nonfinite: list[str]) -> Metrics:
        """Policy and critic learn concurrently, the critic alone during its warm-up, neither if anything is
        ``nonfinite``.

        Raises NonFiniteError as configured in ``checks``.
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
        """Warns if sampler and learner disagree; raises SamplingError if they disagree too much to continue."""
        if warning := self.gate.judge(metrics, self.step):
            self.tracker.note(warning)
        if DIFFERENCE in metrics:
            self.stream.compared(self.step)

    def publish(self) -> Metrics:
        """Gives every live rollout worker the learner's weights as version ``step``, verified."""
        return self.roles.rollouts.publish(self.step)

    def measure(self, held_out: Sequence[Prompt]) -> Metrics:
        """Rewards and lengths of ``data.eval_samples`` completions per held-out prompt."""
        data, roles = self.config.data, self.roles
        evaluation = evaluate(held_out, roles.rollouts, roles.reward, num_samples=data.eval_samples)
        return evaluation.metrics(data.eval_pass_reward)

    def record(self, sampled: Batch, batch: TrainBatch, metrics: Metrics) -> None:
        """One line of metrics, and a table of completions every few steps."""
        rollouts, rewards = sampled.rollouts, sampled.scores.rewards
        metrics |= rollout_metrics(rollouts, sampled.scores, group_size=self.config.algorithm.group_size)
        metrics |= source_metrics(rollouts, rewards) | self.staleness(batch) | self.memory()
        metrics |= self.roofline.figures(
            batch,
            self.tracker.step_phases,
            step=self.step,
            generate_s=metrics["pool/busy_s"],
            num_workers=int(metrics["pool/live_workers"]),
        )
        self.tracker.log_step(self.step, metrics, num_tokens=len(batch.tokens), num_episodes=len(rollouts))
        if self.is_due(self.config.tracking.completions_every_steps):
            self.tracker.log_completions(
                self.step,
                rollouts,
                rewards,
                first_of_each(batch),
                given=sampled.scores.given,
                logprobs=sampled_logprobs(batch),
            )

    def staleness(self, batch: TrainBatch) -> Metrics:
        """How many versions the learner was ahead of the weights that sampled each token."""
        staleness = self.step - 1 - batch.versions
        worst = int(staleness.max())
        assert worst <= self.config.rollout.max_staleness, f"a token is {worst} weight versions old"
        return {"staleness/max": worst, "staleness/mean": staleness.float().mean().item()}

    def trained(self) -> dict[str, Trained]:
        critic = {"critic": self.roles.critic} if self.roles.critic else {}
        return {"learner": self.roles.learner, **critic}

    def stateful(self) -> dict[str, Stateful]:
        return {**super().stateful(), "stream": self.stream, "algorithm": self.algorithm}


def first_of_each(batch: TrainBatch) -> Tensor:
    """float32 [S]: the advantage of each completion's first token."""
    assert batch.advantages is not None
    starts = torch.cumsum(batch.completion_lengths, 0) - batch.completion_lengths
    return batch.advantages[starts]


def sampled_logprobs(batch: TrainBatch) -> list[Tensor] | None:
    """S tensors float32 [completion length]: each token's log-probability from the learner before the update, or else
    from the sampler, NaN where it was not asked; None if the step needed neither."""
    logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    return None if logprobs is None else list(logprobs.split(batch.completion_lengths.tolist()))
