"""Advantages, losses and KL terms of PPO, GRPO and RLOO: pure functions over tensors, and one small object each."""

from rlhf.algorithms.advantages import AdvantageInputs
from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.custom import custom_estimator, custom_loss
from rlhf.algorithms.grpo import GroupBaseline, grpo, reinforce_pp, rloo
from rlhf.algorithms.losses import LossInputs
from rlhf.algorithms.ppo import Ppo
from rlhf.config import AlgorithmConfig

__all__ = ["AdvantageInputs", "Algorithm", "LossInputs", "check_algorithm", "make_algorithm"]


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm named by ``algorithm.name``, with the estimator named by ``algorithm.advantage``, if any.

    Raises ConfigError if the estimator cannot be loaded or called.
    """
    if estimator := custom_estimator(config):
        return GroupBaseline(config, estimator)
    return {"grpo": grpo, "rloo": rloo, "reinforce_pp": reinforce_pp, "ppo": Ppo}[config.name](config)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raises ConfigError if the user's own advantage estimator or loss cannot be loaded or called."""
    custom_estimator(config)
    custom_loss(config)
