"""Learning curves: one chart per metric, with all runs in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from jobs.report.parts import Chart, Section, colour_of, faint, number
from jobs.report.records import RunRecord, Series
from jobs.report.series import SMOOTH_FROM, smoothed, thinned

CI95 = "/ci95"
SHARE = "share"
MANY = 3  # steps from which "always" means something
LEGEND = (
    "Pale: each step. Strong: smoothed. Band: one standard deviation over the batch. Diamonds: held-out data, with "
    "their 95\u00a0% confidence interval where it is known. Drag to enlarge, double-click to see all again."
)


@dataclass(frozen=True)
class Curve:
    """A metric, and what is drawn around it: a band of one deviation, or from a lowest to a highest value.

    ``also``: its name in PPO runs, where TRL gives it another.
    """

    title: str
    metric: str
    unit: str = ""
    also: str = ""
    deviation: str | None = None
    lowest: str | None = None
    highest: str | None = None
    caption: str = ""


CURVES = (
    Curve("Reward", "reward", deviation="reward_std"),
    Curve("Accuracy on pairs", "accuracy"),
    Curve("Margin of chosen over rejected", "margin"),
    Curve("KL to the reference", "kl", "nats"),
    Curve("KL to the reference, per completion", "objective/kl", "nats"),
    Curve("Entropy of a token", "entropy", "nats", also="policy/entropy_avg"),
    Curve(
        "Completion length",
        "completions/mean_length",
        "tokens",
        lowest="completions/min_length",
        highest="completions/max_length",
        caption="band: shortest to longest",
    ),
    Curve("Truncated completions", "completions/clipped_ratio", SHARE),
    Curve("Loss", "loss", also="loss/policy_avg"),
    Curve("Gradient norm", "grad_norm"),
    Curve("Clipped tokens", "clip_ratio/region_mean", SHARE, also="policy/clipfrac_avg"),
    Curve("Learning rate", "learning_rate", also="lr"),
    Curve("KL from the policy before the update", "approx_kl", "nats", also="policy/approxkl_avg"),
    Curve("Groups without a signal", "frac_reward_zero_std", SHARE, caption="all rewards of the group are equal"),
    Curve("Completions without a reward", "reward/abstained", SHARE),
    Curve("Advantage, absolute", "advantages/abs_mean"),
    Curve("Loss of the critic", "loss/value_avg"),
    Curve("Gradient norm of the critic", "critic/grad_norm"),
    Curve("Turns of an episode", "episodes/turns/mean", "turns", highest="episodes/turns/max"),
    Curve("Observed tokens of an episode", "episodes/observed_tokens/mean", "tokens"),
)
NOWHERE_ELSE = (
    *("time/", "pool/", "perf/", "memory/", "weight_sync/", "sampling/", "staleness/", "checkpoint/", "environments/"),
)
SHOWN_OTHERWISE = {"step", "wall_s", "num_tokens", "tokens_per_s", "eps", "checks/skipped_steps"}


def learning_curves(runs: Sequence[RunRecord]) -> Section:
    """What the runs have learnt, metric by metric; rewards of single functions after the whole one.

    A metric that never changes gets no chart but a few words.
    """
    functions = sorted({name for run in runs for name in function_rewards(run)})
    parts = [Curve(f"Reward: {name}", f"rewards/{name}/mean", deviation=f"rewards/{name}/std") for name in functions]
    sources = sorted({name for run in runs for name in extra_sources(run)})
    held_out = [Curve(f"Reward on {name}, held out", f"{name}/reward") for name in sources]
    curves = [CURVES[0], *held_out, *(parts if len(parts) > 1 else ()), *CURVES[1:]]
    same = {curve: value for curve in curves if (value := constant(runs, curve)) is not None}
    return Section(
        "Learning curves",
        [chart for curve in curves if curve not in same and (chart := curve_chart(runs, curve))],
        intro=f"{LEGEND}{unchanging(same)}",
        absent="no step and no evaluation has been recorded (metrics.jsonl, eval.jsonl)",
    )


def other_metrics(runs: Sequence[RunRecord]) -> Section:
    """Every other number that the runs record, those of the user's own losses and estimators included."""
    known = {name for c in CURVES for name in (c.metric, c.also, c.deviation, c.lowest, c.highest)}
    names = dict.fromkeys(name for run in runs for name in run.names)
    others = [
        name
        for name in names
        if name not in known | SHOWN_OTHERWISE and not name.startswith((*NOWHERE_ELSE, "rewards/"))
    ]
    curves = [Curve(name, name) for name in others]
    same = {curve: value for curve in curves if (value := constant(runs, curve)) is not None}
    return Section(
        "Other metrics",
        [chart for curve in curves if curve not in same and (chart := curve_chart(runs, curve))],
        intro=unchanging(same).strip(),
        folded=True,
        absent="no step has a metric that is not shown above",
    )


def constant(runs: Sequence[RunRecord], curve: Curve) -> float | None:
    """The value that a metric has in every step and evaluation of every run; None if it changes, or is too rare."""
    found = [run.series(name) for run in runs for name in (curve.metric, curve.also)]
    values = {value for series in (*found, *(run.evaluated(curve.metric) for run in runs)) for value in series.y}
    return values.pop() if len(values) == 1 and sum(len(series.y) for series in found) >= MANY else None


def unchanging(same: Mapping[Curve, float]) -> str:
    """A sentence on the metrics that have no chart."""
    if not same:
        return ""
    values = ", ".join(f"{curve.title} {number(float(value))}" for curve, value in same.items())
    return f" The same in all steps: {values}."


def function_rewards(run: RunRecord) -> Iterable[str]:
    """The names of the reward functions and models."""
    for name in run.names:
        if name.startswith("rewards/") and name.endswith("/mean"):
            yield name.removeprefix("rewards/").removesuffix("/mean")


def extra_sources(run: RunRecord) -> Iterable[str]:
    """The names in data.extra_eval."""
    for key in {key for record in run.evaluations for key in record}:
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if name and metric == "reward":
            yield name


def curve_chart(runs: Sequence[RunRecord], curve: Curve) -> Chart | None:
    """The chart of a curve; None if no run has it."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        add_curve(figure, run, curve, colour_of(index))
        add_evaluations(figure, run, curve.metric, colour_of(index))
    if not figure.data:
        return None
    figure.update_layout(showlegend=False)
    if curve.unit == SHARE:
        figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    unit = "" if curve.unit == SHARE else curve.unit
    return Chart(curve.title, figure, "; ".join(text for text in (unit, curve.caption) if text))


def line_chart(
    runs: Sequence[RunRecord], title: str, metric: str, caption: str = "", *, tickformat: str | None = None
) -> Chart | None:
    """The chart of a metric that is never negative; None if no run has it. ``tickformat``: d3's, such as ``.0%``."""
    if chart := curve_chart(runs, Curve(title, metric, caption=caption)):
        chart.figure.update_yaxes(rangemode="tozero", tickformat=tickformat)
    return chart


def add_curve(figure: go.Figure, run: RunRecord, curve: Curve, colour: str) -> None:
    """Band, raw values and smoothed values of a run, as far as it has them."""
    found = run.series(curve.metric) or run.series(curve.also)
    if not found:
        return
    smooth = len(found.x) >= SMOOTH_FROM and curve.metric != "learning_rate"
    middle = smoothed(found.y) if smooth else found.y
    kept = thinned(found.x)
    x = [found.x[i] for i in kept]
    if edges := band(run, curve, found, middle):
        for edge, fill in zip(edges, (None, "tonexty"), strict=True):
            figure.add_scatter(
                x=x,
                y=[edge[i] for i in kept],
                mode="lines",
                line={"width": 0, "color": colour},
                fill=fill,
                fillcolor=faint(colour, 0.14),
                hoverinfo="skip",
                name="band",
            )
    if smooth:
        figure.add_scatter(
            x=x,
            y=[found.y[i] for i in kept],
            mode="lines",
            line={"width": 1, "color": faint(colour, 0.4)},
            hoverinfo="skip",
            name=run.label,
        )
    figure.add_scatter(
        x=x,
        y=[middle[i] for i in kept],
        mode="lines" if len(x) > 1 else "markers",
        line={"width": 2, "color": colour},
        customdata=[found.y[i] for i in kept],
        hovertemplate="step %{x}: %{customdata:.5g}" + (" (smoothed %{y:.5g})" if smooth else ""),
        name=run.label,
    )


def band(run: RunRecord, curve: Curve, found: Series, middle: list[float]) -> tuple[list[float], list[float]] | None:
    """Lower and upper edge at each of the curve's points; None: it has no band, or the run records none."""

    def around(name: str | None, fallback: list[float]) -> list[float]:
        at = dict(zip(other.x, other.y, strict=True)) if name and (other := run.series(name)) else {}
        values = [at.get(step, value) for step, value in zip(found.x, fallback, strict=True)]
        return smoothed(values) if at and len(found.x) >= SMOOTH_FROM else values

    if curve.deviation is not None:
        pairs = list(zip(middle, around(curve.deviation, [0.0] * len(found.x)), strict=True))
        if not any(deviation for _, deviation in pairs):
            return None
        return [value - deviation for value, deviation in pairs], [value + deviation for value, deviation in pairs]
    if curve.lowest or curve.highest:
        return around(curve.lowest, middle), around(curve.highest, middle)
    return None


def add_evaluations(figure: go.Figure, run: RunRecord, metric: str, colour: str) -> None:
    """Diamonds at the evaluations, with their 95 % confidence interval if it is recorded."""
    found = run.evaluated(metric)
    if not found:
        return
    halves = run.evaluated(f"{metric}{CI95}")
    at = dict(zip(halves.x, halves.y, strict=True))
    figure.add_scatter(
        x=found.x,
        y=found.y,
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": colour, "line": {"width": 1, "color": "#ffffff"}},
        error_y={"type": "data", "array": [at.get(step, 0.0) for step in found.x], "thickness": 1} if at else None,
        hovertemplate="held out, step %{x}: %{y:.5g}",
        name=f"{run.label}, held out",
    )
