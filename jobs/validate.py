"""Finds mistakes in a run's models and reward functions before Ray starts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.config import Config, eval_key
from rlhf.data.prompts import PromptSet, load_prompts
from rlhf.errors import DataError
from rlhf.models.families import load_model_config
from rlhf.rewards import RewardFunctions, load_reward_functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_families(config: Config) -> None:
    """Raises ConfigError if one of the run's models is of an unsupported family."""
    paths = {
        "model.path": config.model.path,
        "reference.path": config.reference.path,
        "critic.path": config.critic.path,
    }
    if config.reward.model:
        paths["reward.model.path"] = config.reward.model.path
    for key, path in paths.items():
        if path is not None:
            load_model_config(path, key=key, max_tokens=None, trust_remote_code=config.model.trust_remote_code)


def load_held_out(config: Config, tokenizer: "PreTrainedTokenizerBase") -> dict[str, PromptSet]:
    """The held-out prompts by the name of their source, '' for data.eval. Raises as ``load_prompts`` does."""
    return {
        name: load_prompts(source, config.data, tokenizer, split="eval", seed=config.seed, key=eval_key(name))
        for name, source in config.data.eval_sources().items()
    }


def check_rewards(config: Config, data: Mapping[str, PromptSet]) -> None:
    """Loads the reward functions, to find a wrong path or a column that they need and the data lack.

    ``data``: prompts by the key that names their source.
    Raises ConfigError for the functions, DataError for a column that is missing altogether or from one row.
    """
    functions = RewardFunctions(
        load_reward_functions(config.reward.functions), timeout_s=config.reward.function_timeout_s
    )
    for key, prompts in data.items():
        for name, needed in functions.required_columns().items():
            for column in sorted(needed):
                _check_column(column, name, prompts, f"{key}={prompts.source}")


def _check_column(column: str, function: str, data: PromptSet, where: str) -> None:
    needs = f'"{column}", which reward function {function} needs'
    if column not in data.columns:
        others = ", ".join(data.columns) or "none"
        raise DataError(f"{where}: has no column {needs} (its columns: {others}); rename one, or set it in kwargs")
    if (line := data.lacking.get(column)) is not None:
        raise DataError(f"{where}: line {line} has no {needs}; add it, or null where the function may abstain")
