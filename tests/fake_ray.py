"""Ray as its callers see it, without a process: calls on fake actors that end at once or on cue, and who makes workers.

``FakeRay`` stands in for ``ray.wait``, ``ray.get`` and ``ray.put``.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors import stacks
from actors.rollouts.engine import Completion
from actors.rollouts.engine_loop import Report
from actors.rollouts.factory import Launch
from tests.clock import Clock

IN_FLIGHT = object()  # the answer of a call that has not ended
PATIENCE_S = 10.0  # for what another thread is about to do
CHECKSUM = 45  # of the one bucket that fake learners send


@dataclass(eq=False)
class Ref:
    """A call of a fake actor."""

    method: str
    args: tuple[Any, ...]
    answer: Any  # an exception is what the call raised, or a RayError what became of its actor

    @property
    def ended(self) -> bool:
        return self.answer is not IN_FLIGHT


class FakeActor:
    """An actor's handle. Each call ends at once with what ``answers`` holds for its method, None if nothing.

    IN_FLIGHT there leaves it to the test to ``end`` the call.
    """

    def __init__(self, changed: threading.Condition, answers: dict[str, Any]) -> None:
        self._changed = changed
        self.answers = answers
        self.calls: list[Ref] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, args))

    def _call(self, method: str, args: tuple[Any, ...]) -> Ref:
        with self._changed:
            self.calls.append(Ref(method, args, self.answers.get(method)))
            self._changed.notify_all()
            return self.calls[-1]

    def end(self, method: str, answer: Any) -> None:
        """Ends the oldest call of the method that is in flight; waits for one where another thread makes them."""

        def in_flight() -> list[Ref]:
            return [ref for ref in self.calls if ref.method == method and not ref.ended]

        with self._changed:
            assert self._changed.wait_for(in_flight, PATIENCE_S), f"nobody has called {method}"
            in_flight()[0].answer = answer
            self._changed.notify_all()

    def report(self, *finished: Completion, generated_tokens: int = 0, silent_s: float = 0.0) -> None:
        """A rollout worker's answer to ``collect``."""
        self.end("collect", Report(list(finished), generated_tokens, silent_s))

    def given(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of the method."""
        return [ref.args for ref in self.calls if ref.method == method]

    def requests(self) -> list[str]:
        """The keys of what a rollout worker was asked to sample."""
        return [request.key for (batch,) in self.given("submit") for request in batch]

    def order(self, *methods: str) -> list[str]:
        """In which order these were called."""
        return [ref.method for ref in self.calls if ref.method in methods]


class FakeRay:
    """``ray`` for calls of fake actors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None) -> None:
        """With a ``clock``, who waits in vain moves it to the end of the wait; else waits are real."""
        self._clock, self._changed = clock, threading.Condition()
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "put", lambda value: value)
        monkeypatch.setattr(stacks, "kept", lambda members: f"stacks of {', '.join(map(str, members))}")

    def actor(self, **answers: Any) -> FakeActor:
        return FakeActor(self._changed, answers)

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        with self._changed:
            if not any(ref.ended for ref in refs):
                if self._clock is None:
                    self._changed.wait_for(lambda: any(ref.ended for ref in refs), timeout)
                else:
                    assert timeout is not None, "a wait without a deadline"
                    self._clock.now_s += timeout
            ready = [ref for ref in refs if ref.ended][:num_returns]
            return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref, *, timeout: float | None = None) -> Any:
        if not ref.ended:
            raise GetTimeoutError
        if isinstance(ref.answer, RayError):
            raise ref.answer
        if isinstance(ref.answer, Exception):
            raise RayTaskError(ref.method, "(the traceback)", ref.answer).as_instanceof_cause()
        return ref.answer


class FakeFactory:
    """Implements ``actors.rollouts.factory.WorkerFactory``: workers that start at once and receive what they are sent.

    ``answers`` are those of workers launched from then on.
    """

    def __init__(self, fake_ray: FakeRay) -> None:
        self.fake_ray = fake_ray
        self.answers: dict[str, Any] = {"start": "10.0.0.1", "collect": IN_FLIGHT, "receive_objects": [[CHECKSUM]]}
        self.actors: list[FakeActor] = []  # by worker id
        self.kinds: list[str] = []
        self.placed = True
        self.num_places: int | None = None
        self.ended: list[int] = []

    def launch(self, worker: int, kind: str) -> Launch:
        assert worker == len(self.actors)
        actor = self.fake_ray.actor(**self.answers)
        self.actors.append(actor)
        self.kinds.append(kind)
        return Launch(actor, actor.start.remote())

    def has_place(self, worker: int) -> bool:
        return self.placed

    def end(self, worker: int) -> None:
        assert worker not in self.ended
        self.ended.append(worker)


def completion(key: str, *, version: int = 0, num_tokens: int = 2) -> Completion:
    """A sampled completion; its tokens are its sample index."""
    tokens = [int(key.partition(".")[2])] * num_tokens
    return Completion(key, tokens, "length", None, np.full(num_tokens, version, np.int32))
