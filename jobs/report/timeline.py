"""Where the seconds of a run went: phase by phase, and which role was at work."""

import statistics
from collections.abc import Sequence

import plotly.graph_objects as go

from jobs.report.curves import line_chart
from jobs.report.parts import Chart, Section, colour_of
from jobs.report.records import Record, RunRecord
from jobs.report.series import grouped, means

PHASES = {  # in the order of a step, with their colours
    "start": "#8c8c94",
    "generate": "#3d7fd1",
    "reward": "#a88a1f",
    "reference": "#2f9fb3",
    "score": "#7a6ee0",
    "advantage": "#cf4f4f",
    "update": "#dd7a2b",
    "publish": "#2f9e74",
    "evaluate": "#b4549f",
    "checkpoint": "#6f7f4f",
}
OTHER = "between phases"
IDLE = "rgba(140,140,150,0.28)"
LEARNER_WORKS = ("score", "update", "publish", "checkpoint")
NOBODY_STEPS = ("start",)  # not a part of any step


def timeline(runs: Sequence[RunRecord]) -> Section:
    """Phases of every step, and the shares of the time in which roles were at work."""
    timed = [run for run in runs if phases_of(run)]
    charts = [phase_chart(run, several=len(runs) > 1) for run in timed] + [role_chart(run, runs) for run in timed]
    lines = (
        line_chart(runs, "Rollout workers idle", "pool/idle_fraction", "share of their time", tickformat=".0%"),
        line_chart(runs, "Learner waits for samples", "pool/wait_fraction", "share of the step", tickformat=".0%"),
        line_chart(runs, "Tokens per second", "tokens_per_s", "prompts and completions", tickformat=","),
    )
    return Section(
        "Time",
        [*charts, *(chart for chart in lines if chart)],
        intro="Phases follow each other in the driver, so what a step waits for is what its bar shows. A role that has "
        "nothing to do meanwhile is idle: those are the bubbles.",
        absent="no step has recorded its phases (time/* in metrics.jsonl)",
    )


def phases_of(run: RunRecord) -> list[str]:
    """The phases that the run has recorded, in the order of a step."""
    found = {name[5:-2] for name in run.names if name.startswith("time/") and name.endswith("_s")}
    return [*(name for name in PHASES if name in found), *sorted(found - set(PHASES))]


def seconds_of(record: Record, phase: str) -> float:
    return record.get(f"time/{phase}_s") or 0.0


def wall_seconds(run: RunRecord) -> list[float]:
    """Seconds from one step's record to the next, the first from the start of the run."""
    walls = [record["wall_s"] for record in run.metrics]
    return [after - before for before, after in zip([0.0, *walls], walls, strict=False)]


def phase_chart(run: RunRecord, *, several: bool) -> Chart:
    """Seconds of each phase in each step, stacked; beyond MOST_BARS steps, the means of neighbours."""
    phases = [phase for phase in phases_of(run) if phase not in NOBODY_STEPS]
    groups = grouped(len(run.metrics))
    steps = [record["step"] for record in run.metrics]
    x = [statistics.fmean(steps[i] for i in group) for group in groups]
    by_phase = {phase: [seconds_of(record, phase) for record in run.metrics] for phase in phases}
    start = [seconds_of(record, "start") for record in run.metrics]
    known = [sum(values) for values in zip(start, *by_phase.values(), strict=True)]
    rest = [max(0.0, wall - one) for wall, one in zip(wall_seconds(run), known, strict=True)]
    figure = go.Figure()
    for phase, values in by_phase.items():
        add_bars(figure, phase, x, means(values, groups), PHASES.get(phase, "#8c8c94"))
    add_bars(figure, OTHER, x, means(rest, groups), IDLE)
    figure.update_layout(barmode="stack", bargap=0.08)
    figure.update_yaxes(title_text="seconds")
    if cut := cut_at([sum(values) for values in zip(rest, *by_phase.values(), strict=True)]):
        figure.update_yaxes(range=[0, cut])
    size = len(groups[0])
    caption = f"a bar is the mean of {size} steps" if size > 1 else ""
    if cut:
        caption += f"{'; ' if caption else ''}bars are cut at {cut:.3g} s: double-click shows them whole"
    title = f"Seconds of a step: {run.label}" if several else "Seconds of a step"
    return Chart(title, figure, caption, wide=True, height_px=320)


def add_bars(figure: go.Figure, name: str, x: list[float], y: list[float], colour: str) -> None:
    figure.add_bar(
        x=x, y=y, name=name, marker={"color": colour, "line": {"width": 0}}, hovertemplate=f"{name}: %{{y:.3g}} s"
    )


def cut_at(totals: Sequence[float]) -> float | None:
    """Where to cut bars, if a few of them (a first step that compiles, say) would flatten all others; else None."""
    if len(totals) < 4:
        return None
    usual = 1.6 * statistics.quantiles(totals, n=10)[-2]
    return usual if max(totals) > 2 * usual else None


def role_chart(run: RunRecord, runs: Sequence[RunRecord]) -> Chart:
    """Seconds at work and idle in a median step, by role."""
    rows = role_seconds(run)
    figure = go.Figure()
    names, busy, total = list(rows), [b for b, _ in rows.values()], [t for _, t in rows.values()]
    idle = [max(0.0, whole - work) for work, whole in zip(busy, total, strict=True)]
    shares = [work / whole if whole else 0.0 for work, whole in zip(busy, total, strict=True)]
    for name, values, colour in (("at work", busy, colour_of(runs.index(run))), ("idle", idle, IDLE)):
        figure.add_bar(
            y=names,
            x=values,
            name=name,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            text=[f"{share:.0%}" for share in shares] if name == "at work" else None,
            textangle=0,
            insidetextfont={"color": "#ffffff"},
            hovertemplate=f"{name}: %{{x:.3g}} s",
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title_text="seconds of a median step")
    figure.update_yaxes(autorange="reversed")
    several = len(runs) > 1
    caption = "rollout workers: mean of those alive; learner: scoring, updating, publishing, saving"
    return Chart(f"Roles at work: {run.label}" if several else "Roles at work", figure, caption)


def role_seconds(run: RunRecord) -> dict[str, tuple[float, float]]:
    """Median seconds at work, and of the whole step, for each role whose work is recorded; without the first step,
    which compiles, if there are others."""
    phases = [phase for phase in phases_of(run) if phase not in NOBODY_STEPS]
    records = run.metrics[1:] or run.metrics
    whole = statistics.median(sum(seconds_of(record, phase) for phase in phases) for record in records)
    learner = statistics.median(sum(seconds_of(record, phase) for phase in LEARNER_WORKS) for record in records)
    rows = {"learner": (min(learner, whole), whole)}
    busy = [record["pool/busy_s"] for record in records if record.get("pool/busy_s") is not None]
    return {"rollout workers": (min(statistics.median(busy), whole), whole), **rows} if busy else rows
