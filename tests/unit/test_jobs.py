"""From the command to the exit code: what a job does around its loop. Actors are fake, so no Ray is started."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jobs.restarts
import jobs.train
import jobs.train_reward
from jobs.cli import main
from jobs.train_reward import pad_token_id
from rlhf.data.preferences import Pair
from rlhf.errors import (
    ClusterError,
    ConfigError,
    DataError,
    DeadlineError,
    GpuMemoryError,
    PlacementError,
    RewardError,
    RlhfError,
    RoleLostError,
)
from rlhf.roles import Roles
from rlhf.run_lock import RunLock, read_holder
from tests.fake_roles import Event, Judge, Model, Pool, Reference, lose

CONF = Path(__file__).resolve().parents[2] / "conf"


# ---- whole runs over fake actors


class Actors:
    """The actors of one attempt: ``ActorCluster`` as a job sees it."""

    device = "cpu"

    def __init__(self, config: Any, before: dict[Any, Callable[[], None]], told: list[Event]) -> None:
        self._config, self._told = config, told
        self._learner = Model("learner", told, -1.0, {"loss": 1.0})
        self._learner.before = before

    def __enter__(self) -> "Actors":
        self._learner.before.get("start", lambda: None)()
        self._told.append(("starts",))
        return self

    def __exit__(self, *_: object) -> None:
        self._told.append(("ends",))

    def roles(self) -> Any:
        critic = Model("critic", self._told, 0.25, {"critic/loss": 10.0}) if self._config.uses_critic else None
        pool = Pool(self._learner, self._told, logprobs=True)
        return Roles(self._learner, pool, Judge(self._told), Reference(self._told), critic)  # type: ignore[arg-type]

    def learner(self) -> Model:
        return self._learner

    def device_names(self) -> dict[str, str]:
        return {"learner": "cpu", "rollout": "cpu"}

    def memory_metrics(self) -> dict[str, float]:
        return {"memory/learner/host_gib": 1.0}

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        self._told.append(("is measured",))
        return {"learner": {"host": 1.5}}


@pytest.fixture
def started() -> list[Any]:
    """The configuration of each attempt."""
    return []


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> Any:
    """Runs a command in four steps; returns its exit code and what the actors were told.

    ``run(command, attempts)``: for each attempt, what happens in the learner before a step, and at the "start".
    """
    monkeypatch.setattr(jobs.train.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:6379"))
    for module in (jobs.train, jobs.train_reward):
        monkeypatch.setattr(module, "connect", lambda config: contextlib.nullcontext())

    def run(
        command: str, attempts: Sequence[dict[Any, Callable[[], None]]], *overrides: str, recipe: str = ""
    ) -> tuple[int, list[Event]]:
        told: list[Event] = []
        left = list(attempts)

        def start(config: Any, *_: Any, **__: Any) -> Actors:
            started.append(config)
            return Actors(config, left.pop(0), told)

        monkeypatch.setattr(jobs.train, "Cluster", start)
        monkeypatch.setattr(jobs.train_reward, "RewardTrainingCluster", start)
        fixed = [f"model.path={tiny_model_dir}", f"run_dir={tmp_path / 'run'}", "tracking.progress=false"]
        fixed += ["tracking.tensorboard=false", "placement.device=cpu", "data.eval_size=2", "checkpoint.every_steps=2"]
        if command == "train":
            recipe = recipe or "ppo_tiny"
            fixed += ["num_steps=4", "algorithm.prompts_per_step=2", "algorithm.num_minibatches=1"]
            fixed += ["data.task_args.num_rows=20", "rollout.logprobs=true", "eval_every_steps=3"]
        else:
            recipe = "reward_tiny"
            fixed += ["data.task_args.num_rows=8", "batch_pairs=2", "eval_every_steps=3"]
        monkeypatch.setattr(sys, "argv", ["rlhf", command, "-c", str(CONF / f"{recipe}.yaml"), *fixed, *overrides])
        with pytest.raises(SystemExit) as exit:
            main()
        assert not left, "as many attempts as expected"
        return exit.value.code or 0, told  # type: ignore[return-value]

    return run


def summary_in(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


COMMANDS = ["train", "train-reward"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_leaves_its_models_and_a_summary(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, told = run(command, [{}])
    assert code == 0
    data = {"train": "task:phrases: 20 prompts of 20 rows", "train-reward": "task:phrases: 8 preference pairs"}
    said = capsys.readouterr().out
    assert data[command] in said
    assert said.splitlines()[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert (tmp_path / "run" / "report.html").stat().st_size > 4e6
    exported = [("learner is exported", "model"), *([("critic is exported", "critic")] if command == "train" else [])]
    assert told[0] == ("starts",) and told[-len(exported) - 2 :] == [*exported, ("is measured",), ("ends",)]
    summary = summary_in(tmp_path)
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 3, 4]
    key = "reward" if command == "train" else "loss"
    assert summary["eval_before"][key] == evaluations[0][f"eval/{key}"]
    assert summary["eval_after"][key] == evaluations[2][f"eval/{key}"]
    assert (summary["status"], summary["steps"], summary["device"]) == ("completed", 4, "cpu")
    assert summary["peak_memory_gib"] == {"learner": {"host": 1.5}}
    assert summary["final_model"] == str(tmp_path / "run" / "model")
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    assert not (tmp_path / "run" / "run.lock").exists()
    assert {"start", "update", "evaluate", "checkpoint"} <= summary["phases"].keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_best_model_by_evaluation_is_kept(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    metric = {"train": "eval/again/reward", "train-reward": "eval/loss"}[command]
    extra = ["data.extra_eval.again=task:phrases"] if command == "train" else []
    code, told = run(command, [{}], f"checkpoint.keep_best={metric}", *extra)
    assert code == 0
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    best = max(evaluations, key=lambda row: (row[metric], -row["step"]))
    assert summary_in(tmp_path)["best"] == {"step": best["step"], "metric": metric, "value": best[metric]}
    assert ("learner is exported", ".best-new") in told
    assert (tmp_path / "run" / "best" / "tokenizer.json").is_file()
    assert f"best/, of step {best['step']}" in capsys.readouterr().out
    if command == "train":
        assert evaluations[0]["eval/reward"] == evaluations[0]["eval/again/reward"], "each source under its name"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a run waited before each of its restarts that waited."""
    waited: list[float] = []
    monkeypatch.setattr(jobs.restarts, "time", SimpleNamespace(sleep=waited.append))
    return waited


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_lost_an_actor_starts_all_again_from_its_last_checkpoint(
    run: Any, pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    held = []

    def look() -> None:
        held.append(read_holder(tmp_path / "run"))

    code, told = run(command, [{1: lose}, {0: look, 3: lose}, {2: look}], "checkpoint.max_restarts=2")
    assert code == 0
    assert held[0] is not None and held == [held[0]] * 2, "the run directory, without a gap"
    assert [event for event in told if event in (("starts",), ("ends",))] == [("starts",), ("ends",)] * 3
    learnt = [event[1] for event in told if event[0] == "learner learns"]
    assert learnt == [0, 0, 1, 2, 2, 3], "from the beginning, then after step 2"
    assert [event for event in told if event[0] == "learner is loaded"] == [("learner is loaded",)]
    shown = capsys.readouterr().out
    assert "restarting from the beginning (1 restart(s) left): learner[0] died" in shown
    assert "restarting from the last checkpoint (1 restart(s) left): learner[0] died" in shown, "of two: it got further"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "each step once, in the record that stays"
    assert summary_in(tmp_path)["status"] == "completed"
    assert pauses == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_in_a_directory_ends_before_it_reads_or_writes_anything(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    unfinished = tmp_path / "run" / "checkpoints" / ".partial-000002"
    with RunLock(tmp_path / "run"):
        unfinished.mkdir(parents=True)
        code, told = run(command, [], "model.path=nowhere")
        assert code == 2 and not told and unfinished.is_dir()
    assert re.fullmatch(r"error: run_dir=.*/run: another run is using it \(.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_gets_no_further_waits_longer_and_longer_and_fails(
    run: Any, pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, _ = run(command, [{1: lose}] * 8, "checkpoint.max_restarts=7")
    assert code == 1
    assert capsys.readouterr().err == "error: learner[0] died\n"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert pauses == [4, 8, 16, 32, 60, 60], "the first restart is at once"


def fail_with(error: RlhfError) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_deadline_may_be_too_short_for_the_first_step_but_not_for_a_later_one(run: Any) -> None:
    late = fail_with(DeadlineError("learner[0]: still busy"))
    assert run("train", [{0: late}])[0] == 1
    assert run("train", [{3: late}, {}])[0] == 0


def test_a_run_waits_for_nodes_only_when_it_has_lost_them(run: Any, started: list[Any], pauses: list[float]) -> None:
    gone = {"start": fail_with(PlacementError("no room"))}
    assert run("train", [gone])[0] == 1
    settings = "timeouts.start_s=500", "placement.timeout_s=20", "checkpoint.max_restarts=3"
    code, told = run("train", [{3: lose}, gone, gone, {}], *settings)
    assert code == 0
    assert [config.placement.timeout_s for config in started] == [120, 20, 500, 500, 500]
    assert [event[1] for event in told if event[0] == "learner learns"] == [0, 1, 2, 2, 3]
    assert pauses == [4, 8]


def test_a_gpu_that_is_too_small_gets_half_of_the_tokens_at_once(
    run: Any, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    full = {2: fail_with(GpuMemoryError("critic[0]: out of GPU memory"))}
    budgets = "learner.micro_batch_tokens=1000", "critic.micro_batch_tokens=600", "rollout.max_completion_tokens=16"
    code, told = run("train", [full, {}], *budgets, "data.max_prompt_tokens=100")
    assert code == 0
    used = [(config.learner.micro_batch_tokens, config.critic.micro_batch_tokens) for config in started]
    assert used == [(1000, 600), (500, 300)]
    assert [event[1] for event in told if event[0] == "learner learns"] == [0, 1, 2, 3]
    assert "from now on learner.micro_batch_tokens=500, critic.micro_batch_tokens=300" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "recipe"), [("train", "grpo_tiny"), ("train-reward", "")])
def test_a_run_without_a_critic_halves_the_learners_tokens_alone(
    run: Any, started: list[Any], capsys: pytest.CaptureFixture[str], command: str, recipe: str
) -> None:
    full = {2: fail_with(GpuMemoryError("learner[0]: out of GPU memory"))}
    assert run(command, [full, {}], "learner.micro_batch_tokens=1000", recipe=recipe)[0] == 0
    first, second = started
    assert second.learner == replace(first.learner, micro_batch_tokens=500)
    if recipe:
        assert second.critic == first.critic
    assert "from now on learner.micro_batch_tokens=500\n" in capsys.readouterr().out


def test_a_gpu_that_cannot_hold_the_longest_sequence_ends_the_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    full = {2: fail_with(GpuMemoryError("critic[0]: out of GPU memory"))}
    budgets = "critic.micro_batch_tokens=200", "rollout.max_completion_tokens=16", "data.max_prompt_tokens=100"
    assert run("train", [full], *budgets)[0] == 1
    assert capsys.readouterr().err == "error: critic[0]: out of GPU memory\n"


def test_a_run_keeps_its_device_when_the_cluster_loses_its_gpus(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["cpu", "gpu"])
    monkeypatch.setattr(jobs.restarts, "resolve_device", lambda config: next(found))
    assert run("train", [{1: lose}, {}], "placement.device=auto")[0] == 0
    assert [config.placement.device for config in started] == ["cpu", "cpu"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_interrupted_saves_and_goes_on_with_the_same_command(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, number: int, expected: int
) -> None:
    code, told = run(command, [{2: partial(interrupt, number)}])
    assert code == expected
    assert "stopped after step 3 of 4; the same command resumes from there" in capsys.readouterr().out
    assert "interrupted" in (tmp_path / "run" / "report.html").read_text().split('<p class="status">')[1][:20]
    summary = summary_in(tmp_path)
    assert (summary["status"], summary["steps"], summary["final_model"]) == ("interrupted", 3, None)
    assert summary["eval_before"] is not None and summary["eval_after"] is None
    assert not (tmp_path / "run" / "model").exists()
    code, told = run(command, [{}])
    assert code == 0
    assert [event[1] for event in told if event[0] == "learner learns"] == [3]
    assert summary_in(tmp_path)["eval_before"] == summary["eval_before"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_interrupt_or_a_loss_after_one_ends_the_run_at_once(run: Any, tmp_path: Path, command: str) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    def interrupted_and_lost() -> None:
        interrupt()
        lose()

    def terminated_while_ending() -> None:
        interrupt(signal.SIGTERM)
        lose()

    assert run(command, [{1: terminated_while_ending}])[0] == 143
    assert run(command, [{1: twice}])[0] == 130
    assert run(command, [{1: interrupted_and_lost}])[0] == 130
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_reward_model_s_warm_up_must_end_within_its_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("train-reward", [], "learner.optimizer.warmup_steps=5")
    assert code == 2
    said = "error: learner.optimizer.warmup_steps=5 exceeds the run's 4 optimiser steps; lower it\n"
    assert capsys.readouterr().err == said
    assert run("train-reward", [{}], "learner.optimizer.warmup_steps=4")[0] == 0


def test_a_token_that_ends_a_text_is_not_named_as_padding() -> None:
    tokenizer: Any = SimpleNamespace(pad_token_id=2)

    def pair(chosen: list[int], rejected: list[int]) -> Pair:
        return Pair(np.array(chosen, np.int32), np.array(rejected, np.int32))

    plain = pair([2, 5], [2, 6])
    assert pad_token_id(tokenizer, [plain]) == 2
    assert pad_token_id(tokenizer, [plain, pair([5, 2], [6])]) is None
    assert pad_token_id(tokenizer, [plain, pair([5], [6, 2])]) is None


def test_a_run_may_leave_its_model_unwritten(run: Any, tmp_path: Path) -> None:
    code, told = run("train", [{}], "checkpoint.save_final_model=false", recipe="grpo_tiny")
    assert code == 0 and not [event for event in told if event[0].endswith("is exported")]
    assert summary_in(tmp_path)["final_model"] is None


# ---- exit codes


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        ({"status": "completed"}, 0, ""),
        ({"status": "interrupted", "signal": signal.SIGINT}, 130, ""),
        ({"status": "interrupted", "signal": signal.SIGTERM}, 143, ""),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
        (ConfigError("a key"), 2, "error: a key\n"),
        (DataError("a line"), 2, "error: a line\n"),
        (RewardError("it raised"), 2, "error: it raised\n"),
        (RoleLostError("it died"), 1, "error: it died\n"),
        (ClusterError("no answer"), 1, "error: no answer\n"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_exit_code_says_how_a_run_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    outcome: Any,
    code: int,
    said: str,
) -> None:
    def act(settings: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    name = command.replace("-", "_")
    monkeypatch.setitem(sys.modules, f"jobs.{name}", SimpleNamespace(**{name: act}))
    recipe = "grpo_tiny" if command == "train" else "reward_tiny"
    monkeypatch.setattr(sys, "argv", ["rlhf", command, "-c", str(CONF / f"{recipe}.yaml")])
    with pytest.raises(SystemExit) as exit:
        main()
    assert (exit.value.code or 0, capsys.readouterr().err) == (code, said)


@pytest.mark.parametrize(
    ("command", "base"), [(["train"], "{here}/"), (["train", "--submitted"], ""), (["train-reward"], "{here}/")]
)
def test_what_is_relative_starts_where_the_command_is_given_but_for_a_job_that_has_its_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], base: str
) -> None:
    given: list[Any] = []
    name = command[0].replace("-", "_")
    act = SimpleNamespace(**{name: lambda settings: given.append(settings) or {"status": "completed"}})
    monkeypatch.setitem(sys.modules, f"jobs.{name}", act)
    recipe = CONF / ("grpo_tiny.yaml" if name == "train" else "reward_tiny.yaml")
    monkeypatch.setattr(sys, "argv", ["rlhf", *command, "-c", str(recipe), "run_dir=mine"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main()
    assert [settings.run_dir for settings in given] == [base.format(here=tmp_path) + "mine"]


@pytest.mark.parametrize("arguments", [["train"], ["trains"], ["train", "-c", "conf/none.yaml"], ["train", "--no"]])
def test_a_command_that_cannot_be_understood_ends_with_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2


def test_help_says_what_an_option_is_where_it_is_not_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""
    for command in ("plan", "submit", "scale", "doctor"):
        monkeypatch.setattr(sys, "argv", ["rlhf", command, "--help"])
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit):
            main()
        said += capsys.readouterr().out
    for default in (
        *("data.max_prompt_tokens", "rollout.max_completion_tokens", "this checkout", "only show them", "this machine"),
    ):
        assert f"[default: ({default})]" in said


def test_an_error_of_our_own_making_is_not_made_into_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(settings: Any) -> Any:
        raise AssertionError("an invariant")

    monkeypatch.setitem(sys.modules, "jobs.train", SimpleNamespace(train=act))
    monkeypatch.setattr(sys, "argv", ["rlhf", "train", "-c", str(CONF / "grpo_tiny.yaml")])
    with pytest.raises(AssertionError):
        main()
