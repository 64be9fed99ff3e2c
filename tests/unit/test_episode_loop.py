"""Many episodes on one event loop: what is reported, answered, dropped, and when the loop stands still."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.environments.episode_loop import EpisodeLoop, EpisodeReport, EpisodeTask
from rlhf.batch import Prompt, Rollout
from rlhf.environments.turns import Sampler, TurnReply, TurnRequest
from rlhf.errors import EpisodeFailedError

PATIENCE_S = 10.0
PROMPT = Prompt(5, [1, 2], "say", [{"role": "user", "content": "say"}], {"answer": "much"})

pytestmark = pytest.mark.timeout(60)


def reply(*token_ids: int) -> TurnReply:
    return TurnReply(list(token_ids), np.zeros(len(token_ids), np.int32), "stop", None)


async def two_turns(prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
    """Says what it was told, twice."""
    tokens = list(prompt.token_ids)
    for turn in range(2):
        tokens += (await sampler.sample(TurnRequest(list(tokens), 8, turn))).token_ids
    return Rollout(prompt, sample_index, tokens[2:], np.zeros(len(tokens) - 2, np.int32), "stop")


def collect(loop: EpisodeLoop, enough: Callable[[EpisodeReport], Any]) -> EpisodeReport:
    """Reports until there is enough in one."""
    ends = time.monotonic() + PATIENCE_S
    while not enough(report := loop.collect(0.1)):
        assert time.monotonic() < ends
    return report


def tasks(*keys: str) -> list[EpisodeTask]:
    return [EpisodeTask(key, PROMPT, i) for i, key in enumerate(keys)]


def test_episodes_take_turns_and_end_with_a_rollout_that_leaves_the_prompt_out() -> None:
    loop = EpisodeLoop(two_turns)
    loop.open(tasks("a", "b"))
    asked = dict(collect(loop, lambda report: len(report.turns) == 2).turns)
    assert asked == {key: TurnRequest([1, 2], 8, 0) for key in ("a", "b")}
    loop.answer([("b", reply(7, 8))])
    assert collect(loop, lambda report: report.turns).turns == [("b", TurnRequest([1, 2, 7, 8], 8, 1))]
    loop.answer([("b", reply(9))])
    ((key, rollout),) = collect(loop, lambda report: report.finished).finished
    assert (key, rollout.sample_index, rollout.token_ids) == ("b", 1, [7, 8, 9])
    assert rollout.prompt == Prompt(5, [], "")


def test_an_environment_that_fails_is_reported_with_its_reason() -> None:
    async def broken(prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
        raise EpisodeFailedError("dice.py:3: ValueError: no dice")

    loop = EpisodeLoop(broken)
    loop.open(tasks("a"))
    assert collect(loop, lambda report: report.failed).failed == [("a", "dice.py:3: ValueError: no dice")]


def test_an_error_of_ours_ends_the_worker() -> None:
    async def ours(prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
        raise ZeroDivisionError("ours")

    loop = EpisodeLoop(ours)
    loop.open(tasks("a"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        collect(loop, lambda report: False)


def test_what_is_dropped_ends_without_a_word_and_late_replies_are_for_nobody() -> None:
    ended = threading.Event()

    async def waits(prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
        try:
            return await two_turns(prompt, sample_index, sampler)
        finally:
            ended.set()

    loop = EpisodeLoop(waits)
    loop.open(tasks("a"))
    collect(loop, lambda report: report.turns)
    loop.drop(["a", "unknown"])
    loop.answer([("a", reply(7)), ("unknown", reply(7))])
    assert ended.wait(PATIENCE_S)
    report = loop.collect(0.1)
    assert not (report.turns or report.finished or report.failed)
    loop.open(tasks("b"))
    assert collect(loop, lambda report: report.turns).turns[0][0] == "b", "others go on"


def test_a_coroutine_that_never_awaits_makes_the_loop_silent() -> None:
    standing, release = threading.Event(), threading.Event()

    async def stands_still(prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
        standing.set()
        release.wait(PATIENCE_S)
        await asyncio.sleep(0)
        raise EpisodeFailedError("released")

    loop = EpisodeLoop(stands_still)
    loop.open(tasks("a"))
    assert standing.wait(PATIENCE_S)
    first = loop.collect(0).silent_s
    collect(loop, lambda report: report.silent_s > first + 0.5)
    release.set()
    assert collect(loop, lambda report: report.failed).failed == [("a", "released")]
    collect(loop, lambda report: report.silent_s < 0.5)
