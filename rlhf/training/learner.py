"""What learns: the policy from advantages, the critic from returns. Each is a loss on top of an Engine.

A third, the reward model, learns from preferences in a separate run: ``rlhf.training.reward_learner``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algorithms.custom import custom_loss
from rlhf.algorithms.losses import (
    PolicyLossSettings,
    entropy_bonus,
    packed_policy_loss,
    rollout_importance_ratio,
    token_weights,
    top_entropy_mask,
    truncation_mask,
    value_loss,
)
from rlhf.batch import TrainBatch, merge_scores
from rlhf.checks.nonfinite import skip_report
from rlhf.config import AlgorithmConfig
from rlhf.packing import Unit, plan_micro_batches, prompt_units, split_minibatches, worth_sharing
from rlhf.training.engine import Engine, LossFn, add_stat, is_maximum

Part = tuple[list[int], Tensor]

# TRL PPO's names for the learners' metrics; metrics not listed here keep its GRPO names.
PPO_NAMES = {
    "loss": "loss/policy_avg",
    "approx_kl": "policy/approxkl_avg",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "entropy": "policy/entropy_avg",
    "ratio": "val/ratio",
    "learning_rate": "lr",
}
CRITIC_NAMES = {"loss": "loss/value_avg", "value/clip_ratio": "val/clipfrac_avg"}  # the others: critic/<name>


class PackedLearner:
    """Spreads a batch over ranks and micro-batches."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _micro_batches(self, batch: TrainBatch, *, share_prompts: bool) -> list[list[int]]:
        """This rank's micro-batches of a batch that every rank holds, as sequence indices; some may be empty."""
        plan = plan_micro_batches(
            self._units(batch, share_prompts),
            num_ranks=self.engine.world_size,
            token_budget=self.engine.config.micro_batch_tokens,
            hidden_size=self.engine.model.lm.config.hidden_size,
        )
        return plan[self.engine.rank]

    def _units(self, batch: TrainBatch, share_prompts: bool) -> list[Unit]:
        """Sequences that must share a micro-batch."""
        return prompt_units(
            batch,
            share_prompts=share_prompts,
            num_ranks=self.engine.world_size,
            token_budget=self.engine.config.micro_batch_tokens,
        )

    def _score(self, batch: TrainBatch, pick: Callable[[Any], Tensor]) -> Part:
        """This rank's share: (sequence indices, [n] scores of their completion tokens)."""
        share_prompts = worth_sharing(batch)
        mine = self._micro_batches(batch, share_prompts=share_prompts)
        selected = [batch.select(indices) if indices else None for indices in mine]
        pieces = self.engine.forward(selected, pick, share_prompts=share_prompts)
        self.engine.release_gathered()
        return [i for indices in mine for i in indices], torch.cat(pieces) if pieces else torch.empty(0)

    def _optimise(self, steps: Sequence[TrainBatch], make_loss: Callable[[int], LossFn]) -> dict[str, float]:
        """One optimiser step per batch. Returns the mean of the metrics over the steps that were taken, or all if none
        was (for ``_max``, the largest), and ``skip_report``."""
        results: list[dict[str, float]] = []
        for batch in steps:
            assert batch.loss_weights is not None
            num_tokens = int((batch.loss_weights != 0).sum())
            share_prompts = worth_sharing(batch)
            mine = self._micro_batches(batch, share_prompts=share_prompts)
            selected = [batch.select(indices) if indices else None for indices in mine]
            results.append(self.engine.step(selected, make_loss(num_tokens), share_prompts=share_prompts))
        counted = [result for result in results if not result["skipped"]] or results
        means: dict[str, float] = {}
        for result in counted:
            for name, value in result.items():
                add_stat(means, name, value if is_maximum(name) else value / len(counted))
        skipped = skip_report(results)
        if skipped:  # these are shares of all tokens compared in the update
            means = {name: value for name, value in means.items() if not name.startswith("sampling/")}
        del means["skipped"]
        return means | skipped


class BatchLearner(PackedLearner):
    """Splits a training batch into optimiser steps: epochs of mini-batches. Subclasses define the loss."""

    def __init__(self, engine: Engine, config: AlgorithmConfig, *, seed: int, max_completion_tokens: int) -> None:
        super().__init__(engine)
        self.config = config
        self._seed, self._max_completion_tokens = seed, max_completion_tokens

    def _score_everywhere(self, batch: TrainBatch, pick: Callable[[Any], Tensor]) -> Tensor:
        """float32 [N] on every rank."""
        parts: list[Part | None] = [None] * self.engine.world_size
        dist.all_gather_object(parts, self._score(batch, pick))
        return merge_scores(batch, [part for part in parts if part is not None])

    def _steps(self, batch: TrainBatch, training_step: int) -> list[TrainBatch]:
        """The batches of the optimiser steps: reshuffled for every epoch, the same way on every rank, and
        for critic and policy."""
        if self.config.steps_per_update == 1:
            return [batch]
        shuffle = torch.Generator().manual_seed(self._seed * 1_000_003 + training_step)
        steps = []
        for _ in range(self.config.num_epochs):
            order = torch.randperm(batch.num_sequences, generator=shuffle).tolist()
            # sorted within each, so that sequences that share their prompt are neighbours
            steps += [batch.select(sorted(part)) for part in split_minibatches(order, self.config.num_minibatches)]
        return steps


def with_reward(batch: TrainBatch) -> Tensor:
    """bool [N]: tokens of completions with a reward."""
    return (~batch.abstained).repeat_interleave(batch.completion_lengths)


class PolicyLearner(BatchLearner):
    """The policy's loss over completion tokens: the clipped surrogate, or a custom loss."""

    def __init__(self, engine: Engine, config: AlgorithmConfig, *, seed: int, max_completion_tokens: int) -> None:
        super().__init__(engine, config, seed=seed, max_completion_tokens=max_completion_tokens)
        self._loss_settings = PolicyLossSettings(
            loss_type=config.loss_type,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
            dual_clip=config.dual_clip,
            importance_sampling_level=config.importance_sampling_level,
            beta=config.beta if config.facts.kl == "loss" else 0.0,
            kl_bias_correction=config.kl_bias_correction,
        )
        self._token_loss = custom_loss(config)

    def score(self, batch: TrainBatch) -> Part:
        """This rank's share of the log-probabilities under the current weights."""
        return self._score(batch, lambda output: output[0])

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """All optimiser steps of training step ``step``, counted from 0.

        With a single step the scoring policy is the sampling policy: its own forward gives the old log-probabilities,
        so none is run beforehand.
        """
        batch = self._score_beforehand(batch)
        steps = [part.with_(loss_weights=self._weights(part)) for part in self._steps(batch, step)]
        compared = sum(int(part.compared.sum()) for part in steps if part.compared is not None) / len(steps)
        metrics = self._optimise(
            steps, lambda num_tokens: lambda out, micro: self._loss(out, micro, num_tokens, compared)
        )
        names = PPO_NAMES if self.config.facts.critic else {}
        return {names.get(name, name): value for name, value in metrics.items()}

    def _score_beforehand(self, batch: TrainBatch) -> TrainBatch:
        """Fills in what the optimiser steps need from the policy before the first one."""
        quantile = self.config.top_entropy_quantile
        if quantile == 1 and (batch.old_logprobs is not None or self.config.steps_per_update == 1):
            return batch
        logprobs, entropy = self._score_everywhere(batch, lambda output: torch.stack(output, 1)).unbind(1)
        return batch.with_(
            old_logprobs=logprobs if batch.old_logprobs is None else batch.old_logprobs,
            entropy_mask=top_entropy_mask(entropy, quantile, self._counted(batch)) if quantile < 1 else None,
        )

    def _counted(self, batch: TrainBatch) -> Tensor:
        """bool [N]: the tokens that contribute to the loss."""
        counted = with_reward(batch)
        if self.config.mask_truncated_completions:
            counted = counted & truncation_mask(batch.completion_lengths, batch.truncated)
        return counted

    def _weights(self, batch: TrainBatch) -> Tensor:
        return token_weights(
            batch.completion_lengths,
            loss_type=self.config.loss_type,
            max_completion_length=self._max_completion_tokens,
            mask=self._counted(batch),
        )

    def _loss(
        self, output: tuple[Tensor, Tensor], batch: TrainBatch, num_tokens: int, num_compared: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``num_tokens``: tokens that count in the optimiser step; ``num_compared``: tokens compared with the sampler,
        averaged over the optimiser steps of this update, as the stats are."""
        logprobs, entropy = output
        weights = batch.loss_weights
        assert batch.advantages is not None and weights is not None
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss, stats = packed_policy_loss(
            self._loss_settings,
            logprobs,
            old,
            batch.advantages,
            batch.completion_lengths,
            weights,
            num_tokens=num_tokens,
            ref_logprobs=batch.ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            rollout_ratio=self._rollout_ratio(old, batch),
            entropy_mask=batch.entropy_mask,
            token_loss=self._token_loss,
        )
        if self.config.entropy_coef:
            loss = loss + entropy_bonus(entropy, weights, coef=self.config.entropy_coef)
        counted = weights != 0
        stats["entropy"] = (entropy.detach() * counted).sum() / max(num_tokens, 1)
        if batch.compared is not None and batch.rollout_logprobs is not None and num_compared:
            gap = torch.where(batch.compared, (old - batch.rollout_logprobs).abs(), 0.0)
            stats["sampling/logprob_difference_mean"] = gap.sum() / num_compared
            stats["sampling/logprob_difference_max"] = gap.max()
        return loss, stats

    def _rollout_ratio(self, old: Tensor, batch: TrainBatch) -> Tensor | None:
        if self.config.rollout_correction in ("auto", "none"):
            return None
        assert batch.rollout_logprobs is not None and batch.loss_weights is not None
        level, mode = self.config.rollout_correction.split("_")
        return rollout_importance_ratio(
            old,
            batch.rollout_logprobs,
            batch.completion_lengths,
            batch.loss_weights != 0,
            level=level,  # type: ignore[arg-type]
            mode=mode,  # type: ignore[arg-type]
            cap=self.config.rollout_correction_cap,
            floor=self.config.rollout_correction_floor,
        )


class ValueLearner(BatchLearner):
    """The critic's clipped regression on returns."""

    def score(self, batch: TrainBatch) -> Part:
        """This rank's share of the values under the current weights."""
        return self._score(batch, lambda output: output)

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """All optimiser steps of training step ``step``, counted from 0, over the same mini-batches as the policy's."""
        steps = [
            part.with_(loss_weights=token_weights(part.completion_lengths, loss_type="dapo", mask=with_reward(part)))
            for part in self._steps(batch, step)
        ]
        metrics = self._optimise(steps, lambda num_tokens: lambda out, micro: self._loss(out, micro))
        return {CRITIC_NAMES.get(name, f"critic/{name}"): value for name, value in metrics.items()}

    def _loss(self, values: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None and batch.loss_weights is not None
        return value_loss(values, batch.values, batch.returns, batch.loss_weights, clip_range=self.config.value_clip)
