"""Finds mistakes in a run's models and reward functions before Ray starts."""

from collections.abc import Mapping
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlhf.config import Config, eval_key, train_key
from rlhf.data.mixture import Mixture
from rlhf.data.prompts import PromptSet, load_prompts
from rlhf.environments import EpisodeRunner, load_environment, tool_schemas
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


def load_training(config: Config, tokenizer: PreTrainedTokenizerBase) -> Mixture:
    """The prompts to train on. Raises as ``load_prompts`` and ``Mixture`` do."""
    tools = tool_schemas(config.environment) if config.environment else ()
    sources = config.data.train_sources()
    load = partial(load_prompts, config=config.data, tokenizer=tokenizer, split="train", seed=config.seed, tools=tools)
    return Mixture(
        {name: load(source.path, key=train_key(name), name=name) for name, source in sources.items()},
        {name: source.weight for name, source in sources.items()},
        config.data.curriculum,
    )


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, PromptSet]:
    """The held-out prompts by the name of their source, '' for data.eval. Raises as ``load_prompts`` does.

    Where rows to train on carry the name of their source, so do these.
    """
    tools = tool_schemas(config.environment) if config.environment else ()
    load = partial(load_prompts, config=config.data, tokenizer=tokenizer, split="eval", seed=config.seed, tools=tools)
    return {
        name: load(source, key=eval_key(name), name=(name or "eval") if config.data.mixture else "")
        for name, source in config.data.eval_sources().items()
    }


def check_rewards(config: Config, data: Mapping[str, PromptSet]) -> None:
    """Loads the reward functions, to find a wrong path or a column that they need and the data lack.

    ``data``: prompts by the key that names their source. Raises ConfigError for the functions, DataError for a column
    that is missing altogether or from one row.
    """
    functions = RewardFunctions(
        load_reward_functions(config.reward.functions), timeout_s=config.reward.function_timeout_s
    )
    for name, needed in functions.required_columns().items():
        if config.environment is None:  # else it may note what they need, in every episode
            _check_columns(needed, f"reward function {name}", data)


def check_environment(config: Config, tokenizer: PreTrainedTokenizerBase, data: Mapping[str, PromptSet]) -> list[str]:
    """Loads the environment and its tools as the workers will; returns lines for the log. Raises ConfigError for them
    or the chat template, DataError for data that they cannot use. ``data``: prompts by the key that names their
    source."""
    if config.environment is None:
        return []
    runner = EpisodeRunner(config, tokenizer, stop_ids=stop_ids(config.model))
    environment = load_environment(config.environment)
    _check_columns(environment.required_columns, environment.path, data)
    for key, prompts in data.items():
        if prompts.chats is None:
            raise DataError(f"{key}={prompts.source}: an environment needs chats: prompts that are lists of messages")
    roles = " or ".join(runner.template.rewritten_by)
    rewrites = (
        f"model.path's chat template would rewrite what came before a {roles} message; episodes keep it as it was"
    )
    return [rewrites] if roles else []


def _check_columns(needed: set[str], who: str, data: Mapping[str, PromptSet]) -> None:
    for key, prompts in data.items():
        for column in sorted(needed):
            _check_column(column, who, prompts, f"{key}={prompts.source}")


def _check_column(column: str, who: str, data: PromptSet, where: str) -> None:
    needs = f'"{column}", which {who} needs'
    if column not in data.columns:
        others = ", ".join(data.columns) or "none"
        raise DataError(f"{where}: has no column {needs} (its columns: {others}); rename one, or set it in kwargs")
    if (line := data.lacking.get(column)) is not None:
        raise DataError(f"{where}: line {line} has no {needs}; add it, or null where the function may abstain")
