"""What a run trains on: one source, or several in proportion to their weights; and in which order a source's rows come.

Everything here follows from the data and the configuration alone, so any position can be found again after a restart.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from rlhf.config import train_key
from rlhf.data.prompts import PromptSet
from rlhf.errors import DataError


@dataclass(frozen=True)
class Mixture:
    """The prompt sets of a run by name, and the weight of each; a single one is called ''.

    ``curriculum``: the column whose ascending order the first epoch of every set has; None: no such column. Raises
    DataError if a set lacks it, or it does not hold numbers.
    """

    sets: dict[str, PromptSet]
    weights: dict[str, float]
    curriculum: str | None = None

    def __post_init__(self) -> None:
        assert self.sets and self.sets.keys() == self.weights.keys()
        for name in self.sets:
            self.difficulty(name)

    @classmethod
    def of_one(cls, prompts: PromptSet, curriculum: str | None = None) -> "Mixture":
        return cls({"": prompts}, {"": 1.0}, curriculum)

    def __len__(self) -> int:
        return sum(map(len, self.sets.values()))

    @property
    def source(self) -> str:
        """Its sources, for messages."""
        return ", ".join(prompts.source for prompts in self.sets.values())

    def __str__(self) -> str:
        """Its keys and sources, for errors."""
        return ", ".join(f"{key}={prompts.source}" for key, prompts in self.by_key().items())

    def by_key(self) -> dict[str, PromptSet]:
        """The sets by the key of the configuration that names their source."""
        return {train_key(name): prompts for name, prompts in self.sets.items()}

    def summary(self) -> list[str]:
        """Lines for the log."""
        total = sum(self.weights.values())
        return [
            f"{self.weights[name] / total:.3g} of the prompts are from {name}: {prompts.summary()}"
            if name
            else prompts.summary()
            for name, prompts in self.sets.items()
        ]

    def fingerprint(self) -> str:
        """Hex digest of everything that determines which prompt comes when, but for the seed and ``data.shuffle``."""
        if self.curriculum is None and list(self.sets) == [""]:
            return self.sets[""].fingerprint()
        described = {name: [prompts.fingerprint(), self.weights[name]] for name, prompts in self.sets.items()}
        order = {name: self.difficulty(name) for name in self.sets}
        return hashlib.sha256(json.dumps([described, order]).encode()).hexdigest()[:16]

    def difficulty(self, name: str) -> list[float] | None:
        """The values of the curriculum's column in a set, one per prompt; None without a curriculum."""
        if self.curriculum is None:
            return None
        prompts = self.sets[name]
        where = f"{train_key(name)}={prompts.source}"
        if self.curriculum not in prompts.columns:
            raise DataError(
                f"data.curriculum={self.curriculum}: {where} has no such column (its columns: "
                f"{', '.join(prompts.columns) or 'none'}); name one that holds numbers"
            )
        return [
            _number(value, f"data.curriculum={self.curriculum}: {where}") for value in prompts.columns[self.curriculum]
        ]

    def order(self, name: str, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
        """The row of a set at each place of its epoch: shuffled by seed and epoch, or as they are; in the first epoch
        the rows that a curriculum finds easier come first, and equal ones stay in that order."""
        rows = list(range(len(self.sets[name])))
        if shuffle:
            Random(f"{seed}/{name}/{epoch}" if name else f"{seed}/{epoch}").shuffle(rows)
        difficulty = self.difficulty(name) if epoch == 0 else None
        return rows if difficulty is None else sorted(rows, key=lambda row: difficulty[row])


def _number(value: Any, where: str) -> float:
    """A finite number, which a CSV file gives as a string."""
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: a row has {str(value)[:40]!r}; a curriculum needs a finite number in every row")
    return number


class Schedule:
    """Which source the prompt at each position of a mixture comes from.

    Among the first n prompts a source with share p has more than p n - 1 and fewer than p n + 1: the j-th prompt of a
    source (from 0) is due in the window from floor(j / p) to ceil((j + 1) / p), and of those whose window has begun the
    one whose window ends first is taken (earliest deadline first; the windows are of Baruah et al. 1996).
    The pattern repeats after as many positions as the weights have in their smallest whole numbers.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # as they are written: 0.1 is a tenth
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        self._sources: list[int] = []  # by position, as far as they have been asked for, up to the period
        self._drawn: list[int] = []  # how many that source had given before, in this period
        self._counts = [0] * len(weights)

    def at(self, position: int) -> tuple[int, int]:
        """(index of the source, how many prompts it has given before) for a position."""
        periods, place = divmod(position, self._period)
        while len(self._sources) <= place:
            self._extend()
        source = self._sources[place]
        return source, periods * self._weights[source] + self._drawn[place]

    def _extend(self) -> None:
        now = len(self._sources)
        due = [
            (-(-(count + 1) * self._period // weight), source)
            for source, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * self._period // weight <= now
        ]
        _, source = min(due)
        self._sources.append(source)
        self._drawn.append(self._counts[source])
        self._counts[source] += 1
