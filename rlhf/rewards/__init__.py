"""Reward functions: the built-in ones, loading a user's, and calling them together; ``total`` alone imports torch."""

from rlhf.rewards.compose import RewardFunctions, Scoring
from rlhf.rewards.loading import MODEL_NAME, RewardFunction, load_reward_functions

__all__ = ["MODEL_NAME", "RewardFunction", "RewardFunctions", "Scoring", "load_reward_functions"]
