"""Publishing the learner's weights to rollout workers: three transports, one protocol.

begin (workers stop sampling) -> transfer (they report checksums) -> compare -> finish -> commit (they sample again).
Only a worker that reports the learner's own checksums is committed. One that fails is reported and left behind; if
others waited for it, their transfer is aborted and repeated without it.

* CPU: buckets through Ray's object store (shared memory on one node, the network between nodes).
* GPU, colocated: every learner rank's buckets are mapped by the worker processes on its GPU (CUDA IPC).
* GPU, separate: buckets broadcast over NCCL from learner rank 0 to every worker process.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import ray
import torch.distributed as dist

from actors.group import ActorGroup, Deadline, Member, fetch
from actors.weights.channel import Rendezvous, TransferAbortedError
from actors.weights.sender import Route
from rlhf.errors import DeadlineError, RlhfError, WeightSyncError
from rlhf.training.weights import Layout, bucket_size

GRACE_S = 10.0  # after a transfer was aborted, a process that does not answer for so long counts as hung


class Clock:
    """A deadline that began now. A wait for workers takes half of what is left: a late one leaves others time."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._ends = time.monotonic() + deadline.seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())


class Calls:
    """Calls in flight on several members; one's failure does not end the others'."""

    def __init__(self, refs: Mapping[ray.ObjectRef, Member], doing: str) -> None:
        self._refs, self._doing = dict(refs), doing
        self.answers: dict[Member, Any] = {}
        self.failed: dict[Member, RlhfError] = {}

    def wait(self, timeout_s: float, *, until_failure: bool = False) -> bool:
        """Returns whether all have ended."""
        ends = time.monotonic() + timeout_s
        while self._refs and not (until_failure and self.failed):
            ready, _ = ray.wait(list(self._refs), num_returns=1, timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                return False
            for ref in ready:
                member = self._refs.pop(ref)
                try:
                    self.answers[member] = fetch(ref, member, self._doing)
                except RlhfError as error:
                    self.failed[member] = error
        return not self._refs

    def give_up(self, clock: Clock) -> None:
        """Counts those that have not answered as failed."""
        key, seconds = clock.deadline.key, clock.deadline.seconds
        for member in self._refs.values():
            self.failed[member] = DeadlineError(
                f"{member}: still busy with {self._doing}, too late for the others within {seconds:g} s; raise {key} "
                "if that is normal"
            )
        self._refs.clear()


def call_each(members: Sequence[Member], method: str, *args: Any, doing: str, clock: Clock) -> Calls:
    """``method`` on every member, each given half of the time that is left."""
    calls = Calls({getattr(m.handle, method).remote(*args): m for m in members}, doing)
    calls.wait(clock.left_s / 2)
    calls.give_up(clock)
    return calls


@dataclass(frozen=True)
class Transfer:
    """What one attempt achieved. A member in neither mapping has to begin again."""

    sent: list[int]  # the learner's checksums; of no use if nobody received
    received: dict[Member, list[list[int]]]  # those of each worker's processes
    failed: dict[Member, RlhfError]
    num_bytes: int
    join_s: float = 0.0


class ObjectStoreTransport:
    """CPU: the whole model passes through the object store, a bucket per object."""

    def __init__(self, learner: ActorGroup) -> None:
        self._learner = learner

    def transfer(self, members: Mapping[Member, int], clock: Clock) -> Transfer:
        """Moves the weights to the members. Raises what the learner raises."""
        deadline = Deadline(clock.left_s, clock.deadline.key)
        stored = self._learner.call("send_object_store", deadline=deadline, doing="gathering weights").result()[0]
        buckets = [(specs, reference) for specs, reference, _ in stored]
        calls = call_each(list(members), "receive", clock.left_s, buckets, doing="receiving weights", clock=clock)
        num_bytes = sum(bucket_size(specs) for specs, _ in buckets)
        return Transfer([sum_ for _, _, sum_ in stored], calls.answers, calls.failed, num_bytes)


class SessionTransport:
    """Sender and receivers move buckets among themselves, in a session that lasts until the members change.

    ``route``: 'broadcast' from learner rank 0, or 'share' each learner rank's ring with the processes on its GPU.
    """

    def __init__(self, learner: ActorGroup, route: Route) -> None:
        self._learner, self._route = learner, route
        self._members: dict[Member, int] = {}  # of the session that stands
        self._rendezvous = Rendezvous("", 0, "", 0)
        self._layout: Layout = []
        self._store: dist.TCPStore | None = None

    def transfer(self, members: Mapping[Member, int], clock: Clock) -> Transfer:
        """Moves the weights to the members (with the number of their processes). Raises what the learner raises."""
        self._connect(clock)
        num_bytes = sum(bucket_size(specs) for specs in self._layout)
        started = time.monotonic()
        if self._members != dict(members):
            failed = self._join(members, clock)
            if failed is not None:
                return Transfer([], {}, failed, 0, time.monotonic() - started)
        join_s = time.monotonic() - started
        sending = {m.handle.send_weights.remote(clock.left_s): m for m in self._learner.members}
        receiving = {m.handle.receive.remote(clock.left_s): m for m in members}
        calls = Calls({**receiving, **sending}, "moving weights")
        failed = self._settle(calls, clock) or {}
        root = self._learner.members[0]
        received = {m: calls.answers[m] for m in members if m in calls.answers and root in calls.answers}
        return Transfer(calls.answers.get(root, []), received, failed, num_bytes, join_s)

    def _connect(self, clock: Clock) -> None:
        """Has learner rank 0 host the store of all sessions; once."""
        if self._store is not None:
            return
        deadline = Deadline(clock.left_s, clock.deadline.key)
        root = ActorGroup(self._learner.members[:1])
        (self._layout,) = root.call("weight_layout", deadline=deadline, doing="describing weights").result()
        (port,) = root.call("host_rendezvous", clock.left_s, deadline=deadline, doing="opening a store").result()
        self._address, self._port = root.members[0].node, port
        self._store = dist.TCPStore(
            self._address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=clock.left_s)
        )

    def _join(self, members: Mapping[Member, int], clock: Clock) -> dict[Member, RlhfError] | None:
        """A new session with these members; returns who failed, or None if it stands."""
        self._members = {}
        name = f"weights-{uuid4().hex}"
        self._rendezvous = Rendezvous(self._address, self._port, name, sum(members.values()))
        joining = {
            m.handle.join_weights.remote(self._rendezvous, self._route, clock.left_s): m for m in self._learner.members
        }
        handles: dict[str, bytes] = {}
        learners = Calls(joining, "joining a weight session")
        if self._route == "share":  # receivers need the handles first; a broadcast begins when all have come
            self._settle(learners, clock)
            handles = dict(learners.answers.values())
            joining = {}
        first = 0
        for member, num_processes in members.items():
            info = {
                "rendezvous": dataclasses.asdict(self._rendezvous),
                "first_receiver": first,
                "timeout_s": clock.left_s,
                "layout": [[dataclasses.asdict(spec) for spec in specs] for specs in self._layout],
                "handles": handles,
            }
            joining[member.handle.join_weights.remote(info)] = member
            first += num_processes
        failed = self._settle(Calls(joining, "joining a weight session"), clock)
        if failed is None:
            self._members = dict(members)
        return failed

    def _settle(self, calls: Calls, clock: Clock) -> dict[Member, RlhfError] | None:
        """Waits for all. At the first failure, or when half of the time is up, aborts the session for everyone.

        Returns None if nothing failed, else the workers at fault; the others only ran into the abort. Raises the
        learner's failure, and WeightSyncError where the transfer broke and nobody died of it.
        """
        if calls.wait(clock.left_s / 2, until_failure=True) and not calls.failed:
            return None
        assert self._store is not None
        self._members = {}
        reason = next((str(error) for error in calls.failed.values()), "a rollout worker is late")
        store = dist.PrefixStore(self._rendezvous.name, self._store)
        store.set("off", reason.splitlines()[0][:300])
        calls.wait(min(GRACE_S, clock.left_s / 2))
        calls.give_up(clock)
        guilty = {m: error for m, error in calls.failed.items() if not isinstance(error, TransferAbortedError)}
        for member in self._learner.members:
            if member in guilty:
                raise guilty[member]
        if not guilty:
            raise WeightSyncError(f"weights could not be moved ({self._route}): {reason}; see the workers' logs")
        return guilty


Transport = ObjectStoreTransport | SessionTransport


@dataclass(frozen=True)
class PublishResult:
    """What became of a version: who samples with it, and who failed (died, late, or received other bytes)."""

    committed: tuple[Member, ...]
    failed: dict[Member, RlhfError]
    checksums: list[int]  # the learner's, of every bucket
    num_bytes: int  # of one copy of the weights, with padding
    seconds: dict[str, float]  # begin, join, transfer, finish


def publish(version: int, transport: Transport, members: Sequence[Member], deadline: Deadline) -> PublishResult:
    """Gives the members the learner's weights as ``version``.

    A worker's failure is in the result, a learner's is raised. A worker that failed must not be used again.
    """
    clock = Clock(deadline)
    marks = [time.monotonic()]
    begun = call_each(members, "begin_update", doing="preparing for new weights", clock=clock)
    waiting, failed = dict(begun.answers), dict(begun.failed)
    good: list[Member] = []
    sent: list[int] = []
    num_bytes, join_s = 0, 0.0
    marks.append(time.monotonic())
    while waiting:
        transfer = transport.transfer(waiting, clock)
        failed |= transfer.failed
        sent = transfer.sent or sent
        num_bytes, join_s = max(num_bytes, transfer.num_bytes), join_s + transfer.join_s
        for member, received in transfer.received.items():
            error = _compare(member, version, transfer.sent, received)
            if error is None:
                good.append(member)
            else:
                failed[member] = error
        again = [m for m in waiting if m not in failed and m not in good]
        begun = call_each(again, "begin_update", doing="preparing for new weights", clock=clock)
        waiting = begun.answers
        failed |= begun.failed
    marks.append(time.monotonic())
    for method, doing in (("finish_update", "loading weights"), ("commit", "committing weights")):
        args = (version,) if method == "commit" else ()
        calls = call_each(good, method, *args, doing=doing, clock=clock)
        failed |= calls.failed
        good = [m for m in good if m in calls.answers]
    marks.append(time.monotonic())
    begin_s, transfer_s, finish_s = (after - before for before, after in pairwise(marks))
    seconds = {"begin": begin_s, "join": join_s, "transfer": transfer_s - join_s, "finish": finish_s}
    return PublishResult(tuple(good), failed, sent, num_bytes, seconds)


def _compare(member: Member, version: int, sent: list[int], received: list[list[int]]) -> WeightSyncError | None:
    for process, sums in enumerate(received):
        if sums != sent:
            wrong = [i for i, (a, b) in enumerate(zip(sent, sums, strict=False)) if a != b]
            return WeightSyncError(
                f"{member}, process {process}: weight version {version} arrived changed in bucket(s) {wrong} of "
                f"{len(sent)} ({len(sums)} received); it was not committed"
            )
    return None
