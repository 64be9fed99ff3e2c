"""Starts, listens to, replaces and ends the processes behind the pool's workers. The caller holds the lock."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import stacks
from actors.group import ActorGroup, Deadline, Member, fetch
from actors.rollouts.engine import Completion, Request, request_key
from actors.rollouts.engine_loop import Report
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.scheduler import Group, Scheduler, State, Worker
from rlhf.config import DEFAULT_KIND, Config
from rlhf.errors import ActorError, DeadlineError, RlhfError

COLLECT_WAIT_S = 1.0  # how long a collect call waits for a whole group; longer in large pools:
MAX_REPORTS_PER_S = 50  # of workers that have nothing to report
MAX_BACKOFF_S = 60.0  # between attempts to start a worker
PACE_OVER_S = 2.0  # a worker's pace is measured over at least this long

Accepted = tuple[int, int, int, Completion]  # (worker id, group id, sample index, what was sampled)


@dataclass
class Process:
    """One worker's process and the calls in flight to it."""

    member: Member
    starting: ray.ObjectRef | None
    launched_s: float
    waiting_since: float  # for it to start, or to report
    collecting: ray.ObjectRef | None = None
    pending: set[ray.ObjectRef] = field(default_factory=set)  # calls that only have to succeed
    has_sampled: bool = False
    counted_tokens: int = 0
    counted_s: float = 0.0
    sample_s: float = 0.0  # running samples x seconds since then

    def refs(self) -> list[ray.ObjectRef]:
        """The calls in flight."""
        return [*filter(None, (self.starting, self.collecting)), *self.pending]


@dataclass
class Starts:
    """How starting workers of a kind goes."""

    failures: int = 0  # in a row: of workers that sampled nothing, each launched after the previous one had failed
    counted_until: int = 0  # workers with lower ids existed at the last failure: theirs may have the same cause
    backoff_until: float = 0.0


class Supervisor:
    """Keeps the pool's target number of worker processes, and talks to them."""

    def __init__(self, config: Config, factory: WorkerFactory, note: Callable[[str], None]) -> None:
        """``note`` reports to the user what happens to workers."""
        self._factory, self._note, self._timeouts = factory, note, config.timeouts
        self._settings, self._place_s = config.rollout, config.placement.timeout_s
        self.scheduler = Scheduler(expected_completion_tokens=config.rollout.max_completion_tokens)
        self.targets = {kind: settings.num_workers for kind, (settings, _) in config.rollout.kinds().items()}
        self.num_replaced = 0
        self._processes: dict[int, Process] = {}
        self._in_flight: dict[ray.ObjectRef, int] = {}  # every call, and the worker it went to
        self._starts = {kind: Starts() for kind in self.targets}

    # Coming and going

    def launch(self) -> None:
        """Creates the first workers, without waiting for them."""
        for kind, count in self.targets.items():
            for _ in range(count):
                self._spawn(kind)

    def await_started(self) -> None:
        """Waits for the first workers. Raises what kept one from starting, for the user to fix."""
        ends = time.monotonic() + self._timeouts.start_s
        for worker_id, process in list(self._processes.items()):
            assert process.starting is not None
            ready, _ = ray.wait([process.starting], timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                raise DeadlineError(
                    f"{process.member}: not up after {self._timeouts.start_s:g} s; raise timeouts.start_s if that is "
                    f"normal; {stacks.kept([process.member])}"
                )
            self._started(worker_id)

    def reconcile(self, *, asleep: bool, may_start: bool) -> None:
        """Ends workers that are done or silent, and starts or drains others until each kind has its target number.

        ``asleep``: no worker is expected to make progress.
        """
        self.scheduler.forget_dead()
        for worker_id in self.scheduler.emptied():
            self._end(worker_id)
        if not asleep:
            self._replace_silent()
        order = {State.STARTING: 0, State.SYNCING: 1, State.LIVE: 2}  # those not yet serving go first
        for kind, target in self.targets.items():
            active = self.scheduler.active(kind)
            if may_start and time.monotonic() >= self._starts[kind].backoff_until:
                for _ in range(min(target - len(active), self._free_places())):
                    self._spawn(kind)
            if len(active) <= target:
                continue
            by_use = sorted(active, key=lambda w: (order[w.state], self.scheduler.outstanding_tokens(w), -w.id))
            for worker in by_use[: len(active) - target]:
                self.scheduler.drain(worker.id)
                if worker.state is State.DEAD:
                    self._end(worker.id)

    def fail(self, worker_id: int, error: BaseException) -> None:
        """Quarantines a worker: its work goes back to the queue, its process ends, and another will be started, unless
        too many in a row have failed before they sampled anything.

        Raises ActorError if no other worker is left then, or when too many in a row have failed over the same group.
        """
        process, kind = self._processes[worker_id], self.scheduler.workers[worker_id].kind
        self._note(f"rollout pool: replacing a worker: {str(error).splitlines()[0]}")
        self.num_replaced += 1
        suspect = self.scheduler.fail(worker_id)
        self._end(worker_id)
        self.scheduler.mark_dead(worker_id)
        limit = self._settings.max_failures
        if suspect is not None and suspect.losses >= limit:
            raise ActorError(
                f"rollout pool: {limit} workers in a row failed while sampling prompt {suspect.prompt_id} "
                f"(rollout.max_failures); the last: {error}"
            )
        if not process.has_sampled and worker_id >= self._starts[kind].counted_until:
            self._count_failed_start(kind, error)

    def _count_failed_start(self, kind: str, error: BaseException) -> None:
        starts, limit = self._starts[kind], self._settings.max_failures
        starts.failures += 1
        starts.counted_until = self.scheduler.next_worker
        starts.backoff_until = time.monotonic() + min(MAX_BACKOFF_S, 2.0**starts.failures)
        if starts.failures < limit:
            return
        why = f"{limit} in a row failed before they sampled anything (rollout.max_failures)"
        if not any(worker.version >= 0 for worker in self.scheduler.in_state(State.SYNCING, State.LIVE)):
            raise ActorError(f"rollout pool: of {kind} workers {why}; the last: {error}")
        self._give_up(kind, why)

    def _give_up(self, kind: str, why: str) -> None:
        """Goes on with the workers of a kind that there are."""
        self._starts[kind] = Starts()
        target = min(self.targets[kind], len(self.scheduler.active(kind)))
        self._note(f"rollout pool: {self.targets[kind]} -> {target} {kind} worker(s): {why}")
        self.targets[kind] = target

    def retire(self, worker_id: int) -> None:
        """Ends a healthy worker; others do its unfinished work."""
        self.scheduler.retire(worker_id)
        self._end(worker_id)

    def admit(self, worker_id: int) -> None:
        """The worker has the pool's weights and serves from now on."""
        self.scheduler.admit(worker_id, self.scheduler.version)
        self._processes[worker_id].waiting_since = time.monotonic()

    def close(self) -> None:
        for worker_id in list(self._processes):
            self._end(worker_id)

    def _spawn(self, kind: str) -> None:
        worker = self.scheduler.spawn(kind, self._settings.kinds()[kind][0].max_num_seqs)
        launch = self._factory.launch(worker.id, kind)
        member = Member(launch.handle, "rollout", worker.id, "?")
        now = time.monotonic()
        self._processes[worker.id] = Process(member, launch.started, launched_s=now, waiting_since=now)
        self._in_flight[launch.started] = worker.id

    def _free_places(self) -> int:
        """How many workers may be started now: on shared GPUs a draining one keeps its place until it ends."""
        places = self._factory.num_places
        return sys.maxsize if places is None else places - len(self._processes)

    def _end(self, worker_id: int) -> None:
        self._factory.end(worker_id)
        for ref in self._processes.pop(worker_id).refs():
            self._in_flight.pop(ref, None)

    def _replace_silent(self) -> None:
        """Replaces workers that have not answered for too long, as if they had died."""
        now = time.monotonic()
        for worker in self.scheduler.in_state(State.STARTING, State.LIVE, State.DRAINING):
            process = self._processes[worker.id]
            starting = worker.state is State.STARTING
            if starting and not self._factory.has_place(worker.id):
                self._await_place(worker, process)
                continue
            key = "start_s" if starting else "worker_silence_s"
            limit_s = getattr(self._timeouts, key)
            if now - process.waiting_since > limit_s:
                where = stacks.kept([process.member])
                late = f"{process.member}: silent for {limit_s:g} s (timeouts.{key}); {where}"
                self.fail(worker.id, DeadlineError(late))

    def _await_place(self, worker: Worker, process: Process) -> None:
        """A worker may wait for room in the cluster as long as that takes, but not where the pool sizes itself."""
        process.waiting_since = time.monotonic()
        autoscale = self._settings.autoscale
        if autoscale is None or worker.kind != DEFAULT_KIND or self.targets[worker.kind] <= autoscale.min:
            return
        if time.monotonic() - process.launched_s > self._place_s:
            self.retire(worker.id)
            why = f"the cluster has had no room for another in {self._place_s:g} s (placement.timeout_s)"
            self._give_up(worker.kind, why)

    # Calls

    def members(self, workers: Sequence[Worker]) -> list[Member]:
        return [self._processes[w.id].member for w in workers]

    def call(self, workers: Sequence[Worker], method: str, doing: str) -> dict[int, Any]:
        """Answers by worker id to a method without arguments; workers that fail to answer are replaced."""
        deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
        answers, failed = ActorGroup(self.members(workers)).call(method, deadline=deadline, doing=doing).gather()
        for member, error in failed.items():
            self.fail(member.rank, error)
        return {member.rank: answer for member, answer in answers.items()}

    def send(self, requests: Mapping[int, list[Request]]) -> None:
        """Submits requests, by worker id, without waiting. A worker gets all of its requests in one call; otherwise its
        first groups would be half done when the last ones arrive."""
        for worker_id, batch in requests.items():
            handle = self._processes[worker_id].member.handle
            self._expect(worker_id, handle.submit.remote(batch))

    def _expect(self, worker_id: int, ref: ray.ObjectRef) -> None:
        """A call that only has to succeed."""
        self._processes[worker_id].pending.add(ref)
        self._in_flight[ref] = worker_id

    def cancel(self, group_id: int) -> None:
        """Nobody wants this group any more, if it has not ended."""
        if group := self.scheduler.cancel(group_id):
            self._abort(group)

    def _abort(self, group: Group) -> None:
        """Drops what the holders of a group are still sampling."""
        keys = [request_key(group.id, sample) for sample in range(group.num_samples)]
        for worker_id in group.holders:
            handle = self._processes[worker_id].member.handle
            self._expect(worker_id, handle.abort.remote(keys))

    # Listening

    def refs(self) -> dict[ray.ObjectRef, int]:
        """Every call in flight and the worker it went to."""
        return dict(self._in_flight)

    def hear(self, worker_id: int, ref: ray.ObjectRef) -> list[Accepted]:
        """Handles a call that has ended; returns the completions it brought that are still wanted."""
        process = self._processes.get(worker_id)
        self._in_flight.pop(ref, None)
        if process is None:  # the worker has ended meanwhile
            return []
        try:
            if ref == process.starting:
                self._started(worker_id)
            elif ref == process.collecting:
                return self._reported(worker_id, fetch(ref, process.member, "generating"))
            elif ref in process.pending:
                process.pending.remove(ref)
                fetch(ref, process.member, "taking requests")
        except RlhfError as error:
            self.fail(worker_id, error)
        return []

    def _started(self, worker_id: int) -> None:
        process = self._processes[worker_id]
        assert process.starting is not None
        self._in_flight.pop(process.starting, None)
        node = fetch(process.starting, process.member, "starting")
        process.member = Member(process.member.handle, "rollout", worker_id, node)
        process.starting, process.waiting_since = None, time.monotonic()
        self._collect(worker_id)
        self.scheduler.started(worker_id)

    def _collect(self, worker_id: int) -> None:
        """Asks for the next report: less often in a large pool, but often enough to tell who is silent."""
        wait_s = max(COLLECT_WAIT_S, len(self._processes) / MAX_REPORTS_PER_S)
        process = self._processes[worker_id]
        ref = process.member.handle.collect.remote(min(wait_s, self._timeouts.worker_silence_s / 4))
        process.collecting = ref
        self._in_flight[ref] = worker_id

    def _reported(self, worker_id: int, report: Report) -> list[Accepted]:
        process = self._processes[worker_id]
        if report.silent_s < self._timeouts.worker_silence_s:
            process.waiting_since = time.monotonic()
        if report.finished and not process.has_sampled:
            process.has_sampled = True
            self._starts[self.scheduler.workers[worker_id].kind] = Starts()
        self._collect(worker_id)
        self._measure_pace(worker_id, report.generated_tokens)
        return [accepted for completion in report.finished if (accepted := self._accept(worker_id, completion))]

    def _accept(self, worker_id: int, completion: Completion) -> Accepted | None:
        """A completion with its place in its group, or None if another worker was faster."""
        group_id, sample = map(int, completion.key.split("."))
        group = self.scheduler.groups.get(group_id)
        if group is None or not self.scheduler.sample_done(group_id, sample, len(completion.token_ids)):
            return None
        if not group.missing and len(group.holders) > 1:
            self._abort(group)  # the slower one
        return worker_id, group_id, sample, completion

    def _measure_pace(self, worker_id: int, generated_tokens: int) -> None:
        process, now = self._processes[worker_id], time.monotonic()
        if now - process.counted_s < PACE_OVER_S:
            return
        new_tokens = generated_tokens - process.counted_tokens
        if process.sample_s > 0 and new_tokens > 0:
            self.scheduler.measured(worker_id, new_tokens / process.sample_s)
        process.counted_tokens, process.counted_s, process.sample_s = generated_tokens, now, 0.0

    def count_time(self, elapsed_s: float) -> tuple[float, float]:
        """(seconds with work, all seconds) of the last ``elapsed_s``, summed over serving workers."""
        busy_s = 0.0
        serving = self.scheduler.serving()
        for worker in serving:
            self._processes[worker.id].sample_s += elapsed_s * worker.samples
            busy_s += elapsed_s if worker.groups else 0.0
        return busy_s, elapsed_s * len(serving)

    def status(self) -> list[dict[str, Any]]:
        """Each worker's state, as `rlhf scale` shows it."""
        return [
            {
                "worker": worker.id,
                "kind": worker.kind,
                "state": str(worker.state),
                "node": self._processes[worker.id].member.node,
                "version": worker.version,
                "samples": worker.samples,
            }
            for worker in self.scheduler.workers.values()
            if worker.id in self._processes
        ]
