"""Where the files are that a configuration names: a relative path starts where the command is given."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants, get_session

from rlhf.config import Config
from rlhf.data.tasks import task_name
from rlhf.errors import ConfigError, one_line
from rlhf.planning.shapes import read_model_config
from rlhf.reward_config import RewardTrainingConfig
from rlhf.user_code import split_file

AnyConfig = TypeVar("AnyConfig", Config, RewardTrainingConfig)
HUB_ANSWER_S = 10.0
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def with_full_paths(config: AnyConfig, base: Path) -> AnyConfig:
    """The configuration with every local path absolute; relative ones start at ``base``, ``~`` is the home directory.

    A model path that looks like a hub id is one if there is no such directory.
    """

    def full(path: str) -> str:
        return os.path.normpath(base / Path(path).expanduser())

    def model(path: str) -> str:
        return path if HUB_ID.fullmatch(path) and not (base / path).exists() else full(path)

    def data(source: str) -> str:
        return source if task_name(source) is not None else full(source)

    for key, change in {
        "run_dir": full,
        "checkpoint.resume": lambda path: path if path in ("auto", "none") else full(path),
        "data.train": data,
        "data.mixture": lambda sources: {n: replace(source, path=data(source.path)) for n, source in sources.items()},
        "data.eval": data,
        "data.extra_eval": lambda sources: {name: data(source) for name, source in sources.items()},
        **dict.fromkeys(("model.path", "critic.path", "reference.path", "reward.model.path"), model),
    }.items():
        config = _changed(config, key.split("."), change)
    return with_function_files(config, lambda key, file: full(file))


def with_function_files(config: AnyConfig, locate: Callable[[str, str], str]) -> AnyConfig:
    """The configuration with ``locate(key, file)`` for every ``file`` that holds a function of the user's."""

    def change(key: str, path: str) -> str:
        named = split_file(path)
        return f"{locate(f'{key}={path}', named[0])}:{named[1]}" if named else path

    for key in ("algorithm.advantage", "algorithm.loss"):
        config = _changed(config, key.split("."), partial(change, key))
    return _changed(
        config,
        ["reward", "functions"],
        lambda functions: [
            replace(function, path=change(f"reward.functions[{i}].path", function.path))
            for i, function in enumerate(functions)
        ],
    )


def _changed(part: Any, names: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """A copy of a section with the value at ``names`` changed, if there is one."""
    value = getattr(part, names[0], None)
    if value is None:
        return part
    return replace(part, **{names[0]: _changed(value, names[1:], change) if names[1:] else change(value)})


def check_model_directory(path: str, key: str) -> None:
    """Raises ConfigError if ``path`` is no directory on this node, and not a hub id whose files can be had either.

    Where the hub does not answer, this process and those that it starts use its cache without asking again:
    transformers would ask for each file for most of a minute.
    """
    if os.path.isdir(path):
        return
    if os.path.isabs(path):
        raise ConfigError(
            f"{key}={path}: no such directory on {socket.gethostname()}; correct it, or put it where all nodes see it "
            "at that path"
        )
    if (why := hub_is_silent()) is None:
        return
    if read_model_config(path) is None:
        raise ConfigError(
            f"{key}={path}: no such directory in {Path.cwd()}, and no hub id that can be loaded: it is not in the "
            f"cache, and {constants.ENDPOINT} does not answer ({why}); correct it, or give a model's directory"
        )
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"


@cache
def hub_is_silent() -> str | None:
    """Why the Hugging Face hub cannot be asked for anything from here; None: it answers."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_ANSWER_S)
    except Exception as error:  # of whichever HTTP client is set
        return one_line(error)
    return None
