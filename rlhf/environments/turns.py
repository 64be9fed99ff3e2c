"""One turn of an episode, as it is asked for and answered."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample."""

    token_ids: list[int]  # the whole context: the prompt, replies and observations since
    max_tokens: int
    turn: int


@dataclass(frozen=True)
class TurnReply:
    """What was sampled."""

    token_ids: list[int]
    versions: np.ndarray
    finish_reason: str
    logprobs: np.ndarray | None


class Sampler(Protocol):
    """Samples the turns of an episode."""

    async def sample(self, request: TurnRequest) -> TurnReply: ...
