"""Environments and tools for tests, a sampler that says what it was given, and a runner of one with the other."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Prompt, Rollout
from rlhf.config import Config, DataConfig, EnvironmentConfig, RewardConfig, RewardFunctionConfig, RolloutConfig
from rlhf.environments import EpisodeRunner
from rlhf.environments.turns import TurnReply, TurnRequest


class Scripted:
    """A sampler that says what it was given, one reply for each turn, and keeps what it was asked.

    A reply that does not end with ``stop`` was cut. Each turn has a version, and a log-probability, of its own.
    """

    def __init__(self, replies: list[list[int]], stop: int) -> None:
        self.replies, self._stop = replies, stop
        self.requests: list[TurnRequest] = []

    async def sample(self, request: TurnRequest) -> TurnReply:
        turn = len(self.requests)
        self.requests.append(request)
        await asyncio.sleep(0)
        ids = self.replies[turn]
        logprobs = np.full(len(ids), -1.0 - turn, np.float32)
        reason = "stop" if ids[-1] == self._stop else "length"
        return TurnReply(list(ids), np.full(len(ids), turn, np.int32), reason, logprobs)


def add(left: int, right: int = 1) -> int:
    """Adds two numbers."""
    return left + right


async def converse(chat: Any, said: list[str]) -> None:
    """Says one thing after another."""
    await chat()
    for message in said:
        await chat(message)


def runner(
    tokenizer: PreTrainedTokenizerBase,
    path: str | None,
    *,
    stop_ids: list[int],
    max_completion_tokens: int = 256,
    **settings: Any,
) -> EpisodeRunner:
    """A runner of an environment of this module, or of a test's."""
    limits: Any = {"max_context_tokens": 8000, "max_turns": 99} | settings
    config = Config(
        data=DataConfig(train="task:guess", max_prompt_tokens=8),
        reward=RewardConfig(functions=[RewardFunctionConfig("even_tokens")]),
        rollout=RolloutConfig(max_completion_tokens=max_completion_tokens),
        environment=EnvironmentConfig(path=path, **limits),
    )
    return EpisodeRunner(config, tokenizer, stop_ids=stop_ids)


def run(runner: EpisodeRunner, prompt: Prompt, sampler: Scripted) -> Rollout:
    return asyncio.run(runner.run(prompt, 0, sampler))


@dataclass
class Log:
    """What an environment tells its test, in a column of the data."""

    lines: list[str] = field(default_factory=list)


async def scored(chat: Any, log: Log) -> float | None:
    """Gives turns rewards, notes what was said, and returns a reward of its own."""
    try:
        for number in range(3):
            reply = await chat(None if number == 0 else {"role": "user", "content": "Go on."})
            log.lines.append(reply.text + (" (cut)" if reply.truncated else ""))
            chat.reward(0.25)
            chat.reward(number)
        chat.notes["said"] = len(chat.messages)
        return 0.5
    finally:
        log.lines.append("cleaned up")


async def hanging_reset(chat: Any, log: Log) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        log.lines.append("cleaned up")


async def hanging_step(chat: Any, log: Log) -> float:
    await chat()
    chat.reward(0.5)
    try:
        await asyncio.sleep(3600)
    finally:
        log.lines.append("cleaned up")
    return 1.0


async def deaf(chat: Any, log: Log) -> float:
    """Goes on when it is cancelled."""
    await chat()
    for _ in range(2):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            log.lines.append("cancelled")
    return 1.0


async def answers(chat: Any, log: Log) -> None:
    log.lines.append((await chat()).text)


async def raising(chat: Any) -> None:
    await chat()
    raise KeyError("board")


async def wordless(chat: Any) -> float:
    return 1.0


async def two_at_once(chat: Any) -> None:
    await asyncio.gather(chat(), chat())


async def unsaid(chat: Any, said: Any) -> None:
    await chat()
    await chat(said)


async def returning(chat: Any, value: Any) -> Any:
    await chat()
    return value


FREE = threading.Event()  # ends ``endless``, whose threads Python would wait for when it exits


def endless() -> str:
    """Never returns."""
    FREE.wait()
    return "late"


async def slow() -> str:
    """Never returns."""
    await asyncio.sleep(3600)
    return "late"


def broken(why: str) -> str:
    """Raises."""
    raise RuntimeError(why)


async def shapes(sides: list[int], colour: Literal["red", "blue"] = "red") -> dict[str, Any]:
    """Draws a shape."""
    return {"sides": sides, "colour": colour}
