"""Worker processes kept, heard and replaced: with fake actors, and a clock that the tests move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from actors.rollouts.engine import Request
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.scheduler import State
from actors.rollouts.supervisor import Accepted, Supervisor
from rlhf.errors import ActorError, DeadlineError
from rlhf.planning.topology import plan_topology
from rlhf.recipes import load_config
from tests.clock import Clock
from tests.fake_ray import IN_FLIGHT, FakeActor, FakeFactory, FakeRay, completion

RECIPE = Path(__file__).resolve().parents[2] / "conf" / "grpo_tiny.yaml"
SILENCE_S = 300.0  # timeouts.worker_silence_s


class Crew:
    """A supervisor of fake workers, and the pool's part in its life."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.clock = Clock(monkeypatch)
        self.factory = FakeFactory(FakeRay(monkeypatch, self.clock))
        self.notes: list[str] = []
        self.supervisor = Supervisor(load_config(RECIPE, overrides), self.factory, self.notes.append)  # type: ignore[arg-type]
        self.scheduler = self.supervisor.scheduler
        self.scheduler.advance(0)

    @property
    def actors(self) -> list[FakeActor]:
        return self.factory.actors

    def hear(self) -> list[Accepted]:
        """Everything that has ended, as the pool's thread hears it."""
        ended = [(ref, worker_id) for ref, worker_id in self.supervisor.refs().items() if ref.ended]
        return [accepted for ref, worker_id in ended for accepted in self.supervisor.hear(worker_id, ref)]

    def reconcile(self, asleep: bool = False) -> None:
        self.supervisor.reconcile(asleep=asleep, may_start=not asleep)

    def come_up(self) -> None:
        """Missing workers are started, and those that are up serve."""
        self.reconcile()
        self.hear()
        for worker in self.scheduler.in_state(State.SYNCING):
            self.supervisor.admit(worker.id)

    def sample_something(self) -> None:
        """Every worker that runs proves that it can."""
        for worker_id in self.running():
            self.actors[worker_id].report(completion("999.0"))
        self.hear()

    def die(self, worker_id: int) -> None:
        self.actors[worker_id].end("collect", ActorDiedError())
        self.hear()

    def give(self, num_samples: int = 2, prompt_id: int = 0) -> int:
        """A new group, at the worker that the scheduler chose; its id."""
        group = self.scheduler.enqueue(prompt_id=prompt_id, prompt_tokens=1, num_samples=num_samples)
        assert [assignment.group for assignment in self.scheduler.dispatch()] == [group]
        return group

    def running(self) -> list[int]:
        """Workers with a process, by id."""
        return [worker_id for worker_id in range(len(self.actors)) if worker_id not in self.factory.ended]

    def seconds_to_next_launch(self) -> float:
        before, started = len(self.actors), self.clock.now_s
        while len(self.actors) == before:
            self.reconcile()
            self.clock.now_s += 0.5
        return self.clock.now_s - 0.5 - started


MakeCrew = Callable[..., Crew]


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> MakeCrew:
    """``crew('rollout.num_workers=2')``."""
    return lambda *overrides: Crew(monkeypatch, *overrides)


# Starting


def test_starts_that_fail_are_spaced_out_and_a_worker_that_sampled_is_replaced_at_once(crew: MakeCrew) -> None:
    pool = crew("rollout.max_failures=10")
    pool.factory.answers["start"] = ValueError("no such model")
    pool.supervisor.launch()
    gaps = []
    for _ in range(7):
        pool.hear()
        gaps.append(pool.seconds_to_next_launch())
    assert gaps == [2, 4, 8, 16, 32, 60, 60]
    pool.actors[-1].calls[0].answer = "10.0.0.1"  # this one comes up
    pool.come_up()
    pool.sample_something()
    pool.die(pool.running()[0])
    assert pool.seconds_to_next_launch() == 0
    pool.hear()
    assert pool.seconds_to_next_launch() == 2, "counted anew"


def test_the_run_ends_when_too_many_starts_in_a_row_have_failed(crew: MakeCrew) -> None:
    pool = crew("rollout.max_failures=3")
    started = pool.factory.answers["start"]

    def start_in_vain() -> None:
        pool.factory.answers["start"] = ValueError("no such model")
        pool.seconds_to_next_launch()
        pool.hear()

    def die_before_sampling() -> None:
        pool.factory.answers["start"] = started
        pool.seconds_to_next_launch()
        pool.come_up()
        pool.die(pool.running()[0])

    start_in_vain()
    die_before_sampling()
    pool.factory.answers["start"] = started
    pool.seconds_to_next_launch()
    pool.come_up()
    pool.sample_something()
    pool.die(pool.running()[0])
    die_before_sampling()
    start_in_vain()
    with pytest.raises(ActorError) as caught:
        start_in_vain()
    assert str(caught.value).startswith(
        "rollout pool: of default workers 3 in a row failed before they sampled anything (rollout.max_failures); the "
        "last: rollout[5] on ?: starting raised ValueError: no such model"
    )
    assert pool.supervisor.num_replaced == len(pool.notes) == 6
    assert pool.notes[0] == (
        "rollout pool: replacing a worker: rollout[0] on ?: starting raised ValueError: no such model"
    )
    assert pool.factory.ended == [0, 1, 2, 3, 4, 5]


def test_what_fails_again_and_again_beside_a_healthy_worker_is_given_up(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2", "rollout.max_failures=3")
    pool.come_up()
    pool.sample_something()
    started, pool.factory.answers["start"] = pool.factory.answers["start"], ValueError("a broken GPU")
    pool.die(1)
    gaps = []
    for _ in range(3):
        gaps.append(pool.seconds_to_next_launch())
        pool.scheduler.suspend(0)  # a publish to the healthy one changes nothing
        pool.supervisor.admit(0)
        pool.hear()
    assert gaps == [0, 2, 4]
    assert pool.notes[-1] == (
        "rollout pool: 2 -> 1 default worker(s): 3 in a row failed before they sampled anything (rollout.max_failures)"
    )
    pool.clock.now_s += 200
    pool.reconcile()
    assert pool.running() == [0]
    pool.supervisor.targets["default"] = 2  # asked for again
    assert pool.seconds_to_next_launch() == 0
    pool.hear()
    assert pool.supervisor.targets == {"default": 2}, "counted anew"
    pool.factory.answers["start"] = started
    pool.seconds_to_next_launch()
    pool.hear()
    assert pool.running() == [0, 6]


def test_failures_of_workers_that_were_there_together_count_once(crew: MakeCrew) -> None:
    pool = crew("rollout.max_failures=2")
    pool.come_up()
    pool.factory.answers["start"] = ValueError("the node left")
    pool.supervisor.targets["default"] = 4
    pool.reconcile()
    pool.hear()
    assert len(pool.notes) == 3 and pool.supervisor.targets == {"default": 4}
    assert pool.seconds_to_next_launch() == 2
    pool.hear()
    assert len(pool.actors) == 1 + 3 + 3 and pool.supervisor.targets["default"] < 4


def test_one_kind_that_fails_does_not_hold_up_another(crew: MakeCrew) -> None:
    pool = crew("rollout.max_failures=2", "rollout.extra_kinds={big: {num_workers: 1}}")
    pool.come_up()
    pool.sample_something()
    started, pool.factory.answers["start"] = pool.factory.answers["start"], ValueError("no such GPU")
    pool.die(1)
    pool.reconcile()
    pool.hear()
    pool.factory.answers["start"] = started
    pool.die(0)
    pool.come_up()
    assert pool.factory.kinds == ["default", "big", "big", "default"], "big waits before it is tried again"
    pool.sample_something()
    pool.factory.answers["start"] = ValueError("no such GPU")
    assert pool.seconds_to_next_launch() == 2
    pool.hear()
    assert pool.supervisor.targets == {"default": 1, "big": 0}, "that the other kind serves changes nothing"


def test_what_keeps_the_first_workers_from_starting_is_told(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.factory.answers["start"] = ValueError("no such model")
    pool.supervisor.launch()
    with pytest.raises(ActorError, match=r"^rollout\[0\] on \?: starting raised ValueError: no such model"):
        pool.supervisor.await_started()
    pool = crew("rollout.num_workers=2")
    pool.supervisor.launch()
    pool.actors[1].calls[0].answer = IN_FLIGHT
    began = pool.clock.now_s
    with pytest.raises(
        DeadlineError, match=r"^rollout\[1\] on \?: not up after 900 s; raise timeouts.start_s.*; stacks"
    ):
        pool.supervisor.await_started()
    assert pool.clock.now_s - began == 900


def test_every_kind_has_its_number_and_its_settings(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2", "rollout.extra_kinds={big: {num_workers: 1, max_num_seqs: 7}}")
    pool.supervisor.launch()
    pool.come_up()
    assert pool.factory.kinds == ["default", "default", "big"]
    assert [worker.capacity for worker in pool.scheduler.workers.values()] == [64, 64, 7]
    pool.sample_something()
    pool.die(2)
    pool.come_up()
    pool.supervisor.targets["default"] = 3
    pool.come_up()
    assert pool.factory.kinds[3:] == ["big", "default"]
    assert [line["state"] for line in pool.supervisor.status()] == ["live"] * 4
    assert pool.supervisor.status()[-1] == {
        "worker": 4,
        "kind": "default",
        "state": "live",
        "node": "10.0.0.1",
        "version": 0,
        "samples": 0,
    }


# Silence


def test_an_engine_that_stands_still_behind_a_live_actor_is_replaced(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    pool.sample_something()
    stuck, busy = pool.actors
    for silent_s in (SILENCE_S - 1, SILENCE_S + 199, 2 * SILENCE_S):
        pool.clock.now_s += 0 if silent_s < SILENCE_S else 200
        stuck.report(silent_s=silent_s)
        busy.report(silent_s=SILENCE_S - 1)
        pool.hear()
        assert not pool.notes
        pool.reconcile()
    assert pool.notes == [
        "rollout pool: replacing a worker: rollout[0] on 10.0.0.1: silent for 300 s (timeouts.worker_silence_s); "
        "stacks of rollout[0] on 10.0.0.1"
    ]
    assert pool.factory.ended == [0] and len(pool.actors) == 3, "another is on its way"


def test_a_worker_that_answers_nothing_is_replaced_unless_it_may_be_silent(crew: MakeCrew) -> None:
    pool = crew()
    pool.come_up()
    pool.clock.now_s += SILENCE_S + 1
    pool.reconcile(asleep=True)
    pool.scheduler.suspend(0)
    pool.reconcile()
    assert pool.running() == [0], "neither asleep nor while it takes new weights"
    pool.supervisor.admit(0)
    pool.reconcile()
    assert pool.running() == [0], "its time begins again when it serves"
    pool.give()
    pool.scheduler.drain(0)
    pool.clock.now_s += SILENCE_S + 1
    pool.reconcile()
    assert pool.factory.ended == [0]


def test_a_start_may_take_its_time_once_the_worker_has_a_place(crew: MakeCrew) -> None:
    pool = crew()
    pool.factory.answers["start"], pool.factory.placed = IN_FLIGHT, False
    pool.reconcile()
    for _ in range(10):
        pool.clock.now_s += 800
        pool.reconcile()
    pool.factory.placed = True
    pool.clock.now_s += 899
    pool.reconcile()
    assert not pool.notes
    pool.clock.now_s += 2
    pool.reconcile()
    assert pool.notes == [
        "rollout pool: replacing a worker: rollout[0] on ?: silent for 900 s (timeouts.start_s); "
        "stacks of rollout[0] on ?"
    ]


def test_a_pool_that_sizes_itself_gives_up_waiting_for_room(crew: MakeCrew) -> None:
    pool = crew("rollout.autoscale={min: 2, max: 4}", "rollout.num_workers=2", "placement.timeout_s=60")
    pool.come_up()
    pool.sample_something()
    pool.factory.placed = False
    pool.factory.answers["start"] = IN_FLIGHT
    pool.supervisor.targets["default"] = 3
    for seconds in (0, 60, 1):
        pool.clock.now_s += seconds
        for actor in pool.actors[:2]:
            actor.report()
        pool.hear()
        assert not pool.notes
        pool.reconcile()
    assert pool.notes == [
        "rollout pool: 3 -> 2 default worker(s): the cluster has had no room for another in 60 s (placement.timeout_s)"
    ]
    assert pool.running() == [0, 1] and pool.supervisor.num_replaced == 0
    pool.die(1)
    for _ in range(3):
        pool.clock.now_s += 100
        pool.actors[0].report()
        pool.hear()
        pool.reconcile()
    assert pool.running() == [0, 3] and pool.supervisor.targets["default"] == 2, "rollout.autoscale.min is waited for"


# Work


def test_completions_are_accepted_once(crew: MakeCrew) -> None:
    pool = crew()
    pool.come_up()
    group = pool.give(num_samples=3)
    first, other = completion(f"{group}.2"), completion(f"{group}.0")
    pool.actors[0].report(first, other, completion("77.0"))
    assert pool.hear() == [(0, group, 2, first), (0, group, 0, other)]
    pool.actors[0].report(first)
    assert pool.hear() == []
    last = completion(f"{group}.1")
    pool.actors[0].report(last)
    assert pool.hear() == [(0, group, 1, last)]
    assert pool.actors[0].given("collect") == [(1.0,)] * 4, "asked again after every report"
    assert not pool.actors[0].given("abort"), "nobody else held it"


@pytest.mark.parametrize(("silence_s", "wait_s"), [(300, 5.0), (4, 1.0)])
def test_workers_of_a_large_pool_report_less_often_but_before_they_count_as_silent(
    crew: MakeCrew, silence_s: int, wait_s: float
) -> None:
    pool = crew("rollout.num_workers=250", f"timeouts.worker_silence_s={silence_s}")
    pool.come_up()
    assert {actor.given("collect")[-1] for actor in pool.actors} == {(wait_s,)}


def test_nobody_listens_to_a_worker_that_has_ended(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.factory.answers["submit"] = IN_FLIGHT
    pool.come_up()
    pool.supervisor.send({0: [Request("0.0", 0, [1], 0)]})
    pool.die(0)
    assert set(pool.supervisor.refs().values()) == {1}


def test_answers_that_are_there_are_taken_together(crew: MakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = crew("rollout.num_workers=20")
    pool.come_up()
    asked, wait = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda refs, **options: asked.append(len(refs)) or wait(refs, **options))
    workers = pool.scheduler.in_state(State.LIVE)
    assert len(pool.supervisor.call(workers, "sleep", "going to sleep")) == 20
    assert asked == [20, 19]


def test_of_two_workers_with_the_same_group_the_slower_drops_it(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    group = pool.give()
    pool.scheduler.measured(0, 1.0)
    pool.scheduler.measured(1, 100.0)
    assert [assignment.worker for assignment in pool.scheduler.take_over()] == [1]
    slow, fast = pool.actors
    slow.report(completion(f"{group}.1"))
    pool.hear()
    fast.report(completion(f"{group}.0"), completion(f"{group}.1"))
    assert [accepted[:3] for accepted in pool.hear()] == [(1, group, 0)]
    assert slow.given("abort") == fast.given("abort") == [([f"{group}.0", f"{group}.1"],)]
    slow.report(completion(f"{group}.0"))
    assert pool.hear() == []


def test_a_worker_that_dies_leaves_its_work_to_others(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    pool.sample_something()
    group = pool.give()
    stale = pool.supervisor.refs()
    pool.die(0)
    assert "rollout[0] on 10.0.0.1: died while generating" in pool.notes[0]
    assert [a.worker for a in pool.scheduler.dispatch()] == [1] and group in pool.scheduler.workers[1].groups
    assert [pool.supervisor.hear(worker_id, ref) for ref, worker_id in stale.items() if worker_id == 0] == [[]], (
        "what else is heard of it is ignored"
    )
    pool.come_up()
    assert pool.running() == [1, 2] and pool.supervisor.num_replaced == 1


def test_the_run_ends_when_workers_in_a_row_die_of_the_same_prompt(crew: MakeCrew) -> None:
    pool = crew("rollout.max_failures=2")
    pool.come_up()
    pool.sample_something()
    pool.give(prompt_id=7)
    pool.die(0)
    pool.come_up()
    pool.scheduler.dispatch()
    with pytest.raises(ActorError, match="2 workers in a row failed while sampling prompt 7"):
        pool.die(1)
    assert pool.factory.ended == [0, 1]


def test_requests_go_out_in_one_call_and_their_refusal_is_noticed(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    pool.actors[1].answers["submit"] = RuntimeError("the engine is gone")
    a, b, c = (Request(f"{i}.0", i, [1], 0) for i in range(3))
    pool.supervisor.send({0: [a, b], 1: [c]})
    assert pool.actors[0].given("submit") == [([a, b],)] and pool.actors[1].given("submit") == [([c],)]
    pool.hear()
    assert pool.running() == [0]
    assert "rollout[1] on 10.0.0.1: taking requests raised RuntimeError: the engine is gone" in pool.notes[0]


def test_who_fails_to_answer_a_question_is_replaced(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=3")
    pool.come_up()
    for actor, answer in zip(pool.actors, ("a GPU", RuntimeError("no"), IN_FLIGHT), strict=True):
        actor.answers["device_name"] = answer
    workers = list(pool.scheduler.workers.values())
    assert pool.supervisor.call(workers, "device_name", "naming its device") == {0: "a GPU"}
    assert pool.factory.ended == [1, 2]
    assert "raised RuntimeError: no" in pool.notes[0] and "still busy with naming its device" in pool.notes[1]


def test_pace_is_tokens_per_second_and_running_sample(crew: MakeCrew) -> None:
    pool = crew()
    pool.come_up()
    pool.actors[0].report()
    pool.hear()
    pool.give(num_samples=4)
    paces = []
    for generated_tokens in (30, 80, 160, 240):
        pool.clock.now_s += 1
        pool.supervisor.count_time(1.0)
        pool.actors[0].report(generated_tokens=generated_tokens)
        pool.hear()
        paces.append(pool.scheduler.workers[0].pace)
    assert paces == [None, 10.0, 10.0, pytest.approx(0.7 * 10 + 0.3 * 20)], "80, then 160 tokens in 2 s of 4 samples"


def test_time_is_counted_of_workers_that_serve(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=3")
    pool.come_up()
    pool.give()
    assert pool.supervisor.count_time(2.0) == (2.0, 6.0)
    pool.scheduler.suspend(2)
    assert pool.supervisor.count_time(2.0) == (2.0, 4.0)


# Scaling


def test_those_that_would_be_missed_least_go_first(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=3")
    pool.come_up()
    for _ in range(2):
        pool.give()
    pool.supervisor.targets["default"] = 5
    pool.factory.answers["start"] = IN_FLIGHT
    pool.reconcile()
    pool.actors[3].end("start", "10.0.0.1")
    pool.hear()
    gone = []
    for target in (4, 3, 2):
        pool.supervisor.targets["default"] = target
        pool.reconcile()
        gone.append(pool.factory.ended[-1])
    assert gone == [4, 3, 2], "one that starts, one without weights, one without work"


def test_a_worker_that_is_not_needed_any_more_finishes_what_it_holds(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    for group in (pool.give(), pool.give()):
        assert pool.scheduler.groups[group].holders == {group}
    pool.supervisor.targets["default"] = 1
    pool.reconcile()
    assert pool.running() == [0, 1] and pool.scheduler.workers[1].state is State.DRAINING, "of equals the newest"
    pool.actors[1].report(completion("1.0"), completion("1.1"))
    assert len(pool.hear()) == 2
    pool.reconcile()
    assert pool.running() == [0] and not pool.notes


@pytest.mark.parametrize(("mode", "places"), [("colocate", 2), ("separate", None)])
def test_workers_on_shared_gpus_have_the_places_that_were_planned(mode: str, places: int | None) -> None:
    config = load_config(RECIPE, [f"placement.mode={mode}", "learner.num_ranks=2", "rollout.num_workers=2"])
    unused: Any = None
    factory = WorkerFactory(config, plan_topology(config, "cpu"), unused, unused, unused, unused)
    assert factory.num_places == places


def test_a_draining_worker_keeps_its_place_until_it_ends(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.factory.num_places = 2
    pool.come_up()
    for _ in range(2):
        pool.give()
    for target in (1, 2):
        pool.supervisor.targets["default"] = target
        pool.reconcile()
    assert pool.running() == [0, 1] and pool.scheduler.workers[1].state is State.DRAINING
    pool.actors[1].report(completion("1.0"), completion("1.1"))
    pool.hear()
    pool.reconcile()
    assert pool.running() == [0, 2]


def test_nobody_is_started_while_the_pool_sleeps(crew: MakeCrew) -> None:
    pool = crew()
    pool.reconcile(asleep=True)
    assert not pool.actors
    pool.reconcile()
    assert len(pool.actors) == 1


def test_closing_ends_every_process(crew: MakeCrew) -> None:
    pool = crew("rollout.num_workers=2")
    pool.come_up()
    pool.supervisor.retire(1)
    pool.supervisor.close()
    assert pool.factory.ended == [1, 0]
