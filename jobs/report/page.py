"""One HTML file from runs: what is said at its top, its sections, and everything that it needs to show them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from jobs.report.curves import learning_curves, other_metrics
from jobs.report.hardware import memory, roofline
from jobs.report.health import duration, health
from jobs.report.parts import Chart, Section, colour_of, number
from jobs.report.records import RunRecord
from jobs.report.samples import samples
from jobs.report.settings import origins, settings
from jobs.report.timeline import timeline
from rlhf.tracking.progress import HEADLINES


@dataclass(frozen=True)
class Card:
    """A run in a few figures."""

    label: str
    colour: str
    status: str
    figures: list[tuple[str, str]]
    warnings: list[str]


def sections(runs: Sequence[RunRecord]) -> list[Section]:
    """Everything that the page shows below its top, in order; some are empty."""
    return [
        learning_curves(runs),
        timeline(runs),
        health(runs),
        memory(runs),
        roofline(runs),
        samples(runs),
        settings(runs),
        origins(runs),
        other_metrics(runs),
    ]


def card(run: RunRecord, index: int) -> Card:
    """What a run is, how far it has come, and what it has learnt."""
    summary = run.summary or {}
    figures = [
        (
            "steps",
            f"{run.last_step:,} of {run.config['num_steps']:,}" if "num_steps" in run.config else f"{run.last_step:,}",
        )
    ]
    for name in HEADLINES:
        evaluated, trained = run.evaluated(name), run.series(name)
        if evaluated:
            first, last = number(evaluated.y[0]), number(evaluated.y[-1])
            figures.append((f"{name}, held out", f"{first} → {last}" if len(evaluated.y) > 1 else first))
        if trained:
            figures.append((f"{name}, training", f"{number(trained.y[0])} → {number(trained.y[-1])}"))
    if run.metrics:
        figures.append(("time", duration(summary.get("wall_s") or run.metrics[-1].get("wall_s"))))
        figures.append(("tokens", number(run.metrics[-1].get("num_tokens"))))
    if bound := (summary.get("performance") or {}).get("bottleneck"):
        figures.append(("bottleneck", bound))
    if "device" in summary:
        figures.append(("device", summary["device"]))
    return Card(run.label, colour_of(index), status_of(run), figures, run.unreadable)


def status_of(run: RunRecord) -> str:
    """How the run ended, as far as its files tell."""
    if run.summary is None:
        return f"no summary: running, or killed after step {run.last_step:,}"
    if run.summary.get("steps", 0) < run.last_step:
        return f"resumed after step {run.summary['steps']:,}, and no newer summary: running, or killed"
    return str(run.summary.get("status", "ended"))


def render(runs: Sequence[RunRecord], made: datetime) -> str:
    """The page. Every text of the runs is escaped by the template; figures are JSON in which no tag can begin."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    here = files("jobs.report")
    parts = sections(runs)
    page = environment.from_string((here / "page.html.jinja").read_text(encoding="utf-8")).render(
        title=" and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        made=f"{made:%Y-%m-%d %H:%M}",
        cards=[card(run, index) for index, run in enumerate(runs)],
        sections=[part for part in parts if not part.empty],
        absent=[part for part in parts if part.empty],
        figure_json=figure_json,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # an environment may say half of a character


def figure_json(chart: Chart) -> Markup:
    """A figure for a script element: inside of one, only ``<`` could end it or begin a comment."""
    figure = chart.figure.to_plotly_json()
    layout = {key: value for key, value in figure["layout"].items() if key != "template"}
    text = json.dumps({"data": figure["data"], "layout": layout}, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
