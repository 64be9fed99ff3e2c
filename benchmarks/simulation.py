"""A cluster without processes: Ray's calls answered at simulated times, and what the driver's code spends meanwhile.

Time is the machine's own, less the waits: when nothing is left to compute, the clock jumps to the next event. So the
pool's two threads take turns as they do in a run, and events that arrive while one computes are found together.
"""

import heapq
import itertools
import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

real_time_s = time.monotonic


class Meter:
    """CPU seconds of all threads by part of the work; what a part calls counts towards the inner part only."""

    def __init__(self) -> None:
        self._threads: list[dict[str, float]] = []
        self._local = threading.local()

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, counted towards ``part``."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return counted

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the body towards a part."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by part."""
        total: defaultdict[str, float] = defaultdict(float)
        for spent in self._threads:
            for part in list(spent):
                total[part] += spent.pop(part)
        return total

    def _switch(self, part: str | None) -> str | None:
        """Makes a part current in this thread; returns the one before."""
        local, now = self._local, time.thread_time()
        if not hasattr(local, "spent"):
            local.spent, local.part = defaultdict(float), None
            self._threads.append(local.spent)
        outer = local.part
        if outer is not None:
            local.spent[outer] += now - local.since
        local.part, local.since = part, now
        return outer


class Ref:
    """A call of a simulated actor. Its answer travels pickled, as Ray's do."""

    __slots__ = ("answer", "ended")

    def __init__(self) -> None:
        self.ended = False
        self.answer: bytes | Exception = b""


class Simulation:
    """Stands in for ``ray.wait``, ``ray.get``, ``ray.put`` and ``time.monotonic`` while it is entered."""

    def __init__(self, meter: Meter, latency_s: float) -> None:
        """``latency_s``: of every call that does not wait for something."""
        self._meter, self.latency_s = meter, latency_s
        self._skipped_s, self._num_ended = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._lock = threading.RLock()
        self._idle: set[int] = set()  # threads that wait, so that the clock may jump
        self._driver = threading.get_ident()
        self._patches = ExitStack()
        self.counts: Counter[str] = Counter()  # of Ray's calls, by what was called

    def __enter__(self) -> "Simulation":
        stands_in = {"wait": self._wait, "get": self._get, "put": self._put}
        self._patches.enter_context(mock.patch.multiple(ray, **stands_in))
        self._patches.enter_context(mock.patch.object(time, "monotonic", self.now_s))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()

    def now_s(self) -> float:
        return real_time_s() + self._skipped_s

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Schedules an event."""
        with self._lock:
            heapq.heappush(self._events, (self.now_s() + seconds, next(self._number), do))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """While the driver's thread waits for another."""
        self._idle.add(threading.get_ident())
        try:
            yield
        finally:
            self._idle.discard(threading.get_ident())

    def sleep(self, seconds: float) -> None:
        """The driver waits for something that is not simulated."""
        ended = threading.Event()
        self.after(seconds, ended.set)
        with self.idle():
            ended.wait()

    # Ray

    def call(self, method: str, args: tuple[Any, ...], serve: Callable[[Ref, tuple[Any, ...]], None]) -> Ref:
        """A call of an actor: pickles the arguments at the caller's expense."""
        self.counts[method] += 1
        sent = tuple(arg if isinstance(arg, Ref) else pickle.dumps(arg, protocol=5) for arg in args)
        with self._meter.part("simulation"), self._lock:
            ref = Ref()
            serve(ref, tuple(arg.answer if isinstance(arg, Ref) else pickle.loads(arg) for arg in sent))
            return ref

    def end(self, ref: Ref, answer: Any) -> None:
        """Ends a call; an exception is what it raised."""
        if not ref.ended:
            ref.answer = answer if isinstance(answer, Exception) else pickle.dumps(answer, protocol=5)
            ref.ended = True
            self._num_ended += 1

    def _put(self, value: Any) -> Ref:
        self.counts["put"] += 1
        ref = Ref()
        ref.answer, ref.ended = pickle.dumps(value, protocol=5), True
        return ref

    def _get(self, ref: Ref, *, timeout: float | None = None) -> Any:
        self.counts["get"] += 1
        if not ref.ended:
            raise GetTimeoutError
        if isinstance(ref.answer, ActorDiedError):
            raise ref.answer
        if isinstance(ref.answer, Exception):
            raise RayTaskError("call", "(the traceback)", ref.answer).as_instanceof_cause()
        return pickle.loads(ref.answer)

    def _wait(self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        with self._meter.part("simulation"):
            self.counts["wait"] += 1
            self.counts["waited for"] += len(refs)
            ends, seen, ready = self.now_s() + timeout, -1, []
            while True:
                self._catch_up()
                if self._num_ended != seen:
                    seen = self._num_ended
                    ready = list(itertools.islice((ref for ref in refs if ref.ended), num_returns))
                if len(ready) == num_returns or self.now_s() >= ends:
                    found = set(ready)
                    return ready, [ref for ref in refs if ref not in found]
                self._pass_time(ends)

    def _catch_up(self) -> None:
        """What has happened by now."""
        with self._lock:
            while self._events and self._events[0][0] <= self.now_s():
                heapq.heappop(self._events)[2]()

    def _pass_time(self, ends: float) -> None:
        """Jumps to the next event, or to ``ends``; in the pool's thread only if the driver waits too."""
        with self._lock:
            if threading.get_ident() == self._driver or self._driver in self._idle:
                until = min(ends, self._events[0][0]) if self._events else ends
                self._skipped_s += max(0.0, until - self.now_s())
                return
        time.sleep(0.001)


class Actor:
    """A handle whose methods answer after the latency with what ``answers`` holds, unless a subclass has its own."""

    def __init__(self, simulation: Simulation, **answers: Any) -> None:
        self._simulation, self._answers = simulation, answers
        self._dead = False
        self._unfinished: set[Ref] = set()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        serve = type(self).__dict__.get(f"serve_{method}")
        do = self._answer(method) if serve is None else serve.__get__(self)

        def remote(*args: Any) -> Ref:
            return self._simulation.call(method, args, lambda ref, given: self._begin(ref, do, given))

        return SimpleNamespace(remote=remote)

    def _answer(self, method: str) -> Callable[..., None]:
        def do(ref: Ref, *args: Any) -> None:
            answer = self._answers.get(method)
            self.reply(ref, answer(*args) if callable(answer) else answer, self._simulation.latency_s)

        return do

    def _begin(self, ref: Ref, do: Callable[..., None], given: tuple[Any, ...]) -> None:
        if self._dead:
            self._simulation.end(ref, ActorDiedError())
        else:
            self._unfinished.add(ref)
            do(ref, *given)

    def reply(self, ref: Ref, answer: Any, delay_s: float) -> None:
        """Ends a call after a while, unless the actor dies first."""

        def end() -> None:
            self._unfinished.discard(ref)
            self._simulation.end(ref, answer)

        self._simulation.after(delay_s, end)

    def die(self) -> None:
        """Its process is gone: unfinished calls and all later ones fail."""
        self._dead = True
        for ref in self._unfinished:
            self._simulation.end(ref, ActorDiedError())
        self._unfinished.clear()
