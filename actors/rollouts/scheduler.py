"""The rollout pool's state machine: which worker may sample what. Pure: no Ray, no clock, no thread of its own.

    starting -> syncing -> live <-> syncing (while weights are published)
                             |-> draining -> dead
    any of them -> quarantined -> dead

A task is one group of completions. It waits in the queue, or is held by a worker that may serve, or is finished; never
two of these. Only a live worker takes new tasks, and a live worker has the fleet's weight version. A draining one
finishes what it holds, and loses it at the next publish.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

PACE_MEMORY = 0.7  # weight of the past in a worker's measured pace
SLOW_FACTOR = 4.0  # an idle worker takes over from one that is slower than it by this factor
LENGTH_MEMORY = 0.98  # weight of the past in the expected length of a completion


class State(StrEnum):
    STARTING = "starting"  # its process comes up
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
    kind: str  # its worker class
    capacity: int  # samples it may hold at once
    state: State = State.STARTING
    version: int = -1  # of its weights; -1: none yet
    pace: float | None = None  # tokens per second and running sample, measured while it had work
    tasks: set[int] = field(default_factory=set)


@dataclass
class Task:
    """A group of completions of one prompt."""

    id: int
    prompt_id: int
    prompt_tokens: int
    missing: set[int]  # sample indices that have not come back
    holders: set[int] = field(default_factory=set)  # workers that sample it: one, or two where the first is slow
    losses: int = 0  # holders in a row that failed before any of its samples came back, each started after the last
    counted_until: int = 0  # ids of workers that were there when a loss was counted: theirs may have the same cause


@dataclass(frozen=True)
class Assignment:
    """Samples of a task to be sent to a worker."""

    worker: int
    task: int
    samples: tuple[int, ...]


class Fleet:
    """Workers, tasks, and who does what."""

    def __init__(self, *, expected_completion_tokens: float) -> None:
        """``expected_completion_tokens``: what a completion costs before any has been seen."""
        self.version = -1  # of the weights that live workers serve; -1: nothing published yet
        self.workers: dict[int, Worker] = {}
        self.tasks: dict[int, Task] = {}
        self.queue: deque[int] = deque()
        self.completion_tokens = expected_completion_tokens
        self._next_worker = self._next_task = 0

    # Workers

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
        """New weights are on their way to a live worker. It keeps its tasks, and samples nothing meanwhile."""
        self._move(worker_id, State.SYNCING)

    def advance(self, version: int) -> None:
        """``version`` becomes current. No worker may serve another any more: live ones were suspended before, and
        draining ones have been retired."""
        assert not self.serving(), "a worker would serve an old weight version"
        assert version >= self.version, f"version {version} is older than {self.version}"
        self.version = version

    def admit(self, worker_id: int, version: int) -> None:
        """Its weights have been verified: it may serve."""
        assert version == self.version, f"worker {worker_id} has version {version}, the fleet {self.version}"
        self.workers[worker_id].version = version
        self._move(worker_id, State.LIVE)

    def drain(self, worker_id: int) -> None:
        """No new tasks. Dead at once if it holds none."""
        worker = self.workers[worker_id]
        if worker.state is State.LIVE and worker.tasks:
            self._move(worker_id, State.DRAINING)
        else:
            self.retire(worker_id)

    def retire(self, worker_id: int) -> None:
        """Takes a healthy worker out, whatever it holds."""
        self._give_back(worker_id)
        if self.workers[worker_id].state is State.LIVE:
            self._move(worker_id, State.DRAINING)
        self._move(worker_id, State.DEAD)

    def fail(self, worker_id: int) -> Task | None:
        """It died, stopped answering or received wrong weights: others do its unfinished work.

        Returns the one of its tasks with the most losses: perhaps that is what workers cannot bear. None: it held none.
        """
        held = [self.tasks[t] for t in sorted(self.workers[worker_id].tasks)]
        for task in held:
            if worker_id >= task.counted_until:
                task.losses += 1
                task.counted_until = self._next_worker
        self._give_back(worker_id)
        self._move(worker_id, State.QUARANTINED)
        return max(held, key=lambda task: task.losses, default=None)

    def bury(self, worker_id: int) -> None:
        """A quarantined worker's process is gone and its place given back."""
        self._move(worker_id, State.DEAD)

    def forget_dead(self) -> list[int]:
        """Drops dead workers; their ids."""
        dead = [w.id for w in self.workers.values() if w.state is State.DEAD]
        for worker_id in dead:
            del self.workers[worker_id]
        return dead

    def in_state(self, *states: State) -> list[Worker]:
        return [w for w in self.workers.values() if w.state in states]

    def serving(self) -> list[Worker]:
        """Workers that sample right now."""
        return self.in_state(State.LIVE, State.DRAINING)

    def emptied(self) -> list[int]:
        """Draining workers with nothing left to do; they are dead now."""
        done = [w.id for w in self.in_state(State.DRAINING) if not w.tasks]
        for worker_id in done:
            self._move(worker_id, State.DEAD)
        return done

    def active(self, kind: str) -> list[Worker]:
        """Workers of a class that serve or will."""
        return [w for w in self.in_state(State.STARTING, State.SYNCING, State.LIVE) if w.kind == kind]

    def _move(self, worker_id: int, state: State) -> None:
        worker = self.workers[worker_id]
        assert state in ALLOWED[worker.state], f"worker {worker_id}: {worker.state} -> {state}"
        worker.state = state

    def _give_back(self, worker_id: int) -> None:
        """Tasks that nobody else holds go to the head of the queue, oldest first."""
        worker = self.workers[worker_id]
        for task_id in sorted(worker.tasks, reverse=True):
            task = self.tasks[task_id]
            task.holders.discard(worker_id)
            if not task.holders:
                self.queue.appendleft(task_id)
        worker.tasks.clear()

    # Tasks

    def enqueue(self, *, prompt_id: int, prompt_tokens: int, num_samples: int) -> int:
        """A new task; its id."""
        task = Task(self._next_task, prompt_id, prompt_tokens, set(range(num_samples)))
        self._next_task += 1
        self.tasks[task.id] = task
        self.queue.append(task.id)
        return task.id

    def dispatch(self) -> list[Assignment]:
        """Hands queued tasks, in order, to the live worker that would finish each soonest and has room for it."""
        assignments: list[Assignment] = []
        if not self.queue:
            return assignments
        live = self.in_state(State.LIVE)
        pace = {w.id: self._expected_pace(w) for w in live}
        samples = {w.id: self.outstanding_samples(w) for w in live}  # summed once: there may be thousands of tasks
        tokens = {w.id: self.outstanding_tokens(w) for w in live}
        while self.queue:
            task = self.tasks[self.queue[0]]
            roomy = [w for w in live if self._has_room(w, samples[w.id], task)]
            if not roomy:
                break
            self.queue.popleft()
            cost = self._cost(task)
            finish_s = {w.id: (tokens[w.id] + cost) / pace[w.id] for w in roomy}  # up to a factor that all share
            worker = min(roomy, key=lambda w: (finish_s[w.id], w.id))
            samples[worker.id] += len(task.missing)
            tokens[worker.id] += cost
            assignments.append(self._assign(worker, task))
        return assignments

    def take_over(self) -> list[Assignment]:
        """Gives idle workers what much slower ones hold, once the queue is empty.

        Only the worker's pace counts, never how long a completion has become: to run long ones a second time and keep
        the first to finish would prefer short ones.
        """
        assignments: list[Assignment] = []
        if self.queue:
            return assignments
        for idle in self.in_state(State.LIVE):
            if idle.tasks or idle.pace is None:
                continue
            slow = [w for w in self.serving() if w.tasks and w.pace is not None and w.pace * SLOW_FACTOR < idle.pace]
            held = [self.tasks[t] for w in slow for t in w.tasks if len(self.tasks[t].holders) == 1]
            for task in sorted(held, key=lambda t: t.id):
                if self._has_room(idle, self.outstanding_samples(idle), task):
                    assignments.append(self._assign(idle, task))
        return assignments

    def sample_done(self, task_id: int, sample: int, num_tokens: int) -> bool:
        """A completion came back. False: it is not wanted any more (another worker was faster)."""
        task = self.tasks.get(task_id)
        if task is None or sample not in task.missing:
            return False
        task.missing.remove(sample)
        task.losses = 0
        self.completion_tokens = LENGTH_MEMORY * self.completion_tokens + (1 - LENGTH_MEMORY) * num_tokens
        if not task.missing:
            self._drop(task_id)
        return True

    def _drop(self, task_id: int) -> None:
        """Ends a task, wherever it is: it may be queued again when the last sample comes from a worker thought lost."""
        task = self.tasks.pop(task_id)
        for worker_id in task.holders:
            self.workers[worker_id].tasks.discard(task_id)
        if not task.holders:
            self.queue.remove(task_id)

    def measured(self, worker_id: int, pace: float) -> None:
        """Tokens per second and sample over a stretch in which the worker had samples to run.

        Per sample, because a worker with little to do makes few tokens without being slow.
        """
        worker = self.workers[worker_id]
        worker.pace = pace if worker.pace is None else PACE_MEMORY * worker.pace + (1 - PACE_MEMORY) * pace

    def outstanding_tokens(self, worker: Worker) -> float:
        """What a worker is expected to have left to do."""
        return sum(self._cost(self.tasks[t]) for t in worker.tasks)

    def outstanding_samples(self, worker: Worker) -> int:
        return sum(len(self.tasks[t].missing) for t in worker.tasks)

    def _cost(self, task: Task) -> float:
        """Tokens: the prompt once, for its cache is shared, and the completions."""
        return task.prompt_tokens + len(task.missing) * self.completion_tokens

    def _has_room(self, worker: Worker, samples: int, task: Task) -> bool:
        """For a task beside the ``samples`` that the worker holds; an empty one takes any, however large."""
        return not worker.tasks or samples + len(task.missing) <= worker.capacity

    def _expected_pace(self, worker: Worker) -> float:
        """Measured; else the mean of its class, else of all, else 1."""
        known = [w for w in self.workers.values() if w.pace is not None]
        like = [worker] if worker.pace is not None else [w for w in known if w.kind == worker.kind] or known
        return max(sum(w.pace or 0.0 for w in like) / len(like), 1e-6) if like else 1.0

    def _assign(self, worker: Worker, task: Task) -> Assignment:
        assert worker.state is State.LIVE and worker.version == self.version
        worker.tasks.add(task.id)
        task.holders.add(worker.id)
        return Assignment(worker.id, task.id, tuple(sorted(task.missing)))
