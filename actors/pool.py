"""The rollout pool: an elastic set of vLLM workers behind one stream of groups.

The rules are in ``rlhf.fleet``; this is its hands and ears. One thread listens to all workers, replaces those that fail,
and starts and ends others until there are as many as wanted; the driver's calls and that thread take turns under one
lock. Only two moments touch the learner: ``publish``, and bringing new workers up to date while the driver waits for
groups - in both of them it is idle.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.control import RunControl
from actors.group import ActorGroup, Deadline, Member, fetch
from actors.rollout import Report, Request
from actors.weight_sync import Transport, publish
from actors.worker_factory import WorkerFactory
from rlhf.autoscale import Autoscaler, StepLoad
from rlhf.batch import Prompt, Rollout
from rlhf.config import DEFAULT_KIND, Config
from rlhf.errors import ActorError, DeadlineError, RlhfError
from rlhf.fleet import Assignment, Fleet, State, Worker

COLLECT_WAIT_S = 1.0  # how long a worker holds an empty-handed collect call
LISTEN_S = 0.2  # how long the listening thread waits at most before it looks around
MAX_BACKOFF_S = 60.0  # between attempts to start a worker
PACE_OVER_S = 2.0  # a worker's pace is measured over at least so long


@dataclass
class Process:
    """The process behind a worker of the fleet."""

    member: Member
    starting: ray.ObjectRef | None
    waiting_since: float  # for what it owes: to start, or to report
    collecting: ray.ObjectRef | None = None
    pending: set[ray.ObjectRef] = field(default_factory=set)  # submissions not yet acknowledged
    requests: dict[str, tuple[int, int]] = field(default_factory=dict)  # request key -> (task, sample)
    has_lived: bool = False
    counted_tokens: int = 0
    counted_s: float = 0.0
    sample_s: float = 0.0  # running samples x seconds since then


@dataclass
class GroupInProgress:
    """A submitted group and the completions that have come back."""

    prompt: Prompt
    greedy: bool
    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class RolloutPool:
    """Implements ``rlhf.roles.Rollouts``."""

    def __init__(
        self,
        config: Config,
        factory: WorkerFactory,
        control: RunControl,
        *,
        shares_gpus: bool,
        note: Callable[[str], None],
    ) -> None:
        """``shares_gpus``: the workers sleep while the learner works. ``note`` tells the user what happens to them."""
        self._factory, self._control, self._note = factory, control, note
        self._settings, self._timeouts = config.rollout, config.timeouts
        self._shares_gpus, self._asleep = shares_gpus, False
        self._fleet = Fleet(expected_completion_tokens=config.rollout.max_completion_tokens)
        self._targets = {kind: settings.num_workers for kind, (settings, _) in config.rollout.kinds().items()}
        self._autoscaler = Autoscaler(config.rollout.autoscale) if config.rollout.autoscale else None
        self._transport: Transport | None = None
        self._processes: dict[int, Process] = {}
        self._groups: dict[int, GroupInProgress] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._attempts = itertools.count()
        self._start_failures, self._backoff_until = 0, 0.0
        self._failure: BaseException | None = None
        self._driver_waits = False
        self._load = StepLoad(0.0, 0.0, 0.0, 0.0)
        self._num_replaced = 0
        self._looked_s = self._published_s = time.monotonic()
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rollout-pool", daemon=True)

    # Life

    def launch(self) -> None:
        """Creates the first workers, without waiting for them."""
        for kind, count in self._targets.items():
            for _ in range(count):
                self._spawn(kind)

    def await_started(self) -> None:
        """Waits for the first workers. Raises what kept one from starting: now it is the user's to mend."""
        ends = time.monotonic() + self._timeouts.start_s
        for worker_id, process in list(self._processes.items()):
            assert process.starting is not None
            ready, _ = ray.wait([process.starting], timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                raise DeadlineError(
                    f"{process.member}: not up after {self._timeouts.start_s:g} s; raise timeouts.start_s if that is "
                    "normal"
                )
            self._started(worker_id)
        self._thread.start()

    def connect(self, transport: Transport) -> None:
        """How weights come from the learner."""
        self._transport = transport

    def close(self) -> None:
        """Ends the listening thread and every worker."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for worker_id in list(self._processes):
            self._end(worker_id)

    def members(self) -> list[Member]:
        """The workers that are up."""
        with self._lock:
            return self._members(self._fleet.in_state(State.SYNCING, State.LIVE, State.DRAINING))

    def status(self) -> list[dict[str, Any]]:
        """Each worker's state in words and numbers."""
        with self._lock:
            return [
                {
                    "worker": worker.id,
                    "kind": worker.kind,
                    "state": str(worker.state),
                    "node": self._processes[worker.id].member.node,
                    "version": worker.version,
                    "samples": self._fleet.outstanding_samples(worker),
                    "pace": worker.pace or 0.0,
                }
                for worker in self._fleet.workers.values()
                if worker.id in self._processes
            ]

    def scale(self, kind: str, num_workers: int, reason: str) -> None:
        """Changes how many workers of a kind there should be; they come and go in the background."""
        with self._lock:
            if self._targets[kind] != num_workers:
                self._note(f"rollout pool: {self._targets[kind]} -> {num_workers} {kind} worker(s): {reason}")
                self._targets[kind] = num_workers

    # Groups

    def submit(self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool = False) -> list[int]:
        """Queues groups; each goes whole to one worker, so that its completions share their prompt's cache."""
        assert not self._asleep, "a sleeping pool cannot sample; publish wakes it"
        with self._lock:
            ids = []
            for prompt in prompts:
                task = self._fleet.enqueue(prompt_tokens=len(prompt.token_ids), num_samples=group_size)
                self._groups[task] = GroupInProgress(prompt, greedy, group_size)
                ids.append(task)
            self._dispatch()
        return ids

    def next_group(self, ids: Collection[int]) -> tuple[int, list[Rollout]]:
        """Waits for the first of these groups. Raises DeadlineError at timeouts.generate_s."""
        started = time.monotonic()
        with self._lock:
            self._driver_waits = True
            try:
                while (found := next((i for i in self._finished if i in ids), None)) is None:
                    self._raise_failure()
                    left = started + self._timeouts.generate_s - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(
                            f"rollout pool: no group finished within {self._timeouts.generate_s:g} s "
                            f"({self._describe()}); raise timeouts.generate_s, or lower rollout.max_completion_tokens"
                        )
                    self._lock.wait(left)
            finally:
                self._driver_waits = False
                self._add_load(wait_s=time.monotonic() - started)
            return found, self._finished.pop(found)

    # Weights

    def publish(self, version: int) -> dict[str, float]:
        """Commits the learner's weights as ``version`` on every worker that is up; one that fails is replaced."""
        started = time.monotonic()
        with self._lock:
            self._raise_failure()
            for worker in self._fleet.in_state(State.DRAINING):
                self._retire(worker.id)
            for worker in self._fleet.in_state(State.LIVE):
                self._fleet.suspend(worker.id)
            self._fleet.advance(version)
            self._sync(self._fleet.in_state(State.SYNCING))
            metrics = self._close_step()
            self._dispatch()
        return metrics | {
            "weight_sync/publish_s": time.monotonic() - started,
            "weight_sync/version": float(version),
        }

    def sleep(self) -> None:
        """Workers that share their GPU with the learner give its memory back until the next ``publish``."""
        if not self._shares_gpus or self._asleep:
            return
        with self._lock:
            self._call(self._fleet.in_state(State.SYNCING, State.LIVE), "sleep", "going to sleep")
            self._asleep = True

    def _sync(self, workers: Sequence[Worker]) -> None:
        """Brings workers to the fleet's version; those that confirm the learner's checksums are live from here on."""
        assert self._transport is not None
        deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
        if self._shares_gpus and self._asleep:
            woken = self._call(workers, "wake_weights", "waking up")
            workers = [worker for worker in workers if worker.id in woken]
        result = publish(self._fleet.version, self._transport, self._members(workers), deadline)
        for member, error in result.failed.items():
            self._fail(member.rank, error)
        if self._shares_gpus and self._asleep:
            self._call([w for w in workers if w.state is State.SYNCING], "wake_cache", "waking up")
            self._asleep = False
        for worker in workers:
            if worker.state is State.SYNCING:
                self._fleet.admit(worker.id, self._fleet.version)
                process = self._processes[worker.id]
                process.has_lived, self._start_failures = True, 0
                process.waiting_since = time.monotonic()

    def ask(self, method: str, doing: str) -> list[Any]:
        """The answers of all workers that are up to a method without arguments; one that fails to answer is replaced."""
        with self._lock:
            return list(self._call(self._fleet.in_state(State.SYNCING, State.LIVE), method, doing).values())

    def _call(self, workers: Sequence[Worker], method: str, doing: str) -> dict[int, Any]:
        """Answers by worker id; workers that fail to answer are replaced."""
        deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
        calls = {
            w.id: ActorGroup([self._processes[w.id].member]).call(method, deadline=deadline, doing=doing)
            for w in workers
        }
        answers = {}
        for worker_id, call in calls.items():
            try:
                (answers[worker_id],) = call.result()
            except RlhfError as error:
                self._fail(worker_id, error)
        return answers

    # The listening thread

    def _listen(self) -> None:
        try:
            while not self._closing.is_set():
                with self._lock:
                    refs = {ref: i for i, process in self._processes.items() for ref in _refs(process)}
                ready = _ready(list(refs))
                with self._lock:
                    for ref in ready:
                        if refs[ref] in self._processes:
                            self._hear(refs[ref], ref)
                    self._look_around()
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _hear(self, worker_id: int, ref: ray.ObjectRef) -> None:
        """One call of a worker has ended."""
        process = self._processes[worker_id]
        try:
            if ref == process.starting:
                self._started(worker_id)
            elif ref == process.collecting:
                self._reported(worker_id, fetch(ref, process.member, "generating"))
            elif ref in process.pending:
                process.pending.remove(ref)
                fetch(ref, process.member, "taking requests")
        except RlhfError as error:
            self._fail(worker_id, error)

    def _started(self, worker_id: int) -> None:
        process = self._processes[worker_id]
        node = fetch(process.starting, process.member, "starting")
        process.member = Member(process.member.handle, "rollout", worker_id, node)
        process.starting, process.waiting_since = None, time.monotonic()
        process.collecting = process.member.handle.collect.remote(COLLECT_WAIT_S)
        self._fleet.started(worker_id)

    def _reported(self, worker_id: int, report: Report) -> None:
        process = self._processes[worker_id]
        now = time.monotonic()
        if report.silent_s < self._timeouts.worker_silence_s:
            process.waiting_since = now
        process.collecting = process.member.handle.collect.remote(COLLECT_WAIT_S)
        for key, rollout in report.finished:
            task, sample = process.requests.pop(key, (-1, -1))
            if self._fleet.sample_done(task, sample, len(rollout.token_ids)):
                self._take(task, sample, rollout)
        if now - process.counted_s >= PACE_OVER_S:
            if process.sample_s > 0 and report.generated_tokens > process.counted_tokens:
                pace = (report.generated_tokens - process.counted_tokens) / process.sample_s
                self._fleet.measured(worker_id, pace)
            process.counted_tokens, process.counted_s, process.sample_s = report.generated_tokens, now, 0.0

    def _take(self, task: int, sample: int, rollout: Rollout) -> None:
        group = self._groups[task]
        group.rollouts[sample] = rollout
        if len(group.rollouts) < group.size:
            return
        del self._groups[task]
        self._finished[task] = [group.rollouts[i] for i in range(group.size)]
        for process in self._processes.values():  # another worker may be sampling the same
            if keys := [key for key, (owner, _) in process.requests.items() if owner == task]:
                for key in keys:
                    del process.requests[key]
                process.pending.add(process.member.handle.abort.remote(keys))
        self._lock.notify_all()

    def _look_around(self) -> None:
        """Ends what is over, starts what is missing, and gives out work."""
        self._account()
        for kind, count in self._control.poll(self.status, dict(self._targets)).items():
            self.scale(kind, count, "asked for by rlhf scale")
        self._fleet.forget_dead()
        for worker_id in self._fleet.emptied():
            self._end(worker_id)
        self._find_silent()
        self._reconcile()
        if self._driver_waits and self._fleet.version >= 0 and (joining := self._fleet.in_state(State.SYNCING)):
            self._sync(joining)
        self._dispatch()

    def _find_silent(self) -> None:
        """Workers that have owed an answer for too long are replaced like dead ones."""
        now = time.monotonic()
        for worker in self._fleet.in_state(State.STARTING, State.LIVE, State.DRAINING):
            process = self._processes[worker.id]
            starting = worker.state is State.STARTING
            if starting and not self._factory.has_place(worker.id):
                process.waiting_since = now  # it waits for the cluster to have room, for as long as that takes
            limit_s = self._timeouts.start_s if starting else self._timeouts.worker_silence_s
            if now - process.waiting_since > limit_s and not self._asleep:
                key = "timeouts.start_s" if starting else "timeouts.worker_silence_s"
                self._fail(worker.id, DeadlineError(f"{process.member}: silent for {limit_s:g} s ({key})"))

    def _reconcile(self) -> None:
        """As many workers of each kind as wanted. Those that have not begun to serve go first."""
        order = {State.STARTING: 0, State.SYNCING: 1, State.LIVE: 2}
        for kind, target in self._targets.items():
            active = self._fleet.active(kind)
            for _ in range(target - len(active)):
                if time.monotonic() >= self._backoff_until:
                    self._spawn(kind)
            by_use = sorted(active, key=lambda w: (order[w.state], self._fleet.outstanding_tokens(w), -w.id))
            for worker in by_use[: max(0, len(active) - target)]:
                self._fleet.drain(worker.id)
                if worker.state is State.DEAD:
                    self._end(worker.id)

    # Hands

    def _spawn(self, kind: str) -> None:
        worker = self._fleet.spawn(kind, self._settings.kinds()[kind][0].max_num_seqs)
        launch = self._factory.launch(worker.id, kind)
        member = Member(launch.handle, "rollout", worker.id, "?")
        self._processes[worker.id] = Process(member, launch.started, time.monotonic())

    def _fail(self, worker_id: int, error: BaseException) -> None:
        """Quarantines a worker: its work goes back to the queue, its process ends, another will be started."""
        process = self._processes[worker_id]
        self._note(f"rollout pool: replacing {process.member}: {str(error).splitlines()[0]}")
        self._num_replaced += 1
        self._fleet.fail(worker_id)
        if not process.has_lived:
            self._start_failures += 1
            self._backoff_until = time.monotonic() + min(MAX_BACKOFF_S, 2.0**self._start_failures)
        self._end(worker_id)
        self._fleet.bury(worker_id)
        if self._start_failures >= self._settings.max_start_failures:
            raise ActorError(
                f"rollout pool: {self._start_failures} workers in a row failed before they could serve; the last: {error}"
            )

    def _retire(self, worker_id: int) -> None:
        self._fleet.retire(worker_id)
        self._end(worker_id)

    def _end(self, worker_id: int) -> None:
        self._factory.end(worker_id)
        del self._processes[worker_id]

    def _dispatch(self) -> None:
        if self._asleep:
            return
        for assignment in [*self._fleet.dispatch(), *self._fleet.take_over()]:
            self._send(assignment)

    def _send(self, assignment: Assignment) -> None:
        process, group = self._processes[assignment.worker], self._groups[assignment.task]
        requests = []
        for sample in assignment.samples:
            key = f"{assignment.task}.{sample}.{next(self._attempts)}"
            process.requests[key] = (assignment.task, sample)
            requests.append(Request(key, group.prompt, sample, group.greedy))
        process.pending.add(process.member.handle.submit.remote(requests))

    def _members(self, workers: Sequence[Worker]) -> list[Member]:
        return [self._processes[w.id].member for w in workers]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _describe(self) -> str:
        states = [str(w.state) for w in self._fleet.workers.values() if w.state is not State.DEAD]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) or "none"
        return f"workers: {counts}; {len(self._fleet.queue)} group(s) queued, {len(self._groups)} unfinished"

    # Load

    def _account(self) -> None:
        """Adds the time since the last look to the workers' busy and idle time.

        Strictly on-policy, a worker can only have something to do while the driver waits for samples.
        """
        now = time.monotonic()
        elapsed_s, self._looked_s = now - self._looked_s, now
        busy_s = 0.0
        live = self._fleet.serving()
        for worker in live:
            self._processes[worker.id].sample_s += elapsed_s * self._fleet.outstanding_samples(worker)
            busy_s += elapsed_s if worker.tasks else 0.0
        if self._driver_waits or self._settings.max_staleness > 0:
            self._add_load(busy_worker_s=busy_s, worker_s=elapsed_s * len(live))

    def _add_load(self, **seconds: float) -> None:
        self._load = StepLoad(**{key: value + seconds.get(key, 0.0) for key, value in vars(self._load).items()})

    def _close_step(self) -> dict[str, float]:
        """Judges the step's load, begins a new one, and says what the pool looks like."""
        now = time.monotonic()
        self._add_load(step_s=now - self._published_s)
        load, self._load, self._published_s = self._load, StepLoad(0.0, 0.0, 0.0, 0.0), now
        num_workers = self._targets[DEFAULT_KIND]
        if self._autoscaler:
            settled = sum(w.kind == DEFAULT_KIND for w in self._fleet.in_state(State.LIVE)) == num_workers
            decision = self._autoscaler.judge(load, num_workers=num_workers, settled=settled)
            if decision:
                self.scale(DEFAULT_KIND, decision.num_workers, decision.reason)
        return {
            "pool/live_workers": float(len(self._fleet.in_state(State.LIVE))),
            "pool/wanted_workers": float(sum(self._targets.values())),
            "pool/replaced_workers": float(self._num_replaced),
            "pool/idle_fraction": load.idle_fraction,
            "pool/wait_fraction": load.wait_fraction,
        }


def _refs(process: Process) -> list[ray.ObjectRef]:
    """The calls of a worker that are in flight."""
    return [*filter(None, (process.starting, process.collecting)), *process.pending]


def _ready(refs: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
    """Those of the calls that have ended; waits a moment for one."""
    if not refs:
        time.sleep(LISTEN_S)
        return []
    ready, rest = ray.wait(refs, num_returns=1, timeout=LISTEN_S)
    return ready + (ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest and ready else [])
