"""`rlhf status`: how a run goes, from another process; by its files if it has ended. The run itself is not asked."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.control import find_run, running
from actors.health import role_health
from jobs.run_directory import RunFiles, find_directory, read_run_files
from jobs.scale import ask, joined, worker_table
from rlhf.errors import ClusterError, ConfigError, DeadlineError
from rlhf.tracking.progress import HEADLINES, SHOWN_FROM_S, duration

View = dict[str, Any]
"""What is known of a run, as plain JSON: what ``--json`` prints."""

OLD_S = 10.0  # older than that, what a run has left is not what it does now
SHOWN = {
    "kl": "kl",
    "objective/kl": "kl",
    "reward_std": "reward std",
    "completions/mean_length": "tokens per completion",
}


def status(
    run: str | None, *, address: str, as_json: bool, every_s: float | None, console: Console | None = None
) -> None:
    """Prints how a run goes, again every ``every_s`` seconds until it has ended; None: once.

    ``run``: its directory or its name; None: the only one on the cluster. Raises ConfigError if there is no such run,
    ClusterError or DeadlineError if it is known by its name alone and its cluster does not answer.
    """
    console = console or Console()
    looker = Looker(run, address)
    while True:
        view = looker.look()
        if as_json:
            print(json.dumps(view), flush=True)
        else:
            console.print(render(view))
        if every_s is None or view["state"] != "running":
            return
        time.sleep(every_s)


class Looker:
    """Looks at one run as often as asked. Joins its cluster for each look, and only if the run has not ended: Ray ends
    whoever is connected to a cluster that goes away, and a run's own cluster ends with it."""

    def __init__(self, run: str | None, address: str) -> None:
        self._name, self._address = run, address
        self._directory = None if run is None else find_directory(run)
        self._seen = False

    def look(self) -> View:
        """How the run is now. Raises as ``status`` does."""
        files = None if self._directory is None else read_run_files(self._directory)
        if files is not None:
            self._name = files.name
            if files.state != "running":
                return from_files(files)
        try:
            view = self._ask()
        except (ClusterError, ConfigError, DeadlineError) as error:
            if files is None and not self._seen:
                raise
            if files is None:
                return {"run": self._name, "state": "ended", "why": "it is not on the cluster any more"}
            return from_files(files) | {"unreachable": str(error)}
        self._seen = True
        if self._directory is None and (directory := find_directory(view["directory"])):
            self._directory = directory  # on this machine, or one that shares it
        return (from_files(files) if files else {}) | view

    def _ask(self) -> View:
        with joined(self._address):
            if self._name is None:
                self._name = only(running())
            report = ask(find_run(self._name).progress.remote())
            roles = role_health(self._name)
        return from_report(self._name, report) | {"roles": {name: role.as_json() for name, role in roles.items()}}


def only(names: list[str]) -> str:
    """The one run that there is. Raises ConfigError if there are several, or none."""
    if len(names) != 1:
        found = f"there are several runs on this cluster ({', '.join(names)})" if names else "no run is on this cluster"
        raise ConfigError(f"--run: {found}; give a run's name, or its directory")
    return names[0]


def from_files(files: RunFiles) -> View:
    """What its directory tells of a run."""
    plain = files.as_json()
    return {"run": plain.pop("name"), **plain}


def from_report(run: str, report: Mapping[str, Any]) -> View:
    """What a run has left with its control actor, as of now: ``age_s`` seconds have passed since."""
    age_s, phase, left_s = report["age_s"], report.get("phase"), report.get("left_s")
    return {
        "run": run,
        "state": "running",
        **report,
        "phase_s": report.get("phase_s", 0.0) + age_s if phase else 0.0,
        "left_s": None if left_s is None else max(0.0, left_s - age_s),
    }


def render(view: View) -> RenderableType:
    """A page of what is known."""
    title = Text(f"{view['run']}: {view['state']}", style="bold")
    title.append(f" ({view['why']})" if view.get("why") else "", style="default")
    grid = Table.grid(padding=(0, 2))
    for name, value in lines(view):
        grid.add_row(name, Text(value))
    parts: list[RenderableType] = [title, grid]
    if roles := view.get("roles"):
        parts.append(role_table(roles, view.get("metrics", {})))
    if workers := view.get("pool", {}).get("workers"):
        parts.append(worker_table(workers))
    parts += [Text(f"{note['at']}  {note['note']}", style="dim") for note in view.get("notes", [])]
    if why := view.get("unreachable"):
        parts.append(Text(f"from its files alone: {why}", style="yellow"))
    return Group(*parts)


def lines(view: View) -> Iterable[tuple[str, str]]:
    """What is known in names and values."""
    metrics, evaluation, pool = view.get("metrics", {}), view.get("evaluation", {}), view.get("pool", {})
    if "step" in view:
        pace = f", {duration(view['step_s'])} each" if view.get("step_s") else ""
        left = f", {duration(view['left_s'])} left" if view.get("left_s") else ""
        yield "step", f"{view['step']} of {view.get('num_steps') or '?'}{pace}{left}"
    if view.get("age_s", 0.0) > OLD_S:
        yield "silent", f"the run last told how it is {duration(view['age_s'])} ago"
    if view.get("phase"):
        yield "now", f"{view['phase']} for {duration(view['phase_s'])}"
    for name in HEADLINES:
        found = [_number(metrics[name])] if name in metrics else []
        if f"eval/{name}" in evaluation:
            found.append(f"{_number(evaluation[f'eval/{name}'])} in the evaluation after step {evaluation['step']}")
        if found:
            yield name, "; ".join(found)
    for name, label in SHOWN.items():
        if name in metrics:
            yield label, _number(metrics[name])
    if metrics.get("tokens_per_s"):
        yield "tokens/s", f"{metrics['tokens_per_s']:.0f}"
    seconds = {n.removeprefix("time/").removesuffix("_s"): s for n, s in metrics.items() if n.startswith("time/") and s}
    if any(spent >= SHOWN_FROM_S for spent in seconds.values()):
        yield "last step", "  ".join(f"{name} {s:.1f} s" for name, s in seconds.items() if s >= SHOWN_FROM_S)
    if metrics.get("bottleneck"):
        yield "bottleneck", metrics["bottleneck"]
    if "version" in pool:
        stale = (
            f"; tokens of the last step at most {metrics['staleness/max']:g} behind"
            if "staleness/max" in metrics
            else ""
        )
        yield "weights", f"version {pool['version']}{stale}"
        yield "groups", f"{pool['queued_groups']} queued, {pool['unfinished_groups']} unfinished"
        if pool.get("episodes"):
            yield "episodes", pool["episodes"]
        wanted = ", ".join(f"{count} {kind}" for kind, count in view.get("wanted", {}).items())
        yield "workers", f"{wanted} wanted; {pool['replaced_workers']} replaced so far"
    if view.get("checkpoint_step") is not None:
        yield "checkpoint", f"after step {view['checkpoint_step']}"
    if view.get("directory"):
        yield "directory", view["directory"]


def role_table(roles: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, Any]) -> Table:
    """Each role's actors, what they hold in memory, and the last death that nobody had asked for."""
    table = Table("role", "up", "starting", "died", "GiB here", "GPU GiB", "the last died of")
    for name, role in roles.items():
        counts = [str(role[key] or "") for key in ("up", "starting", "died")]
        memory = f"{role['memory_gib']:.1f}" if role["memory_gib"] else ""
        reserved = metrics.get(f"memory/{name.replace(' ', '_')}/gpu_gib")  # of the fullest, in the last step
        on_gpu = "" if reserved is None else f"{reserved:.1f}"
        table.add_row(name, *counts, memory, on_gpu, Text(role["reason"], overflow="ellipsis", no_wrap=True))
    return table


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
