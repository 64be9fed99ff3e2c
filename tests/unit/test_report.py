"""`rlhf report`: whatever a run has left behind becomes one page that shows it, and asks nothing of the network."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.report.command import write_report
from jobs.report.curves import learning_curves
from jobs.report.hardware import memory, memory_chart, roofline
from jobs.report.health import duration, gate_chart, notes_table
from jobs.report.records import read_run, read_runs, unique_labels
from jobs.report.samples import Token, spread
from jobs.report.series import grouped, means, moving_average, smoothed, thinned
from jobs.report.settings import changed_keys, settings
from jobs.report.timeline import OTHER, phase_chart, role_seconds
from jobs.runs import leave_report
from rlhf.config import Config
from rlhf.errors import ConfigError
from rlhf.recipes import load_config, to_yaml

CONF = Path(__file__).resolve().parents[2] / "conf"
HOSTILE = "<script>alert(1)</script><!-- </pre> & \"'"


# ---- run directories


@dataclass
class RunFiles:
    """A run directory to be: change its parts, then write it."""

    recipe: str = "grpo_tiny"
    overrides: tuple[str, ...] = ()
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        config: Config = load_config(CONF / f"{self.recipe}.yaml", self.overrides)
        (directory / "config.yaml").write_text(to_yaml(config))
        lines = {name: asdict(self)[name] for name in ("metrics", "completions", "notes")} | {"eval": self.evaluations}
        for name, records in lines.items():
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if self.summary is not None:
            (directory / "summary.json").write_text(json.dumps(self.summary))
        return directory


def step_record(step: int, **more: float) -> dict[str, Any]:
    return {
        **{"step": step, "wall_s": 10.0 + 4 * step, "time/generate_s": 2.0, "time/update_s": 1.0},
        **{"num_tokens": 100 * step, "tokens_per_s": 33.0, "bottleneck": "generate: engine overhead"},
        **{"reward": step / 30, "reward_std": 0.1, "kl": 0.01 * step, "loss": -0.1 * step, "learning_rate": 1e-3},
        **{"completions/mean_length": 20.0 + step, "completions/min_length": 1.0, "completions/max_length": 64.0},
        **{"pool/live_workers": 2.0, "pool/wanted_workers": 2.0, "pool/replaced_workers": 0.0, "pool/busy_s": 1.5},
        **{"staleness/max": 1, "staleness/mean": 0.5},
        **more,
    }


def sample(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "prompt": "ask", "completion": "tell", "reward": 1.0, "advantage": -0.5, **more}


def whole_run(**more: Any) -> RunFiles:
    """A run of 30 steps that has ended."""
    summary = {
        **{"status": "completed", "steps": 30, "wall_s": 130.0, "device": "gpu", "command": "rlhf train -c x.yaml"},
        **{"commit": "abc123", "versions": {"python": "3.11.7", "torch": "2.13.0"}, "performance": {}},
        "peak_memory_gib": {"learner": {"host": 2.0, "gpu": 20.0, "predicted": 22.0}, "rollout": {"host": 3.0}},
    }
    files = RunFiles(
        metrics=[step_record(step) for step in range(1, 31)],
        evaluations=[
            {"step": step, "wall_s": 1.0, "eval/reward": step / 30, "eval/reward/ci95": 0.1} for step in (0, 30)
        ],
        completions=[sample(step) for step in range(5, 31, 5)],
        notes=[{"step": 3, "wall_s": 22.0, "note": "rollout pool: 1 -> 2 default worker(s): asked"}],
        summary=summary,
    )
    for name, value in more.items():
        setattr(files, name, value)
    return files


# ---- the page, as a browser reads it


class Page(HTMLParser):
    """Headings, figures, tags and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[dict[str, Any]] = []
        self.titles: list[str] = []  # of figures
        self.sections: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(f"{tag} {dict(attrs).get('type') or ''}".strip())
        if tag == "section":
            self.sections.append(dict(attrs)["id"] or "")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().split()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script application/json":
            self.figures.append(json.loads(data))
        elif inside not in ("script", "style"):
            self.text += data
        if inside == "strong":
            self.titles.append(data)


def page_of(*directories: Path, out: Path | None = None) -> Page:
    return Page(write_report(directories, out).read_text())


def test_a_page_shows_a_whole_run(tmp_path: Path) -> None:
    page = page_of(whole_run().write(tmp_path / "good"))
    assert page.sections == [
        *("learning-curves", "time", "health", "memory", "roofline", "samples", "configuration", "origin"),
        "left-out",
    ]
    assert page.titles[:3] == ["Reward", "KL to the reference", "Completion length"]
    assert {"Seconds of a step", "Roles at work", "Rollout workers", "Memory on the GPU"} <= set(page.titles)
    for text in ("completed", "30 of 30", "0 → 1", "0:02:10", "generate: engine overhead", "30 of 30", "abc123"):
        assert text in page.text, text
    assert "rollout pool: 1 -> 2 default worker(s): asked" in page.text
    assert "Other metrics: no step has a metric that is not shown above." in " ".join(page.text.split())
    assert all(figure["data"] for figure in page.figures) and len(page.figures) == len(page.titles)


def test_a_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    page = page_of(whole_run().write(tmp_path / "run"))
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attributes.get(name) or "#").startswith("#"), f"{tag} {name}={attributes[name]}"
        assert tag not in ("link", "iframe", "object", "embed", "base")
    css = (Path(write_report.__code__.co_filename).parent / "page.css").read_text()
    assert "url(" not in css and "@import" not in css


def test_nothing_that_a_model_says_becomes_part_of_the_page(tmp_path: Path) -> None:
    hostile = {"completion": HOSTILE, "prompt": HOSTILE, "ended": HOSTILE}
    said = {"messages": [{"role": HOSTILE, "text": HOSTILE, "calls": [HOSTILE]}], "tokens": [[HOSTILE, -1.0]]}
    files = whole_run(
        completions=[sample(5, **hostile), sample(10, **hostile, **said), sample(15, tokens=[[HOSTILE, -0.1]])],
        metrics=[step_record(s, **{f"rewards/{HOSTILE}/mean": s, "rewards/b/mean": s, HOSTILE: s}) for s in (1, 2, 3)],
        notes=[{"step": 1, "wall_s": 1.0, "note": HOSTILE}],
        overrides=("name=<script>alert(1)</script>", f"data.system_prompt={json.dumps(HOSTILE)}"),
    )
    harmless = page_of(whole_run().write(tmp_path / "harmless"))
    page = page_of(files.write(tmp_path / "<script>alert(2)<"))
    assert page.text.count(HOSTILE) >= 8
    scripts = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert scripts.count(None) == 2, "plotly and ours"
    assert len(scripts) - 2 == len(page.figures) == len(page.titles)
    assert {tag for tag, _ in page.tags} - {tag for tag, _ in harmless.tags} <= {"i", "span", "details", "summary"}


def test_in_a_figure_no_tag_can_end_its_script(tmp_path: Path) -> None:
    files = whole_run(metrics=[step_record(step, **{"time/</script><b>_s": 1.0}) for step in (1, 2, 3)])
    html = write_report([files.write(tmp_path / "run")]).read_text()
    page = Page(html)
    assert "</script><b>" in [trace.get("name") for figure in page.figures for trace in figure["data"]]
    assert html.count("</script>") == len(page.figures) + 2, "plotly's, ours, and one for each figure"


def test_half_of_a_character_is_shown_as_a_question_mark(tmp_path: Path) -> None:
    page = page_of(whole_run(completions=[sample(5, completion="a\ud800b")]).write(tmp_path / "run"))
    assert "a?b" in page.text


# ---- runs that did not end well, or are of another kind


def test_a_run_killed_in_the_middle_of_a_line_is_reported(tmp_path: Path) -> None:
    directory = whole_run(summary=None).write(tmp_path / "killed")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rew')
    page = page_of(directory)
    assert "no summary: running, or killed after step 30" in page.text
    assert "metrics.jsonl: line 31 is not a whole record with a step; it is left out" in page.text
    assert "Reward" in page.titles and "memory" not in page.sections
    for why in ("Memory: no step has recorded memory", "Origin: summary.json"):
        assert why in page.text


@pytest.mark.parametrize("broken", ["", "{", "[]", '"text"'])
def test_a_summary_that_cannot_be_read_is_left_out(tmp_path: Path, broken: str) -> None:
    directory = whole_run().write(tmp_path / "run")
    (directory / "summary.json").write_text(broken)
    page = page_of(directory)
    assert "summary.json" in page.text and "it is left out" in page.text and "Reward" in page.titles


def test_a_run_without_a_step_has_a_page_that_says_what_it_lacks(tmp_path: Path) -> None:
    directory = RunFiles().write(tmp_path / "young")
    for file in directory.glob("*.jsonl"):
        file.unlink()
    page = page_of(directory)
    assert page.sections == ["configuration", "left-out"] and page.figures == []
    assert "no step and no evaluation has been recorded" in page.text


def test_a_run_that_was_resumed_after_its_summary_is_not_called_ended(tmp_path: Path) -> None:
    summary = {"status": "interrupted", "steps": 12}
    page = page_of(whole_run(summary=summary).write(tmp_path / "run"))
    assert "resumed after step 12, and no newer summary: running, or killed" in page.text


def test_steps_that_are_null_are_left_out_of_curves(tmp_path: Path) -> None:
    metrics = [step_record(1), step_record(2) | {"reward": None, "reward_std": None}, step_record(3)]
    run = read_run(whole_run(metrics=metrics).write(tmp_path / "run"), "run")
    assert run.series("reward").x == [1, 3]
    reward = learning_curves([run]).charts[0].figure
    assert [list(trace.x) for trace in reward.data if trace.name == "run"] == [[1, 3]]


def test_rewards_have_a_band_and_their_parts_and_held_out_sources_charts_of_their_own(tmp_path: Path) -> None:
    parts = {"rewards/right/mean": 0.5, "rewards/short/mean": 0.25}
    metrics = [step_record(s, **{name: value * s for name, value in parts.items()}) for s in (1, 2, 3)]
    evaluations = [{"step": s, "eval/reward": 0.5, "eval/hard/reward": 0.1 * s} for s in (0, 3)]
    run = read_run(whole_run(metrics=metrics, evaluations=evaluations).write(tmp_path / "run"), "run")
    charts = {chart.title: chart.figure for chart in learning_curves([run]).charts}
    assert list(charts)[:4] == ["Reward", "Reward on hard, held out", "Reward: right", "Reward: short"]
    lower, upper = (list(trace.y) for trace in charts["Reward"].data if trace.name == "band")
    assert lower == pytest.approx([s / 30 - 0.1 for s in (1, 2, 3)]) and upper[0] == pytest.approx(1 / 30 + 0.1)
    shortest, longest = (list(trace.y) for trace in charts["Completion length"].data if trace.name == "band")
    assert (shortest, longest) == ([1.0] * 3, [64.0] * 3)


def test_an_environment_s_episodes_are_shown_as_conversations(tmp_path: Path) -> None:
    said = [
        {"role": "user", "text": "guess"},
        {"role": "assistant", "text": "", "calls": ['{"name": "look"}'], "reward": -0.25},
        {"role": "tool", "text": "nothing there"},
    ]
    completions = [sample(5, messages=said, ended="turns")]
    metrics = [step_record(s, **{"episodes/turns/mean": 2.0 + s, "episodes/turns/max": 9.0}) for s in (1, 2, 3)]
    page = page_of(whole_run(completions=completions, metrics=metrics).write(tmp_path / "run"))
    shown = " ".join(page.text[page.text.index("Step 5") :].split())
    assert shown.startswith(
        'Step 5 reward 1advantage -0.5ended turns userguess assistantreward -0.25{"name": "look"} toolnothing there'
    ), shown[:200]
    assert "Turns of an episode" in page.titles


def test_a_ppo_run_s_names_find_their_charts(tmp_path: Path) -> None:
    names = {"loss/policy_avg": 1.0, "loss/value_avg": 2.0, "lr": 3.0, "policy/entropy_avg": 4.0, "objective/kl": 5.0}
    metrics = [step_record(s, **{name: value * s for name, value in names.items()}) for s in (1, 2, 3)]
    for record in metrics:
        del record["loss"], record["learning_rate"]
    titles = page_of(RunFiles("ppo_tiny", metrics=metrics).write(tmp_path / "ppo")).titles
    wanted = [
        "KL to the reference, per completion",
        "Entropy of a token",
        "Loss",
        "Learning rate",
        "Loss of the critic",
    ]
    assert [title for title in titles if title in wanted] == sorted(wanted, key=titles.index) and set(wanted) <= {
        *titles
    }


def test_a_reward_model_s_training_has_its_own_headline(tmp_path: Path) -> None:
    from rlhf.reward_config import RewardTrainingConfig

    directory = tmp_path / "rm"
    directory.mkdir()
    (directory / "config.yaml").write_text(to_yaml(load_config(CONF / "reward_tiny.yaml", (), RewardTrainingConfig)))
    lines = [
        {"step": s, "wall_s": 1.0 * s, "accuracy": s / 10, "margin": 0.1 * s, "time/update_s": 1.0} for s in (1, 2)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(directory)
    assert page.titles[:2] == ["Accuracy on pairs", "Margin of chosen over rejected"]
    assert "center_coef" in page.text and "algorithm.name" not in page.text


# ---- several runs


def test_several_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = whole_run(overrides=("name=one", "algorithm.beta=0.5")).write(tmp_path / "one")
    other = whole_run(overrides=("name=other", "algorithm.group_size=4")).write(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert write_report([one, other]) == tmp_path / "report.html"
    page = Page((tmp_path / "report.html").read_text())
    reward = page.figures[0]["data"]
    assert [trace["name"] for trace in reward if trace["mode"] == "markers"] == ["one, held out", "other, held out"]
    assert len({trace["line"]["color"] for trace in reward if trace.get("name") in ("one", "other")}) == 4
    table = settings(read_runs([one, other])).tables[0]
    assert table.columns == ("key", "one", "other")
    assert table.rows == [("algorithm.group_size", "8", "4"), ("algorithm.beta", "0.5", "0.001")]


def test_labels_tell_runs_apart() -> None:
    assert unique_labels([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert unique_labels([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]
    assert unique_labels([Path("/x/a"), Path("/x/a"), Path("/x/b")]) == ["a (1)", "a (2)", "b"]


# ---- what is drawn


def test_smoothing_by_hand() -> None:
    # w = 1 - 2 / (3 + 1) = 1/2: m = 1/2, 5/4 over 1 - 1/2, 1 - 1/4
    assert moving_average([1.0, 2.0], 3) == [1.0, pytest.approx(5 / 3)]
    assert smoothed([1.0, 2.0], span=3) == pytest.approx([(1 + 4 / 3) / 2, (5 / 3 + 2) / 2])
    line = [float(x) for x in range(101)]
    assert smoothed(line)[50] == pytest.approx(50.0), "no lag"
    assert smoothed([5.0] * 40) == pytest.approx([5.0] * 40)
    assert smoothed([]) == []


def test_long_runs_are_thinned_with_both_ends_and_bars_are_means() -> None:
    kept = thinned(range(10_001), 101)
    assert (kept[0], kept[-1], len(kept), kept[1]) == (0, 10_000, 101, 100)
    assert thinned([7, 8], 2000) == [0, 1]
    groups = grouped(5, 2)
    assert groups == [range(0, 3), range(3, 5)]
    assert means([1.0, 2.0, 3.0, 10.0, 20.0], groups) == [2.0, 15.0]


def test_a_page_of_a_very_long_run_stays_small(tmp_path: Path) -> None:
    files = whole_run(metrics=[step_record(step) for step in range(1, 12_001)])
    page = page_of(files.write(tmp_path / "long"))
    assert max(len(trace.get("x", ())) for figure in page.figures for trace in figure["data"]) <= 2000
    bars = next(f["data"] for f, title in zip(page.figures, page.titles, strict=True) if title == "Seconds of a step")
    assert len(bars[0]["x"]) == 200 and "a bar is the mean of 60 steps" in page.text


def test_what_no_phase_took_is_drawn_as_such(tmp_path: Path) -> None:
    run = read_run(whole_run().write(tmp_path / "run"), "run")
    figure = phase_chart(run, several=False).figure
    by_name = {trace.name: list(trace.y) for trace in figure.data}
    assert by_name["generate"] == [2.0] * 30 and by_name["update"] == [1.0] * 30
    assert by_name[OTHER] == [11.0, *[1.0] * 29], "14 s and 4 s of wall time, of which phases took 3"


def test_a_role_is_idle_while_others_work(tmp_path: Path) -> None:
    slow_first = [step_record(1, **{"time/generate_s": 100.0}), *(step_record(s) for s in (2, 3))]
    run = read_run(whole_run(metrics=slow_first).write(tmp_path / "run"), "run")
    assert role_seconds(run) == {"rollout workers": (1.5, 3.0), "learner": (1.0, 3.0)}


def test_memory_is_shown_beside_what_was_predicted(tmp_path: Path) -> None:
    run = read_run(whole_run().write(tmp_path / "run"), "run")
    gpu, host = memory_chart([run], "gpu"), memory_chart([run], "host")
    assert gpu and host
    (held, predicted) = gpu.figure.data
    assert (held.x, held.y, predicted.x) == ((20.0,), ("learner",), (22.0,))
    assert [trace.x for trace in host.figure.data] == [(2.0, 3.0)]
    assert "predicted" in gpu.caption and "predicted" not in host.caption


def test_memory_of_each_step_has_a_chart_where_it_changes(tmp_path: Path) -> None:
    held = {"memory/learner/allocated_gib": 9.0, "memory/reward/host_gib": 1.0}
    metrics = [
        step_record(s, **{"memory/learner/gpu_gib": 10.0 + s, "memory/rollout/gpu_gib": 30.0, **held})
        for s in range(1, 6)
    ]
    run = read_run(whole_run(metrics=metrics, summary=None).write(tmp_path / "run"), "run")
    section = memory([run])
    assert [chart.title for chart in section.charts] == ["learner: memory on the GPU, by step"]
    (line,) = section.charts[0].figure.data
    assert list(line.y) == [11.0, 12.0, 13.0, 14.0, 15.0]


def test_shares_of_peaks_have_a_chart_each_and_bottlenecks_a_count(tmp_path: Path) -> None:
    metrics = [step_record(s, **{"perf/mfu_update": 0.4, "perf/hbm_decode": 0.2}) for s in (1, 2)]
    metrics[0]["bottleneck"] = "update: compute"
    section = roofline([read_run(whole_run(metrics=metrics).write(tmp_path / "run"), "run")])
    assert [chart.title for chart in section.charts] == [
        "Share of memory bandwidth, generating",
        "Share of the matrix rate, updating",
    ]
    assert section.tables[0].rows == [
        ("run", "update: compute", "1 of 2"),
        ("run", "generate: engine overhead", "1 of 2"),
    ]


@pytest.mark.parametrize(
    ("device", "bounds"), [("cpu", "0.001 is a warning, above 0.01"), ("gpu", "0.1 is a warning, above 0.5")]
)
def test_the_gate_s_bounds_are_those_of_the_run(tmp_path: Path, device: str, bounds: str) -> None:
    metrics = [step_record(1, **{"sampling/logprob_difference_mean": 1e-4, "sampling/logprob_difference_max": 1e-3})]
    summary = {"status": "completed", "steps": 1, "device": device}
    chart = gate_chart([read_run(whole_run(metrics=metrics, summary=summary).write(tmp_path / "run"), "run")])
    assert chart is not None and f"a mean above {bounds} it ends the run" in chart.caption


def test_only_the_last_notes_are_shown(tmp_path: Path) -> None:
    notes = [{"step": s, "wall_s": 3600.0 + s, "note": f"note {s}"} for s in range(250)]
    table = notes_table(read_run(whole_run(notes=notes).write(tmp_path / "run"), "run"), several=False)
    assert table is not None and len(table.rows) == 200 and "50 earlier ones are in notes.jsonl" in table.title
    assert table.rows[-1] == ("249", "1:04:09", "note 249")
    assert duration(None) == "-"


def test_a_metric_that_never_changes_is_named_instead_of_drawn(tmp_path: Path) -> None:
    section = learning_curves([read_run(whole_run().write(tmp_path / "run"), "run")])
    assert "The same in all steps: Learning rate 0.001." in section.intro
    assert "Learning rate" not in [chart.title for chart in section.charts]


def test_samples_are_of_the_first_the_middle_and_the_last_step() -> None:
    assert spread([5, 5, 10, 15, 20, 25]) == [5, 15, 25]
    assert spread([5, 10]) == [5, 10] and spread([]) == []


def test_improbable_tokens_stand_out() -> None:
    assert [Token("a", logprob).doubt for logprob in (0.0, -3.0, -6.0, -60.0)] == [0.0, 0.5, 1.0, 1.0]
    assert Token("\n", 0.0).shown == "⏎\n" and Token("", 0.0).shown == "∅"
    assert Token("a", -2.302585).probability == "0.1"


def test_only_what_differs_from_the_defaults_is_listed(tmp_path: Path) -> None:
    run = read_run(RunFiles(overrides=("algorithm.beta=0.25",)).write(tmp_path / "run"), "run")
    rows = {key: (value, default) for key, value, default in changed_keys(run)}
    assert rows["algorithm.beta"] == ("0.25", "0.0") and rows["model.path"] == ("models/tiny", "")
    assert "algorithm.gamma" not in rows and "algorithm.name" not in rows


# ---- the command


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rlhf", "report", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0  # type: ignore[return-value]


def test_the_command_says_where_the_report_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = whole_run().write(tmp_path / "run")
    assert run_command(monkeypatch, str(directory)) == 0
    assert capsys.readouterr().out.split() == [str(directory / "report.html")]
    out = tmp_path / "elsewhere.html"
    assert run_command(monkeypatch, str(directory), "--out", str(out)) == 0 and out.stat().st_size > 4e6


def test_the_report_opens_in_a_browser_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = whole_run().write(tmp_path / "run")
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(shown.append(address)))
    assert run_command(monkeypatch, str(directory)) == 0 and not shown
    assert run_command(monkeypatch, str(directory), "--open") == 2
    assert shown == [(directory / "report.html").as_uri()]
    assert "--open: there is no browser here; " in capsys.readouterr().err
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    assert run_command(monkeypatch, str(directory), "--open") == 0


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (
            lambda run: shutil.rmtree(run),
            "not a run's directory (no config.yaml); give one that rlhf train has written",
        ),
        (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml: not valid YAML: "),
        (lambda run: (run / "config.yaml").write_text("- a"), "config.yaml: must hold keys and values; restore it"),
    ],
)
def test_what_is_no_run_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_it: Callable[[Path], object],
    told: str,
) -> None:
    directory = whole_run().write(tmp_path / "run")
    break_it(directory)
    assert run_command(monkeypatch, str(directory)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {directory}") and told in line


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    directory = whole_run().write(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot be written .*; give a file in a directory of yours"):
        write_report([directory], tmp_path / "nowhere" / "report.html")


def test_a_report_that_cannot_be_made_does_not_spoil_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_report(tmp_path)
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"warning: no report: {tmp_path}: not a run's directory")
    assert said.err.endswith(f"try again: rlhf report {tmp_path}\n")


def test_a_run_loads_what_draws_only_for_its_report() -> None:
    code = "import sys, jobs.train; print([name for name in sys.modules if name.startswith(('plotly', 'jobs.report'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- in a browser

LOOK = """
addEventListener("load", async () => {
  await Promise.all([...document.querySelectorAll("figure.chart")].map(draw));
  const seen = document.documentElement.dataset;
  seen.plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.querySelector(".main-svg .trace")).length;
  seen.over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
});
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_draws_every_figure_and_scrolls_only_down(tmp_path: Path, width: int) -> None:
    directory = whole_run().write(tmp_path / "run")
    report = write_report([directory])
    report.write_text(report.read_text().replace("</body>", f"<script>{LOOK}</script></body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", report.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    page = Page(done.stdout)
    attributes = next(attributes for tag, attributes in page.tags if tag == "html")
    assert attributes["data-plots"] == str(len(page.titles)), done.stderr[-2000:]
    assert attributes["data-over"] == "0", "pixels that the page is too wide"
