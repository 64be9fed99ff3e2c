"""How much of the hardware a run used: memory by role against its plan, shares of the peaks, and what bounds a step."""

from collections import Counter
from collections.abc import Sequence

import plotly.graph_objects as go

from jobs.report.curves import Curve, constant, line_chart
from jobs.report.parts import Chart, Section, Table, colour_of
from jobs.report.records import RunRecord
from rlhf.tracking.performance import LIMITS

KINDS = {"gpu": "GPU", "host": "host"}
PREFIX, SUFFIX = "memory/", "_gib"  # of the metrics of each step
CAPTIONS = {"gpu": "GiB, most reserved during the step", "host": "GiB, resident after the step"}


def memory(runs: Sequence[RunRecord]) -> Section:
    """The most that a process of each role has held, on its GPU and on the host, a line where the plan saw it; and step
    by step, if that changes."""
    charts = [chart for kind in KINDS if (chart := memory_chart(runs, kind))]
    charts += [chart for name in memory_names(runs) if (chart := memory_curve(runs, name))]
    return Section("Memory", charts, absent="no step has recorded memory, and no summary.json its peaks")


def memory_names(runs: Sequence[RunRecord]) -> list[str]:
    """Who has recorded what it holds, and where: ``learner/gpu``."""
    names = dict.fromkeys(name for run in runs for name in run.names if name.startswith(PREFIX))
    where = (f"/{kind}{SUFFIX}" for kind in KINDS)
    return [name.removeprefix(PREFIX).removesuffix(SUFFIX) for end in where for name in names if name.endswith(end)]


def memory_curve(runs: Sequence[RunRecord], name: str) -> Chart | None:
    """What the fullest process of a role has held in each step, in GiB; None if it is always the same."""
    metric, (role, kind) = f"{PREFIX}{name}{SUFFIX}", name.rsplit("/", 1)
    if constant(runs, Curve(role, metric)) is not None:
        return None
    return line_chart(runs, f"{role}: memory on the {KINDS[kind]}, by step", metric, CAPTIONS[kind])


def memory_chart(runs: Sequence[RunRecord], kind: str) -> Chart | None:
    """Peaks by role; None if none was measured there."""
    figure, planned = go.Figure(), False
    for index, run in enumerate(runs):
        peaks = (run.summary or {}).get("peak_memory_gib") or {}
        roles = [role for role, peak in peaks.items() if kind in peak]
        if not roles:
            continue
        label = {"name": run.label, "legendgroup": run.label, "offsetgroup": run.label}
        figure.add_bar(
            y=roles,
            x=[peaks[role][kind] for role in roles],
            orientation="h",
            marker={"color": colour_of(index)},
            hovertemplate="%{y}: %{x:.2f} GiB",
            **label,
        )
        predicted = {role: peaks[role]["predicted"] for role in roles if "predicted" in peaks[role]}
        if kind == "gpu" and predicted:
            planned = True
            figure.add_scatter(
                y=list(predicted),
                x=list(predicted.values()),
                mode="markers",
                marker={"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour_of(index)}},
                hovertemplate="%{y}: %{x:.2f} GiB predicted",
                showlegend=False,
                **label,
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="group", bargap=0.3, scattermode="group", showlegend=len(runs) > 1)
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    caption = "highest of a role's processes" + ("; upright line: predicted before anything loaded" if planned else "")
    bars = sum(len(trace.y) for trace in figure.data if trace.type == "bar")
    return Chart(f"Memory on the {KINDS[kind]}", figure, caption, height_px=max(240, 100 + 20 * bars))


def roofline(runs: Sequence[RunRecord]) -> Section:
    """Shares of the devices' peaks, step by step, and the named bottlenecks."""
    charts = [chart for figure in LIMITS if (chart := share_chart(runs, figure))]
    named = [run for run in runs if bottlenecks(run)]
    rows = [(run.label, name, f"{count} of {len(run.metrics)}") for run in named for name, count in bottlenecks(run)]
    tables = [Table("Bottleneck", ("run", "what limited the step", "steps"), rows)] if rows else []
    intro = "" if charts else "No shares of peaks: they are known for a bfloat16 model on a GPU of a known kind."
    return Section("Roofline", charts, tables, intro=intro, absent="no step has a bottleneck or a figure of its peaks")


def bottlenecks(run: RunRecord) -> list[tuple[str, int]]:
    """What limited the steps, the most frequent first."""
    return Counter(record["bottleneck"] for record in run.metrics if "bottleneck" in record).most_common()


def share_chart(runs: Sequence[RunRecord], phase: str) -> Chart | None:
    """The share of a peak that a phase reached; None if no run has it."""
    limit = LIMITS[phase]
    chart = line_chart(
        runs,
        f"Share of {limit.peak}",
        limit.figure,
        f"above the dotted line, {phase} is bound by {limit.bound}",
        tickformat=".0%",
    )
    if chart:
        chart.figure.add_hline(y=limit.reached_at, line={"width": 1, "dash": "dot", "color": "#8c8c94"})
    return chart
