"""When a run is tried again, and from where; who has asked a run to stop is not surprised by a restart."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import jobs.restarts
from actors.connect import connect
from jobs.restarts import keep_trying
from jobs.runs import ends_on_sigterm, stops_at_step_end
from rlhf.checkpoint import CheckpointStore
from rlhf.config import Config
from rlhf.errors import ActorError, RoleLostError
from rlhf.recipes import load_config
from tests.fakes import save

CONF = Path(__file__).resolve().parents[2] / "conf"


def fake_loop(run_dir: Path, grace_s: float = 60.0, stop_requested: int = 0) -> Any:
    """In step 13, with a checkpoint of step 10."""
    store = CheckpointStore(run_dir, keep=1)
    save(store, 10)
    settings = SimpleNamespace(checkpoint=SimpleNamespace(grace_s=grace_s))
    tracker = SimpleNamespace(stopping=lambda message: False)
    return SimpleNamespace(stop_requested=stop_requested, step=12, checkpoints=store, config=settings, tracker=tracker)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


INT, TERM = signal.SIGINT, signal.SIGTERM
LOST = "the last checkpoint is {}; 2 finished step(s) since are lost\n"


@pytest.mark.parametrize(
    ("requests", "then", "code"), [([INT], INT, INT), ([TERM, TERM, TERM], INT, INT), ([INT, TERM, TERM], INT, INT)]
)
def test_the_first_signal_is_a_request_and_a_second_ctrl_c_stops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], requests: list[int], then: int, code: int
) -> None:
    loop, reached = fake_loop(tmp_path), list[str]()
    before = [signal.getsignal(number) for number in (INT, TERM, signal.SIGALRM)]
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm(), stops_at_step_end(loop):
        send(*requests)
        reached.append("taken as a request")
        assert loop.stop_requested == requests[-1]
        send(then)
        reached.append("ignored")
    assert (stopped.value.code, reached) == (128 + code, ["taken as a request"])
    said = capfd.readouterr().err
    assert said.endswith("stopped in step 13, unsaved: " + LOST.format(loop.checkpoints.path(10)))
    assert [signal.getsignal(number) for number in (INT, TERM, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize(("terminal", "how"), [(True, "Ctrl-C again"), (False, "another SIGINT")])
def test_a_job_s_log_speaks_of_signals_and_a_terminal_of_keys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, how: str
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    with stops_at_step_end(fake_loop(tmp_path)):
        send(INT)
    assert f"stopping at the end of this step, with a checkpoint; {how} stops at once" in capfd.readouterr().err


def test_after_the_grace_the_run_ends_and_says_what_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loop = fake_loop(tmp_path, grace_s=0.02)
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm():
        try:
            with stops_at_step_end(loop):
                send(TERM)
                signal.pause()  # the step does not end
                raise AssertionError("another signal")
        finally:
            send(TERM, TERM)  # while the actors are ended
    assert stopped.value.code == 143
    said = capfd.readouterr().err
    assert "at the end of this step, with a checkpoint; within checkpoint.grace_s=0.02 s" in said
    assert said.endswith("stopped in step 13, unsaved: " + LOST.format(loop.checkpoints.path(10)))


def test_the_grace_ends_with_the_loop(tmp_path: Path) -> None:
    loop = fake_loop(tmp_path)
    with ends_on_sigterm():
        with stops_at_step_end(loop):
            send(TERM)
            assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        send(TERM)  # the summary is still to be written
    assert loop.stop_requested == TERM


def test_sigterm_outside_of_the_loop_ends_the_run_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    before, ended = signal.getsignal(TERM), list[str]()
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm():
        try:
            send(TERM)
            raise AssertionError("it goes on")
        finally:
            send(TERM, TERM)
            ended.append("all actors")
    assert (stopped.value.code, ended) == (143, ["all actors"])
    assert "the same command resumes from the last checkpoint" in capfd.readouterr().err
    assert signal.getsignal(TERM) is before


def as_ray_raises_it(*signals: int) -> None:
    """A signal whose handler raises in one of Ray's calls: Ray raises another SystemExit, of code 1."""
    try:
        send(*signals)
    except SystemExit:
        raise SystemExit(1) from None


def test_a_signal_that_interrupts_a_call_of_ray_s_ends_the_run_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm():
        as_ray_raises_it(TERM)
    assert stopped.value.code == 143
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm(), stops_at_step_end(fake_loop(tmp_path)):
        as_ray_raises_it(INT, INT)
    assert stopped.value.code == 130
    with pytest.raises(SystemExit) as stopped, ends_on_sigterm():
        raise SystemExit(1)
    assert stopped.value.code == 1, "not a signal's"


@pytest.mark.parametrize(("requested", "expected"), [(0, RoleLostError), (INT, SystemExit), (TERM, SystemExit)])
def test_a_loss_after_a_request_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], requested: int, expected: type[BaseException]
) -> None:
    loop = fake_loop(tmp_path, stop_requested=requested)
    with pytest.raises(expected) as ended, ends_on_sigterm(), stops_at_step_end(loop):
        raise RoleLostError("learner[0] died")
    said = capfd.readouterr().err
    if requested:
        assert ended.value.args == (128 + requested,)
        assert said == "stopped in step 13, unsaved (learner[0] died): " + LOST.format(loop.checkpoints.path(10))
    else:
        assert not said


def test_the_processes_of_a_local_cluster_do_not_get_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[bool] = []

    def init(**options: Any) -> None:
        code = "import signal; print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        blocked.append(done.stdout == "True\n")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of this process may have one
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with connect(config()):
        assert TERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with connect(config("ray.address=auto")):
        pass  # somebody else's
    assert blocked == [True, False]


def config(*overrides: str) -> Config:
    return load_config(CONF / "grpo_tiny.yaml", ["placement.device=cpu", *overrides])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.restarts, "time", SimpleNamespace(sleep=lambda seconds: None))


class FakeTracker(Any):  # as much of a Tracker as keep_trying knows
    closed = 0
    remembered = ""

    def close(self) -> None:
        self.closed += 1

    def remember(self, message: str) -> None:
        self.remembered = message


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_so_many_restarts_and_no_more(tmp_path: Path, max_restarts: int) -> None:
    trackers: list[FakeTracker] = []

    def new_tracker() -> FakeTracker:
        trackers.append(FakeTracker())
        return trackers[-1]

    def attempt(config: Config, tracker: Any) -> dict[str, Any]:
        assert tracker is trackers[-1] and not tracker.closed
        raise RoleLostError("learner[0] died")

    with pytest.raises(RoleLostError):
        keep_trying(
            config(f"checkpoint.max_restarts={max_restarts}"), CheckpointStore(tmp_path, keep=1), new_tracker, attempt
        )
    assert [tracker.closed for tracker in trackers] == [1] * (max_restarts + 1)
    left = [f"restarting from the beginning ({max_restarts - n} restart(s) left): " for n in range(1, max_restarts + 1)]
    assert [tracker.remembered for tracker in trackers] == ["", *(f"{told}learner[0] died" for told in left)]


def test_a_restart_begins_where_the_attempt_before_got_to_whatever_the_first_one_resumed(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, keep=9), 7)  # of an earlier run, which this one does not resume
    store = CheckpointStore(tmp_path, keep=9)
    resumed = []

    def attempt(config: Config, tracker: Any) -> dict[str, Any]:
        resumed.append(config.checkpoint.resume)
        if len(resumed) == 2:
            save(store, 3)
        if len(resumed) < 4:
            raise RoleLostError("learner[0] died")
        return {"status": "completed"}

    assert keep_trying(config("checkpoint.resume=none", "checkpoint.max_restarts=3"), store, FakeTracker, attempt)
    assert resumed == ["none", "none", str(store.path(3)), str(store.path(3))]


def test_only_the_loss_of_an_actor_is_tried_again(tmp_path: Path) -> None:
    tried: list[int] = []

    def attempt(config: Config, tracker: Any) -> dict[str, Any]:
        tried.append(1)
        raise ActorError("learner[0]: update raised ValueError")

    with pytest.raises(ActorError):
        keep_trying(config(), CheckpointStore(tmp_path, keep=1), FakeTracker, attempt)
    assert tried == [1]
