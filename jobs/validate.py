"""Finds mistakes in a run's models and reward functions before Ray starts."""

from transformers import PreTrainedTokenizerBase

from rlhf.config import Config
from rlhf.data.prompts import PromptSet
from rlhf.environments import EpisodeRunner, load_environment
from rlhf.errors import DataError
from rlhf.models.families import load_model_config
from rlhf.models.loading import stop_ids
from rlhf.rewards import RewardFunctions, load_reward_functions


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


def check_rewards(config: Config, prompts: PromptSet, eval_prompts: PromptSet | None) -> None:
    """Loads the reward functions, to find a wrong path or a column that they need and the data lack.

    Raises ConfigError for the functions, DataError for a column that is missing altogether or from one row.
    """
    functions = RewardFunctions(
        load_reward_functions(config.reward.functions), timeout_s=config.reward.function_timeout_s
    )
    for name, needed in functions.required_columns().items():
        if config.environment is None:  # else it may note what they need, in every episode
            _check_columns(needed, f"reward function {name}", prompts, eval_prompts)


def check_environment(
    config: Config, tokenizer: PreTrainedTokenizerBase, prompts: PromptSet, eval_prompts: PromptSet | None
) -> list[str]:
    """Loads the environment and its tools as the workers will; returns lines for the log. Raises ConfigError for them
    or the chat template, DataError for data that they cannot use."""
    if config.environment is None:
        return []
    runner = EpisodeRunner(config, tokenizer, stop_ids=stop_ids(config.model))
    environment = load_environment(config.environment)
    _check_columns(environment.required_columns, environment.path, prompts, eval_prompts)
    for split, data in {"train": prompts, "eval": eval_prompts}.items():
        if data is not None and data.chats is None:
            raise DataError(
                f"data.{split}={data.source}: an environment needs chats: prompts that are lists of messages"
            )
    roles = " or ".join(runner.template.rewritten_by)
    rewrites = (
        f"model.path's chat template would rewrite what came before a {roles} message; episodes keep it as it was"
    )
    return [rewrites] if roles else []


def _check_columns(needed: set[str], who: str, prompts: PromptSet, eval_prompts: PromptSet | None) -> None:
    for split, data in {"train": prompts, "eval": eval_prompts}.items():
        for column in sorted(needed) if data else ():
            _check_column(column, who, data, f"data.{split}={data.source}")


def _check_column(column: str, who: str, data: PromptSet, where: str) -> None:
    needs = f'"{column}", which {who} needs'
    if column not in data.columns:
        others = ", ".join(data.columns) or "none"
        raise DataError(f"{where}: has no column {needs} (its columns: {others}); rename one, or set it in kwargs")
    if (line := data.lacking.get(column)) is not None:
        raise DataError(f"{where}: line {line} has no {needs}; add it, or null where the function may abstain")
