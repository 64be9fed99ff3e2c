"""One turn of an episode, as it is asked for and answered."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample."""

    token_ids: list[int]  # the whole context: the prompt, replies and observations since
    max_tokens: int
    turn: int  # 0, 1, ...


@dataclass(frozen=True)
class TurnReply:
    """What was sampled. The fields are those of ``rlhf.batch.Rollout``."""

    token_ids: list[int]
    versions: np.ndarray
    finish_reason: str
    logprobs: np.ndarray | None


class Sampler(Protocol):
    """Samples the turns of one episode."""

    async def sample(self, request: TurnRequest) -> TurnReply:
        """May take long, and may be cancelled with the episode."""
        ...
