"""Reward functions: the built-in ones, loading a user's, and calling them together; ``total`` alone imports torch."""

from rlhf.rewards.loading import MODEL_NAME, RewardFunction, load_reward_functions
from rlhf.rewards.scoring import RewardFunctions, Scoring

__all__ = ["MODEL_NAME", "RewardFunction", "RewardFunctions", "Scoring", "load_reward_functions"]
