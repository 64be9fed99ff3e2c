"""The driver's side of the pool: groups, publishes and sleep, with fake actors that answer on cue."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError

from actors.environments.crew import Crew
from actors.environments.episode_loop import EpisodeReport
from actors.group import ActorGroup, Deadline, Member
from actors.rollouts.engine import Ready, Request, request_seed
from actors.rollouts.pool import RolloutPool
from actors.weights.transports import BrokenTransferError, Transfer
from rlhf.batch import Episode, Prompt, Rollout
from rlhf.environments.turns import TurnRequest
from rlhf.errors import DeadlineError, EpisodeFailedError, UnwrittenWeightsError
from rlhf.recipes import load_config
from tests.fake_ray import CHECKSUM, IN_FLIGHT, PATIENCE_S, FakeActor, FakeFactory, FakeRay, completion

RECIPE = Path(__file__).resolve().parents[2] / "conf" / "grpo_tiny.yaml"
PROMPTS = [Prompt(i, [1, 2, i], f"prompt {i}") for i in range(4)]
UPDATE = ("begin_update", "receive_objects", "finish_update", "commit")

pytestmark = pytest.mark.timeout(60)


class OneBucket:
    """A transport without a learner."""

    def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
        received = {member: ray.get(member.handle.receive_objects.remote([], deadline.left_s)) for member in members}
        return Transfer([CHECKSUM], received, {}, num_bytes=10)


class Setting:
    """A pool and what is around it. Its thread hears an answer as soon as a test gives it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        shares_gpus: bool = False,
        num_places: int | None = None,
    ) -> None:
        config = load_config(RECIPE, [f"timeouts.generate_s={PATIENCE_S}", *overrides])
        self.config = config
        self.factory = FakeFactory(FakeRay(monkeypatch))
        self.factory.num_places = num_places
        self.notes: list[str] = []
        self.asked: dict[str, int] = {}  # workers by kind, through `rlhf scale`
        control: Any = SimpleNamespace(poll=lambda status, targets: self.asked)
        factory: Any = self.factory
        self.pool = RolloutPool(config, factory, control, shares_gpus=shares_gpus, note=self.notes.append)

    def serve(self, environments: Crew | None = None) -> RolloutPool:
        """The pool, serving version 1."""
        self.pool.launch()
        self.pool.await_started()
        self.pool.connect(OneBucket(), environments)
        self.pool.publish(1)
        return self.pool

    @property
    def actors(self) -> list[FakeActor]:
        return self.factory.actors


def until(true: Callable[[], object]) -> None:
    """Waits for what the pool's thread is about to do."""
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


MakeSetting = Callable[..., Setting]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSetting]:
    """``setting('rollout.num_workers=2')``."""
    made: list[Setting] = []

    def make(*overrides: str, **settings: Any) -> Setting:
        made.append(Setting(monkeypatch, *overrides, **settings))
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


def keys(group: int, size: int) -> list[str]:
    return [f"{group}.{sample}" for sample in range(size)]


# Groups


def test_a_group_comes_back_in_order_whatever_the_order_of_its_completions(setting: MakeSetting) -> None:
    pool = setting().serve()
    (worker,) = pool.members()
    first, other = pool.submit(PROMPTS[:2], group_size=3, with_logprobs=[1])
    (requests,) = [batch for (batch,) in worker.handle.given("submit")]
    assert [request.key for request in requests] == [*keys(first, 3), *keys(other, 3)]
    assert [(r.prompt_id, r.token_ids, r.sample_index) for r in requests[3:]] == [(1, [1, 2, 1], k) for k in range(3)]
    assert [request.logprobs for request in requests] == [False] * 3 + [True] * 3
    assert not any(request.greedy for request in requests)
    worker.handle.report(*[completion(key, version=1) for key in (f"{other}.0", f"{first}.2", f"{first}.0")])
    worker.handle.report(completion(f"{first}.1", version=1))
    groups = pool.next_groups([first, other])
    assert list(groups) == [first]
    assert [rollout.sample_index for rollout in groups[first]] == [0, 1, 2]
    for rollout in groups[first]:
        assert rollout.prompt is PROMPTS[0] and rollout.token_ids == [rollout.sample_index] * 2
        assert rollout.versions.tolist() == [1, 1] and rollout.finish_reason == "length"


def test_all_that_have_finished_come_together_and_others_stay(setting: MakeSetting) -> None:
    pool = setting().serve()
    (worker,) = pool.members()
    ids = pool.submit(PROMPTS, group_size=1, greedy=True)
    assert all(request.greedy for (batch,) in worker.handle.given("submit") for request in batch)
    worker.handle.report(*[completion(f"{ids[i]}.0") for i in (2, 3, 1)])
    assert list(pool.next_groups([ids[0], ids[1], ids[2]])) == [ids[2], ids[1]], "in the order of finishing"
    assert list(pool.next_groups(ids)) == [ids[3]]
    worker.handle.report(completion(f"{ids[0]}.0"))
    assert list(pool.next_groups(ids)) == [ids[0]]


def test_a_driver_that_waits_in_vain_is_told_of_what(setting: MakeSetting) -> None:
    pool = setting("timeouts.generate_s=0.05").serve()
    ids = pool.submit(PROMPTS[:2], group_size=2)
    with pytest.raises(DeadlineError, match=r"within 0\.05 s \(workers: 1 live; 0 group\(s\) queued, 2 unfinished\)"):
        pool.next_groups(ids)


def test_a_run_that_cannot_go_on_is_told_so_wherever_it_waits(setting: MakeSetting) -> None:
    given = setting()
    pool = given.serve()
    ids = pool.submit(PROMPTS[:1], group_size=1)
    given.actors[0].report(completion("999.0"))
    given.factory.answers["finish_update"] = UnwrittenWeightsError("model.path=m: lm_head is left unwritten")
    given.actors[0].end("collect", RuntimeError("out of memory"))
    with pytest.raises(UnwrittenWeightsError, match="lm_head"):
        pool.next_groups(ids)
    for actor in given.actors:  # whoever tries it again would find nothing wrong
        actor.answers.pop("finish_update", None)
    with pytest.raises(UnwrittenWeightsError, match="lm_head"):
        pool.publish(2)


def test_a_request_for_more_workers_than_there_are_places_changes_nothing(setting: MakeSetting) -> None:
    given = setting(shares_gpus=True, num_places=2)
    pool = given.serve()
    for asked in (3, 2, 3):
        pool.scale("default", asked, "asked for")
    until(lambda: len(pool.members()) == 2)
    assert len(given.actors) == 2
    assert given.notes[1] == "rollout pool: 1 -> 2 default worker(s): asked for"
    assert given.notes[2].startswith(
        "rollout pool: stays at 2 default worker(s), not 3: this run's workers share the learner's GPUs, which have "
        "room for 2; ask for at most 2"
    )


# Publishes


@pytest.mark.parametrize("step", UPDATE)
def test_a_worker_that_fails_a_publish_serves_no_more(setting: MakeSetting, step: str) -> None:
    given = setting("rollout.num_workers=2")
    pool = given.serve()
    ids = pool.submit(PROMPTS[:2], group_size=2)
    given.factory.answers["start"] = IN_FLIGHT  # no successor meanwhile
    bad, good = given.actors
    bad.answers[step] = [[CHECKSUM + 1]] if step == "receive_objects" else RuntimeError("out of memory")
    metrics = pool.publish(2)
    assert (metrics["pool/live_workers"], metrics["pool/replaced_workers"]) == (1, 1)
    assert [member.handle for member in pool.members()] == [good]
    assert len(given.notes) == 1 and "rollout[0] on 10.0.0.1" in given.notes[0] and given.factory.ended == [0]
    before = bad.requests()
    assert set(good.requests()) == {*keys(ids[0], 2), *keys(ids[1], 2)}, "it has taken the other's work"
    pool.submit(PROMPTS[2:], group_size=2)
    assert bad.requests() == before
    assert good.given("commit") == [(1,), (2,)]


def test_a_publish_goes_to_all_that_are_up_and_waits_for_nobody_else(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=2")
    pool = given.serve()
    given.factory.answers["start"] = IN_FLIGHT
    pool.scale("default", 3, "asked for")
    until(lambda: len(given.actors) == 3)
    pool.publish(2)
    assert [actor.order(*UPDATE) for actor in given.actors] == [[*UPDATE, *UPDATE], [*UPDATE, *UPDATE], []]
    given.actors[2].end("start", "10.0.0.2")
    until(lambda: len(pool.members()) == 3)
    assert not given.actors[2].given("commit"), "while the learner works, nobody may ask it for weights"
    (group,) = pool.submit(PROMPTS[:1], group_size=1)
    waiting = threading.Thread(target=pool.next_groups, args=([group],))
    waiting.start()
    until(lambda: given.actors[2].given("commit"))
    assert given.actors[2].given("commit") == [(2,)], "while the driver waits for samples, it is brought up to date"
    given.actors[0].report(completion(f"{group}.0"))
    waiting.join()
    assert given.notes == ["rollout pool: 2 -> 3 default worker(s): asked for"]


def test_a_worker_on_its_way_out_is_not_kept_for_a_publish(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=2")
    pool = given.serve()
    ids = pool.submit(PROMPTS[:2], group_size=2)
    given.asked = {"default": 1}
    until(lambda: given.notes)
    metrics = pool.publish(2)
    assert (metrics["pool/live_workers"], metrics["pool/wanted_workers"]) == (1, 1)
    assert metrics["pool/replaced_workers"] == 0
    assert given.factory.ended == [1] and len(given.actors[1].given("commit")) == 1
    assert set(given.actors[0].requests()) == {*keys(ids[0], 2), *keys(ids[1], 2)}, "its work is done by another"
    assert given.notes == ["rollout pool: 2 -> 1 default worker(s): requested by rlhf scale"]


def test_without_a_learner_workers_serve_what_they_have_loaded_and_so_do_their_replacements(
    setting: MakeSetting,
) -> None:
    given = setting()
    pool = given.pool
    pool.launch()
    pool.await_started()
    pool.publish(0)
    ids = pool.submit(PROMPTS[:1], group_size=1)
    first = given.actors[0]
    assert first.order(*UPDATE) == ["commit"] and first.given("commit") == [(0,)]
    first.end("collect", RayActorError())
    threading.Timer(0, lambda: _finish(given)).start()
    assert list(pool.next_groups(ids)) == ids
    assert given.actors[1].order(*UPDATE) == ["commit"] and given.actors[1].given("commit") == [(0,)]


def _finish(given: Setting) -> None:
    until(lambda: len(given.actors) == 2 and given.actors[1].requests())
    given.actors[1].report(completion("0.0"))


def test_a_publish_that_was_repeated_is_reported(setting: MakeSetting) -> None:
    given = setting()
    pool = given.serve()

    class Flapping(OneBucket):
        broken = False

        def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
            if not self.broken:
                self.broken = True
                raise BrokenTransferError("connection reset")
            return super().transfer(members, deadline)

    pool.connect(Flapping())
    assert pool.publish(2)["pool/replaced_workers"] == 0
    assert given.notes == ["rollout pool: a publish was repeated: connection reset"]
    assert given.actors[0].given("commit") == [(1,), (2,)]


def test_a_model_that_a_publish_cannot_fill_ends_the_run(setting: MakeSetting) -> None:
    given = setting()
    pool = given.serve()
    given.actors[0].answers["finish_update"] = UnwrittenWeightsError("model.path=m: lm_head is left unwritten")
    with pytest.raises(UnwrittenWeightsError, match="lm_head"):
        pool.publish(2)
    assert not given.notes, "another worker would fail too"


# Workers that share their GPU with the learner

SHARED = ("wake_weights", "begin_update", "commit", "wake_cache", "sleep")


def test_workers_sleep_while_the_learner_works_and_wake_in_two_parts(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=2", shares_gpus=True)
    pool = given.serve()
    pool.sleep()
    pool.sleep()
    with pytest.raises(AssertionError, match="a sleeping pool cannot sample"):
        pool.submit(PROMPTS, group_size=1)
    pool.publish(2)
    awake = ["begin_update", "commit"]
    for actor in given.actors:
        assert actor.order(*SHARED) == [*awake, "sleep", "wake_weights", *awake, "wake_cache"]
    pool.publish(3)
    assert given.actors[0].order(*SHARED)[-2:] == awake, "it is awake"
    pool.submit(PROMPTS, group_size=1)
    assert given.actors[0].requests() and given.actors[1].requests()


def test_the_learner_waits_for_workers_that_load_into_its_memory(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=2", shares_gpus=True)
    pool = given.serve()
    for actor in given.actors:
        actor.report(completion("999.0"))
    given.factory.answers["start"] = IN_FLIGHT
    given.actors[1].end("collect", RuntimeError("out of memory"))
    until(lambda: len(given.actors) == 3)
    going = threading.Thread(target=pool.sleep)
    going.start()
    until(lambda: len(given.notes) == 2)
    assert given.notes[1] == "rollout pool: the learner waits until 1 new worker(s) have loaded"
    given.actors[0].end("collect", RuntimeError("out of memory"))
    until(lambda: 0 in given.factory.ended)
    assert not given.actors[2].given("sleep")
    given.actors[2].end("start", "10.0.0.1")
    going.join()
    assert given.actors[2].given("sleep") == [()], "and then sleeps like the others"
    assert len(given.actors) == 3, "nobody else is started now"
    pool.publish(2)
    assert given.actors[2].order(*SHARED) == ["sleep", "wake_weights", "begin_update", "commit", "wake_cache"]
    until(lambda: len(given.actors) == 4)


def test_a_worker_that_does_not_come_up_is_not_waited_for(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=2", "timeouts.start_s=0.5", shares_gpus=True)
    pool = given.serve()
    for actor in given.actors:
        actor.report(completion("999.0"))
    given.factory.answers["start"] = IN_FLIGHT
    given.actors[1].end("collect", RuntimeError("out of memory"))
    until(lambda: len(given.actors) == 3)
    pool.sleep()
    assert "rollout[2] on ?: silent for 0.5 s (timeouts.start_s)" in given.notes[-1]
    assert given.actors[0].given("sleep") == [()] and not given.actors[2].given("sleep")


def test_a_worker_that_cannot_wake_up_is_replaced(setting: MakeSetting) -> None:
    given = setting("rollout.num_workers=3", shares_gpus=True)
    pool = given.serve()
    given.factory.answers["start"] = IN_FLIGHT
    given.actors[0].answers["wake_weights"] = RuntimeError("out of memory")
    given.actors[1].answers["wake_cache"] = RuntimeError("out of memory")
    pool.sleep()
    assert pool.publish(2)["pool/live_workers"] == 1
    assert given.factory.ended == [0, 1] and given.actors[0].order(*SHARED)[-1] == "wake_weights"
    assert [member.handle for member in pool.members()] == [given.actors[2]]


def test_a_pool_with_gpus_of_its_own_never_sleeps(setting: MakeSetting) -> None:
    given = setting()
    pool = given.serve()
    pool.sleep()
    pool.submit(PROMPTS, group_size=1)
    assert not given.actors[0].given("sleep")


# Episodes


class Episodes:
    """A pool whose groups are episodes, on one fake environment worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: MakeSetting, *overrides: str) -> None:
        environment = "environment={path: guess, max_context_tokens: 256}"
        self.scene = setting(environment, "data.train=task:guess", "rollout.ignore_eos=false", *overrides)
        self.worker = self.scene.factory.fake_ray.actor(collect=IN_FLIGHT, start=IN_FLIGHT)
        monkeypatch.setattr(ray, "kill", lambda handle: None)
        group = ActorGroup([Member(self.worker, "environment", 0, "10.0.0.1")])
        crew = Crew(self.scene.config, group, lambda rank: self.worker, self.scene.notes.append)
        self.pool = self.scene.serve(crew)

    def ask(self, key: str, *context: int, turn: int = 0) -> None:
        """An episode wants its next turn."""
        self.worker.end("collect", EpisodeReport(turns=[(key, TurnRequest(list(context), 8, turn))]))

    def requests(self, worker: int = 0) -> list[Request]:
        return [request for (batch,) in self.scene.actors[worker].given("submit") for request in batch]


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch, setting: MakeSetting) -> Callable[..., Episodes]:
    return lambda *overrides: Episodes(monkeypatch, setting, *overrides)


def ended(token: int) -> Rollout:
    episode = Episode(np.ones(1, bool), [1], [0.0], 1.0, "done", [], {})
    return Rollout(Prompt(-1, [], ""), 0, [token], np.zeros(1, np.int32), "stop", None, episode)


def test_a_group_of_episodes_is_sampled_turn_by_turn(episodes: Callable[..., Episodes]) -> None:
    scene = episodes()
    (group,) = scene.pool.submit(PROMPTS[:1], group_size=2, with_logprobs=(0,))
    until(lambda: scene.worker.given("open"))
    scene.ask("0.1.0", 1, 2, 0)
    until(scene.requests)
    (first,) = scene.requests()
    assert (first.token_ids, first.sample_index, first.max_tokens, first.logprobs) == ([1, 2, 0], 1, 8, True)
    scene.scene.actors[0].report(completion(first.key, num_tokens=3))
    until(lambda: scene.worker.given("answer"))
    (((key, reply),),) = scene.worker.given("answer")[0]
    assert (key, reply.token_ids) == ("0.1.0", [0, 0, 0])
    scene.worker.end("collect", EpisodeReport(finished=[("0.1.0", ended(7)), ("0.0.0", ended(6))]))
    rollouts = scene.pool.next_groups([group])[group]
    assert [rollout.token_ids for rollout in rollouts] == [[6], [7]]
    assert {rollout.prompt.id for rollout in rollouts} == {0}


def test_a_turn_outlives_the_worker_that_sampled_it_with_its_context_and_its_seed(
    episodes: Callable[..., Episodes],
) -> None:
    scene = episodes("rollout.num_workers=2")
    scene.pool.submit(PROMPTS[:1], group_size=1)
    until(lambda: scene.worker.given("open"))
    scene.ask("0.0.0", 1, 2, 0, turn=1)
    until(lambda: scene.requests(0) or scene.requests(1))
    at = 0 if scene.requests(0) else 1
    (lost,) = scene.requests(at)
    scene.scene.actors[at].end("collect", ActorDiedError())
    until(lambda: scene.requests(1 - at))
    (again,) = scene.requests(1 - at)
    assert again == lost and request_seed(0, again) == request_seed(0, lost)
    assert not scene.worker.given("answer") and len(scene.worker.given("open")) == 1, "the episode knows nothing of it"


def test_an_environment_that_ends_the_run_is_heard_by_the_driver(episodes: Callable[..., Episodes]) -> None:
    scene = episodes("environment.retries=0", "environment.on_failure=fail")
    ids = scene.pool.submit(PROMPTS[:1], group_size=1)
    until(lambda: scene.worker.given("open"))
    scene.worker.end("collect", EpisodeReport(failed=[("0.0.0", "no dice")]))
    with pytest.raises(EpisodeFailedError, match="no dice"):
        scene.pool.next_groups(ids)


def test_as_many_episodes_begin_as_keep_the_workers_busy(episodes: Callable[..., Episodes]) -> None:
    scene = episodes("rollout.max_num_seqs=3")
    scene.pool.submit(PROMPTS, group_size=4)
    until(lambda: scene.worker.given("open"))
    ((tasks,),) = scene.worker.given("open")
    assert len(tasks) == 2 * 3
    metrics = scene.pool.publish(2)
    assert metrics["environments/retried_episodes"] == 0.0


def test_a_driver_that_waits_for_episodes_in_vain_is_told_of_them(episodes: Callable[..., Episodes]) -> None:
    scene = episodes("timeouts.generate_s=0.1")
    ids = scene.pool.submit(PROMPTS[:2], group_size=2)
    with pytest.raises(DeadlineError, match=r"0 group\(s\) queued, 0 unfinished; 4 episodes open, 0 waiting"):
        scene.pool.next_groups(ids)
