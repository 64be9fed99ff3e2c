"""What a page is made of: sections of charts, tables and samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

# Readable on white and on near-black. Runs take them in this order.
COLOURS = ("#3d7fd1", "#dd7a2b", "#2f9e74", "#b4549f", "#a88a1f", "#7a6ee0", "#cf4f4f", "#2f9fb3")


def colour_of(index: int) -> str:
    """The colour of the run with this number."""
    return COLOURS[index % len(COLOURS)]


def faint(colour: str, opacity: float) -> str:
    """``#rrggbb`` with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


@dataclass(frozen=True)
class Chart:
    """A figure under a title. The page gives it its colours for text and grid, and its width."""

    title: str
    figure: go.Figure
    caption: str = ""
    wide: bool = False  # takes the whole width of the page
    height_px: int = 240


@dataclass(frozen=True)
class Table:
    """Cells are texts; ``changed`` rows are marked."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    changed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """A part of the page. One without content is left out, and ``absent`` says why."""

    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Any] = ()  # of samples.SampleGroup
    intro: str = ""
    absent: str = ""
    folded: bool = field(default=False)  # opens on a click

    @property
    def empty(self) -> bool:
        return not (self.charts or self.tables or self.samples)

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-").replace(",", "")


def number(value: object) -> str:
    """A number in four digits, ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
