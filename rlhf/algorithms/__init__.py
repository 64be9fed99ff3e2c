"""Advantages, losses and KL terms of PPO, GRPO and RLOO: pure functions over tensors, and one small object for each."""

from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.grpo import grpo, reinforce_pp, rloo
from rlhf.algorithms.ppo import Ppo
from rlhf.config import AlgorithmConfig

__all__ = ["Algorithm", "make_algorithm"]


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that ``algorithm.name`` names."""
    return {"grpo": grpo, "rloo": rloo, "reinforce_pp": reinforce_pp, "ppo": Ppo}[config.name](config)
