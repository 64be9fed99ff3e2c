"""Environments and tools for tests, a sampler that says what it was given, and a runner of one with the other."""

import asyncio
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Prompt, Rollout
from rlhf.config import Config, DataConfig, EnvironmentConfig, RolloutConfig
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
    config = Config(
        data=DataConfig(train="task:guess", max_prompt_tokens=8),
        rollout=RolloutConfig(max_completion_tokens=max_completion_tokens),
        environment=EnvironmentConfig(path=path, **{"max_context_tokens": 8000, "max_turns": 99} | settings),
    )
    return EpisodeRunner(config, tokenizer, stop_ids=stop_ids)


def run(runner: EpisodeRunner, prompt: Prompt, sampler: Scripted) -> Rollout:
    return asyncio.run(runner.run(prompt, 0, sampler))
