"""Environments: episodes of several turns, exact to the token. Knows neither Ray nor vLLM.

An environment is a coroutine that talks to the model (``chat``). ``episode`` runs one; ``template`` turns what is said
to the model into tokens; ``tools`` are functions that the model may call.
"""

from rlhf.environments.episode import EpisodeRunner
from rlhf.environments.loading import Environment, load_environment, tool_schemas

__all__ = ["Environment", "EpisodeRunner", "load_environment", "tool_schemas"]
