"""A step's load as it is measured, and scaling decisions from it."""

import pytest

from actors.rollouts.autoscale import Autoscaler, LoadMeter, StepLoad
from rlhf.config import AutoscaleConfig
from tests.fake_ray import Clock

WAITING = StepLoad(step_s=10, wait_s=6, busy_worker_s=9, worker_s=10)
IDLE = StepLoad(step_s=10, wait_s=0.5, busy_worker_s=3, worker_s=10)
BALANCED = StepLoad(step_s=10, wait_s=1, busy_worker_s=8, worker_s=10)


def judge(loads: list[StepLoad], *, num_workers: int = 2, maximum: int = 4) -> list[int | None]:
    scaler = Autoscaler(AutoscaleConfig(min=1, max=maximum, patience_steps=3))
    decided = []
    for load in loads:
        decision = scaler.judge(load, num_workers=num_workers, settled=True)
        num_workers = decision.num_workers if decision else num_workers
        decided.append(decision and decision.num_workers)
    return decided


@pytest.mark.parametrize(
    ("on_policy", "busy_s", "worker_s"),
    [(False, 30, 45), (True, 10, 15)],  # on policy: without the ten seconds before the driver waited
)
def test_a_steps_load_is_what_happened_since_the_last_publish(
    monkeypatch: pytest.MonkeyPatch, on_policy: bool, busy_s: float, worker_s: float
) -> None:
    clock = Clock(monkeypatch)
    meter = LoadMeter(on_policy=on_policy)

    def look(elapsed_s: float, *, driver_waits: bool) -> None:
        """Two of three workers are busy."""
        clock.now_s += elapsed_s
        meter.looked(lambda seconds: (2 * seconds, 3 * seconds), driver_waits=driver_waits)

    for elapsed_s in (8, 2):
        look(elapsed_s, driver_waits=False)
    for elapsed_s in (1, 4):
        look(elapsed_s, driver_waits=True)
    for waited_s in (1.5, 2.5):
        meter.waited(waited_s)
    clock.now_s += 5
    assert meter.close() == StepLoad(step_s=20, wait_s=4, busy_worker_s=busy_s, worker_s=worker_s)
    look(3, driver_waits=True)
    assert meter.close() == StepLoad(step_s=3, wait_s=0, busy_worker_s=16, worker_s=24), "the five before it, too"


def test_grows_after_waiting_for_several_steps_in_a_row() -> None:
    assert judge([WAITING] * 6) == [None, None, 3, None, None, 4]


def test_shrinks_when_workers_idle() -> None:
    assert judge([IDLE] * 3) == [None, None, 1]
    assert judge([IDLE] * 3, num_workers=4) == [None, None, 3], "by one"


def test_does_not_swing() -> None:
    assert judge([WAITING, IDLE, WAITING, BALANCED, WAITING, WAITING]) == [None] * 6
    assert judge([WAITING, WAITING, IDLE, IDLE, IDLE]) == [None] * 4 + [1], "only steps that agree count"
    both = StepLoad(step_s=10, wait_s=6, busy_worker_s=2, worker_s=10)
    assert judge([both] * 5) == [None] * 5


def test_stays_within_its_bounds() -> None:
    assert judge([WAITING] * 3, num_workers=4) == [None] * 3
    assert judge([IDLE] * 3, num_workers=1) == [None] * 3


def test_waits_until_the_last_change_has_taken_effect() -> None:
    scaler = Autoscaler(AutoscaleConfig(max=4, patience_steps=1))
    assert scaler.judge(WAITING, num_workers=2, settled=False) is None
    decision = scaler.judge(WAITING, num_workers=2, settled=True)
    assert decision and decision.num_workers == 3
    assert "the learner waited for samples for more than 25%" in decision.reason
    assert "(now 60%)" in decision.reason
    decision = scaler.judge(IDLE, num_workers=2, settled=True)
    assert decision and "workers were idle for more than 50% of the time (now 70%)" in decision.reason


@pytest.mark.parametrize("patience", [1, 2])
def test_each_time_it_could_not_grow_it_waits_twice_as_long(patience: int) -> None:
    scaler = Autoscaler(AutoscaleConfig(max=9, patience_steps=patience))

    def steps_to_grow(num_workers: int) -> int:
        for step in range(1, 99):
            decision = scaler.judge(WAITING, num_workers=num_workers, settled=True)
            if decision:
                assert decision.num_workers == num_workers + 1 and f"in each of {step} steps" in decision.reason
                assert scaler.judge(WAITING, num_workers=num_workers + 1, settled=False) is None, "it is starting"
                return step
        raise AssertionError("never")

    assert [steps_to_grow(2) / patience for _ in range(4)] == [1, 2, 4, 8]
    assert steps_to_grow(3) == patience, "it has grown"
    assert steps_to_grow(3) == 2 * patience
    *_, last = (scaler.judge(IDLE, num_workers=3, settled=True) for _ in range(patience))
    assert last is not None, "shrinking needs no more"
    assert steps_to_grow(2) == 4 * patience, "nor does it help growing"


def test_at_a_threshold_the_pool_is_left_alone() -> None:
    assert judge([StepLoad(step_s=8, wait_s=2, busy_worker_s=9, worker_s=10)] * 3) == [None] * 3
    assert judge([StepLoad(step_s=8, wait_s=0, busy_worker_s=5, worker_s=10)] * 3) == [None] * 3


def test_a_pool_without_load_is_left_alone() -> None:
    assert judge([StepLoad(0, 0, 0, 0)] * 4) == [None] * 4
