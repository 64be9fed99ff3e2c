"""Data as columns: one holds the prompts, and reward functions get the others by name."""

from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.errors import DataError

Table = dict[str, list[Any]]  # column -> one value per row

# What the loop passes to reward functions in addition to the columns, which must not use these names.
ARGUMENTS = ("prompts", "completions", "completion_ids")


def columnar(rows: list[dict[str, Any]]) -> Table:
    """Rows as columns; None where a row lacks one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def first_lacking(numbered: Sequence[tuple[int, dict[str, Any]]], names: Iterable[str]) -> dict[str, int]:
    """By column, the first line that lacks the key: null is a value, a missing key is a mistake."""
    first = {name: next((number for number, row in numbered if name not in row), None) for name in names}
    return {name: number for name, number in first.items() if number is not None}


def split_columns(table: Table, prompt_column: str, where: str) -> tuple[list[Any], Table]:
    """The prompts, and the other columns. Raises DataError without prompts, or if a column hides an argument."""
    if prompt_column not in table:
        raise DataError(
            f"{where}: has no column {prompt_column!r}; set data.prompt_column to one of {', '.join(table)}"
        )
    columns = {name: column for name, column in table.items() if name != prompt_column}
    hidden = [name for name in ARGUMENTS if name in columns]
    if hidden:
        raise DataError(f"{where}: rename column {hidden[0]!r}, which would hide an argument of reward functions")
    return table[prompt_column], columns
