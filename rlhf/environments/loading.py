"""The user's environment and tools, from the configuration. Loads nothing heavy."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config import EnvironmentConfig
from rlhf.environments.builtin import BUILT_IN
from rlhf.environments.tools import schema
from rlhf.errors import ConfigError
from rlhf.user_code import defined_at, load_function, named_parameters, takes_any_keyword

CHAT = "chat"  # the argument that every environment has


@dataclass(frozen=True)
class Environment:
    """A coroutine function that is called for every episode, with the chat and the columns of the data it names."""

    call: Callable[..., Any]
    path: str

    @property
    def required_columns(self) -> set[str]:
        """Its arguments without a default."""
        named = named_parameters(self.call).items()
        return {name for name, p in named if p.default is p.empty} - {CHAT}

    def accepted(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Those columns that it takes."""
        if takes_any_keyword(self.call):
            return dict(columns)
        named = named_parameters(self.call)
        return {name: value for name, value in columns.items() if name in named and name != CHAT}

    @property
    def file(self) -> str:
        """Where it is defined."""
        return defined_at(self.call)[0]


async def answer(chat: Any) -> None:
    """What an environment of tools alone does: the model answers the prompt, with their help."""
    await chat()


def load_environment(config: EnvironmentConfig) -> Environment:
    """Raises ConfigError if ``environment.path`` cannot be loaded or is no coroutine function that takes a chat."""
    if config.path is None:
        return Environment(answer, "environment.tools")
    key = f"environment.path={config.path}"
    call = load_function(config.path, key, built_in={name: built_in.call for name, built_in in BUILT_IN.items()})
    if not inspect.iscoroutinefunction(call):
        raise ConfigError(f"{key}: it is no coroutine function; write it as async def {call.__name__}(chat, ...)")
    if CHAT not in named_parameters(call):
        raise ConfigError(f"{key}: it takes no argument {CHAT!r}; write it as async def {call.__name__}(chat, ...)")
    return Environment(call, config.path)


def load_tools(config: EnvironmentConfig) -> list[Callable[..., Any]]:
    """The functions of ``environment.tools``, or those that come with a built-in environment. Raises ConfigError if one
    cannot be loaded, or two have the same name."""
    if not config.tools and config.path in BUILT_IN:
        return list(BUILT_IN[config.path].tools)
    functions: list[Callable[..., Any]] = []
    for index, path in enumerate(config.tools):
        key = f"environment.tools[{index}]={path}"
        function = load_function(path, key)
        if any(function.__name__ == other.__name__ for other in functions):
            raise ConfigError(f"{key}: another tool is called {function.__name__} too; rename one")
        functions.append(function)
    return functions


def tool_schemas(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """What the prompt tells the model of its tools. Raises ConfigError, as ``load_tools`` and ``schema`` do."""
    keys: Sequence[str] = [f"environment.tools[{i}]={path}" for i, path in enumerate(config.tools)]
    functions = load_tools(config)
    keys = keys or [f"environment.path={config.path}"] * len(functions)
    return [schema(function, key) for function, key in zip(functions, keys, strict=True)]


def missing_columns(environment: Environment, columns: Collection[str]) -> list[str]:
    """Columns that it requires and the data lack, in order."""
    return sorted(environment.required_columns.difference(columns))
