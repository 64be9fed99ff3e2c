"""Scaling decisions from measured loads."""

from actors.rollouts.autoscale import Autoscaler, Decision, StepLoad
from rlhf.config import AutoscaleConfig

WAITING = StepLoad(step_s=10, wait_s=6, busy_worker_s=9, worker_s=10)
IDLE = StepLoad(step_s=10, wait_s=0.5, busy_worker_s=3, worker_s=10)
BALANCED = StepLoad(step_s=10, wait_s=1, busy_worker_s=8, worker_s=10)


def judge(loads: list[StepLoad], *, num_workers: int = 2, maximum: int = 4) -> list[int | None]:
    scaler = Autoscaler(AutoscaleConfig(min=1, max=maximum, patience_steps=3))
    decisions: list[Decision | None] = [scaler.judge(x, num_workers=num_workers, settled=True) for x in loads]
    return [d and d.num_workers for d in decisions]


def test_grows_after_waiting_for_several_steps_in_a_row() -> None:
    assert judge([WAITING] * 4) == [None, None, 3, None]


def test_shrinks_when_workers_idle() -> None:
    assert judge([IDLE] * 3) == [None, None, 1]


def test_does_not_swing() -> None:
    assert judge([WAITING, IDLE, WAITING, BALANCED, WAITING, WAITING]) == [None] * 6
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


def test_a_pool_without_load_is_left_alone() -> None:
    assert judge([StepLoad(0, 0, 0, 0)] * 4) == [None] * 4
