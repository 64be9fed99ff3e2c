"""What learns: the policy from advantages, the critic from returns. Each is a loss on top of an Engine.

A third, the reward model, learns from preferences in a separate run: ``rlhf.training.reward_learner``.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from rlhf.algorithms.custom import custom_loss
from rlhf.algorithms.losses import (
    PolicyLossSettings,
    entropy_bonus,
    packed_policy_loss,
    rollout_importance_ratio,
    value_loss,
)
from rlhf.batch import TrainBatch
from rlhf.checks.nonfinite import skip_report
from rlhf.config import AlgorithmConfig
from rlhf.models.lora import without_adapters
from rlhf.shares import BatchPlanner, Planner, PolicyPlanner, Share, ValuePlanner
from rlhf.training.engine import Engine, LossFn, add_stat, is_maximum

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
    """One rank of a model that scores and learns. Its shares are those of ``planner``'s plans."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def planner(self) -> Planner:
        """How batches have to be spread for it; the same on every rank."""
        raise NotImplementedError

    def _score(self, share: Share, pick: Callable[[Any], Tensor]) -> Tensor:
        """[n, ...]: scores of the share's completion tokens."""
        (scoring,) = share.steps
        pieces = self.engine.forward(share.micro_batches(scoring), pick, share_prompts=scoring.share_prompts)
        self.engine.release_gathered()
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _optimise(self, share: Share, make_loss: Callable[[int], LossFn]) -> dict[str, float]:
        """All optimiser steps. Returns the mean of the metrics over the steps that were taken, or all if none was
        (for ``_max``, the largest), and ``skip_report``."""
        results: list[dict[str, float]] = []
        for step in share.steps:
            micro_batches, loss = share.micro_batches(step), make_loss(step.num_tokens)
            results.append(self.engine.step(micro_batches, loss, share_prompts=step.share_prompts))
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


class SpreadOver(TypedDict):
    """What every planner must know of an engine."""

    num_ranks: int
    token_budget: int
    hidden_size: int


def spread_over(engine: Engine) -> SpreadOver:
    """The engine's ranks, and what one of its micro-batches holds."""
    return {
        "num_ranks": engine.world_size,
        "token_budget": engine.config.micro_batch_tokens,
        "hidden_size": engine.model.lm.config.hidden_size,
    }


class BatchLearner(PackedLearner):
    """Learns in epochs of mini-batches. Subclasses define the loss."""

    PLANNER: ClassVar[type[BatchPlanner]]

    def __init__(self, engine: Engine, config: AlgorithmConfig, *, seed: int, max_completion_tokens: int) -> None:
        super().__init__(engine)
        self.config = config
        self._seed, self._max_completion_tokens = seed, max_completion_tokens

    @property
    def planner(self) -> Planner:
        return self.PLANNER(
            **spread_over(self.engine),
            config=self.config,
            seed=self._seed,
            max_completion_tokens=self._max_completion_tokens,
        )


class PolicyLearner(BatchLearner):
    """The policy's loss over completion tokens: the clipped surrogate, or a custom loss."""

    PLANNER = PolicyPlanner

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

    def score(self, share: Share) -> Tensor:
        """float32 [n]: log-probabilities under the current weights."""
        return self._score(share, lambda output: output[0])

    def score_reference(self, share: Share) -> Tensor:
        """float32 [n]: log-probabilities under the weights that the adapters were put on."""
        with without_adapters(self.engine.model):
            return self.score(share)

    def score_with_entropy(self, share: Share) -> Tensor:
        """float32 [n, 2]: log-probabilities and entropies under the current weights."""
        return self._score(share, lambda output: torch.stack(output, 1))

    def update(self, share: Share) -> dict[str, float]:
        """All optimiser steps of a training step."""
        compared = share.num_compared
        metrics = self._optimise(
            share, lambda num_tokens: lambda out, micro: self._loss(out, micro, num_tokens, compared)
        )
        names = PPO_NAMES if self.config.facts.critic else {}
        return {names.get(name, name): value for name, value in metrics.items()}

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

    PLANNER = ValuePlanner

    def score(self, share: Share) -> Tensor:
        """float32 [n]: values under the current weights."""
        return self._score(share, lambda output: output)

    def update(self, share: Share) -> dict[str, float]:
        """All optimiser steps of a training step, over the same mini-batches as the policy's."""
        metrics = self._optimise(share, lambda num_tokens: lambda out, micro: self._loss(out, micro))
        return {CRITIC_NAMES.get(name, f"critic/{name}"): value for name, value in metrics.items()}

    def _loss(self, values: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None and batch.loss_weights is not None
        return value_loss(values, batch.values, batch.returns, batch.loss_weights, clip_range=self.config.value_clip)
