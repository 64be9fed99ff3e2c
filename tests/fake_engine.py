"""An inference engine in pure Python, for tests of what surrounds one: in this process or in a RolloutActor."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from actors.rollouts.engine import Output, Ready, Request, WorkerSpec
from rlhf.config import RolloutConfig
from rlhf.training.weights import TensorSpec

LOGPROB = -0.5  # of every token


def fake_spec(max_completion_tokens: int = 4) -> WorkerSpec:
    return WorkerSpec(
        config=RolloutConfig(max_completion_tokens=max_completion_tokens),
        model_path="",
        trust_remote_code=False,
        max_model_tokens=64,
        device="cpu",
        colocated=False,
        workers_on_gpu=1,
        logprobs=False,
        seed=0,
    )


def origin(token: int) -> tuple[int, int, int]:
    """(updates of the weights before it, prompt id, sample index) of a token that a FakeEngine sampled."""
    rest, sample_index = divmod(token, 100)
    return *divmod(rest, 1000), sample_index


class FakeEngine:
    """Implements ``actors.rollouts.engine.Engine``: a step adds a token to every request, up to max_completion_tokens.

    Tokens tell where they come from (``origin``). ``calls`` records what the engine was asked. Its asserts are what an
    engine may rely on. A test holds it back with ``allow`` and ``slow_down``, and makes it misbehave with ``fail``,
    ``hang`` and ``corrupt``: directly, or through ``EngineLoop.call`` where the engine is in an actor.
    """

    def __init__(
        self, spec: WorkerSpec, *, num_steps: int | None = None, runs_ahead: bool = False, poison: int | None = None
    ) -> None:
        """``num_steps``: how many it may take before ``allow``; None: any number.

        ``runs_ahead``: it samples one more step when paused, like an engine in a process of its own.
        ``poison``: id of a prompt that no engine survives: a step with it raises.
        """
        self._spec, self._runs_ahead, self._poison = spec, runs_ahead, poison
        self._running: dict[str, tuple[Request, list[int]]] = {}
        self._paused = False
        self._awake = {"weights", "cache"}
        self._updates = 0  # of its weights
        self._error: BaseException | None = None
        self._is_corrupt = False
        self._allowed, self._step_s = num_steps, 0.0
        self.calls: list[tuple[Any, ...]] = []
        self.halted = threading.Event()  # it has taken all the steps it was allowed
        self.hanging = threading.Event()  # it is in a step that does not end
        self.released = threading.Event()  # end such a step with this
        self.released.set()

    # For tests

    def allow(self, num_steps: int) -> None:
        """Lets it take this many steps; then it stops."""
        self.halted.clear()
        self._allowed = num_steps

    def slow_down(self, step_s: float) -> None:
        """From now on a step takes this long."""
        self._step_s = step_s

    def fail(self, error: BaseException) -> None:
        """The next step raises."""
        self._error, self._allowed = error, None
        self.released.set()

    def hang(self) -> None:
        """The next step does not end before it is ``released``."""
        self.released.clear()

    def corrupt(self) -> None:
        """From now on it reports checksums of other weights than it was sent."""
        self._is_corrupt = True

    # Sampling

    def add(self, request: Request, version: int) -> None:
        assert not self._paused and request.key not in self._running
        self.calls.append(("add", request.key, version))
        self._running[request.key] = request, []

    def abort(self, keys: Sequence[str]) -> None:
        self.calls.append(("abort", *keys))
        for key in keys:
            self._running.pop(key, None)

    def has_unfinished(self) -> bool:
        return (bool(self._running) and self._allowed != 0) or self._error is not None

    def step(self) -> list[Output]:
        assert not self._paused and self._awake == {"weights", "cache"}
        if self._error is not None:
            raise self._error
        if any(request.prompt_id == self._poison for request, _ in self._running.values()):
            raise RuntimeError("this group is poison")
        if not self.released.is_set():
            self.hanging.set()
            self.released.wait()
        time.sleep(self._step_s)
        outputs = self._sample()
        self.calls.append(("step",))
        if self._allowed is not None:
            self._allowed -= 1
            if self._allowed == 0:
                self.halted.set()
        return outputs

    def _sample(self) -> list[Output]:
        outputs = []
        for key, (request, tokens) in list(self._running.items()):
            tokens.append((self._updates * 1000 + request.prompt_id) * 100 + request.sample_index)
            if len(tokens) == self._spec.config.max_completion_tokens:
                del self._running[key]
                logprobs = np.full(len(tokens), LOGPROB, np.float32) if request.logprobs else None
                outputs.append(Output(key, tokens, "length", logprobs))
        return outputs

    def running_tokens(self) -> dict[str, int]:
        return {key: len(tokens) for key, (_, tokens) in self._running.items()}

    def pause(self) -> list[Output]:
        assert not self._paused
        outputs = self._sample() if self._runs_ahead else []
        self._paused = True
        return outputs

    def resume(self) -> None:
        assert self._paused
        self._paused = False

    # Weights

    def begin_update(self) -> Ready:
        assert self._paused and "weights" in self._awake, "nowhere to put the weights"
        self.calls.append(("begin_update",))
        return Ready(1)

    def join_weights(self, info: dict[str, Any]) -> None:
        self.calls.append(("join_weights", info))

    def receive_session(self, timeout_s: float, *, frozen: bool) -> list[list[int]]:
        return self.receive_objects([])

    def receive_objects(self, buckets: Iterable[tuple[tuple[TensorSpec, ...], np.ndarray]]) -> list[list[int]]:
        """The checksum of a bucket is the sum of its bytes."""
        assert self._paused
        return [[int(data.sum()) + self._is_corrupt for _, data in buckets]]

    def finish_update(self) -> None:
        assert self._paused
        self._updates += 1

    # Sharing a GPU

    def sleep(self) -> None:
        self.calls.append(("sleep",))
        self._awake.clear()

    def wake_weights(self) -> None:
        self._awake.add("weights")

    def wake_cache(self) -> None:
        self._awake.add("cache")

    # Facts

    def device_name(self) -> str:
        return "cpu"

    def peak_gpu_bytes(self) -> int:
        return 0
