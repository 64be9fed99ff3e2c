"""Bounds on numbers, declared in a field's type: ``num_ranks: Annotated[int, Bounds(min=1)] = 1``.

``Section`` rejects numbers out of bounds, NaN and infinity on construction. OmegaConf and type checkers see the plain
type.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from rlhf.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """The finite numbers from ``min`` to ``max``; ``above`` and ``below`` are exclusive bounds.

    At most one bound at each end. An error names the violated bound, or both of an ``interval``, and the ``hint``.
    """

    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    interval: bool = False
    hint: str = ""

    def complaint(self, value: float) -> str | None:
        """The requirement that ``value`` violates, or None."""
        too_small = (self.min is not None and value < self.min) or (self.above is not None and value <= self.above)
        too_large = (self.max is not None and value > self.max) or (self.below is not None and value >= self.below)
        if not math.isfinite(value):
            wanted = "must be a finite number"
        elif not (too_small or too_large):
            return None
        else:
            wanted = self._interval() if self.interval else self._low_end() if too_small else self._high_end()
        return wanted + (f": {self.hint}" if self.hint else "")

    def _interval(self) -> str:
        if self.min is None and self.max is None:
            return f"must lie between {self.above} and {self.below}, exclusive"
        low = f"({self.above}" if self.min is None else f"[{self.min}"
        high = f"{self.below})" if self.max is None else f"{self.max}]"
        return f"must lie in {low}, {high}"

    def _low_end(self) -> str:
        if self.min is not None:
            return f"must be at least {self.min}"
        return "must be positive" if self.above == 0 else f"must be greater than {self.above}"

    def _high_end(self) -> str:
        return f"must be less than {self.below}" if self.max is None else f"must be at most {self.max}"


class Section:
    """A section of the configuration: a dataclass that raises ConfigError if one of its numbers is out of bounds.

    It checks its own fields and everything nested in them, including members of lists and dictionaries, but not other
    sections, which check themselves. ``key``: its full key; "" at the top.
    """

    KEY: ClassVar[str]

    def __init_subclass__(cls, *, key: str) -> None:
        cls.KEY = key

    def __post_init__(self) -> None:
        for key, value, bounds in _numbers(self, self.KEY):
            if (complaint := bounds.complaint(value)) is not None:
                raise ConfigError(f"{key}={value} {complaint}")


_type_hints = cache(get_type_hints)  # slow, and constant for a class


def _numbers(part: Any, key: str) -> Iterator[tuple[str, float, Bounds]]:
    """Key, value and bounds of the numbers in a dataclass."""
    hints = _type_hints(type(part), include_extras=True)
    for field in fields(part):
        yield from _numbers_in(
            getattr(part, field.name), hints[field.name], f"{key}.{field.name}" if key else field.name
        )


def _numbers_in(value: Any, annotation: Any, key: str) -> Iterator[tuple[str, float, Bounds]]:
    """The same for a value of type ``annotation``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if value is None or isinstance(value, Section):
        return
    if NoneType in args:
        yield from _numbers_in(value, next(arg for arg in args if arg is not NoneType), key)
    elif is_dataclass(value):
        yield from _numbers(value, key)
    elif origin is Annotated:
        yield key, value, annotation.__metadata__[0]
    elif origin is dict:
        for name, member in value.items():
            yield from _numbers_in(member, args[1], f"{key}.{name}")
    elif origin is list or origin is tuple:
        for index, member in enumerate(value):
            yield from _numbers_in(member, args[index if origin is tuple else 0], f"{key}[{index}]")
