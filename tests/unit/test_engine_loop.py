"""The engine loop around a fake engine: versions, pauses, held requests, failures. No vLLM and no Ray."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import actors.rollouts.engine_loop
from actors.rollouts.engine import Completion, Request, WorkerSpec, request_seed
from actors.rollouts.engine_loop import EngineLoop, stamp
from tests.fake_engine import LOGPROB, FakeEngine, fake_spec, origin

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # the fixture's way to end a loop

DEADLINE_S = 20.0

Start = Callable[..., tuple[EngineLoop, FakeEngine]]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(tokens=4)``: a running loop, and its engine, which takes no step that the test does not ask for."""
    started: list[tuple[EngineLoop, FakeEngine]] = []

    def start(tokens: int = 4, **settings: Any) -> tuple[EngineLoop, FakeEngine]:
        engine = FakeEngine(fake_spec(tokens), num_steps=0, **settings)
        loop = EngineLoop(fake_spec(tokens), lambda spec: engine)
        loop.start()
        started.append((loop, engine))
        return loop, engine

    yield start
    for loop, engine in started:
        engine.fail(SystemExit())
        loop.join(DEADLINE_S)
        assert not loop.is_alive()


def ask(key: str, prompt_id: int = 0, sample_index: int = 0, **flags: bool) -> Request:
    return Request(key, prompt_id, [1, 2], sample_index, **flags)


def advance(loop: EngineLoop, engine: FakeEngine, num_steps: int) -> None:
    """Returns after this many steps, with what they finished handed out."""
    loop.call(lambda _: engine.allow(num_steps))
    assert engine.halted.wait(DEADLINE_S)
    loop.call(lambda _: None)  # the step is over


def update_weights(loop: EngineLoop) -> None:
    """What a publish does before it commits."""
    loop.begin_update()
    loop.call(lambda engine: engine.receive_objects([]))
    loop.call(lambda engine: engine.finish_update())


def publish(loop: EngineLoop, version: int) -> None:
    update_weights(loop)
    loop.commit(version)


def finished(loop: EngineLoop) -> dict[str, Completion]:
    return {completion.key: completion for completion in loop.collect(wait_s=0).finished}


def weights_of(completion: Completion) -> list[int]:
    """Which weights the engine had when it sampled each token: counted from 1, as the tests count versions."""
    return [origin(token)[0] for token in completion.token_ids]


def test_tokens_carry_the_version_they_were_sampled_from() -> None:
    assert stamp(5, [], 7).tolist() == [7] * 5
    assert stamp(6, [(2, 3), (5, 4)], 5).tolist() == [3, 3, 4, 4, 4, 5]
    assert stamp(4, [(0, 1), (4, 2)], 3).tolist() == [2] * 4, (
        "weights changed before the first token and after the last"
    )


def test_a_sample_is_the_same_whoever_makes_it_and_however_often() -> None:
    first, again = (request_seed(0, ask(key, 3, 1)) for key in ("8.1", "9.1"))
    assert first == again == 0x42DEDFFB6BCDA4CE, "samples of earlier runs can be repeated"
    others = [ask("k", 3, 2), ask("k", 4, 1), ask("k", 3, 1, greedy=True)]
    assert len({first, request_seed(1, ask("k", 3, 1)), *(request_seed(0, r) for r in others)}) == 5


def test_every_turn_of_an_episode_has_a_seed_of_its_own_and_the_first_that_of_a_single_one() -> None:
    turns = [replace(ask("8.1", 3, 1), turn=turn) for turn in range(3)]
    seeds = [request_seed(0, request) for request in turns]
    assert len(set(seeds)) == 3 and seeds[0] == request_seed(0, ask("9.1", 3, 1))


def test_completions_come_back_with_what_was_asked(start: Start) -> None:
    loop, engine = start(tokens=2)
    publish(loop, 1)
    loop.submit([ask("a", 5, 1), ask("b", 6, 0, logprobs=True)])
    advance(loop, engine, 2)
    done = finished(loop)
    assert [origin(token) for token in done["a"].token_ids] == [(1, 5, 1)] * 2
    assert [origin(token) for token in done["b"].token_ids] == [(1, 6, 0)] * 2
    assert done["a"].logprobs is None and done["a"].finish_reason == "length"
    assert done["b"].logprobs is not None and done["b"].logprobs.tolist() == [LOGPROB] * 2
    assert done["a"].versions.dtype == np.int32


def test_versions_follow_changes_of_weights_under_a_completion(start: Start) -> None:
    loop, engine = start(tokens=5)
    publish(loop, 1)
    loop.submit([ask("early")])
    advance(loop, engine, 2)
    publish(loop, 2)
    loop.submit([ask("late")])
    advance(loop, engine, 1)
    publish(loop, 3)  # nothing is sampled from these
    publish(loop, 4)
    advance(loop, engine, 4)
    done = finished(loop)
    assert done["early"].versions.tolist() == weights_of(done["early"]) == [1, 1, 2, 4, 4]
    assert done["late"].versions.tolist() == weights_of(done["late"]) == [2, 4, 4, 4, 4]


def test_what_finishes_while_the_engine_is_being_paused_has_the_old_version(start: Start) -> None:
    loop, engine = start(tokens=3, runs_ahead=True)
    publish(loop, 1)
    loop.submit([ask("a")])
    advance(loop, engine, 2)
    publish(loop, 2)
    done = finished(loop)["a"]
    assert done.versions.tolist() == weights_of(done) == [1, 1, 1]


def test_requests_that_come_during_a_pause_are_sampled_after_it(start: Start) -> None:
    loop, engine = start(tokens=2)
    publish(loop, 1)
    loop.submit([ask("before")])
    update_weights(loop)
    loop.submit([ask("during")])
    assert ("add", "during", 1) not in engine.calls
    loop.commit(2)
    assert [call for call in engine.calls if call[0] == "add"] == [("add", "before", 1), ("add", "during", 2)], (
        "each with the version that is current when the engine gets it: its caches depend on that"
    )
    advance(loop, engine, 2)
    assert {key: done.versions.tolist() for key, done in finished(loop).items()} == {"before": [2, 2], "during": [2, 2]}


def test_an_update_that_broke_off_can_begin_again(start: Start) -> None:
    loop, engine = start(tokens=1)
    publish(loop, 1)
    loop.begin_update()
    publish(loop, 2)
    assert engine.calls.count(("begin_update",)) == 3
    loop.submit([ask("a")])
    advance(loop, engine, 1)
    assert finished(loop)["a"].versions.tolist() == [2]


def test_abort_drops_running_and_held_requests(start: Start) -> None:
    loop, engine = start(tokens=3)
    publish(loop, 1)
    loop.submit([ask("running")])
    advance(loop, engine, 1)
    publish(loop, 2)
    update_weights(loop)
    loop.submit([ask("held"), ask("kept")])
    loop.abort(["running", "held", "unknown"])
    loop.commit(3)
    loop.submit([ask("running")])  # the same key again: nothing of the first is left
    advance(loop, engine, 3)
    assert {key: done.versions.tolist() for key, done in finished(loop).items()} == {
        "kept": [3, 3, 3],
        "running": [3, 3, 3],
    }


def test_nothing_is_sampled_before_the_first_commit(start: Start) -> None:
    loop, engine = start()
    for prepare in (lambda: None, lambda: update_weights(loop)):
        prepare()
        with pytest.raises(AssertionError, match="without a committed weight version"):
            loop.submit([ask("a")])
    loop.commit(1)
    assert not engine.has_unfinished() and ("step",) not in engine.calls


def test_calls_run_between_steps(start: Start) -> None:
    loop, engine = start(tokens=2)
    publish(loop, 1)
    loop.submit([ask("a")])
    engine.hang()
    loop.call(lambda _: engine.allow(2))
    assert engine.hanging.wait(DEADLINE_S)
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(loop.call, lambda _: engine.calls.append(("call",))) for _ in range(2)]
        while loop._calls.qsize() < 2:
            assert loop.is_alive()
        assert ("call",) not in engine.calls
        engine.released.set()
        for call in calls:
            call.result(DEADLINE_S)
    assert engine.halted.wait(DEADLINE_S)
    assert engine.calls[-4:] == [("step",), ("call",), ("call",), ("step",)]


def test_a_report_waits_for_a_whole_group(start: Start) -> None:
    loop, engine = start(tokens=2)
    publish(loop, 1)
    loop.submit([ask("7.0"), ask("7.2")])
    advance(loop, engine, 1)
    loop.submit([ask("7.1")])
    with ThreadPoolExecutor() as pool:
        report = pool.submit(loop.collect, DEADLINE_S)
        advance(loop, engine, 1)
        assert not report.done()
        advance(loop, engine, 1)
        assert {completion.key for completion in report.result().finished} == {"7.0", "7.2", "7.1"}
        loop.submit([ask("8.0"), ask("8.1")])
        loop.abort(["8.1"])
        report = pool.submit(loop.collect, 2 * DEADLINE_S)
        advance(loop, engine, 2)
        assert [completion.key for completion in report.result(DEADLINE_S).finished] == ["8.0"]
    loop.submit([ask("9.0")])
    advance(loop, engine, 1)
    loop.submit([ask("9.1")])
    advance(loop, engine, 1)
    assert finished(loop).keys() == {"9.0"}, "the time is up"


def test_an_engine_that_fails_ends_the_wait_for_a_report(start: Start) -> None:
    loop, engine = start()
    engine.fail(RuntimeError("this engine is broken"))
    loop.join(DEADLINE_S)
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="this engine is broken"):
        pool.submit(loop.collect, 2 * DEADLINE_S).result(DEADLINE_S)


def test_silence_grows_while_a_step_hangs(start: Start) -> None:
    loop, engine = start()
    publish(loop, 1)
    loop.submit([ask("a")])
    engine.hang()
    loop.call(lambda _: engine.allow(1))
    assert engine.hanging.wait(DEADLINE_S)
    first, second = loop.collect(wait_s=0.01).silent_s, loop.collect(wait_s=0.01).silent_s
    assert second >= first + 0.01


def test_a_call_that_raises_ends_nothing(start: Start) -> None:
    loop, engine = start(tokens=1)
    publish(loop, 1)
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 / 0)
    loop.submit([ask("a")])
    advance(loop, engine, 1)
    assert finished(loop).keys() == {"a"}


def test_a_step_that_fails_is_told_to_whoever_asks(start: Start) -> None:
    loop, engine = start()
    publish(loop, 1)
    engine.fail(RuntimeError("this engine is broken"))
    loop.join(DEADLINE_S)
    for ask_loop in (
        lambda: loop.collect(wait_s=0),
        lambda: loop.submit([ask("a")]),
        lambda: loop.call(lambda _: None),
    ):
        with pytest.raises(RuntimeError, match="this engine is broken"):
            ask_loop()


def test_an_engine_that_does_not_start_says_why() -> None:
    def refuse(spec: WorkerSpec) -> FakeEngine:
        raise RuntimeError("no such model")

    loop = EngineLoop(fake_spec(), refuse)
    loop.start()
    with pytest.raises(RuntimeError, match="no such model"):
        loop.call(lambda engine: None)


def test_unfinished_tokens_are_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.rollouts.engine_loop, "COUNT_EVERY_S", 0.0)
    loop, engine = start(tokens=4)
    publish(loop, 1)
    loop.submit([ask("a")])
    advance(loop, engine, 2)
    loop.submit([ask("b"), ask("c")])
    advance(loop, engine, 3)
    assert loop.collect(wait_s=0).generated_tokens == 4 + 3 + 3
