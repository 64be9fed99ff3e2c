"""The rollout pool's state machine: which worker may sample what. Pure: no Ray, no clock, no thread of its own.

    starting -> syncing -> live <-> syncing (while weights are published)
                             |-> draining -> dead
    any of them -> quarantined -> dead

A group of completions is queued, held by a worker that may serve, or finished; never two of these. Only a live worker
takes new groups, and a live worker has the pool's weight version. A draining one works on what it holds until the next
publish.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

import numpy as np

PACE_MEMORY = 0.7  # weight of the past in a worker's measured pace
SLOW_FACTOR = 4.0  # an idle worker takes over from one that is slower than it by this factor
LENGTH_MEMORY = 0.98  # weight of the past in the expected length of a completion


class State(StrEnum):
    STARTING = "starting"  # its process is not up yet
    SYNCING = "syncing"  # up, but without the current weights
    LIVE = "live"
    DRAINING = "draining"  # finishes what it holds, takes nothing new
    QUARANTINED = "quarantined"  # failed; its process is being ended
    DEAD = "dead"


ALLOWED: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SYNCING, State.QUARANTINED, State.DEAD}),
    State.SYNCING: frozenset({State.LIVE, State.QUARANTINED, State.DEAD}),
    State.LIVE: frozenset({State.SYNCING, State.DRAINING, State.QUARANTINED}),
    State.DRAINING: frozenset({State.DEAD, State.QUARANTINED}),
    State.QUARANTINED: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}


@dataclass
class Worker:
    """One rollout worker as the pool sees it."""

    id: int
    kind: str
    capacity: int  # samples it may hold at once
    state: State = State.STARTING
    version: int = -1  # of its weights; -1: none yet
    pace: float | None = None  # tokens per second per running sample, measured while it had work
    groups: set[int] = field(default_factory=set)
    samples: int = 0  # of its groups, that have not come back
    prompt_tokens: int = 0  # of its groups


@dataclass
class Group:
    """A group of completions of one prompt."""

    id: int
    prompt_id: int
    prompt_tokens: int
    num_samples: int
    missing: set[int]  # sample indices that have not come back
    holders: set[int] = field(default_factory=set)  # workers that sample it, or did when it finished: at most two
    home: int = -1  # the worker that has the first ``cached_tokens`` of its prompt; -1: none
    cached_tokens: int = 0
    continues: bool = False  # an episode that has begun, which goes before those that have not
    losses: int = 0  # holders in a row that failed before a sample came back, each started after the previous failure
    counted_until: int = 0  # workers with lower ids existed at the last loss: their failures may have the same cause


@dataclass(frozen=True)
class Assignment:
    """Samples of a group to be sent to a worker."""

    worker: int
    group: int
    samples: tuple[int, ...]


class Scheduler:
    """Workers, groups, and who does what."""

    def __init__(self, *, expected_completion_tokens: float) -> None:
        """``expected_completion_tokens``: a completion's expected length before any has been seen."""
        self.version = -1  # of the weights that live workers serve; -1: nothing published yet
        self.workers: dict[int, Worker] = {}
        self.groups: dict[int, Group] = {}
        self.queue: deque[int] = deque()
        self.completion_tokens = expected_completion_tokens
        self._next_worker = self._next_group = 0

    # Workers

    @property
    def next_worker(self) -> int:
        """The id that the next worker will have: all that there are or were have lower ones."""
        return self._next_worker

    def spawn(self, kind: str, capacity: int) -> Worker:
        """A new worker, starting."""
        worker = Worker(self._next_worker, kind, capacity)
        self._next_worker += 1
        self.workers[worker.id] = worker
        return worker

    def started(self, worker_id: int) -> None:
        """Its process is up; it needs weights."""
        self._move(worker_id, State.SYNCING)

    def suspend(self, worker_id: int) -> None:
        """A live worker is about to get new weights. It keeps its groups and samples nothing meanwhile."""
        self._move(worker_id, State.SYNCING)

    def advance(self, version: int) -> None:
        """Makes ``version`` current. No worker may still serve another: live ones have been suspended and draining ones
        retired."""
        assert not self.serving(), "a worker would serve an old weight version"
        assert version >= self.version, f"version {version} is older than {self.version}"
        self.version = version

    def admit(self, worker_id: int, version: int) -> None:
        """Its weights have been verified: it may serve."""
        assert version == self.version, f"worker {worker_id} has version {version}, the pool {self.version}"
        self.workers[worker_id].version = version
        self._move(worker_id, State.LIVE)

    def drain(self, worker_id: int) -> None:
        """Gives it no new groups. It is dead at once if it holds none."""
        worker = self.workers[worker_id]
        if worker.state is State.LIVE and worker.groups:
            self._move(worker_id, State.DRAINING)
        else:
            self.retire(worker_id)

    def retire(self, worker_id: int) -> None:
        """Removes a healthy worker, whatever it holds."""
        self._give_back(worker_id)
        if self.workers[worker_id].state is State.LIVE:
            self._move(worker_id, State.DRAINING)
        self._move(worker_id, State.DEAD)

    def fail(self, worker_id: int) -> Group | None:
        """It died, stopped answering or received wrong weights: others do its unfinished work.

        Returns its group with the most losses, which may be what crashes workers; None if it held none.
        """
        held = [self.groups[i] for i in sorted(self.workers[worker_id].groups)]
        for group in held:
            if worker_id >= group.counted_until:
                group.losses += 1
                group.counted_until = self._next_worker
        self._give_back(worker_id)
        self._move(worker_id, State.QUARANTINED)
        return max(held, key=lambda group: group.losses, default=None)

    def mark_dead(self, worker_id: int) -> None:
        """A quarantined worker's process is gone and its place released."""
        self._move(worker_id, State.DEAD)

    def forget_dead(self) -> list[int]:
        """Drops dead workers; returns their ids."""
        dead = [w.id for w in self.workers.values() if w.state is State.DEAD]
        for worker_id in dead:
            del self.workers[worker_id]
        return dead

    def in_state(self, *states: State) -> list[Worker]:
        """Workers in one of these states."""
        return [w for w in self.workers.values() if w.state in states]

    def serving(self) -> list[Worker]:
        """Workers that sample right now."""
        return self.in_state(State.LIVE, State.DRAINING)

    def emptied(self) -> list[int]:
        """Marks draining workers with nothing left to do as dead; returns their ids."""
        done = [w.id for w in self.in_state(State.DRAINING) if not w.groups]
        for worker_id in done:
            self._move(worker_id, State.DEAD)
        return done

    def active(self, kind: str) -> list[Worker]:
        """Workers of a kind that serve or will."""
        return [w for w in self.in_state(State.STARTING, State.SYNCING, State.LIVE) if w.kind == kind]

    def _move(self, worker_id: int, state: State) -> None:
        worker = self.workers[worker_id]
        assert state in ALLOWED[worker.state], f"worker {worker_id}: {worker.state} -> {state}"
        worker.state = state

    def _give_back(self, worker_id: int) -> None:
        """Puts groups that no other worker holds at the head of the queue, oldest first."""
        worker = self.workers[worker_id]
        for group_id in sorted(worker.groups, reverse=True):
            group = self.groups[group_id]
            group.holders.discard(worker_id)
            self._release(worker, group)
            if not group.holders:
                self.queue.appendleft(group_id)

    # Groups

    def enqueue(self, *, prompt_id: int, prompt_tokens: int, num_samples: int) -> int:
        """Queues a new group; returns its id."""
        group = self._new_group(prompt_id, prompt_tokens, num_samples)
        self.queue.append(group.id)
        return group.id

    def enqueue_turn(self, *, prompt_id: int, prompt_tokens: int, home: int, cached_tokens: int) -> int:
        """Queues the next turn of an episode behind other such turns; returns its id as a group of one.

        Worker ``home`` has ``cached_tokens`` of its ``prompt_tokens``, and gets it unless another would finish it
        sooner all the same.
        """
        group = self._new_group(prompt_id, prompt_tokens, 1)
        group.home, group.cached_tokens, group.continues = home, cached_tokens, True
        waiting = takewhile(lambda i: self.groups[i].continues, self.queue)
        self.queue.insert(sum(1 for _ in waiting), group.id)
        return group.id

    def _new_group(self, prompt_id: int, prompt_tokens: int, num_samples: int) -> Group:
        group = Group(self._next_group, prompt_id, prompt_tokens, num_samples, set(range(num_samples)))
        self._next_group += 1
        self.groups[group.id] = group
        return group

    def cancel(self, group_id: int) -> Group | None:
        """Ends a group that nobody wants any more; returns it with its holders, None if it has ended."""
        if group_id not in self.groups:
            return None
        group = self.groups[group_id]
        self._drop(group_id)
        return group

    def dispatch(self) -> list[Assignment]:
        """Hands out queued groups in order, each to the live worker with room that would finish it soonest."""
        assignments: list[Assignment] = []
        live = self.in_state(State.LIVE) if self.queue else []
        if not any(self._has_room(w, self.groups[self.queue[0]]) for w in live):
            return assignments
        # arrays, because there may be a thousand workers for each of tens of thousands of groups
        pace = np.array(self._expected_paces(live))
        tokens = np.array([self.outstanding_tokens(w) for w in live])
        room = np.array([w.capacity - w.samples if w.groups else np.inf for w in live])
        ids = np.array([w.id for w in live])
        while self.queue:
            group = self.groups[self.queue[0]]
            ahead = tokens + self._cost(group) - group.cached_tokens * (ids == group.home)
            finish = np.where(room >= len(group.missing), ahead / pace, np.inf)
            best = int(finish.argmin())  # the first of those that are equal
            if finish[best] == np.inf:
                break
            self.queue.popleft()
            worker = live[best]
            assignments.append(self._assign(worker, group))
            tokens[best], room[best] = self.outstanding_tokens(worker), worker.capacity - worker.samples
        return assignments

    def take_over(self) -> list[Assignment]:
        """Gives idle workers what much slower ones hold, if the queue is empty.

        Only the worker's pace counts, never how long a completion has become: rerunning long ones and keeping the first
        to finish would favour short ones.
        """
        assignments: list[Assignment] = []
        if self.queue:
            return assignments
        idle = [(w.pace, w) for w in self.in_state(State.LIVE) if not w.groups and w.pace is not None]
        fastest = max((pace for pace, _ in idle), default=0.0)
        slow = [(w.pace, w) for w in self.serving() if w.groups and w.pace is not None]
        held = [(i, pace) for pace, w in slow if pace * SLOW_FACTOR < fastest for i in w.groups]
        alone = sorted((i, pace) for i, pace in held if len(self.groups[i].holders) == 1)
        for pace, worker in idle if alone else []:
            for group_id, slow_pace in alone:
                group = self.groups[group_id]
                if len(group.holders) == 1 and slow_pace * SLOW_FACTOR < pace and self._has_room(worker, group):
                    assignments.append(self._assign(worker, group))
        return assignments

    def sample_done(self, group_id: int, sample: int, num_tokens: int) -> bool:
        """Takes a completion that came back. False if it is no longer wanted (another worker was faster)."""
        group = self.groups.get(group_id)
        if group is None or sample not in group.missing:
            return False
        group.missing.remove(sample)
        for worker_id in group.holders:
            self.workers[worker_id].samples -= 1
        group.losses = 0
        self.completion_tokens = LENGTH_MEMORY * self.completion_tokens + (1 - LENGTH_MEMORY) * num_tokens
        if not group.missing:
            self._drop(group_id)
        return True

    def _drop(self, group_id: int) -> None:
        """Ends a group, even a queued one: its last sample may come from a worker presumed lost."""
        group = self.groups.pop(group_id)
        for worker_id in group.holders:
            self._release(self.workers[worker_id], group)
        if not group.holders:
            self.queue.remove(group_id)

    def measured(self, worker_id: int, pace: float) -> None:
        """``pace``: tokens per second per sample over a period in which the worker had samples to run.

        Per sample, because a worker with little to do generates few tokens without being slow.
        """
        worker = self.workers[worker_id]
        worker.pace = pace if worker.pace is None else PACE_MEMORY * worker.pace + (1 - PACE_MEMORY) * pace

    def outstanding_tokens(self, worker: Worker) -> float:
        """How much a worker is expected to have left to do."""
        return worker.prompt_tokens + worker.samples * self.completion_tokens

    def _cost(self, group: Group) -> float:
        """Tokens: the prompt once, since its cache is shared, and the completions."""
        return group.prompt_tokens + len(group.missing) * self.completion_tokens

    def _has_room(self, worker: Worker, group: Group) -> bool:
        """Whether a group fits in addition to what the worker holds; an empty worker takes any."""
        return not worker.groups or worker.samples + len(group.missing) <= worker.capacity

    def _expected_paces(self, workers: Sequence[Worker]) -> list[float]:
        """Each worker's: measured; else the mean of its kind, else of all, else 1."""
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for worker in self.workers.values():
            if worker.pace is not None:
                by_kind[worker.kind].append(worker.pace)
        of_kind = {kind: sum(paces) / len(paces) for kind, paces in by_kind.items()}
        known = [pace for paces in by_kind.values() for pace in paces]
        of_all = sum(known) / len(known) if known else 1.0
        return [max(of_kind.get(w.kind, of_all) if w.pace is None else w.pace, 1e-6) for w in workers]

    def _assign(self, worker: Worker, group: Group) -> Assignment:
        assert worker.state is State.LIVE and worker.version == self.version
        worker.groups.add(group.id)
        worker.samples += len(group.missing)
        worker.prompt_tokens += group.prompt_tokens
        group.holders.add(worker.id)
        return Assignment(worker.id, group.id, tuple(sorted(group.missing)))

    @staticmethod
    def _release(worker: Worker, group: Group) -> None:
        """The worker no longer holds the group."""
        worker.groups.discard(group.id)
        worker.samples -= len(group.missing)
        worker.prompt_tokens -= group.prompt_tokens
