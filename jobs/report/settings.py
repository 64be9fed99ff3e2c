"""Where a run comes from: what its configuration changes, what differs between runs, versions, command and commit."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from jobs.report.parts import Section, Table
from jobs.report.records import RunRecord, leaves
from rlhf.config import Config
from rlhf.reward_config import RewardTrainingConfig

ABSENT = "(absent)"
OWN = {"name", "run_dir"}  # differ between any two runs


def settings(runs: Sequence[RunRecord]) -> Section:
    """What differs between the runs, if there are several, and what each changes of the defaults."""
    tables = [difference_table(runs)] if len(runs) > 1 else []
    for run in runs:
        title = f"{run.label}: what differs from the defaults" if len(runs) > 1 else "What differs from the defaults"
        tables.append(Table(title, ("key", "value", "default"), changed_keys(run)))
    return Section("Configuration", tables=tables)


@cache
def defaults(trains_rewards: bool) -> dict[str, Any]:
    """Every key of a schema with its default."""
    schema = OmegaConf.structured(RewardTrainingConfig if trains_rewards else Config)
    return dict(leaves(OmegaConf.to_container(schema)))  # type: ignore[arg-type]


def changed_keys(run: RunRecord) -> list[tuple[str, str, str]]:
    """(key, value, default) of every key that is not as by default."""
    standard = defaults(run.trains_rewards)
    rows = []
    for key, value in leaves(run.config):
        default = standard.get(key, ABSENT)
        if value != default:
            rows.append((key, shown(value), "" if default in ("???", ABSENT) else shown(default)))
    return rows


def difference_table(runs: Sequence[RunRecord]) -> Table:
    """The keys whose values are not the same in all runs."""
    flat = [dict(leaves(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in OWN]
    rows = [(key, *values) for key in keys if len(set(values := [shown(one.get(key, ABSENT)) for one in flat])) > 1]
    return Table("What differs between the runs", ("key", *(run.label for run in runs)), rows)


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def origins(runs: Sequence[RunRecord]) -> Section:
    """Command, commit and versions of the runs that have ended."""
    ended = [run for run in runs if run.summary]
    summaries = [run.summary or {} for run in ended]
    packages = dict.fromkeys(name for summary in summaries for name in summary.get("versions") or {})
    rows = [
        ("command", *(str(summary.get("command") or "-") for summary in summaries)),
        ("git commit", *(str(summary.get("commit") or "-") for summary in summaries)),
        *((name, *(str((s.get("versions") or {}).get(name, "-")) for s in summaries)) for name in packages),
    ]
    different = frozenset(i for i, row in enumerate(rows) if i and len(set(row[1:])) > 1)
    columns = ("", *(run.label for run in ended))
    tables = [Table("Command, commit, versions", columns, rows, different)] if ended else []
    return Section(
        "Origin",
        tables=tables,
        absent="summary.json, which names versions, command and git commit, is written when a run ends",
    )
