"""Drives an inference engine, step by step, in a thread of its own.

Requests arrive at any time and completions leave as they finish; everything else that touches the engine (weights,
sleep) runs between two steps. Versions, pauses and counting live here; sampling is behind ``engine.Engine``.
"""

import concurrent.futures
import contextlib
import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from actors.rollouts.engine import Completion, Engine, MakeEngine, Output, Ready, Request, WorkerSpec, group_of

IDLE_WAIT_S = 0.1  # how long an idle loop waits for a call before it starts another round
COUNT_EVERY_S = 1.0  # how often the loop counts the tokens of unfinished completions

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What has happened on a worker since its last report."""

    finished: list[Completion]
    generated_tokens: int  # since the worker started, including those of unfinished completions
    silent_s: float  # since its engine loop last started a round; large if the engine hangs


def between_steps(method: Callable[Concatenate["EngineLoop", P], T]) -> Callable[Concatenate["EngineLoop", P], T]:
    """Runs the method in the loop's own thread, between two steps; the caller waits for the result."""

    @functools.wraps(method)
    def enqueue(self: "EngineLoop", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run_between_steps(lambda: method(self, *args, **kwargs))

    return enqueue


class EngineLoop(threading.Thread):
    """Owns the engine. The public methods may be called from any thread but its own.

    From ``begin_update`` to ``commit`` nothing is sampled; unfinished completions stay in the engine and continue with
    the new weights. Each token is stamped with the version it was sampled from.
    """

    def __init__(self, spec: WorkerSpec, make_engine: MakeEngine) -> None:
        super().__init__(name="engine-loop", daemon=True)
        self.version = -1  # of the weights that sample; -1: none committed yet, nothing may be sampled
        self._make_engine = functools.partial(make_engine, spec)
        self._engine: Engine  # made in the loop's thread
        self._failure: BaseException | None = None  # what ended the loop
        self._paused = False
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._held: list[Request] = []  # arrived during a pause
        self._older_tokens: dict[str, list[tuple[int, int]]] = {}  # of unfinished completions; see ``stamp``
        self._unfinished: defaultdict[str, set[str]] = defaultdict(set)  # keys by group
        self._finished: queue.Queue[Completion] = queue.Queue()
        self._worth_reporting = threading.Event()  # a whole group has finished, or the loop has ended
        self._finished_tokens = self._generated_tokens = 0
        self._counted_s = self._round_started_s = time.monotonic()

    # For other threads

    def collect(self, wait_s: float) -> Report:
        """Waits up to ``wait_s`` for a whole group, then takes all completions that have finished.

        Raises what ended the loop. A report for each completion would cost the driver of many workers too much.
        """
        self._worth_reporting.wait(wait_s)
        self._worth_reporting.clear()
        finished: list[Completion] = []
        with contextlib.suppress(queue.Empty):
            while True:
                finished.append(self._finished.get_nowait())
        if self._failure is not None:
            raise self._failure
        return Report(finished, self._generated_tokens, time.monotonic() - self._round_started_s)

    @between_steps
    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; during a pause they are held back. A version must have been committed."""
        for request in requests:
            self._unfinished[group_of(request.key)].add(request.key)
            self._add(request)

    @between_steps
    def abort(self, keys: Sequence[str]) -> None:
        """Drops requests; unknown keys (already finished) are ignored."""
        self._held = [request for request in self._held if request.key not in keys]
        for key in keys:
            self._older_tokens.pop(key, None)
            self._leaves_group(key)
        self._engine.abort(keys)

    @between_steps
    def begin_update(self) -> Ready:
        """Pauses sampling and prepares for new weights, even if the last update broke off."""
        if not self._paused:
            self._emit(self._engine.pause())
            self._paused = True
        return self._engine.begin_update()

    @between_steps
    def commit(self, version: int) -> None:
        """Resumes sampling, from now on with ``version``."""
        for key, num_tokens in self._engine.running_tokens().items():
            self._older_tokens.setdefault(key, []).append((num_tokens, self.version))
        self.version = version
        if self._paused:
            self._engine.resume()
            self._paused = False
        held, self._held = self._held, []
        for request in held:
            self._add(request)

    @between_steps
    def call(self, function: Callable[[Engine], T]) -> T:
        """Returns ``function(engine)``, for what concerns the engine alone. The first call waits until it is up."""
        return function(self._engine)

    def _run_between_steps(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((function, future))
        while not future.done():
            if self._failure is not None:
                raise self._failure
            concurrent.futures.wait([future], timeout=1.0)
        return future.result()

    # In the loop's thread

    def run(self) -> None:
        try:
            self._engine = self._make_engine()
            while True:
                self._round_started_s = time.monotonic()
                self._count_tokens()
                self._serve_calls()
                if self._can_step():
                    self._emit(self._engine.step())
        except BaseException as error:
            self._failure = error
            self._worth_reporting.set()
            raise

    def _can_step(self) -> bool:
        return not self._paused and self._engine.has_unfinished()

    def _serve_calls(self) -> None:
        """Runs the pending calls; waits a moment for one only if there is nothing to sample."""
        wait = not self._can_step()
        while True:
            try:
                function, future = self._calls.get(block=wait, timeout=IDLE_WAIT_S)
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            wait = False

    def _add(self, request: Request) -> None:
        assert self.version >= 0, "a worker without a committed weight version must not be asked to sample"
        if self._paused:
            self._held.append(request)
        else:
            self._engine.add(request, self.version)

    def _emit(self, outputs: Sequence[Output]) -> None:
        """Stamps what has finished and hands it out."""
        for output in outputs:
            versions = stamp(len(output.token_ids), self._older_tokens.pop(output.key, []), self.version)
            self._finished_tokens += len(output.token_ids)
            self._finished.put(Completion(**vars(output), versions=versions))
            if self._leaves_group(output.key):
                self._worth_reporting.set()

    def _leaves_group(self, key: str) -> bool:
        """Whether it was the last of its group's requests here."""
        group = group_of(key)
        self._unfinished[group].discard(key)
        if self._unfinished[group]:
            return False
        del self._unfinished[group]
        return True

    def _count_tokens(self) -> None:
        if self._round_started_s - self._counted_s > COUNT_EVERY_S:
            self._generated_tokens = self._finished_tokens + sum(self._engine.running_tokens().values())
            self._counted_s = self._round_started_s


def stamp(num_tokens: int, changes: list[tuple[int, int]], version: int) -> np.ndarray:
    """int32 [num_tokens]: each token's weight version. ``changes``: (tokens so far, version until then), in order."""
    versions = np.full(num_tokens, version, dtype=np.int32)
    for so_far, older in reversed(changes):
        versions[:so_far] = older
    return versions
