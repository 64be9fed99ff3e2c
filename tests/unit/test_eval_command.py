"""`rlhf eval` over fake actors: which model, configuration and data it takes, and what it shows and writes."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import jobs.evaluate
from jobs.cli import main
from jobs.evaluate import for_sampling
from jobs.trained import find_model
from rlhf.batch import Rollout
from rlhf.errors import ConfigError
from rlhf.planning.topology import plan_sampling
from rlhf.recipes import load_config
from rlhf.rewards.total import Scores
from tests.fake_roles import Event, Model, Pool
from tests.fakes import Done

CONF = Path(__file__).resolve().parents[2] / "conf"
RECIPE = str(CONF / "grpo_tiny.yaml")


class Judge:
    """Gives 1 to the first sample of a prompt, and to the second of the first prompt."""

    def score(self, rollouts: Sequence[Rollout]) -> Done[Scores]:
        right = [float(r.sample_index == 0 or r.prompt.id + r.sample_index == 1) for r in rollouts]
        return Done(Scores({"right": right}, {"right": 1.0}))


Run = Callable[..., int]


@pytest.fixture
def started() -> list[Any]:
    """The configurations of the clusters that were started."""
    return []


@pytest.fixture
def run(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> Run:
    """Runs the command on sources of three prompts; returns its exit code."""

    class Sampling:
        def __init__(self, config: Any) -> None:
            started.append(config)

        def __enter__(self) -> "Sampling":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def sampler(self) -> Any:
            told: list[Event] = []
            return Pool(Model("none", told, 0.0, {}), told, logprobs=False), Judge()

    monkeypatch.setattr(jobs.evaluate, "connect", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(jobs.evaluate, "SamplingCluster", Sampling)

    def run(model: str | Path, *arguments: str) -> int:
        fixed = ["data.eval_size=3", "data.eval_samples=2", "data.eval_pass_reward=1"]
        monkeypatch.setattr(sys, "argv", ["rlhf", "eval", str(model), *arguments, *fixed])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0  # type: ignore[return-value]

    return run


def test_figures_of_every_source_are_shown_and_written(
    run: Run, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    data = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{i} + 1", "source": "easy" if i else "hard"} for i in range(3)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures, completions = tmp_path / "figures.json", tmp_path / "completions.jsonl"
    sources = [f"data.eval={data}", f"data.extra_eval.again={data}"]
    written = ["--json", str(figures), "--completions", str(completions), "--by", "source"]
    assert run(tiny_model_dir, "-c", RECIPE, *sources, *written) == 0

    found = json.loads(figures.read_text())
    assert found["model"] == str(tiny_model_dir) and list(found["data"]) == ["eval", "again"]
    of_eval = found["data"]["eval"]
    assert (of_eval["source"], of_eval["num_prompts"]) == (str(data), 3)
    metrics = of_eval["metrics"]  # of the prompts 1, 1/2 and 1/2
    assert (metrics["reward"], metrics["pass@1"], metrics["pass@2"]) == pytest.approx((2 / 3, 2 / 3, 1))
    assert metrics["reward/ci95"] == pytest.approx(1.959964 * (1 / 12) ** 0.5 / 3**0.5)
    assert {name: part["metrics"]["reward"] for name, part in of_eval["by"].items()} == {"hard": 1.0, "easy": 0.5}
    shown = capsys.readouterr().out
    assert "0.6667 ± 0.3267" in shown and "source=easy" in shown

    rows = [json.loads(line) for line in completions.read_text().splitlines()]
    assert [(row["data"], row["prompt_id"], row["sample"]) for row in rows[:3]] == [
        *(("eval", 0, 0), ("eval", 0, 1), ("eval", 1, 0))
    ]
    assert len(rows) == 12 and rows[3]["prompt"].endswith("1 + 1")
    assert [row["rewards/right"] for row in rows[:6]] == [row["reward"] for row in rows[:6]] == [1, 1, 1, 0, 1, 0]


def test_a_run_is_evaluated_by_its_own_recipe_and_its_final_model(
    run: Run, tiny_model_dir: Path, tmp_path: Path, started: list[Any]
) -> None:
    (tmp_path / "config.yaml").write_text(f"extends: {RECIPE}\nname: mine\nseed: 5\n")
    (tmp_path / "model").symlink_to(tiny_model_dir)
    assert run(tmp_path) == 0
    (config,) = started
    assert (config.model.path, config.seed, config.name) == (str(tmp_path / "model"), 5, "mine-eval")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "not a run's directory, whose recipe could be used; give one with -c"),
        (["-c", RECIPE, "data.eval=null"], "data.eval: no value given, so there is nothing to evaluate on; set it"),
        (["-c", RECIPE, "--by", "level"], "--by level: data.eval=task:phrases has no such column"),
        (["-c", RECIPE, "--json", "nowhere/x.json"], "--json nowhere/x.json: no such directory: nowhere"),
        (
            ["-c", RECIPE, "reward.functions=[{path: exact_match}]", "data.extra_eval.b=task:phrases"],
            'data.eval=task:phrases: has no column "answer"',
        ),
        (["-c", RECIPE, "data.extra_eval.b=x.jsonl"], "data.extra_eval.b="),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    run: Run,
    tiny_model_dir: Path,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(tiny_model_dir, *arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("error: ") and len(shown.splitlines()) == 1
    assert not started


def test_a_directory_without_a_model_is_answered_with_what_it_has(tmp_path: Path) -> None:
    assert find_model("org/some-model") == "org/some-model"
    with pytest.raises(ConfigError, match="neither a model's directory"):
        find_model(str(tmp_path))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="the run has left no model/") as caught:
        find_model(str(tmp_path))
    assert "best" not in str(caught.value)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").touch()
    with pytest.raises(ConfigError, match=f"or take {tmp_path / 'best'}"):
        find_model(str(tmp_path))


def test_only_what_samples_and_scores_is_placed_each_on_its_own_gpu() -> None:
    overrides = ["placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=4", "reward.num_workers=3"]
    config = for_sampling(load_config(RECIPE, overrides))
    topology = plan_sampling(config, "gpu")
    assert {role: len(slots) for role, slots in topology.slots.items()} == {"rollout": 2, "reward": 3}
    assert topology.totals() == {"GPU": 2.0, "CPU": 2 + 3}
