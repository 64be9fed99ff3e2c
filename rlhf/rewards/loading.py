"""Loading reward functions by name or path, and checking what they return. Imports no torch: see ``process``.

A reward function is ``fn(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or async. It is
called with keywords: one list of S per argument, and one per column of the data. For chat data a prompt is its messages
and a completion is ``[{"role": "assistant", "content": text}]``; otherwise both are strings. None abstains for that
row. A function without ``**kwargs`` gets only the arguments it names.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from rlhf.config import RewardFunctionConfig
from rlhf.data.columns import ARGUMENTS
from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.rewards.built_in import BUILT_IN
from rlhf.user_code import defined_at, described, load_function, named_parameters, place_in, takes_any_keyword

MODEL_NAME = "model"  # the reward model's name among the functions: for its metric and its weight in the sum
ENVIRONMENT_NAME = "environment"  # the environment's


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function. ``name`` is unique among those loaded with it, and names its metric."""

    name: str
    weight: float
    call: Callable[..., Any]
    path: str  # from which ``resolve`` loads it, in another process too
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: str = "reward.functions"  # where the configuration names it, for errors

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    @property
    def needs_text(self) -> bool:
        return "completions" in named_parameters(self.call) or takes_any_keyword(self.call)

    @property
    def required_columns(self) -> set[str]:
        """The columns it requires: arguments without a default that neither the loop nor its kwargs supply."""
        named = named_parameters(self.call).items()
        return {name for name, p in named if p.default is p.empty} - {*ARGUMENTS, *self.kwargs}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises RewardError unless ``columns`` has all those it requires."""
        if missing := sorted(self.required_columns.difference(columns)):
            raise RewardError(
                f"{self.key}: {self.name} needs an argument {missing[0]!r}, which is not a column of the data "
                f"({', '.join(columns) or 'it has none'}); rename a column, set it in kwargs, or give it a default"
            )

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``arguments`` that it accepts, and its configured kwargs, which override columns of that name."""
        merged = {**arguments, **self.kwargs}
        if takes_any_keyword(self.call):
            return merged
        named = named_parameters(self.call)
        return {name: value for name, value in merged.items() if name in named}

    def checked(self, values: Any, num_rows: int) -> list[float]:
        """Its values as floats, None as NaN. Raises RewardError unless each row has one finite number or None."""
        if hasattr(values, "tolist"):  # NumPy and torch
            values = values.tolist()
        if not isinstance(values, (list, tuple)):
            raise self._returned(f"a {type(values).__name__}", "a list with one number per completion")
        if len(values) != num_rows:
            raise self._returned(f"{len(values)} values for {num_rows} completions", "one per completion")
        checked = []
        for row, value in enumerate(values):
            number = value.tolist() if hasattr(value, "tolist") else value
            if number is None:
                checked.append(math.nan)
            elif isinstance(number, Real) and _is_finite(number):
                checked.append(float(number))
            else:
                shown = " ".join(repr(number).split())[:80]
                raise self._returned(f"{shown} for completion {row}", "a finite number or None")
        return checked

    def _returned(self, what: str, wanted: str) -> RewardError:
        file, line = defined_at(self.call)
        place = f" (at {Path(file).name}:{line})" if file else ""
        return RewardError(f"{self} returned {what}; return {wanted}{place}")

    def raised(self, error: BaseException) -> RewardError:
        """The error to report when it raised ``error``."""
        file, _ = defined_at(self.call)
        return RewardError(f"{self} raised {described(error)}{place_in(file, error)}")

    def late(self, num_rows: int, timeout_s: float) -> DeadlineError:
        """The error to report when it missed its deadline."""
        return DeadlineError(
            f"{self} did not finish {num_rows} completions within reward.function_timeout_s={timeout_s:g}; raise that, "
            "or make it faster"
        )

    def __str__(self) -> str:
        """Its name in errors."""
        return f"reward function {self.name} ({self.key})"


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def load_reward_functions(configs: Sequence[RewardFunctionConfig]) -> list[RewardFunction]:
    """Loads them in order; a repeated name, or the reward model's or environment's, gets ``_2``, ``_3``, ... appended.

    A path is a built-in name, ``package.module.function`` or ``path/to/file.py:function``. Raises ConfigError, naming
    the key, if one cannot be loaded or called as a reward function, or if its kwargs do not fit.
    """
    functions: list[RewardFunction] = []
    for index, config in enumerate(configs):
        key = f"reward.functions[{index}].path={config.path}"
        call = resolve(config.path, key)
        _check_signature(call, key)
        _check_kwargs(call, config.kwargs, f"reward.functions[{index}].kwargs")
        name = _unique(_name_of(call), {MODEL_NAME, ENVIRONMENT_NAME, *(function.name for function in functions)})
        functions.append(RewardFunction(name, float(config.weight), call, config.path, dict(config.kwargs), key))
    return functions


def _name_of(call: Callable[..., Any]) -> str:
    inner = call.func if isinstance(call, functools.partial) else call
    return getattr(inner, "__name__", type(inner).__name__)


def _unique(name: str, taken: Collection[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def resolve(path: str, key: str) -> Callable[..., Any]:
    """The function at ``path``; ``key``: where the configuration names it. Raises ConfigError if it does not load."""
    return load_function(path, key, built_in=BUILT_IN)


def _check_signature(call: Callable[..., Any], key: str) -> None:
    remedy = "write it as fn(prompts, completions, completion_ids, **kwargs)"
    try:
        named = named_parameters(call)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: its signature cannot be read; {remedy}") from error
    if not takes_any_keyword(call) and not set(ARGUMENTS) & set(named):
        raise ConfigError(f"{key}: it takes none of {', '.join(ARGUMENTS)} by keyword; {remedy}")


def _check_kwargs(call: Callable[..., Any], kwargs: Mapping[str, Any], key: str) -> None:
    named = named_parameters(call)
    for name in kwargs:
        if name in ARGUMENTS:
            raise ConfigError(f"{key}.{name} would hide what the loop passes as {name!r}; remove it")
        if name not in named and not takes_any_keyword(call):
            known = ", ".join(n for n in named if n not in ARGUMENTS)
            raise ConfigError(f"{key}.{name} is not an argument of {_name_of(call)}; it has {known or 'none to set'}")
