"""Reading a source as a table: a built-in task, a JSONL, CSV or Parquet file, or a directory saved by datasets.

Every error is one line that names the key and the source. Rows count from 1, without blank lines of a JSONL file.
"""

import csv
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rlhf.config import DataConfig
from rlhf.data.columns import Table, columnar, first_lacking
from rlhf.data.tasks import Split, task_name, task_rows
from rlhf.errors import DataError, one_line

if TYPE_CHECKING:
    import pyarrow

DIRECTORY_SPLITS: dict[Split, str] = {"train": "train", "eval": "test"}  # in a saved DatasetDict
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # of JSONL and CSV files: pyarrow's names by suffix
SOURCES = (
    "a source is task:NAME, a .jsonl, .csv (both also .gz or .zst) or .parquet file, or a directory saved by datasets"
)
MAX_CSV_FIELD = 2**31 - 1  # characters; csv's own limit is 131,072
MAX_NESTING = 100  # levels of a JSON line; pickle, which sends columns to actors, fails before json does


def read_table(source: str, config: DataConfig, *, split: Split, seed: int, where: str) -> tuple[Table, dict[str, int]]:
    """The table of a source (for eval, its first ``eval_size`` rows), and for each column of a JSONL file the first
    line that lacks it, if any. All values of a CSV file are strings.

    ``where`` names the source in errors. Raises DataError if it cannot be read or holds no rows, ConfigError if a
    task's arguments do not fit.
    """
    max_rows = config.eval_size if split == "eval" else None
    if (task := task_name(source)) is not None:
        return columnar(task_rows(task, config.task_args, split=split, seed=seed, max_rows=max_rows)), {}
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(f"{where}: no such file or directory; {SOURCES}{_how_to_save(path)}")
    lacking: dict[str, int] = {}
    if path.is_dir():
        table = _read_directory(path, DIRECTORY_SPLITS[split], where)
    elif is_text(path, ".jsonl"):
        numbered = read_json_lines(path, where)[:max_rows]
        table = columnar([row for _, row in numbered])
        lacking = first_lacking(numbered, table)
    elif is_text(path, ".csv"):
        table = _read_csv(path, where)
    elif path.suffix == ".parquet":
        table = _read_parquet(path, where)
    else:
        raise DataError(f"{where}: cannot read a {path.suffix or 'file without suffix'}; {SOURCES}")
    if not any(table.values()):
        raise DataError(f"{where}: holds no rows")
    return {name: column[:max_rows] for name, column in table.items()}, lacking


def _how_to_save(missing: Path) -> str:
    """What makes a directory of the data set on the Hugging Face hub that ``missing`` seems to name; '': it is none."""
    owner_and_name = Path(os.path.relpath(missing)).parts
    if (
        len(owner_and_name) != 2
        or missing.parent.exists()
        or missing.suffix in (".jsonl", ".csv", ".parquet", *COMPRESSIONS)
    ):
        return ""
    id = "/".join(owner_and_name)
    return (
        f". If {id} is a data set on the Hugging Face hub, fetch it in Python first, where there is a network: "
        f'datasets.load_dataset("{id}", SUBSET).save_to_disk("{id}"); of its splits, data.train takes '
        f"{DIRECTORY_SPLITS['train']} and data.eval takes {DIRECTORY_SPLITS['eval']}"
    )


def is_text(path: Path, suffix: str) -> bool:
    """Whether it is a ``suffix`` file by its name, compressed or not."""
    return path.suffix == suffix or (path.suffix in COMPRESSIONS and path.with_suffix("").suffix == suffix)


def _open(path: Path) -> BinaryIO:
    """Opens it to read, decompressed. Opening and reading raise OSError, also where a compressed file is cut short."""
    if path.suffix not in COMPRESSIONS:
        return path.open("rb")
    import pyarrow

    compressed = pyarrow.input_stream(str(path), compression=COMPRESSIONS[path.suffix])
    return io.BufferedReader(cast(io.RawIOBase, compressed))


def read_json_lines(path: Path, where: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank. Raises DataError naming ``where``."""
    rows = []
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                rows.append((number, _read_json_line(line, f"{where}: line {number}")))
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {one_line(error)}") from error
    return rows


def _read_json_line(line: bytes, where: str) -> dict[str, Any]:
    too_deep = f"{where} is nested more than {MAX_NESTING} levels deep; flatten it"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(f"{where} is not valid JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise DataError(too_deep) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}; every line must be an object")
    if line.count(b"[") + line.count(b"{") > MAX_NESTING and _nesting(row) > MAX_NESTING:
        raise DataError(too_deep)
    if b"\\u" in line:  # JSON can escape what UTF-8 cannot encode
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise DataError(
                f"{where} has {half}, half of a surrogate pair and not a character; write both halves, or remove it"
            ) from error
    return row


def _nesting(value: Any) -> int:
    """Levels of lists and objects."""
    levels, current = 0, [value]
    while current := [inner for inner in current if isinstance(inner, dict | list)]:
        current = [x for inner in current for x in (inner.values() if isinstance(inner, dict) else inner)]
        levels += 1
    return levels


def _read_csv(path: Path, where: str) -> Table:
    """Its columns as strings, named by its first line."""
    csv.field_size_limit(MAX_CSV_FIELD)
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except (OSError, ValueError, csv.Error) as error:  # ValueError: UnicodeDecodeError
        raise DataError(f"{where}: not a readable CSV file in UTF-8: {one_line(error)}") from error
    names, rows = (lines[0], lines[1:]) if lines else ([], [])
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: its first line names column {twice!r} twice; rename one")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise DataError(
                f"{where}: row {number} has {len(row)} fields, but the first line names {len(names)} columns; quote "
                "fields that contain commas or line breaks"
            )
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _read_parquet(path: Path, where: str) -> Table:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{where}: not a readable Parquet file: {one_line(error)}") from error
    try:
        return table.to_pydict()
    except UnicodeDecodeError as error:
        raise _not_utf8(table, where) from error


def _not_utf8(table: "pyarrow.Table", where: str) -> DataError:
    """Names the first value that does not decode: Arrow accepts any bytes as a string."""
    for name in table.column_names:
        for row, value in enumerate(table[name], start=1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                return DataError(f"{where}: row {row}: column {name!r} is not valid UTF-8: {one_line(error)}")
    raise AssertionError("one of the values did not decode")


def _read_directory(path: Path, split: str, where: str) -> Table:
    import datasets  # slow to import

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged or foreign directory makes datasets raise nearly anything
        raise DataError(
            f"{where}: not a directory written by datasets' save_to_disk: {one_line(error)}; name a file in it instead"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        saved = [str(name) for name in loaded]
        if split not in saved:
            raise DataError(
                f"{where}: needs a split {split!r}, but the saved ones are {', '.join(saved)}; name the directory of "
                f"one, such as {path / saved[0] if saved else path}"
            )
        loaded = loaded[split]
    try:
        table = loaded.with_format(None).to_dict()
    except UnicodeDecodeError as error:
        raise _not_utf8(loaded.with_format("arrow")[:], where) from error
    assert isinstance(table, dict), "only a batched to_dict gives an iterator"
    return table
