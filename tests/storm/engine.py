"""An engine whose samples depend on nothing but the request: no failure may change a digit of the run around it."""

import time
import zlib
from collections.abc import Iterable

import numpy as np
import torch

from actors.rollouts.engine import Output, Request
from rlhf.training.weights import TensorSpec, checksum
from tests.fake_engine import LOGPROB, FakeEngine

TOKEN_S = 0.01  # of every request at once, so that there is a time in which to die
LOWEST, HIGHEST = 3, 500  # of the token ids it samples: no special ones


class StormEngine(FakeEngine):
    """Samples the same tokens for a request whichever worker it is on, and however often it is asked."""

    def _sample(self) -> list[Output]:
        time.sleep(TOKEN_S)
        self.calls.clear()  # a storm is long
        outputs: list[Output] = []
        for key, (request, tokens) in list(self._running.items()):
            tokens.append(token_of(request, len(tokens)))
            if len(tokens) == self._spec.config.max_completion_tokens:
                del self._running[key]
                logprobs = np.full(len(tokens), LOGPROB, np.float32) if request.logprobs else None
                outputs.append(Output(key, tokens, "length", logprobs))
        return outputs

    def receive_objects(self, buckets: Iterable[tuple[tuple[TensorSpec, ...], np.ndarray]]) -> list[list[int]]:
        """The checksums that a learner compares."""
        assert self._paused
        return [[int(checksum(torch.tensor(data))) for _, data in buckets]]


def token_of(request: Request, position: int) -> int:
    """Which token it samples there."""
    drawn = zlib.crc32(f"{request.prompt_id}/{request.sample_index}/{request.greedy}/{position}".encode())
    return LOWEST + drawn % (HIGHEST - LOWEST)
