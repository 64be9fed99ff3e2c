"""What `rlhf scale` asks of a run, and how long it waits. Ray is fake."""

import time
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.control import NAMESPACE, control_name
from jobs.scale import scale
from rlhf.errors import ClusterError, ConfigError, DeadlineError, PlacementError, RlhfError
from tests.fake_ray import IN_FLIGHT, Clock, FakeActor, FakeRay


def worker(number: int, kind: str, state: str) -> dict[str, Any]:
    return {"worker": number, "kind": kind, "state": state, "node": f"10.0.0.{number}", "version": 3, "samples": 40}


class FakeRun:
    """A run's control actor, on a cluster that a command joins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch)
        self.control: FakeActor = FakeRay(monkeypatch, self.clock).actor(look=([], {"default": 1}))
        self.left = 0
        self.later: list[list[dict[str, Any]]] = []  # states of the pool, each as of the next look
        monkeypatch.setattr(ray, "init", lambda **_: None)
        monkeypatch.setattr(ray, "shutdown", self._leave)
        named = {(control_name("mine"), NAMESPACE): self.control}
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: named[name, namespace])
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _leave(self) -> None:
        self.left += 1

    def _sleep(self, seconds: float) -> None:
        self.clock.now_s += seconds
        assert self.clock.now_s < 9000, "it waits for ever"
        if self.later:
            self.shows(self.later.pop(0))

    def shows(self, workers: list[dict[str, Any]]) -> None:
        self.control.answers["look"] = (workers, {"default": 2, "small": 1})

    def scale(self, num_workers: int | None, *, kind: str = "default", timeout_s: float = 600.0) -> None:
        scale("mine", kind=kind, num_workers=num_workers, address="auto", timeout_s=timeout_s)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(monkeypatch)


SMALL = worker(9, "small", "live")
LIVE = [worker(0, "default", "live"), worker(1, "default", "live"), SMALL]
STARTING = [LIVE[0], worker(1, "default", "starting"), SMALL]


@pytest.mark.parametrize(
    "before",
    [
        [STARTING],  # one is still to come
        [[*LIVE, worker(2, "default", "live")]],  # one is still to go
        [STARTING, [LIVE[0], SMALL], STARTING],
    ],
)
def test_it_waits_until_exactly_so_many_of_the_kind_serve(
    run: FakeRun, capsys: pytest.CaptureFixture[str], before: list[list[dict[str, Any]]]
) -> None:
    run.shows(before[0])
    run.later = [*before[1:], LIVE]
    run.scale(2)
    assert run.control.given("scale") == [("default", 2)]
    assert len(run.control.given("look")) == len(before) + 2, "until they serve, and once for the table"
    shown = capsys.readouterr().out
    assert "mine: wants 2 default, 1 small" in shown and "10.0.0.9" in shown and "starting" not in shown
    assert run.left == 1


def test_it_gives_up_at_its_deadline_and_says_how_many_serve(run: FakeRun) -> None:
    run.shows(STARTING)
    with pytest.raises(DeadlineError, match=r"^run mine: 1 of 2 default worker\(s\) serve after 7 s .*--timeout-s$"):
        run.scale(2, timeout_s=7)
    assert 1007 < run.clock.now_s <= 1008
    assert run.left == 1


def test_it_waits_no_longer_when_the_run_has_given_them_up(run: FakeRun) -> None:
    run.control.answers["look"] = (STARTING, {"default": 1, "small": 1})
    with pytest.raises(PlacementError, match=r"^run mine: it now wants 1 default worker\(s\), not 2; what it prints"):
        run.scale(2)
    assert run.clock.now_s == 1000 and run.left == 1


def test_it_need_not_wait_and_need_not_change_anything(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.shows(STARTING)
    run.scale(2, timeout_s=0)
    assert run.control.given("scale") == [("default", 2)] and run.clock.now_s == 1000
    run.scale(None)
    assert len(run.control.given("scale")) == 1
    run.scale(0, timeout_s=0)
    assert run.control.given("scale")[1:] == [("default", 0)]
    assert capsys.readouterr().out.count("starting") == 3


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (ConfigError("--kind=big: this run has default"), ConfigError, "--kind=big: this run has default"),
        (ConfigError("--rollout-workers=9: room for 2"), ConfigError, "--rollout-workers=9: room for 2"),
        (RayActorError(), ClusterError, "the run has ended, or .* try again$"),
        (IN_FLIGHT, DeadlineError, "the run did not answer within 30 s"),
        (ValueError("odd"), ValueError, "the traceback"),
    ],
)
def test_what_the_run_answers_is_what_the_user_reads(
    run: FakeRun, answer: Any, error: type[Exception], said: str
) -> None:
    run.control.answers["scale"] = answer
    with pytest.raises(error, match=said) as caught:
        run.scale(1)
    assert isinstance(caught.value, RlhfError) == (error is not ValueError)
    assert run.left == 1, "whatever happens, it leaves the cluster"


def test_no_cluster_is_one_line(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("nobody\nis there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ClusterError, match=r"^--address=auto: .* \(nobody is there\); give the address that the run prints$"
    ):
        run.scale(1)
    assert run.left == 0
