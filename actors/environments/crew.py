"""Which environment worker runs which episode, and what becomes of it. The caller holds the pool's lock.

An episode's turns are sampled by the rollout pool, one at a time. A rollout worker that dies costs a turn, which
another samples again from the same context. An environment worker that dies, or an environment that fails, costs the
episode: it begins anew, with a fresh state and the same seeds, at most ``environment.retries`` times.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import ray

from actors import stacks
from actors.environments.episode_loop import EpisodeReport, EpisodeTask
from actors.group import ActorGroup, Member, fetch
from actors.rollouts.engine import Completion, Request, request_key
from rlhf.batch import Episode, Prompt, Rollout
from rlhf.config import Config
from rlhf.environments.turns import TurnReply, TurnRequest
from rlhf.errors import ActorError, DeadlineError, EpisodeFailedError, RlhfError

COLLECT_WAIT_S = 1.0  # how long a collect call waits for something to report
MAX_LOSSES = 3  # of environment workers in a row, without a finished episode between them

Launch = Callable[[int], Any]
"""Creates the actor of this rank, without waiting for it."""


@dataclass
class EpisodeGroup:
    """A submitted group, and the episodes that have ended."""

    prompt: Prompt
    size: int
    greedy: bool
    logprobs: bool
    rollouts: dict[int, Rollout] = field(default_factory=dict)


@dataclass
class OpenEpisode:
    """One attempt at an episode."""

    group_id: int
    sample: int
    attempt: int = 0
    cached_since: int | None = None  # the weights' version that began its first turn, whose cache it keeps
    rank: int = -1  # of the environment worker that runs it; -1: it has failed for good, and none does
    home: int = -1  # the rollout worker that sampled its last turn
    cached_tokens: int = 0  # which that worker has seen
    turn_id: int | None = None  # of the turn that is being sampled

    @property
    def key(self) -> str:
        return f"{self.group_id}.{self.sample}.{self.attempt}"


@dataclass
class Turn:
    """A turn that the pool samples."""

    episode: OpenEpisode
    group: EpisodeGroup
    asked: TurnRequest

    def request(self, turn_id: int, sample: int) -> Request:
        """The request to a rollout worker."""
        return Request(
            request_key(turn_id, sample),
            self.group.prompt.id,
            self.asked.token_ids,
            self.episode.sample,
            self.group.greedy,
            self.group.logprobs,
            turn=self.asked.turn,
            max_tokens=self.asked.max_tokens,
            cached_since=self.episode.cached_since,
        )


class Turns(Protocol):
    """What the crew needs of the rollout pool."""

    def sample(self, turn: Turn) -> int:
        """Queues a turn; returns its id. Its completion comes back through ``Crew.answer``."""
        ...

    def cancel(self, turn_id: int) -> None:
        """Nobody wants this turn any more."""
        ...

    def finish(self, group_id: int, rollouts: list[Rollout]) -> None:
        """All episodes of a group have ended."""
        ...


@dataclass
class Process:
    """One environment worker's process and the calls in flight to it."""

    member: Member
    waiting_since: float  # for it to start, or to report
    starting: ray.ObjectRef | None = None
    collecting: ray.ObjectRef | None = None
    pending: set[ray.ObjectRef] = field(default_factory=set)
    episodes: dict[str, OpenEpisode] = field(default_factory=dict)
    replies: list[tuple[str, TurnReply]] = field(default_factory=list)  # not sent yet

    def refs(self) -> list[ray.ObjectRef]:
        """The calls in flight."""
        return [*filter(None, (self.starting, self.collecting)), *self.pending]


class Crew:
    """The environment workers of a run, and the episodes they run."""

    def __init__(self, config: Config, group: ActorGroup, launch: Launch, note: Callable[[str], None]) -> None:
        """``group``: the workers, started; a replaced one changes there too. ``note`` reports what happens to them."""
        assert config.environment is not None
        self._settings, self._timeouts = config.environment, config.timeouts
        self._group, self._launch, self._note = group, launch, note
        self._processes = {member.rank: Process(member, time.monotonic()) for member in group.members}
        self._groups: dict[int, EpisodeGroup] = {}
        self._waiting: deque[OpenEpisode] = deque()
        self._open: dict[str, OpenEpisode] = {}
        self._next_group = 0
        self._losses = 0  # of workers in a row
        self.num_replaced = self.num_retried = 0
        self._turns: Turns

    def connect(self, turns: Turns) -> None:
        """Begins to listen to the workers. ``turns`` samples."""
        self._turns = turns
        for rank in self._processes:
            self._collect(rank)

    # Groups

    def submit(
        self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool, with_logprobs: Collection[int]
    ) -> list[int]:
        """Queues a group of episodes per prompt; returns the groups' ids."""
        ids = list(range(self._next_group, self._next_group + len(prompts)))
        self._next_group += len(prompts)
        for position, (group_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            self._groups[group_id] = EpisodeGroup(prompt, group_size, greedy, position in with_logprobs)
            self._waiting += [OpenEpisode(group_id, sample) for sample in range(group_size)]
        return ids

    def open(self, *, most: int) -> None:
        """Begins episodes that wait, oldest first, each where fewest run, until ``most`` are open."""
        tasks: dict[int, list[EpisodeTask]] = {}
        up = [process for process in self._processes.values() if process.starting is None]
        while self._waiting and len(self._open) < most:
            process = min(up, key=lambda process: len(process.episodes), default=None)
            if process is None or len(process.episodes) >= self._settings.episodes_per_worker:
                break
            episode = self._waiting.popleft()
            episode.rank = process.member.rank
            process.episodes[episode.key] = self._open[episode.key] = episode
            task = EpisodeTask(episode.key, self._groups[episode.group_id].prompt, episode.sample)
            tasks.setdefault(episode.rank, []).append(task)
        for rank, batch in tasks.items():
            self._send(rank, "open", batch)

    def answer(self, turn: Turn, worker: int, completion: Completion) -> None:
        """Takes a turn that rollout worker ``worker`` sampled; ``flush`` sends it."""
        episode = turn.episode
        episode.turn_id = None
        episode.home, episode.cached_tokens = worker, len(turn.asked.token_ids) + len(completion.token_ids)
        if episode.cached_since is None:
            episode.cached_since = int(completion.versions[0])
        if episode.rank < 0:
            self._end(episode, failed_rollout(turn, completion))
        else:
            reply = TurnReply(completion.token_ids, completion.versions, completion.finish_reason, completion.logprobs)
            self._processes[episode.rank].replies.append((episode.key, reply))

    def flush(self) -> None:
        """Sends the replies that have come, to each worker in one call."""
        for rank, process in self._processes.items():
            if process.replies:
                replies, process.replies = process.replies, []
                self._send(rank, "answer", replies)

    def metrics(self) -> dict[str, float]:
        """What has gone wrong since the run began."""
        return {
            "environments/replaced_workers": float(self.num_replaced),
            "environments/retried_episodes": float(self.num_retried),
        }

    def describe(self) -> str:
        """How many episodes run and wait."""
        return f"{len(self._open)} episodes open, {len(self._waiting)} waiting"

    def _end(self, episode: OpenEpisode, rollout: Rollout) -> None:
        self._forget(episode)
        group = self._groups[episode.group_id]
        group.rollouts[episode.sample] = replace(rollout, prompt=group.prompt)
        if len(group.rollouts) == group.size:
            del self._groups[episode.group_id]
            self._turns.finish(episode.group_id, [group.rollouts[i] for i in range(group.size)])

    def _forget(self, episode: OpenEpisode) -> None:
        """This attempt is over, and what is being sampled for it is not needed."""
        del self._open[episode.key]
        if episode.rank >= 0:
            del self._processes[episode.rank].episodes[episode.key]
        if episode.turn_id is not None:
            self._turns.cancel(episode.turn_id)

    def _again(self, episode: OpenEpisode, why: str) -> None:
        """An attempt has failed: another begins, or the episode gets no reward. Raises EpisodeFailedError if
        ``environment.on_failure`` says so."""
        self._forget(episode)
        if episode.attempt < self._settings.retries:
            self.num_retried += 1
            self._waiting.appendleft(OpenEpisode(episode.group_id, episode.sample, episode.attempt + 1))
            return
        group = self._groups[episode.group_id]
        said = f"prompt {group.prompt.id}, episode {episode.sample} failed {episode.attempt + 1} times; at last: {why}"
        if self._settings.on_failure == "fail":
            raise EpisodeFailedError(f"{said}; with environment.on_failure=skip the run would go on without it")
        self._note(f"environments: {said}")
        # A rollout has a token at least, sampled like any other; without a reward, it is not learnt from.
        lost = replace(episode, rank=-1, turn_id=None)
        self._open[lost.key] = lost
        lost.turn_id = self._turns.sample(Turn(lost, group, TurnRequest(group.prompt.token_ids, 1, 0)))

    # Listening

    def refs(self) -> dict[ray.ObjectRef, int]:
        """Every call in flight, and the rank of the worker it went to."""
        return {ref: rank for rank, process in self._processes.items() for ref in process.refs()}

    def hear(self, rank: int, ref: ray.ObjectRef) -> None:
        """Handles a call that has ended."""
        process = self._processes[rank]
        try:
            if ref == process.starting:
                self._started(process, fetch(ref, process.member, "starting"))
            elif ref == process.collecting:
                self._reported(process, fetch(ref, process.member, "running episodes"))
            elif ref in process.pending:
                process.pending.remove(ref)
                fetch(ref, process.member, "taking episodes")
        except EpisodeFailedError:
            raise
        except RlhfError as error:
            self._replace(process, error)

    def look(self) -> None:
        """Replaces workers that have been silent for too long, as if they had died."""
        now = time.monotonic()
        for process in list(self._processes.values()):
            key = "start_s" if process.starting is not None else "worker_silence_s"
            limit_s = getattr(self._timeouts, key)
            if now - process.waiting_since > limit_s:
                where = stacks.kept([process.member])
                late = f"{process.member}: silent for {limit_s:g} s (timeouts.{key}); {where}"
                self._replace(process, DeadlineError(late))

    def _started(self, process: Process, node: str) -> None:
        rank = process.member.rank
        process.member = self._group.members[rank] = replace(process.member, node=node)
        process.starting, process.waiting_since = None, time.monotonic()
        self._collect(rank)

    def _reported(self, process: Process, report: EpisodeReport) -> None:
        if report.silent_s < self._timeouts.worker_silence_s:
            process.waiting_since = time.monotonic()
        self._collect(process.member.rank)
        for key, asked in report.turns:
            if episode := self._open.get(key):
                turn = Turn(episode, self._groups[episode.group_id], asked)
                episode.turn_id = self._turns.sample(turn)
        for key, rollout in report.finished:
            self._losses = 0
            if episode := self._open.get(key):
                self._end(episode, rollout)
        for key, why in report.failed:
            if episode := self._open.get(key):
                self._again(episode, why)

    def _collect(self, rank: int) -> None:
        process = self._processes[rank]
        wait_s = min(COLLECT_WAIT_S, self._timeouts.worker_silence_s / 4)
        process.collecting = process.member.handle.collect.remote(wait_s)

    def _send(self, rank: int, method: str, batch: list[Any]) -> None:
        """A call that only has to succeed."""
        process = self._processes[rank]
        process.pending.add(getattr(process.member.handle, method).remote(batch))

    def _replace(self, process: Process, error: RlhfError) -> None:
        """Its episodes begin anew, on others or on the worker that takes its place.

        Raises ActorError if one after the other is lost and no episode ends.
        """
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise ActorError(
                f"environments: {self._losses} workers in a row were lost, and no episode ended; the last: {error}"
            )
        self._note(f"environments: replacing a worker: {str(error).splitlines()[0]}")
        self.num_replaced += 1
        rank = process.member.rank
        ray.kill(process.member.handle)
        handle = self._launch(rank)
        member = self._group.members[rank] = replace(process.member, handle=handle, node="?")
        lost = list(process.episodes.values())
        self._processes[rank] = Process(
            member, time.monotonic(), starting=handle.start.remote(), episodes=process.episodes
        )
        for episode in reversed(lost):  # each goes to the head of those that wait
            self._again(episode, str(error).splitlines()[0])


def failed_rollout(turn: Turn, completion: Completion) -> Rollout:
    """What stands in the batch for an episode that failed: what the model would have begun to say, without a reward."""
    num_tokens = len(completion.token_ids)
    episode = Episode(
        sampled=np.ones(num_tokens, dtype=bool),
        turn_lengths=[num_tokens],
        turn_rewards=[0.0],
        reward=float("nan"),
        status="failed",
        messages=[],
        notes={},
    )
    return Rollout(
        turn.group.prompt,
        turn.episode.sample,
        completion.token_ids,
        completion.versions,
        completion.finish_reason,
        completion.logprobs,
        episode,
    )
