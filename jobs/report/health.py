"""Whether a run was well: the rollout pool, how old samples were, sampler against learner, and what the log said."""

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from jobs.report.curves import line_chart
from jobs.report.parts import Chart, Section, Table, colour_of
from jobs.report.records import RunRecord
from jobs.trained import CONFIG
from rlhf.checks.gate import DIFFERENCE, SamplingGate
from rlhf.errors import ConfigError
from rlhf.recipes import load_config

DIFFERENCE_MAX = "sampling/logprob_difference_max"
MOST_NOTES = 200
TROUBLES = {  # shown if there were any
    "Replaced environment workers": "environments/replaced_workers",
    "Episodes begun anew": "environments/retried_episodes",
    "Skipped steps, not finite": "checks/skipped_steps",
}


def health(runs: Sequence[RunRecord]) -> Section:
    """Pool, weight versions, the comparison of sampler and learner, skipped steps, notes."""
    charts = [pool_chart(runs), staleness_chart(runs), gate_chart(runs)]
    charts += [
        line_chart(runs, "Seconds to publish the weights", "weight_sync/publish_s"),
        *(line_chart(runs, title, metric) for title, metric in TROUBLES.items() if any_of(runs, metric)),
    ]
    return Section(
        "Health",
        [chart for chart in charts if chart],
        [table for run in runs if (table := notes_table(run, several=len(runs) > 1))],
        absent="no step has recorded its pool, and there are no notes",
    )


def any_of(runs: Sequence[RunRecord], metric: str) -> bool:
    """Whether it is ever more than 0."""
    return any(any(run.series(metric).y) for run in runs)


def add_line(
    figure: go.Figure,
    run: RunRecord,
    metric: str,
    colour: str,
    name: str,
    *,
    dash: str = "solid",
    steps: bool = False,
) -> None:
    """A line of one metric, if the run has it. ``steps``: of whole numbers that jump."""
    found = run.series(metric).thin()
    if found:
        figure.add_scatter(
            x=found.x,
            y=found.y,
            name=name,
            mode="lines" if len(found.x) > 1 else "markers",
            line={"width": 2, "color": colour, "dash": dash, "shape": "hv" if steps else "linear"},
            hovertemplate="step %{x}: %{y:.4g}",
        )


def pool_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """Rollout workers: live, wanted, and replaced so far."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        for metric, name, dash in (
            ("pool/live_workers", "live", "solid"),
            ("pool/wanted_workers", "wanted", "dot"),
            ("pool/replaced_workers", "replaced so far", "dash"),
        ):
            add_line(figure, run, metric, colour_of(index), f"{run.label}, {name}", dash=dash, steps=True)
    if not figure.data:
        return None
    figure.update_layout(showlegend=False)
    figure.update_yaxes(rangemode="tozero")
    return Chart("Rollout workers", figure, "solid: live; dotted: wanted; dashed: replaced so far")


def staleness_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """By how many versions the learner was ahead of the weights that sampled a token."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        add_line(figure, run, "staleness/mean", colour_of(index), f"{run.label}, mean")
        add_line(figure, run, "staleness/max", colour_of(index), f"{run.label}, oldest", dash="dot", steps=True)
    if not figure.data:
        return None
    figure.update_layout(showlegend=False)
    figure.update_yaxes(rangemode="tozero")
    return Chart(
        "Staleness: versions behind the learner", figure, "solid: mean of the tokens; dotted: the oldest token"
    )


def gate_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """Mean and greatest difference of log-probabilities between sampler and learner, on a logarithmic scale."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        for metric, name, symbol in ((DIFFERENCE, "mean", "circle"), (DIFFERENCE_MAX, "greatest", "triangle-up")):
            found = run.series(metric).thin()
            if found:
                figure.add_scatter(
                    x=found.x,
                    y=found.y,
                    name=f"{run.label}, {name}",
                    mode="markers",
                    marker={"symbol": symbol, "size": 7, "color": colour_of(index)},
                    hovertemplate=f"{name}, step %{{x}}: %{{y:.2g}} nats",
                )
    if not figure.data:
        return None
    figure.update_layout(showlegend=False)
    figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    caption = "differences of log-probabilities in nats; circle: mean, triangle: greatest"
    gates = {gate for run in runs if run.series(DIFFERENCE) and (gate := gate_of(run))}
    if len(gates) == 1:
        (gate,) = gates
        caption += f"; a mean above {gate.warn:g} is a warning, above {gate.stop:g} it ends the run"
    return Chart("Sampler against learner", figure, caption)


def gate_of(run: RunRecord) -> SamplingGate | None:
    """The bounds of the run's comparison; None if they are not known: without the run's device, or its version."""
    device = (run.summary or {}).get("device")
    try:
        config = load_config(run.directory / CONFIG)
    except ConfigError:
        return None
    if config.model.dtype == "auto" and device is None:
        return None
    half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and device == "gpu")
    return SamplingGate.of(config.checks, config.rollout, torch.bfloat16 if half else torch.float32)


def notes_table(run: RunRecord, *, several: bool) -> Table | None:
    """What the log told the user: workers replaced, the pool scaled and why, restarts; None without any."""
    if not run.notes:
        return None
    rows = [(f"{note['step']:,}", duration(note.get("wall_s")), str(note.get("note", ""))) for note in run.notes]
    left_out = len(rows) - MOST_NOTES
    title = f"Notes: {run.label}" if several else "Notes"
    if left_out > 0:
        title += f" (the last {MOST_NOTES}; {left_out:,} earlier ones are in notes.jsonl)"
    return Table(title, ("after step", "at", "note"), rows[-MOST_NOTES:])


def duration(seconds: object) -> str:
    """``1:02:03``, hours first."""
    if not isinstance(seconds, int | float):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
