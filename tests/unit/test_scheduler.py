"""The pool's state machine: hand-made histories, and random ones against its invariants."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.rollouts.scheduler import Assignment, Scheduler, State


def live_scheduler(*capacities: int, version: int = 0) -> Scheduler:
    scheduler = Scheduler(expected_completion_tokens=10)
    for capacity in capacities:
        scheduler.started(scheduler.spawn("default", capacity).id)
    scheduler.advance(version)
    for worker in list(scheduler.workers):
        scheduler.admit(worker, version)
    return scheduler


def join(scheduler: Scheduler) -> int:
    """One more live worker; its id."""
    worker = scheduler.spawn("default", 8).id
    scheduler.started(worker)
    scheduler.admit(worker, scheduler.version)
    return worker


def test_a_group_goes_whole_to_the_worker_with_least_to_do() -> None:
    scheduler = live_scheduler(100, 100)
    long, *_short = (scheduler.enqueue(prompt_id=0, prompt_tokens=n, num_samples=4) for n in (500, 10, 10, 10))
    assert scheduler.dispatch() == [
        Assignment(0, long, (0, 1, 2, 3)),
        *(Assignment(1, group, (0, 1, 2, 3)) for group in (1, 2, 3)),
    ]


def turn(scheduler: Scheduler, prompt_tokens: int, *, home: int = -1, cached_tokens: int = 0) -> int:
    return scheduler.enqueue_turn(prompt_id=0, prompt_tokens=prompt_tokens, home=home, cached_tokens=cached_tokens)


def test_episodes_that_have_begun_go_before_those_that_have_not_in_their_own_order() -> None:
    scheduler = live_scheduler(1)
    started = [scheduler.enqueue(prompt_id=i, prompt_tokens=1, num_samples=1) for i in range(2)]
    continuing = [turn(scheduler, 5), turn(scheduler, 5)]
    order = []
    while scheduler.queue:
        (assignment,) = scheduler.dispatch()
        order.append(assignment.group)
        scheduler.sample_done(assignment.group, 0, 10)
    assert order == [*continuing, *started]


def test_a_turn_goes_to_the_worker_that_has_its_cache_unless_another_is_quicker_all_the_same() -> None:
    scheduler = live_scheduler(100, 100)
    scheduler.enqueue(prompt_id=0, prompt_tokens=0, num_samples=4)  # worker 0 is expected to take 40
    scheduler.dispatch()
    at_home = turn(scheduler, 50, home=0, cached_tokens=45)  # done after 40 + 5 + 10 there, or 50 + 10 elsewhere
    (assignment,) = scheduler.dispatch()
    assert assignment == Assignment(0, at_home, (0,))
    away = turn(scheduler, 50, home=0, cached_tokens=45)  # 100 + 5 + 10, or 50 + 10
    (assignment,) = scheduler.dispatch()
    assert assignment == Assignment(1, away, (0,))


def test_a_turn_whose_home_is_gone_costs_its_whole_context() -> None:
    scheduler = live_scheduler(100, 100)
    scheduler.retire(0)
    gone = turn(scheduler, 50, home=0, cached_tokens=45)
    assert scheduler.dispatch() == [Assignment(1, gone, (0,))]


def test_what_nobody_wants_any_more_is_neither_queued_nor_held() -> None:
    scheduler = live_scheduler(1)
    held, queued = (scheduler.enqueue(prompt_id=0, prompt_tokens=3, num_samples=1) for _ in range(2))
    scheduler.dispatch()
    cancelled = scheduler.cancel(held)
    assert cancelled is not None and cancelled.holders == {0}
    (worker,) = scheduler.workers.values()
    assert (worker.groups, worker.samples, worker.prompt_tokens) == (set(), 0, 0)
    assert scheduler.cancel(queued) is not None and not scheduler.queue and not scheduler.groups
    assert scheduler.cancel(queued) is None, "it has ended"
    assert not scheduler.sample_done(held, 0, 10)


def test_work_is_spread_in_proportion_to_pace() -> None:
    scheduler = live_scheduler(1000, 1000)
    scheduler.measured(0, 30.0)
    scheduler.measured(1, 10.0)
    for _ in range(40):
        scheduler.enqueue(prompt_id=0, prompt_tokens=0, num_samples=4)
    counts = [a.worker for a in scheduler.dispatch()]
    assert counts.count(0) == 30


def test_a_group_costs_its_prompt_too_where_paces_differ() -> None:
    scheduler = live_scheduler(1000, 1000)
    scheduler.measured(0, 20.0)
    scheduler.measured(1, 10.0)
    for prompt_tokens, num_samples in ((30, 1), (0, 1), (90, 1), (0, 20)):  # a completion is expected to take 10
        scheduler.enqueue(prompt_id=0, prompt_tokens=prompt_tokens, num_samples=num_samples)
    # done after 40/20 or 40/10; (40 + 10)/20 or 10/10; (40 + 100)/20 or (10 + 100)/10; (140 + 200)/20 or (10 + 200)/10
    assert [a.worker for a in scheduler.dispatch()] == [0, 1, 0, 0]
    assert scheduler.dispatch() == [], "nothing is queued"


def test_a_worker_is_as_fast_as_its_kind_until_it_has_been_measured() -> None:
    scheduler = Scheduler(expected_completion_tokens=10)
    for kind in ("small", "big", "small", "big", "new"):
        scheduler.started(scheduler.spawn(kind, 1000).id)
    scheduler.advance(0)
    for worker in scheduler.workers:
        scheduler.admit(worker, 0)
    scheduler.measured(0, 10.0)
    scheduler.measured(1, 30.0)
    for _ in range(100):
        scheduler.enqueue(prompt_id=0, prompt_tokens=0, num_samples=1)
    counts = [a.worker for a in scheduler.dispatch()]
    assert [counts.count(worker) for worker in range(5)] == [10, 30, 10, 30, 20], "of a new kind: as fast as the mean"


def test_a_new_worker_is_as_fast_as_the_mean_of_its_kind() -> None:
    scheduler = live_scheduler(1000, 1000, 1000)
    scheduler.measured(0, 30.0)
    scheduler.measured(1, 10.0)
    for _ in range(3):
        scheduler.enqueue(prompt_id=0, prompt_tokens=0, num_samples=1)
    # done after 10/30, 10/10 or 10/20; 20/30, 10/10 or 10/20; 20/30, 10/10 or 20/20
    assert [a.worker for a in scheduler.dispatch()] == [0, 2, 0]


def test_a_worker_that_has_come_to_a_standstill_is_the_slowest() -> None:
    scheduler = live_scheduler(8, 8)
    scheduler.measured(0, 0.0)
    scheduler.measured(1, 1e-3)
    for _ in range(2):
        scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    assert [a.worker for a in scheduler.dispatch()] == [1, 1]


def test_paces_and_lengths_are_remembered() -> None:
    scheduler = live_scheduler(8)
    scheduler.measured(0, 30.0)
    scheduler.measured(0, 10.0)
    assert scheduler.workers[0].pace == pytest.approx(0.7 * 30 + 0.3 * 10)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=5, num_samples=3)
    scheduler.dispatch()
    assert scheduler.outstanding_tokens(scheduler.workers[0]) == 5 + 3 * 10
    scheduler.sample_done(group, 0, num_tokens=110)
    assert scheduler.outstanding_tokens(scheduler.workers[0]) == pytest.approx(5 + 2 * (0.98 * 10 + 0.02 * 110))


def test_a_full_worker_takes_no_more_and_an_empty_one_takes_anything() -> None:
    scheduler = live_scheduler(4)
    first, second = (scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=6) for _ in range(2))
    assert [a.group for a in scheduler.dispatch()] == [first]
    for sample in range(6):
        assert scheduler.sample_done(first, sample, num_tokens=5)
    assert [a.group for a in scheduler.dispatch()] == [second]


def test_a_full_worker_takes_no_more_however_fast_it_is() -> None:
    scheduler = live_scheduler(4, 100)
    scheduler.measured(0, 100.0)
    scheduler.measured(1, 1.0)
    for worker in (0, 1):
        scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=4)
        assert [a.worker for a in scheduler.dispatch()] == [worker]


def test_a_workers_load_counts_what_it_held_before_and_all_it_is_given_now() -> None:
    scheduler = live_scheduler(5, 100)
    sizes = {0: 2, 1: 2, 2: 1, 3: 2, 4: 2}
    for group, num_samples in sizes.items():
        assert group == scheduler.enqueue(prompt_id=0, prompt_tokens=100, num_samples=num_samples)
    scheduler.suspend(1)
    assert [a.group for a in scheduler.dispatch()] == [0, 1, 2], "five samples, and no more"
    scheduler.admit(1, 0)
    assert [(a.worker, a.group) for a in scheduler.dispatch()] == [(1, 3), (1, 4)]
    for worker in scheduler.workers.values():
        assert worker.samples == sum(sizes[group] for group in worker.groups)
        assert worker.prompt_tokens == 100 * len(worker.groups)
    scheduler.sample_done(2, 0, num_tokens=10)
    late = scheduler.enqueue(prompt_id=0, prompt_tokens=100, num_samples=1)
    assert [(a.worker, a.group) for a in scheduler.dispatch()] == [(0, late)], "the tie goes to the first"


def test_a_failed_workers_unfinished_samples_go_elsewhere_first() -> None:
    scheduler = live_scheduler(8, 8)
    held, other = (scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=4) for _ in range(2))
    scheduler.dispatch()
    waiting = [scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=4) for _ in range(3)]
    scheduler.sample_done(held, 2, num_tokens=5)
    scheduler.fail(0)
    assert list(scheduler.queue) == [held, *waiting]
    assert scheduler.outstanding_tokens(scheduler.workers[0]) == 0
    assert scheduler.dispatch() == [Assignment(1, held, (0, 1, 3))]
    assert not scheduler.sample_done(held, 2, num_tokens=5), "it came back before"
    scheduler.mark_dead(0)
    assert scheduler.workers[0].state is State.DEAD
    assert other in scheduler.workers[1].groups


def test_groups_come_back_in_their_order_and_the_most_suspect_is_named() -> None:
    scheduler = live_scheduler(8, 8)
    scheduler.suspend(1)
    first, second, third = (scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2) for _ in range(3))
    scheduler.dispatch()
    waiting = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    scheduler.groups[second].losses = 1
    assert scheduler.fail(0) is scheduler.groups[second]
    assert [scheduler.groups[group].losses for group in (first, second, third)] == [1, 2, 1]
    assert list(scheduler.queue) == [first, second, third, waiting]


def test_a_late_sample_may_end_a_group_that_is_queued_again() -> None:
    scheduler = live_scheduler(8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    scheduler.dispatch()
    scheduler.fail(0)
    assert scheduler.sample_done(group, 0, num_tokens=5)
    assert not scheduler.queue and not scheduler.groups
    assert scheduler.dispatch() == []


def test_a_group_that_outlives_its_workers_is_suspect() -> None:
    scheduler = live_scheduler(8)
    group = scheduler.groups[scheduler.enqueue(prompt_id=7, prompt_tokens=1, num_samples=2)]
    for losses in (1, 2):
        scheduler.dispatch()
        (holder,) = group.holders
        assert scheduler.fail(holder) is group and group.losses == losses
        join(scheduler)
    assert (group.prompt_id, group.num_samples) == (7, 2), "for the report"
    assert scheduler.fail(join(scheduler)) is None, "it held nothing"
    scheduler.dispatch()
    scheduler.sample_done(group.id, 0, num_tokens=3)
    assert group.losses == 0, "a sample came back"


def test_a_node_that_takes_its_workers_along_makes_nobody_suspect() -> None:
    scheduler = live_scheduler(*[8] * 8)
    group = scheduler.groups[scheduler.enqueue(prompt_id=7, prompt_tokens=1, num_samples=2)]
    for _ in range(8):
        scheduler.dispatch()
        (holder,) = group.holders
        scheduler.fail(holder)
    assert group.losses == 1


def test_no_worker_serves_an_old_version() -> None:
    assert Scheduler(expected_completion_tokens=10).version == -1, "nothing is published yet"
    scheduler = live_scheduler(8)
    with pytest.raises(AssertionError, match="old weight version"):
        scheduler.advance(1)
    scheduler.suspend(0)
    scheduler.advance(1)
    with pytest.raises(AssertionError, match="has version 0"):
        scheduler.admit(0, 0)
    scheduler.admit(0, 1)


def test_groups_stay_with_a_worker_over_a_publish() -> None:
    scheduler = live_scheduler(8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    scheduler.dispatch()
    scheduler.suspend(0)
    assert scheduler.dispatch() == []
    scheduler.advance(1)
    scheduler.admit(0, 1)
    assert scheduler.workers[0].groups == {group}


def test_draining_finishes_what_it_holds_and_takes_nothing() -> None:
    scheduler = live_scheduler(8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    scheduler.dispatch()
    scheduler.drain(0)
    scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    assert scheduler.dispatch() == [] and scheduler.emptied() == []
    scheduler.sample_done(group, 0, num_tokens=3)
    assert scheduler.emptied() == [0]
    assert scheduler.forget_dead() == [0]


def test_a_worker_without_work_or_without_weights_leaves_at_once() -> None:
    scheduler = live_scheduler(8, 8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    scheduler.dispatch()
    scheduler.suspend(0)
    for worker in (0, 1):
        scheduler.drain(worker)
        assert scheduler.workers[worker].state is State.DEAD
    assert list(scheduler.queue) == [group], "another takes what it held"
    assert scheduler.forget_dead() == [0, 1] and not scheduler.workers


def test_active_are_those_of_a_kind_that_serve_or_will() -> None:
    scheduler = live_scheduler(8, 8, 8, 8)
    scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    scheduler.dispatch()
    scheduler.drain(0)
    scheduler.suspend(1)
    scheduler.fail(2)
    scheduler.spawn("big", 8)
    scheduler.spawn("default", 8)
    assert [worker.id for worker in scheduler.active("default")] == [1, 3, 5]
    assert [worker.id for worker in scheduler.active("big")] == [4]
    assert [worker.id for worker in scheduler.serving()] == [0, 3]


def test_an_idle_worker_takes_over_from_a_much_slower_one_only() -> None:
    scheduler = live_scheduler(8, 8)
    scheduler.measured(0, 100.0)
    scheduler.measured(1, 25.0)
    fast = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    scheduler.workers[1].groups.add(fast)
    scheduler.groups[fast].holders.add(1)
    scheduler.queue.clear()
    assert scheduler.take_over() == [], "a quarter is not yet much slower"
    for _ in range(20):
        scheduler.measured(1, 5.0)
    assert scheduler.take_over() == [Assignment(0, fast, (0, 1))]
    assert scheduler.take_over() == [], "two are enough"
    assert scheduler.sample_done(fast, 0, num_tokens=3)
    assert not scheduler.sample_done(fast, 0, num_tokens=3), "the slower copy is not wanted"
    scheduler.sample_done(fast, 1, num_tokens=3)
    assert not scheduler.workers[0].groups and not scheduler.workers[1].groups


def test_of_idle_workers_only_one_that_is_much_faster_takes_over() -> None:
    scheduler = live_scheduler(8, 8, 8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    scheduler.dispatch()
    scheduler.measured(1, 20.0)
    scheduler.measured(2, 100.0)
    assert scheduler.take_over() == [], "nobody knows how fast its holder is"
    scheduler.measured(0, 5.0)
    assert scheduler.take_over() == [Assignment(2, group, (0, 1))], "four times as fast is not yet much faster"


def test_a_group_has_two_holders_at_most_and_a_third_when_one_of_them_is_gone() -> None:
    scheduler = live_scheduler(8, 8, 8)
    group = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2)
    assert scheduler.dispatch() == [Assignment(0, group, (0, 1))]
    for worker, pace in enumerate((1.0, 100.0, 100.0)):
        scheduler.measured(worker, pace)
    assert scheduler.take_over() == [Assignment(1, group, (0, 1))], "one of the two that are idle"
    assert scheduler.take_over() == []
    scheduler.fail(1)
    assert list(scheduler.queue) == [], "the first still has it"
    assert scheduler.take_over() == [Assignment(2, group, (0, 1))]


def test_an_idle_worker_takes_over_what_it_has_room_for_oldest_first() -> None:
    scheduler = live_scheduler(100, 4)
    scheduler.suspend(1)
    groups = [scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=2) for _ in range(3)]
    scheduler.dispatch()
    scheduler.admit(1, 0)
    scheduler.measured(0, 1.0)
    scheduler.measured(1, 100.0)
    queued = scheduler.enqueue(prompt_id=0, prompt_tokens=1, num_samples=1)
    assert scheduler.take_over() == [], "queued groups go first"
    assert scheduler.dispatch() == [Assignment(1, queued, (0,))]
    assert scheduler.take_over() == [], "it has work of its own"
    scheduler.sample_done(queued, 0, num_tokens=1)
    assert [(a.worker, a.group) for a in scheduler.take_over()] == [(1, groups[0]), (1, groups[1])]


class RandomHistory(RuleBasedStateMachine):
    """Events in any order that the pool could meet."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(expected_completion_tokens=5)
        self.given: dict[int, int] = {}  # group -> samples
        self.accepted: set[tuple[int, int]] = set()
        self.sent: list[Assignment] = []

    def workers(self, *states: State) -> list[int]:
        return [w.id for w in self.scheduler.in_state(*states)]

    @rule()
    @precondition(lambda self: len(self.scheduler.workers) < 6)
    def spawn(self) -> None:
        self.scheduler.spawn("default", 4)

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING))
    def started(self, data: st.DataObject) -> None:
        self.scheduler.started(data.draw(st.sampled_from(self.workers(State.STARTING))))

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.version >= 0 and self.workers(State.SYNCING))
    def catch_up(self, data: st.DataObject) -> None:
        self.scheduler.admit(data.draw(st.sampled_from(self.workers(State.SYNCING))), self.scheduler.version)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        for worker in self.workers(State.DRAINING):
            self.scheduler.retire(worker)
        for worker in self.workers(State.LIVE):
            self.scheduler.suspend(worker)
        self.scheduler.advance(self.scheduler.version + 1)
        for worker in self.workers(State.SYNCING):
            if data.draw(st.booleans()):
                self.scheduler.admit(worker, self.scheduler.version)
            else:
                self.scheduler.fail(worker)

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING, State.SYNCING, State.LIVE, State.DRAINING))
    def fail(self, data: st.DataObject) -> None:
        candidates = self.workers(State.STARTING, State.SYNCING, State.LIVE, State.DRAINING)
        self.scheduler.fail(data.draw(st.sampled_from(candidates)))

    @rule(data=st.data())
    @precondition(lambda self: self.workers(State.STARTING, State.SYNCING, State.LIVE))
    def drain(self, data: st.DataObject) -> None:
        self.scheduler.drain(data.draw(st.sampled_from(self.workers(State.STARTING, State.SYNCING, State.LIVE))))

    @rule()
    def clean_up(self) -> None:
        for worker in self.workers(State.QUARANTINED):
            self.scheduler.mark_dead(worker)
        self.scheduler.emptied()
        self.scheduler.forget_dead()

    @rule(samples=st.integers(1, 6))
    def enqueue(self, samples: int) -> None:
        self.given[self.scheduler.enqueue(prompt_id=0, prompt_tokens=3, num_samples=samples)] = samples

    @rule()
    def dispatch(self) -> None:
        self.sent += self.scheduler.dispatch()

    @rule(data=st.data(), pace=st.floats(0.01, 1000))
    @precondition(lambda self: self.workers(State.LIVE))
    def measure(self, data: st.DataObject, pace: float) -> None:
        self.scheduler.measured(data.draw(st.sampled_from(self.workers(State.LIVE))), pace)
        self.sent += self.scheduler.take_over()

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def come_back(self, data: st.DataObject) -> None:
        """Any sample that was ever sent, from whomever, late ones and second copies included."""
        sent = data.draw(st.sampled_from(self.sent))
        sample = data.draw(st.sampled_from(sent.samples))
        if self.scheduler.sample_done(sent.group, sample, num_tokens=4):
            assert (sent.group, sample) not in self.accepted, "a sample was accepted twice"
            self.accepted.add((sent.group, sample))

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        assert set(self.scheduler.queue) <= set(self.scheduler.groups), "queued, but over"
        for group in self.scheduler.groups.values():
            assert (group.id in self.scheduler.queue) != bool(group.holders), "queued or held, never both or neither"
            assert list(self.scheduler.queue).count(group.id) <= 1
            assert len(group.holders) <= 2
            assert group.missing
            for holder in group.holders:
                assert group.id in self.scheduler.workers[holder].groups

    @invariant()
    def work_adds_up(self) -> None:
        for worker in self.scheduler.workers.values():
            held = [self.scheduler.groups[i] for i in worker.groups]
            assert worker.samples == sum(len(group.missing) for group in held)
            assert worker.prompt_tokens == sum(group.prompt_tokens for group in held)

    @invariant()
    def nothing_is_lost(self) -> None:
        for group, samples in self.given.items():
            done = {sample for owner, sample in self.accepted if owner == group}
            missing = self.scheduler.groups[group].missing if group in self.scheduler.groups else set()
            assert done | missing == set(range(samples)) and not done & missing

    @invariant()
    def who_serves_is_up_to_date(self) -> None:
        for worker in self.scheduler.serving():
            assert worker.version == self.scheduler.version

    @invariant()
    def only_workers_that_may_come_back_to_them_hold_groups(self) -> None:
        for worker in self.scheduler.workers.values():
            assert not worker.groups or worker.state in (State.LIVE, State.DRAINING, State.SYNCING)


TestRandomHistories = RandomHistory.TestCase
TestRandomHistories.settings = settings(max_examples=200, stateful_step_count=50)
