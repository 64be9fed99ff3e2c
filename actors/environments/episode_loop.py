"""Runs many episodes at once on an event loop in a thread of its own: turns to sample go out, replies come in."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from rlhf.batch import Prompt, Rollout
from rlhf.environments.turns import Sampler, TurnReply, TurnRequest
from rlhf.errors import EpisodeFailedError

BEAT_S = 0.25  # how often a loop that is free to run says so

RunEpisode = Callable[[Prompt, int, Sampler], Awaitable[Rollout]]
"""Runs an episode of a prompt for a sample index. Raises EpisodeFailedError."""


@dataclass(frozen=True)
class EpisodeTask:
    """An episode to run. ``key`` names it wherever it is mentioned."""

    key: str
    prompt: Prompt
    sample_index: int


@dataclass
class EpisodeReport:
    """What has happened since the last report. A rollout comes without its prompt, which the driver has."""

    turns: list[tuple[str, TurnRequest]] = field(default_factory=list)
    finished: list[tuple[str, Rollout]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # and why
    silent_s: float = 0.0  # since the loop last ran; large if an environment's coroutine never awaits anything


class EpisodeLoop:
    """The public methods may be called from any thread."""

    def __init__(self, run_episode: RunEpisode) -> None:
        self._run_episode = run_episode
        self._loop = asyncio.new_event_loop()
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._replies: dict[str, asyncio.Future[TurnReply]] = {}  # that episodes wait for
        self._report, self._lock = EpisodeReport(), threading.Lock()
        self._worth_reporting = threading.Event()
        self._failure: BaseException | None = None
        self._beat_s = time.monotonic()
        threading.Thread(target=self._run, name="episode-loop", daemon=True).start()

    def open(self, tasks: Sequence[EpisodeTask]) -> None:
        """Begins episodes."""
        self._loop.call_soon_threadsafe(self._begin, tasks)

    def answer(self, replies: Sequence[tuple[str, TurnReply]]) -> None:
        """Brings the replies that episodes wait for; one that has ended meanwhile needs none."""
        self._loop.call_soon_threadsafe(self._deliver, replies)

    def drop(self, keys: Sequence[str]) -> None:
        """Ends episodes that nobody wants any more, without a word of them in a report."""
        self._loop.call_soon_threadsafe(self._cancel, keys)

    def collect(self, wait_s: float) -> EpisodeReport:
        """Waits up to ``wait_s`` for something to report. Raises an error of ours that an episode met."""
        self._worth_reporting.wait(wait_s)
        self._worth_reporting.clear()
        if self._failure is not None:
            raise self._failure
        with self._lock:
            report, self._report = self._report, EpisodeReport()
        return replace(report, silent_s=time.monotonic() - self._beat_s)

    # In the loop's thread

    def _run(self) -> None:
        self._loop.call_soon(self._beat)
        self._loop.run_forever()

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    def _begin(self, tasks: Sequence[EpisodeTask]) -> None:
        for task in tasks:
            self._episodes[task.key] = self._loop.create_task(self._episode(task))

    def _deliver(self, replies: Sequence[tuple[str, TurnReply]]) -> None:
        for key, reply in replies:
            if key in self._replies and not self._replies[key].done():
                self._replies[key].set_result(reply)

    def _cancel(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self._episodes:
                self._episodes[key].cancel()

    async def _episode(self, task: EpisodeTask) -> None:
        key = task.key
        try:
            rollout = await self._run_episode(task.prompt, task.sample_index, _Turns(self, key))
        except EpisodeFailedError as error:
            why = str(error)
            self._tell(lambda report: report.failed.append((key, why)))
        except asyncio.CancelledError:
            pass  # dropped
        except BaseException as error:
            self._failure = error
            self._worth_reporting.set()
        else:
            bare = replace(rollout, prompt=replace(task.prompt, token_ids=[], text="", messages=None, columns={}))
            self._tell(lambda report: report.finished.append((key, bare)))
        finally:
            del self._episodes[key]

    async def _sample(self, key: str, request: TurnRequest) -> TurnReply:
        assert key not in self._replies, "an episode samples one turn at a time"
        reply = self._replies[key] = self._loop.create_future()
        self._tell(lambda report: report.turns.append((key, request)))
        try:
            return await reply
        finally:
            del self._replies[key]

    def _tell(self, note: Callable[[EpisodeReport], None]) -> None:
        with self._lock:
            note(self._report)
        self._worth_reporting.set()


@dataclass(frozen=True)
class _Turns:
    """Implements ``rlhf.environments.turns.Sampler`` for one episode."""

    loop: EpisodeLoop
    key: str

    async def sample(self, request: TurnRequest) -> TurnReply:
        return await self.loop._sample(self.key, request)
