"""Episodes and the workers that run them: fake workers, fake sampling, and a clock that the tests move."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError

from actors.environments.crew import Crew, Turn
from actors.environments.episode_loop import EpisodeReport
from actors.group import ActorGroup, Member
from actors.rollouts.engine import Completion
from rlhf.batch import Episode, Prompt, Rollout
from rlhf.environments.turns import TurnRequest
from rlhf.errors import ActorError, EpisodeFailedError
from tests.clock import Clock
from tests.fake_ray import IN_FLIGHT, FakeActor, FakeRay

PROMPTS = [Prompt(i, [1, 2, i], f"prompt {i}", [{"role": "user", "content": "?"}], {"answer": i}) for i in range(3)]
SILENCE_S, START_S = 300.0, 600.0


class Stage:
    """A crew, and the pool's part in its life."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        num_workers: int = 2,
        episodes_per_worker: int = 8,
        retries: int = 2,
        on_failure: str = "skip",
    ) -> None:
        self.clock = Clock(monkeypatch)
        self.ray = FakeRay(monkeypatch, self.clock)
        self.killed: list[Any] = []
        monkeypatch.setattr(ray, "kill", self.killed.append)
        self.actors = [self.actor() for _ in range(num_workers)]
        self.group = ActorGroup([Member(actor, "environment", i, "10.0.0.1") for i, actor in enumerate(self.actors)])
        config: Any = SimpleNamespace(
            environment=SimpleNamespace(
                episodes_per_worker=episodes_per_worker, retries=retries, on_failure=on_failure
            ),
            timeouts=SimpleNamespace(worker_silence_s=SILENCE_S, start_s=START_S),
        )
        self.notes: list[str] = []
        self.turns: dict[int, Turn] = {}
        self.cancelled: list[int] = []
        self.finished: dict[int, list[Rollout]] = {}
        self.crew = Crew(config, self.group, self.launch, self.notes.append)
        self.crew.connect(self)
        self._next_turn = 100

    def actor(self, **answers: Any) -> FakeActor:
        return self.ray.actor(**{"collect": IN_FLIGHT, "start": IN_FLIGHT, **answers})

    def launch(self, rank: int) -> FakeActor:
        self.actors[rank] = self.actor()
        return self.actors[rank]

    # What the pool does

    def sample(self, turn: Turn) -> int:
        self._next_turn += 1
        self.turns[self._next_turn] = turn
        return self._next_turn

    def cancel(self, turn_id: int) -> None:
        self.cancelled.append(turn_id)
        del self.turns[turn_id]

    def finish(self, group_id: int, rollouts: list[Rollout]) -> None:
        self.finished[group_id] = rollouts

    # What the tests do

    def submit(self, *prompts: Prompt, group_size: int = 2, most: int = 100) -> list[int]:
        ids = self.crew.submit(prompts, group_size=group_size, greedy=False, with_logprobs=())
        self.crew.open(most=most)
        return ids

    def hear(self) -> None:
        for ref, rank in self.crew.refs().items():
            if ref.ended:
                self.crew.hear(rank, ref)

    def report(self, rank: int, **report: Any) -> None:
        self.actors[rank].end("collect", EpisodeReport(**report))
        self.hear()

    def sampled(self, turn_id: int, token_ids: list[int], *, worker: int = 0) -> None:
        versions = np.full(len(token_ids), 3, np.int32)
        self.crew.answer(self.turns.pop(turn_id), worker, Completion("", token_ids, "stop", None, versions))
        self.crew.flush()

    def opened(self, rank: int) -> list[str]:
        return [task.key for (batch,) in self.actors[rank].given("open") for task in batch]

    def die(self, rank: int) -> None:
        self.actors[rank].end("collect", ActorDiedError())
        self.hear()


MakeStage = Callable[..., Stage]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> MakeStage:
    return lambda **settings: Stage(monkeypatch, **settings)


def ended(token: int, *, reward: float = 1.0) -> Rollout:
    """A rollout as a worker reports it: without its prompt."""
    episode = Episode(np.ones(1, bool), [1], [0.0], reward, "done", [], {})
    return Rollout(Prompt(-1, [], ""), 0, [token], np.zeros(1, np.int32), "stop", None, episode)


def test_episodes_begin_in_their_order_where_fewest_run(stage: MakeStage) -> None:
    scene = stage()
    scene.submit(*PROMPTS, most=5)
    assert scene.opened(0) == ["0.0.0", "1.0.0", "2.0.0"] and scene.opened(1) == ["0.1.0", "1.1.0"]
    (batch,) = scene.actors[0].given("open")[0]
    assert [(task.prompt, task.sample_index) for task in batch] == [(PROMPTS[i], 0) for i in range(3)]
    scene.report(0, finished=[("1.0.0", ended(7))])
    scene.crew.open(most=5)
    assert scene.opened(0)[3:] + scene.opened(1)[2:] == ["2.1.0"], "the sixth takes the place of the one that ended"


def test_a_worker_holds_no_more_episodes_than_it_may(stage: MakeStage) -> None:
    scene = stage(episodes_per_worker=1)
    scene.submit(*PROMPTS)
    assert [scene.opened(0), scene.opened(1)] == [["0.0.0"], ["0.1.0"]]


def test_a_turn_is_sampled_from_its_context_and_its_reply_goes_back(stage: MakeStage) -> None:
    scene = stage()
    scene.submit(PROMPTS[0])
    scene.report(1, turns=[("0.1.0", TurnRequest([1, 2, 0], 16, 0))])
    (turn_id,) = scene.turns
    first = scene.turns[turn_id].request(turn_id, 0)
    assert (first.key, first.prompt_id, first.sample_index) == (f"{turn_id}.0", 0, 1)
    assert (first.token_ids, first.max_tokens, first.turn) == ([1, 2, 0], 16, 0)
    assert first.cached_since is None, "whatever version begins it: a publish may come before"
    scene.sampled(turn_id, [5, 6], worker=4)
    ((replies,),) = scene.actors[1].given("answer")
    ((key, reply),) = replies
    assert key == "0.1.0" and (reply.token_ids, reply.finish_reason) == ([5, 6], "stop")
    scene.report(1, turns=[("0.1.0", TurnRequest([1, 2, 0, 5, 6, 9], 13, 1))])
    (turn,) = scene.turns.values()
    assert (turn.episode.home, turn.episode.cached_tokens) == (4, 5), "worker 4 has all but what was observed"
    second = turn.request(7, 0)
    assert (second.turn, second.max_tokens, second.cached_since) == (1, 13, 3)


def test_a_group_is_done_when_its_last_episode_is_and_comes_in_order(stage: MakeStage) -> None:
    scene = stage()
    scene.submit(PROMPTS[0])
    scene.report(1, finished=[("0.1.0", ended(8))])
    assert not scene.finished
    scene.report(0, finished=[("0.0.0", ended(7))])
    rollouts = scene.finished[0]
    assert [rollout.token_ids for rollout in rollouts] == [[7], [8]]
    assert all(rollout.prompt is PROMPTS[0] for rollout in rollouts)
    assert scene.crew.describe() == "0 episodes open, 0 waiting"


def test_a_worker_that_dies_costs_its_episodes_their_state_and_nobody_else_anything(stage: MakeStage) -> None:
    scene = stage()
    scene.submit(PROMPTS[0], PROMPTS[1])
    scene.report(0, turns=[("0.0.0", TurnRequest([1], 9, 0))])
    scene.report(1, turns=[("0.1.0", TurnRequest([1], 9, 0))])
    lost, kept = scene.turns
    dead = scene.actors[0]
    scene.die(0)
    assert scene.killed == [dead] and scene.cancelled == [lost] and list(scene.turns) == [kept]
    assert "environments: replacing a worker: environment[0] on 10.0.0.1: died" in scene.notes[0]
    scene.crew.open(most=100)
    assert scene.opened(1)[2:] == ["0.0.1", "1.0.1"], "begun anew, where a worker is up"
    assert not scene.actors[0].given("open"), "the one in its place is only starting"
    scene.sampled(kept, [5])
    assert len(scene.actors[1].given("answer")) == 1
    scene.report(1, finished=[("0.0.0", ended(1)), ("0.1.0", ended(2))], turns=[("1.0.0", TurnRequest([1], 9, 0))])
    assert not scene.finished and not scene.turns, "nobody listens to what was said of an attempt that is over"
    scene.actors[0].end("start", "10.0.0.2")
    scene.hear()
    assert scene.group.members[0].node == "10.0.0.2" and scene.group.members[0].handle is scene.actors[0]
    scene.report(1, finished=[("0.0.1", ended(3))])
    assert [rollout.token_ids for rollout in scene.finished[0]] == [[3], [2]]
    assert scene.crew.metrics() == {
        "environments/replaced_workers": 1.0,
        "environments/retried_episodes": 2.0,
    }


def test_a_new_attempt_samples_from_the_same_seeds_with_the_cache_of_now(stage: MakeStage) -> None:
    scene = stage(num_workers=1)
    scene.submit(PROMPTS[0], group_size=1)
    scene.report(0, failed=[("0.0.0", "the game is broken")])
    scene.crew.open(most=9)
    scene.report(0, turns=[("0.0.1", TurnRequest([1], 9, 0))])
    (turn,) = scene.turns.values()
    assert turn.asked == TurnRequest([1], 9, 0), "not the token of an episode that is left out"
    request = turn.request(1, 0)
    assert (request.prompt_id, request.sample_index, request.turn) == (0, 0, 0)
    assert request.cached_since is None


def test_an_episode_that_keeps_failing_is_left_out_and_said_so(stage: MakeStage) -> None:
    scene = stage(num_workers=1, retries=1)
    scene.submit(PROMPTS[0], group_size=1)
    for attempt in range(2):
        scene.report(0, failed=[(f"0.0.{attempt}", "game.py:7: ValueError: no dice")])
        scene.crew.open(most=9)
    assert scene.notes == ["environments: prompt 0, episode 0 failed 2 times; at last: game.py:7: ValueError: no dice"]
    ((turn_id, turn),) = scene.turns.items()
    assert turn.asked == TurnRequest(PROMPTS[0].token_ids, 1, 0)
    scene.sampled(turn_id, [6])
    (rollout,) = scene.finished[0]
    assert rollout.token_ids == [6] and rollout.prompt is PROMPTS[0]
    assert rollout.episode is not None and rollout.episode.status == "failed" and np.isnan(rollout.episode.reward)
    assert scene.crew.describe() == "0 episodes open, 0 waiting"


def test_a_run_that_tolerates_no_failure_ends_with_what_failed(stage: MakeStage) -> None:
    scene = stage(num_workers=1, retries=0, on_failure="fail")
    scene.submit(PROMPTS[0], group_size=1)
    with pytest.raises(EpisodeFailedError, match=r"prompt 0, episode 0 failed 1 times; at last: no dice; with environ"):
        scene.report(0, failed=[("0.0.0", "no dice")])


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_stands_still_is_replaced_even_if_it_answers(stage: MakeStage, answers: bool) -> None:
    scene = stage()
    stuck = scene.actors[1]
    for _ in range(11):
        scene.clock.now_s += SILENCE_S / 10
        scene.report(0)
        if answers:
            scene.report(1, silent_s=SILENCE_S)
        scene.crew.look()
    assert scene.killed == [stuck]
    assert "environment[1] on 10.0.0.1: silent for 300 s (timeouts.worker_silence_s); stacks of" in scene.notes[0]


def test_one_that_does_not_come_up_is_replaced(stage: MakeStage) -> None:
    scene = stage(num_workers=1)
    scene.die(0)
    late = scene.actors[0]
    scene.clock.now_s += START_S + 1
    scene.crew.look()
    assert late in scene.killed and "timeouts.start_s" in scene.notes[-1]


def test_a_run_whose_environment_kills_every_worker_ends(stage: MakeStage) -> None:
    scene = stage(num_workers=1, retries=99)
    scene.submit(PROMPTS[0])
    for _ in range(3):
        scene.die(0)
        scene.actors[0].end("start", "10.0.0.1")
        scene.hear()
    with pytest.raises(ActorError, match="4 workers in a row were lost, and no episode ended"):
        scene.die(0)


def test_an_episode_that_ends_proves_that_workers_can(stage: MakeStage) -> None:
    scene = stage(num_workers=1, retries=99)
    scene.submit(PROMPTS[0], PROMPTS[1])
    for i in range(5):
        scene.die(0)
        scene.actors[0].end("start", "10.0.0.1")
        scene.hear()
        scene.crew.open(most=9)
        if i == 2:
            scene.report(0, finished=[(scene.opened(0)[-1], ended(1))])


def test_replies_that_came_together_go_out_in_one_call_to_each_worker(stage: MakeStage) -> None:
    scene = stage()
    scene.submit(PROMPTS[0], PROMPTS[1])
    scene.report(0, turns=[(key, TurnRequest([1], 9, 0)) for key in ("0.0.0", "1.0.0")])
    for turn_id, token in zip(list(scene.turns), (7, 8), strict=True):
        versions = np.zeros(1, np.int32)
        scene.crew.answer(scene.turns.pop(turn_id), 0, Completion("", [token], "stop", None, versions))
    assert not scene.actors[0].given("answer")
    scene.crew.flush()
    scene.crew.flush()
    ((replies,),) = scene.actors[0].given("answer")
    assert [(key, reply.token_ids) for key, reply in replies] == [("0.0.0", [7]), ("1.0.0", [8])]
    assert not scene.actors[1].given("answer")
