"""Where the files are that a configuration names: a relative path starts where the command is given."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf.config import Config
from rlhf.data.tasks import task_name
from rlhf.errors import ConfigError
from rlhf.reward_config import RewardTrainingConfig
from rlhf.user_code import split_file

AnyConfig = TypeVar("AnyConfig", Config, RewardTrainingConfig)
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def with_full_paths(config: AnyConfig, base: Path) -> AnyConfig:
    """The configuration with every local path absolute; relative ones start at ``base``, ``~`` is the home directory.

    A model path that looks like a hub id is one if there is no such directory.
    """

    def full(path: str) -> str:
        return os.path.normpath(base / Path(path).expanduser())

    def model(path: str) -> str:
        return path if HUB_ID.fullmatch(path) and not (base / path).exists() else full(path)

    for key, change in {
        "run_dir": full,
        "checkpoint.resume": lambda path: path if path in ("auto", "none") else full(path),
        "data.train": lambda source: source if task_name(source) is not None else full(source),
        "data.eval": lambda source: source if task_name(source) is not None else full(source),
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
    """Raises ConfigError if ``path`` is absolute, and there is no such directory on this node."""
    if os.path.isabs(path) and not os.path.isdir(path):
        raise ConfigError(
            f"{key}={path}: no such directory on {socket.gethostname()}; correct it, or put it where all nodes see it "
            "at that path"
        )
