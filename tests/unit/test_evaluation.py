"""What an evaluation samples, its figures by hand, and which model is kept for them."""

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batch import Prompt, Rollout
from rlhf.errors import ConfigError
from rlhf.evaluation import BestModel, Evaluation, evaluate, mean_reward, pass_at_k, pass_rates
from rlhf.recipes import load_config
from rlhf.rewards.total import Scores
from tests.fakes import Done

ROOT = Path(__file__).resolve().parents[2]
NAN = math.nan


def completion(prompt: Prompt, sample: int) -> Rollout:
    return Rollout(prompt, sample, [prompt.id, sample], np.zeros(2, np.int32), "stop")


class Pool:
    """Groups finish one at a time, the last first."""

    def submit(self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool) -> list[int]:
        self.asked = (group_size, greedy)
        self._groups = [[completion(prompt, k) for k in range(group_size)] for prompt in prompts]
        return list(range(len(prompts)))

    def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
        return {max(ids): self._groups[max(ids)]}


class Judge:
    def score(self, rollouts: Sequence[Rollout]) -> Done[Scores]:
        given = {"right": [float(r.sample_index < r.prompt.id) for r in rollouts], "short": [-1.0] * len(rollouts)}
        return Done(Scores(given, {"right": 1.0, "short": 0.0}))


def evaluation() -> Evaluation:
    """Of prompts 0, 1 and 2, with as many right of two completions as their number."""
    prompts = [Prompt(i, [7], "", columns={"source": "ab"[i % 2]}) for i in range(3)]
    pool: Any = Pool()
    done = evaluate(prompts, pool, Judge(), num_samples=2)  # type: ignore[arg-type]
    assert pool.asked == (2, True), "all samples of a prompt in one group, at the temperature of evaluations"
    return done


def test_samples_come_in_the_order_of_prompts_and_samples_with_their_scores() -> None:
    done = evaluation()
    assert [tuple(r.token_ids) for r in done.rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert done.scores.rewards.tolist() == [0, 0, 1, 0, 1, 1]


def test_an_evaluation_s_figures_by_hand() -> None:
    metrics = evaluation().metrics(pass_reward=1.0)
    # per prompt 0, 1/2, 1: their deviation is 1/2
    assert metrics["reward"] == pytest.approx(0.5)
    assert metrics["reward/ci95"] == pytest.approx(1.959964 * 0.5 / math.sqrt(3))
    assert metrics["pass@1"] == pytest.approx(0.5) and metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["rewards/right/mean"] == 0.5 and metrics["rewards/short/mean"] == -1
    assert not any(name.startswith("pass@") for name in evaluation().metrics(pass_reward=None))
    assert "frac_reward_zero_std" not in metrics, "which says what a step learns from, and this is none"


def test_a_breakdown_by_a_column_has_whole_prompts() -> None:
    parts = evaluation().by("source")
    assert {value: part.scores.rewards.tolist() for value, part in parts.items()} == {"a": [0, 0, 1, 1], "b": [1, 0]}
    assert parts["a"].metrics(1.0)["pass@2"] == 0.5
    assert "reward/ci95" not in parts["b"].metrics(1.0)


def test_each_prompt_counts_once_however_many_of_its_samples_have_a_reward() -> None:
    rewards = torch.tensor([[1.0, NAN, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN]], dtype=torch.float64)
    assert mean_reward(rewards)["reward"] == 0.5
    assert mean_reward(rewards[:1]) == {"reward": 1.0}, "one prompt says nothing about others"
    assert pass_rates(rewards, 1.0) == {"pass@1": 0.5, "pass@2": 0.0, "pass@3": 0.0}
    assert math.isnan(mean_reward(rewards[2:])["reward"]) and pass_rates(rewards[2:], 1.0) == {}


def test_pass_at_k_is_the_share_of_draws_without_replacement_that_hold_a_pass() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7), "of ten pairs, three hold neither"
    assert (pass_at_k(5, 0, 3), pass_at_k(5, 4, 2)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.eval_samples=4", "rollout.eval_temperature=0"], "data.eval_samples=4 would be equal completions at"),
        (["data.eval=null", "checkpoint.keep_best=eval/reward"], "checkpoint.keep_best=eval/reward needs evaluations"),
        (["data.extra_eval={a/b: 'task:phrases'}"], "data.extra_eval: 'a/b' names metrics eval/NAME/...; use a name"),
    ],
)
def test_what_an_evaluation_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "conf" / "grpo_tiny.yaml", overrides)
    assert str(caught.value).startswith(message)


def best_in(directory: Path, metric: str = "eval/reward") -> BestModel:
    """Saves which save it was."""
    saves: list[Path] = []

    def save(path: Path) -> None:
        saves.append(path)
        path.mkdir()
        (path / "model").write_text(str(len(saves)))

    return BestModel(metric, directory / "best", save)


def test_the_model_with_the_highest_value_is_kept_and_the_directory_says_its_step(tmp_path: Path) -> None:
    best = best_in(tmp_path)
    for step, value in enumerate([NAN, 0.25, 0.5, 0.5, 0.375]):
        best.judge(step, {"reward": value})
    assert best.best == {"step": 2, "metric": "eval/reward", "value": 0.5}
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == best.best
    assert (tmp_path / "best" / "model").read_text() == "2", "neither the first, nor an equal one"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_resumed_run_keeps_the_best_unless_another_metric_judges(tmp_path: Path) -> None:
    best_in(tmp_path).judge(3, {"reward": 0.5})
    resumed = best_in(tmp_path)
    resumed.resume()
    resumed.judge(4, {"reward": 0.25})
    assert resumed.best["step"] == 3
    other = best_in(tmp_path, "eval/pass@1")
    other.resume()
    other.judge(5, {"pass@1": 0.125})
    assert other.best["step"] == 5
    none = best_in(tmp_path / "none")
    none.resume()
    assert none.best == {}
    fresh = best_in(tmp_path)
    fresh.judge(0, {"reward": 0.1})
    assert fresh.best["step"] == 0, "a run that starts over"


def test_a_model_that_is_not_written_whole_does_not_replace_the_best(tmp_path: Path) -> None:
    best = best_in(tmp_path)
    best.judge(1, {"reward": 0.5})

    def full(path: Path) -> None:
        path.mkdir()
        raise OSError("no space left")

    best.save = full
    with pytest.raises(OSError):
        best.judge(2, {"reward": 0.75})
    resumed = best_in(tmp_path)
    resumed.resume()
    assert resumed.best["step"] == 1 and (tmp_path / "best" / "model").read_text() == "1"
    resumed.judge(3, {"reward": 0.75})
    assert resumed.best["step"] == 3


def test_a_metric_that_no_evaluation_has_is_answered_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        best_in(tmp_path, "reward").judge(0, {"reward": 0.5, "math/reward": 0.1})
    assert str(caught.value) == (
        "checkpoint.keep_best=reward: the evaluation has no such metric; use one of eval/reward, eval/math/reward"
    )
