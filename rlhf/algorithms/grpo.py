"""Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300); variants DAPO, Dr. GRPO, CISPO, GSPO."""

import torch
from torch import Tensor

from rlhf.algorithms.advantages import (
    AdvantageInputs,
    Estimator,
    clip_rewards,
    group_normalized,
    leave_one_out,
    leave_one_out_of_turns,
    reinforce_plus_plus_baseline,
)
from rlhf.algorithms.kl import KLEstimator, per_token_kl
from rlhf.algorithms.losses import sum_sequences
from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig


class GroupBaseline:
    """Advantages from an estimator that compares the completions of a group."""

    def __init__(self, config: AlgorithmConfig, estimator: Estimator) -> None:
        self._config, self._estimator = config, estimator
        self.needs_old_logprobs = config.beta > 0 and config.facts.kl == "reward"

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        assert batch.rewards is not None
        given = ~batch.abstained
        rewards = clip_rewards(batch.rewards, self._config.reward_clip)
        metrics: dict[str, float] = {}
        if self.needs_old_logprobs:
            kl = sequence_kl(batch, self._config.kl_estimator)
            rewards = rewards - self._config.beta * kl
            metrics["kl"] = kl[given].mean().item()  # summed over a completion; in the loss, the mean per token
        advantages = self._estimator(AdvantageInputs.of(batch, rewards, self._config.group_size))
        per_completion = len(advantages) == batch.num_sequences  # if each has one token, both are the same
        given = given if per_completion else given.repeat_interleave(batch.completion_lengths)
        advantages = advantages.masked_fill(~given, 0.0)
        metrics["advantages/abs_mean"] = advantages[given].abs().mean().item()
        if per_completion:
            advantages = advantages.repeat_interleave(batch.completion_lengths)
        return batch.with_(advantages=advantages), metrics

    def adapt(self, batch: TrainBatch) -> None:
        pass  # beta is fixed

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        assert not state


def sequence_kl(batch: TrainBatch, estimator: KLEstimator) -> Tensor:
    """float32 [S]: each completion's summed per-token KL to the reference."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    per_token = per_token_kl(batch.old_logprobs, batch.ref_logprobs, estimator=estimator)
    return sum_sequences(per_token, batch.completion_lengths)


def grpo(config: AlgorithmConfig) -> GroupBaseline:
    """Rewards normalised within their group."""
    return GroupBaseline(config, lambda x: group_normalized(x.rewards, x.group_size, scale=config.scale_rewards))


def rloo(config: AlgorithmConfig) -> GroupBaseline:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): the rest of the group is the baseline, and the
    KL to the reference is part of the reward."""
    if config.credit == "turn":
        return GroupBaseline(config, leave_one_out_of_turns)
    return GroupBaseline(config, lambda x: leave_one_out(x.rewards, x.group_size))


def reinforce_pp(config: AlgorithmConfig) -> GroupBaseline:
    """REINFORCE++ with a group baseline (Hu et al. 2025, arXiv 2501.03262): rewards whitened over the whole batch."""
    return GroupBaseline(config, lambda x: reinforce_plus_plus_baseline(x.rewards, x.group_size))


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """bool [num_groups]: groups with nothing to learn, because all rewards are equal or fewer than two are given.

    rewards float [S], group-contiguous, NaN where missing.
    """
    groups = rewards.reshape(-1, group_size)
    given = ~groups.isnan()
    first = groups.gather(1, given.int().argmax(1, keepdim=True))
    return (torch.isclose(groups, first, rtol=0, atol=1e-8) | ~given).all(1)
