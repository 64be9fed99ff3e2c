"""What a run directory holds, as plain data; of a run that is going on, or was killed, as much as there is."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from jobs.report.series import thinned
from jobs.trained import CONFIG
from rlhf.errors import ConfigError, one_line

Record = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A metric over a run: x and y of the same length, without the steps in which it was not recorded or not finite."""

    x: list[float]
    y: list[float]

    def __bool__(self) -> bool:
        return bool(self.x)

    def thin(self) -> "Series":
        """As many of the points as a line of a chart needs."""
        kept = thinned(self.x)
        return Series([self.x[i] for i in kept], [self.y[i] for i in kept])


@dataclass(frozen=True)
class RunRecord:
    """One run. ``metrics``, ``evaluations``, ``completions`` and ``notes`` are the lines of its files, in order."""

    label: str  # unique among the runs of a report
    directory: Path
    config: Record
    metrics: list[Record]
    evaluations: list[Record]
    completions: list[Record]
    notes: list[Record]
    summary: Record | None  # None: the run has not ended, or was killed
    unreadable: list[str]  # what was passed over, a line each

    @property
    def trains_rewards(self) -> bool:
        """Whether it trained a reward model, not a policy."""
        return "batch_pairs" in self.config

    @property
    def last_step(self) -> int:
        """The last recorded step; 0: none."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @cached_property
    def names(self) -> list[str]:
        """Every number that some step has, in the order of their first appearance."""
        return list(
            dict.fromkeys(name for record in self.metrics for name, value in record.items() if is_number(value))
        )

    def series(self, name: str) -> Series:
        """A metric by training step."""
        return series(self.metrics, name)

    def evaluated(self, name: str) -> Series:
        """A metric of evaluations, by the step that they followed."""
        return series(self.evaluations, f"eval/{name}")


def series(records: Sequence[Record], name: str) -> Series:
    """The numbers under ``name``, by step."""
    found = [(record["step"], record[name]) for record in records if is_number(record.get(name))]
    return Series([step for step, _ in found], [value for _, value in found])


def is_number(value: object) -> bool:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """The runs in these directories. Raises ConfigError if one of them is no run's."""
    labels = unique_labels(directories)
    return [read_run(directory, label) for directory, label in zip(directories, labels, strict=True)]


def unique_labels(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of equally many parts, that tell them apart; a path given twice is numbered."""
    parts = [directory.resolve().parts for directory in directories]
    different = len(set(parts))
    count = next(n for n in range(1, 1 + max(map(len, parts))) if len({p[-n:] for p in parts}) == different)
    labels = ["/".join(p[-count:]) for p in parts]
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: i + 1].count(label)})"
        for i, label in enumerate(labels)
    ]


def read_run(directory: Path, label: str) -> RunRecord:
    """The run in ``directory``. Raises ConfigError if it is none, or if its config.yaml cannot be read."""
    if not (directory / CONFIG).is_file():
        raise ConfigError(
            f"{directory}: not a run's directory (no {CONFIG}); give one that rlhf train has written, such as runs/NAME"
        )
    unreadable: list[str] = []
    lines = {
        name: read_lines(directory / f"{name}.jsonl", unreadable.append)
        for name in ("metrics", "eval", "completions", "notes")
    }
    return RunRecord(
        label,
        directory,
        read_config(directory / CONFIG),
        *lines.values(),
        summary=read_summary(directory / "summary.json", unreadable.append),
        unreadable=unreadable,
    )


def read_config(file: Path) -> Record:
    """The whole configuration, as the run wrote it; it may be an older version's."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # OmegaConf re-exports no common base of YAML's errors
        raise ConfigError(f"{file}: not valid YAML: {one_line(error)}; restore it, or leave this run out") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: must hold keys and values; restore it, or leave this run out")
    return {str(key): value for key, value in config.items()}


def read_lines(file: Path, tell: Callable[[str], None]) -> list[Record]:
    """The records in a .jsonl file, sorted by step; none if it is absent. ``tell`` is called for lines that are none: a
    run that was killed, or is writing just now, leaves half of one at the end."""
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
            record["step"] += 0
        except (ValueError, TypeError, KeyError):
            tell(f"{file.name}: line {number} is not a whole record with a step; it is left out")
        else:
            records.append(record)
    return sorted(records, key=lambda record: record["step"])


def read_summary(file: Path, tell: Callable[[str], None]) -> Record | None:
    """summary.json; None if it is absent, or unreadable, which ``tell`` is told."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        tell(f"{file.name}: {one_line(error)}; it is left out")
        return None
    if not isinstance(summary, dict):
        tell(f"{file.name}: not what a run writes; it is left out")
        return None
    return summary


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every full key of a configuration with its value; empty sections are values."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
