"""Rewards: built-in functions, loading and calling the user's, a reward model, and their weighted sum.

Only ``model`` and ``total`` import torch: the process of the sync functions starts without it.
"""

from rlhf.rewards.loading import ENVIRONMENT_NAME, MODEL_NAME, RewardFunction, load_reward_functions
from rlhf.rewards.scoring import RewardFunctions, Scoring

__all__ = ["ENVIRONMENT_NAME", "MODEL_NAME", "RewardFunction", "RewardFunctions", "Scoring", "load_reward_functions"]
