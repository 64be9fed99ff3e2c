"""Environments that come along, by the name that ``environment.path`` gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf.environments.builtin.calculator import calculate, solve
from rlhf.environments.builtin.guess import guess
from rlhf.environments.builtin.interpreter import compute, python
from rlhf.environments.builtin.search import look_up, search


@dataclass(frozen=True)
class BuiltIn:
    """An environment, and the tools that its model gets."""

    call: Callable[..., Any]
    tools: tuple[Callable[..., Any], ...] = ()


BUILT_IN = {
    "calculator": BuiltIn(solve, (calculate,)),
    "guess": BuiltIn(guess),
    "python": BuiltIn(compute, (python,)),
    "search": BuiltIn(look_up, (search,)),
}
