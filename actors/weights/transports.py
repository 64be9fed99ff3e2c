"""The driver's part in moving weights from the learner to workers: one attempt, in a session or by the object store.

The learner's failure is raised; a worker's is reported, and the caller continues without it.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol
from uuid import uuid4

import torch.distributed as dist

from actors.group import ActorGroup, Call, Deadline, Member
from actors.rollouts.engine import Ready
from actors.weights.channel import Rendezvous, TransferAbortedError
from actors.weights.routes import ROUTES, SessionRoute, session_route
from rlhf.errors import DeadlineError, RlhfError, RoleLostError, WeightSyncError, one_line
from rlhf.training.weights import Layout, bucket_size, first_adapter_bucket, to_plain

GRACE_S = 10.0  # after an abort, a process that does not answer for this long counts as hung


@dataclass(frozen=True)
class Transfer:
    """What one attempt achieved. A member in neither mapping has to begin again."""

    sent: list[int]  # the learner's checksums; meaningless if no worker received
    received: dict[Member, list[list[int]]]  # those of each worker's processes
    failed: dict[Member, RlhfError]
    num_bytes: int
    join_s: float = 0.0


class BrokenTransferError(WeightSyncError):
    """An attempt broke, and no process is at fault: a connection, say. The next one makes all connections anew."""


class Transport(Protocol):
    """Moves the learner's weights to workers."""

    def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
        """One attempt to reach the members. If one lacks the weights that never change, all are sent to all.

        Raises what the learner raises, and BrokenTransferError.
        """
        ...


def _lack_frozen(members: Mapping[Member, Ready]) -> bool:
    return not all(ready.has_frozen for ready in members.values())


def make_transport(learner: ActorGroup, route: str) -> Transport:
    """The transport for a route, by the route's name."""
    in_session = isinstance(ROUTES[route], SessionRoute)
    return SessionTransport(learner, route) if in_session else ObjectStoreTransport(learner)


class ObjectStoreTransport:
    """The learner stores the whole model, a bucket per object; the workers get the references."""

    def __init__(self, learner: ActorGroup) -> None:
        self._learner = learner

    def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
        frozen = _lack_frozen(members)
        stored = self._learner.call("store_weights", frozen, deadline=deadline, doing="gathering weights").result()[0]
        buckets = [bucket for bucket, _ in stored]
        receiving = ActorGroup(list(members)).call(
            "receive_objects", buckets, deadline.left_s, deadline=deadline.half(), doing="receiving weights"
        )
        received, failed = receiving.gather()
        num_bytes = sum(bucket_size(specs) for specs, _ in buckets)
        return Transfer([checksum for _, checksum in stored], received, failed, num_bytes)


class SessionTransport:
    """Sender and receivers move buckets among themselves, in a session that lasts until the members change."""

    def __init__(self, learner: ActorGroup, route: str) -> None:
        self._learner, self._route = learner, route
        self._members: dict[Member, int] = {}  # of the current session
        self._rendezvous = Rendezvous("", 0, "", 0)
        self._layout: Layout = []
        self._store: dist.TCPStore | None = None

    def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
        self._connect(deadline)
        started = time.monotonic()
        processes = {member: ready.processes for member, ready in members.items()}
        failed = self._join(processes, deadline) if self._members != processes else {}
        join_s = time.monotonic() - started
        if failed:
            return Transfer([], {}, failed, 0, join_s)
        half, frozen = deadline.half(), _lack_frozen(members)
        sending = self._learner.call("send_weights", deadline.left_s, frozen, deadline=half, doing="moving weights")
        moving = sending | ActorGroup(list(members)).call(
            "receive_session", deadline.left_s, frozen, deadline=half, doing="moving weights"
        )
        failed = self._settle(moving, deadline)
        root = self._learner.members[0]
        received = {m: moving.answers[m] for m in members if m in moving.answers and root in moving.answers}
        sent = self._layout if frozen else self._layout[first_adapter_bucket(self._layout) :]
        num_bytes = sum(bucket_size(specs) for specs in sent)
        return Transfer(moving.answers.get(root, []), received, failed, num_bytes, join_s)

    def _connect(self, deadline: Deadline) -> None:
        """Has learner rank 0 host the store of all sessions, the first time."""
        if self._store is not None:
            return
        root = ActorGroup(self._learner.members[:1])
        (self._layout,) = root.call("weight_layout", deadline=deadline, doing="describing weights").result()
        hosting = root.call("host_rendezvous", deadline.left_s, deadline=deadline, doing="opening a store")
        self._address, (self._port,) = root.members[0].node, hosting.result()
        timeout = timedelta(seconds=deadline.left_s)
        self._store = dist.TCPStore(self._address, self._port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _join(self, members: Mapping[Member, int], deadline: Deadline) -> dict[Member, RlhfError]:
        """Opens a session with these members; returns those that failed, none if it is open."""
        self._members = {}
        self._rendezvous = Rendezvous(self._address, self._port, f"weights-{uuid4().hex}", sum(members.values()))
        doing = "joining a weight session"
        joining = self._learner.call(
            "join_weights", self._route, self._rendezvous, deadline.left_s, deadline=deadline.half(), doing=doing
        )
        handles: dict[str, bytes] = {}
        if session_route(self._route).needs_handles:
            self._settle(joining, deadline)
            handles = dict(chain.from_iterable(of_rank.items() for of_rank in joining.answers.values()))
        invitations = [(info,) for info in self._invitations(members, handles, deadline)]
        workers = ActorGroup(list(members))
        joining = workers.call_each("join_weights", invitations, deadline=deadline.half(), doing=doing) | joining
        failed = self._settle(joining, deadline)
        if not failed:
            self._members = dict(members)
        return failed

    def _invitations(
        self, members: Mapping[Member, int], handles: dict[str, bytes], deadline: Deadline
    ) -> Iterator[dict[str, Any]]:
        """The arguments of BucketReceiver.join for every member; plain types, because vLLM's processes get them."""
        layout, first_receiver = to_plain(self._layout), 0
        for num_processes in members.values():
            yield {
                "route": self._route,
                "rendezvous": asdict(self._rendezvous),
                "first_receiver": first_receiver,
                "layout": layout,
                "handles": handles,
                "timeout_s": deadline.left_s,
            }
            first_receiver += num_processes

    def _settle(self, call: Call[Any], deadline: Deadline) -> dict[Member, RlhfError]:
        """Waits for all; at the first failure, or at the call's own deadline, aborts the session.

        Returns the workers at fault, without those that only ran into the abort. Raises the learner's failure, or
        BrokenTransferError.
        """
        if call.wait(until_failure=True):
            return {}
        self._members = {}
        reason = next((str(error) for error in call.failed.values()), "a rollout worker is late")
        cut_off = self._abort(reason.splitlines()[0][:300])
        call.wait(min(GRACE_S, deadline.left_s / 2))
        call.give_up()
        at_fault = {m: error for m, error in call.failed.items() if not isinstance(error, TransferAbortedError)}
        for member in self._learner.members:
            if isinstance(error := at_fault.get(member), DeadlineError):  # it cannot be asked for anything any more
                raise RoleLostError(f"{error}; it hangs, and counts as lost") from error
            if error is not None:
                raise error
        if cut_off is not None:
            raise RoleLostError(f"{self._learner.members[0]}: {one_line(cut_off)}; it counts as lost") from cut_off
        if not at_fault:
            raise BrokenTransferError(f"weights could not be moved ({self._route}): {reason}")
        return at_fault

    def _abort(self, reason: str) -> dist.DistError | None:
        """Has all processes leave the session; returns what keeps the driver from reaching the learner's store."""
        assert self._store is not None
        try:
            dist.PrefixStore(self._rendezvous.name, self._store).set("off", reason)
        except dist.DistError as error:
            return error
        return None
