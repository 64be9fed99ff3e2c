"""Reward functions: the built-in ones, loading a user's, and calling them together."""

from rlhf.rewards.compose import RewardFunction, RewardFunctions, Scoring, combine, load_reward_functions

__all__ = ["RewardFunction", "RewardFunctions", "Scoring", "combine", "load_reward_functions"]
