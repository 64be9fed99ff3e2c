"""The pool's state machine: hand-made histories, and random ones against its invariants."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.rollouts.scheduler import Assignment, Fleet, State


def live_fleet(*capacities: int, version: int = 0) -> Fleet:
    fleet = Fleet(expected_completion_tokens=10)
    for capacity in capacities:
        fleet.started(fleet.spawn("default", capacity).id)
    fleet.advance(version)
    for worker in list(fleet.workers):
        fleet.admit(worker, version)
    return fleet


def join(fleet: Fleet) -> int:
    """One more live worker; its id."""
    worker = fleet.spawn("default", 8).id
    fleet.started(worker)
    fleet.admit(worker, fleet.version)
    return worker


def test_a_group_goes_whole_to_the_worker_with_least_to_do() -> None:
    fleet = live_fleet(100, 100)
    long, *_short = (fleet.enqueue(prompt_id=0, prompt_tokens=n, num_samples=4) for n in (500, 10, 10, 10))
    assert fleet.dispatch() == [
        Assignment(0, long, (0, 1, 2, 3)),
        *(Assignment(1, task, (0, 1, 2, 3)) for task in (1, 2, 3)),
    ]


def test_work_is_spread_in_proportion_to_pace() -> None:
    fleet = live_fleet(1000, 1000)
    fleet.measured(0, 30.0)
    fleet.measured(1, 10.0)
    for _ in range(40):
        fleet.enqueue(prompt_id=0, prompt_tokens=0, num_samples=4)
    counts = [a.worker for a in fleet.dispatch()]
    assert counts.count(0) == 30


def test_a_full_worker_takes_no_more_and_an_empty_one_takes_anything() -> None:
    fleet = live_fleet(4)
    first, second = (fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=6) for _ in range(2))
    assert [a.task for a in fleet.dispatch()] == [first]
    for sample in range(6):
        assert fleet.sample_done(first, sample, num_tokens=5)
    assert [a.task for a in fleet.dispatch()] == [second]


def test_a_failed_workers_unfinished_samples_go_elsewhere_first() -> None:
    fleet = live_fleet(8, 8)
    held, other = (fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=4) for _ in range(2))
    fleet.dispatch()
    waiting = [fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=4) for _ in range(3)]
    fleet.sample_done(held, 2, num_tokens=5)
    fleet.fail(0)
    assert list(fleet.queue) == [held, *waiting]
    assert fleet.dispatch() == [Assignment(1, held, (0, 1, 3))]
    assert not fleet.sample_done(held, 2, num_tokens=5), "it came back before"
    fleet.bury(0)
    assert fleet.workers[0].state is State.DEAD
    assert other in fleet.workers[1].tasks


def test_a_late_sample_may_end_a_task_that_is_queued_again() -> None:
    fleet = live_fleet(8)
    task = fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    fleet.dispatch()
    fleet.fail(0)
    assert fleet.sample_done(task, 0, num_tokens=5)
    assert not fleet.queue and not fleet.tasks
    assert fleet.dispatch() == []


def test_a_task_that_outlives_its_workers_is_suspect() -> None:
    fleet = live_fleet(8)
    task = fleet.tasks[fleet.enqueue(prompt_id=7, prompt_tokens=1, num_samples=2)]
    for losses in (1, 2):
        fleet.dispatch()
        (holder,) = task.holders
        assert fleet.fail(holder) is task and task.losses == losses
        join(fleet)
    assert fleet.fail(join(fleet)) is None, "it held nothing"
    fleet.dispatch()
    fleet.sample_done(task.id, 0, num_tokens=3)
    assert task.losses == 0, "a sample came back"


def test_a_node_that_takes_its_workers_along_makes_nobody_suspect() -> None:
    fleet = live_fleet(*[8] * 8)
    task = fleet.tasks[fleet.enqueue(prompt_id=7, prompt_tokens=1, num_samples=2)]
    for _ in range(8):
        fleet.dispatch()
        (holder,) = task.holders
        fleet.fail(holder)
    assert task.losses == 1


def test_no_worker_serves_an_old_version() -> None:
    fleet = live_fleet(8)
    with pytest.raises(AssertionError, match="old weight version"):
        fleet.advance(1)
    fleet.suspend(0)
    fleet.advance(1)
    with pytest.raises(AssertionError, match="has version 0"):
        fleet.admit(0, 0)
    fleet.admit(0, 1)


def test_tasks_stay_with_a_worker_over_a_publish() -> None:
    fleet = live_fleet(8)
    task = fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    fleet.dispatch()
    fleet.suspend(0)
    assert fleet.dispatch() == []
    fleet.advance(1)
    fleet.admit(0, 1)
    assert fleet.workers[0].tasks == {task}


def test_draining_finishes_what_it_holds_and_takes_nothing() -> None:
    fleet = live_fleet(8)
    task = fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    fleet.dispatch()
    fleet.drain(0)
    fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    assert fleet.dispatch() == [] and fleet.emptied() == []
    fleet.sample_done(task, 0, num_tokens=3)
    assert fleet.emptied() == [0]
    assert fleet.forget_dead() == [0]


def test_an_idle_worker_takes_over_from_a_much_slower_one_only() -> None:
    fleet = live_fleet(8, 8)
    fleet.measured(0, 100.0)
    fleet.measured(1, 30.0)
    fast = fleet.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    fleet.workers[1].tasks.add(fast)
    fleet.tasks[fast].holders.add(1)
    fleet.queue.clear()
    assert fleet.take_over() == [], "30 is not much slower than 100"
    for _ in range(20):
        fleet.measured(1, 5.0)
    assert fleet.take_over() == [Assignment(0, fast, (0, 1))]
    assert fleet.take_over() == [], "two are enough"
    assert fleet.sample_done(fast, 0, num_tokens=3)
    assert not fleet.sample_done(fast, 0, num_tokens=3), "the slower copy is not wanted"
    fleet.sample_done(fast, 1, num_tokens=3)
    assert not fleet.workers[0].tasks and not fleet.workers[1].tasks


class RandomHistory(RuleBasedStateMachine):
    """Events in any order that the pool could meet."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(expected_completion_tokens=5)
        self.given: dict[int, int] = {}  # task -> samples
        self.accepted: set[tuple[int, int]] = set()
        self.sent: list[Assignment] = []

    def workers(self, *states: State) -> list[int]:
        return [w.id for w in self.fleet.in_state(*states)]

    @rule()
    @precondition(lambda self: len(self.fleet.workers) < 6)
    def spawn(self) -> None:
        self.fleet.spawn("default", 4)

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING))
    def started(self, data: st.DataObject) -> None:
        self.fleet.started(data.draw(st.sampled_from(self.workers(State.STARTING))))

    @rule(data=st.data())
    @precondition(lambda self: self.fleet.version >= 0 and self.workers(State.SYNCING))
    def catch_up(self, data: st.DataObject) -> None:
        self.fleet.admit(data.draw(st.sampled_from(self.workers(State.SYNCING))), self.fleet.version)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        for worker in self.workers(State.DRAINING):
            self.fleet.retire(worker)
        for worker in self.workers(State.LIVE):
            self.fleet.suspend(worker)
        self.fleet.advance(self.fleet.version + 1)
        for worker in self.workers(State.SYNCING):
            if data.draw(st.booleans()):
                self.fleet.admit(worker, self.fleet.version)
            else:
                self.fleet.fail(worker)

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING, State.SYNCING, State.LIVE, State.DRAINING))
    def fail(self, data: st.DataObject) -> None:
        candidates = self.workers(State.STARTING, State.SYNCING, State.LIVE, State.DRAINING)
        self.fleet.fail(data.draw(st.sampled_from(candidates)))

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING, State.SYNCING, State.LIVE))
    def drain(self, data: st.DataObject) -> None:
        self.fleet.drain(data.draw(st.sampled_from(self.workers(State.STARTING, State.SYNCING, State.LIVE))))

    @rule()
    def clean_up(self) -> None:
        for worker in self.workers(State.QUARANTINED):
            self.fleet.bury(worker)
        self.fleet.emptied()
        self.fleet.forget_dead()

    @rule(samples=st.integers(1, 6))
    def enqueue(self, samples: int) -> None:
        self.given[self.fleet.enqueue(prompt_id=0, prompt_tokens=3, num_samples=samples)] = samples

    @rule()
    def dispatch(self) -> None:
        self.sent += self.fleet.dispatch()

    @rule(data=st.data(), pace=st.floats(0.01, 1000))
    @precondition(lambda self: self.workers(State.LIVE))
    def measure(self, data: st.DataObject, pace: float) -> None:
        self.fleet.measured(data.draw(st.sampled_from(self.workers(State.LIVE))), pace)
        self.sent += self.fleet.take_over()

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def come_back(self, data: st.DataObject) -> None:
        """Any sample that was ever sent, from whomever, late ones and second copies included."""
        sent = data.draw(st.sampled_from(self.sent))
        sample = data.draw(st.sampled_from(sent.samples))
        if self.fleet.sample_done(sent.task, sample, num_tokens=4):
            assert (sent.task, sample) not in self.accepted, "a sample was accepted twice"
            self.accepted.add((sent.task, sample))

    @invariant()
    def every_task_is_in_one_place(self) -> None:
        assert set(self.fleet.queue) <= set(self.fleet.tasks), "queued, but over"
        for task in self.fleet.tasks.values():
            assert (task.id in self.fleet.queue) != bool(task.holders), "queued or held, never both or neither"
            assert list(self.fleet.queue).count(task.id) <= 1
            assert len(task.holders) <= 2
            assert task.missing
            for holder in task.holders:
                assert task.id in self.fleet.workers[holder].tasks

    @invariant()
    def nothing_is_lost(self) -> None:
        for task, samples in self.given.items():
            done = {sample for owner, sample in self.accepted if owner == task}
            missing = self.fleet.tasks[task].missing if task in self.fleet.tasks else set()
            assert done | missing == set(range(samples)) and not done & missing

    @invariant()
    def who_serves_is_up_to_date(self) -> None:
        for worker in self.fleet.serving():
            assert worker.version == self.fleet.version

    @invariant()
    def only_workers_that_may_come_back_to_them_hold_tasks(self) -> None:
        for worker in self.fleet.workers.values():
            assert not worker.tasks or worker.state in (State.LIVE, State.DRAINING, State.SYNCING)


TestRandomHistories = RandomHistory.TestCase
TestRandomHistories.settings = settings(max_examples=200, stateful_step_count=50)
