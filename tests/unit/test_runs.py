"""When a run is tried again, and from where; who has asked a run to stop is not surprised by a restart."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.runs import keep_trying, stops_at_step_end
from rlhf.checkpoint import CheckpointStore
from rlhf.config import Config
from rlhf.errors import ActorError, RoleLostError
from rlhf.recipes import load_config
from tests.fakes import save

CONF = Path(__file__).resolve().parents[2] / "conf"


def test_the_first_signal_is_a_request_and_the_second_stops() -> None:
    loop: Any = SimpleNamespace(stop_requested=False)
    before, signals = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(KeyboardInterrupt), stops_at_step_end(loop):
        os.kill(os.getpid(), signal.SIGTERM)
        signals.append("taken as a request")
        os.kill(os.getpid(), signal.SIGTERM)
        signals.append("ignored")
    assert loop.stop_requested and signals == ["taken as a request"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("stop_requested", "expected"), [(False, RoleLostError), (True, KeyboardInterrupt)])
def test_a_loss_after_a_request_ends_the_run(stop_requested: bool, expected: type[BaseException]) -> None:
    loop: Any = SimpleNamespace(stop_requested=stop_requested)
    with pytest.raises(expected), stops_at_step_end(loop):
        raise RoleLostError("learner[0] died")


def config(*overrides: str) -> Config:
    return load_config(CONF / "grpo_tiny.yaml", overrides)


class FakeTracker(Any):  # as much of a Tracker as keep_trying knows
    closed = 0

    def close(self) -> None:
        self.closed += 1


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
