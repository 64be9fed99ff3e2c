"""Data as columns: one is the prompts, and reward functions get each of the others by its name."""

from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.errors import DataError

Table = dict[str, list[Any]]  # column -> one value per row

# What the loop passes to reward functions beside the columns: no column may be called so.
ARGUMENTS = ("prompts", "completions", "completion_ids")


def columnar(rows: list[dict[str, Any]]) -> Table:
    """Columns of rows; a row that lacks one has None there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def first_lacking(numbered: Sequence[tuple[int, dict[str, Any]]], names: Iterable[str]) -> dict[str, int]:
    """By column, the first line that lacks the key: null is a value, a key that is not there is a slip."""
    first = {name: next((number for number, row in numbered if name not in row), None) for name in names}
    return {name: number for name, number in first.items() if number is not None}


def split_columns(table: Table, prompt_column: str, where: str) -> tuple[list[Any], Table]:
    """The prompts, and the other columns. Raises DataError without prompts, or where a column hides an argument."""
    if prompt_column not in table:
        raise DataError(
            f"{where}: has no column {prompt_column!r}; set data.prompt_column to one of {', '.join(table)}"
        )
    columns = {name: column for name, column in table.items() if name != prompt_column}
    hidden = [name for name in ARGUMENTS if name in columns]
    if hidden:
        raise DataError(f"{where}: rename column {hidden[0]!r}, it would hide an argument of reward functions")
    return table[prompt_column], columns
