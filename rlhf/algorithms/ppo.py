"""Proximal Policy Optimization for language models (Schulman et al. 2017, arXiv 1707.06347; Ziegler et al. 2019).

The reward of a token is ``-beta * KL`` to the reference, plus the completion's score at its last token; what an
environment gave for a turn comes at that turn's last token instead. Advantages and returns come from generalised
advantage estimation over the critic's values.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms.advantages import clip_rewards, gae, place_scores, whiten
from rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, per_token_kl
from rlhf.algorithms.losses import sum_sequences
from rlhf.batch import TrainBatch, completion_mask, pad, unpad
from rlhf.config import AlgorithmConfig


class Ppo:
    """PPO's advantages. Its state is the KL controller's."""

    needs_old_logprobs = True

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._controller: KLController = (
            FixedKLController(config.beta)
            if config.kl_target is None
            else AdaptiveKLController(config.beta, target=config.kl_target, horizon=config.kl_horizon)
        )

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        config, lengths, given = self._config, batch.completion_lengths, ~batch.abstained
        assert batch.values is not None and batch.old_logprobs is not None
        kl, beta = self._kl(batch), self._controller.beta
        scores = self._scores(batch)
        mask = completion_mask(lengths)
        at_end, for_tokens = scores, -beta * kl
        if batch.turn_rewards is not None:
            at_end = at_end - sum_sequences(batch.turn_rewards, lengths)
            for_tokens = for_tokens + batch.turn_rewards
        rewards = place_scores(pad(for_tokens, lengths), at_end, mask)
        advantages, returns = gae(rewards, pad(batch.values, lengths), mask, gamma=config.gamma, lam=config.lam)
        advantages, returns = (x.masked_fill(batch.abstained[:, None], 0.0) for x in (advantages, returns))
        if config.whiten_advantages:
            counted = mask & given[:, None]
            advantages = whiten(advantages, counted) if counted.sum() >= 2 else torch.zeros_like(advantages)
        kl_per_sequence, surprisal = (sum_sequences(x, lengths)[given] for x in (kl, -batch.old_logprobs))
        scores = scores[given]
        metrics = {  # TRL's names; as there, entropy is the mean of a completion's -log p
            "objective/kl": kl_per_sequence.mean().item(),
            "objective/entropy": surprisal.mean().item(),
            "objective/scores": scores.mean().item(),
            "objective/rlhf_reward": (scores - beta * kl_per_sequence).mean().item(),
            "objective/non_score_reward": (-beta * kl_per_sequence).mean().item(),
            "objective/kl_coef": beta,
        }
        return batch.with_(advantages=unpad(advantages, lengths), returns=unpad(returns, lengths)), metrics

    def adapt(self, batch: TrainBatch) -> None:
        kl_per_sequence = sum_sequences(self._kl(batch), batch.completion_lengths)[~batch.abstained]
        if len(kl_per_sequence):
            self._controller.update(kl_per_sequence.mean().item(), len(kl_per_sequence))

    def _kl(self, batch: TrainBatch) -> Tensor:
        """float32 [N]; zero without a reference."""
        assert batch.old_logprobs is not None
        if batch.ref_logprobs is None:
            return batch.old_logprobs.new_zeros(batch.num_completion_tokens)
        return per_token_kl(batch.old_logprobs, batch.ref_logprobs, estimator=self._config.kl_estimator)

    def _scores(self, batch: TrainBatch) -> Tensor:
        """float32 [S]: the rewards, clipped, minus the penalty for a truncated completion; NaN where missing."""
        assert batch.rewards is not None
        penalty = self._config.missing_eos_penalty
        scores = clip_rewards(batch.rewards, self._config.reward_clip)
        return scores if penalty is None else scores - penalty * batch.truncated

    def state_dict(self) -> dict[str, Any]:
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._controller.load_state_dict(state)
