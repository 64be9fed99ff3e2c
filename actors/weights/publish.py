"""Publishing the learner's weights to rollout workers: one protocol, whichever route they take.

begin (workers stop sampling) -> transfer (they report checksums) -> compare -> finish -> commit (they sample again).
Only a worker that reports the learner's own checksums is committed. One that fails is reported and left behind; if
others waited for it, their transfer is aborted and repeated without it. One that breaks through nobody's fault is
repeated once. Weights that never change, beside which adapters learn, are sent while a worker lacks them.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from actors.group import ActorGroup, Deadline, Member
from actors.rollouts.engine import Ready
from actors.weights.transports import BrokenTransferError, Transport
from rlhf.errors import RlhfError, RoleLostError, WeightSyncError


@dataclass(frozen=True)
class PublishResult:
    """Which workers sample with the new version, and which failed (died, were late, or received other bytes)."""

    committed: tuple[Member, ...]
    failed: dict[Member, RlhfError]
    checksums: list[int]  # the learner's, of every bucket
    num_bytes: int  # of one copy of the weights that were sent, with padding
    seconds: dict[str, float]  # begin, join, transfer, finish
    broken: str = ""  # why an attempt had to be repeated with the same members


def publish(version: int, transport: Transport, members: Sequence[Member], deadline: Deadline) -> PublishResult:
    """Gives the members the learner's weights as ``version``.

    A worker's failure is in the result, a learner's is raised. A worker that failed must not be used again. Raises
    RoleLostError if the transfer breaks twice: new processes may reach each other.
    """
    publication = Publication(version, deadline.start())
    marks = [time.monotonic()]
    waiting = publication.begin(members)
    marks.append(time.monotonic())
    publication.transfer(transport, waiting)
    marks.append(time.monotonic())
    committed = publication.commit()
    marks.append(time.monotonic())
    begin_s, transfer_s, finish_s = (after - before for before, after in pairwise(marks))
    join_s = publication.join_s
    seconds = {"begin": begin_s, "join": join_s, "transfer": transfer_s - join_s, "finish": finish_s}
    return PublishResult(
        tuple(committed), publication.failed, publication.sent, publication.num_bytes, seconds, publication.broken
    )


@dataclass
class Publication:
    """A publish in progress. Each wait for workers may take half of the time left, so a late one leaves others time."""

    version: int
    deadline: Deadline
    verified: list[Member] = field(default_factory=list)
    failed: dict[Member, RlhfError] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    num_bytes: int = 0
    join_s: float = 0.0
    broken: str = ""

    def begin(self, members: Iterable[Member]) -> dict[Member, Ready]:
        """Stops the members; returns what each waits with."""
        return self._ask(members, "begin_update", doing="preparing for new weights")

    def transfer(self, transport: Transport, waiting: dict[Member, Ready]) -> None:
        """Moves the weights until each member either has them, verified, or failed."""
        while waiting:
            try:
                attempt = transport.transfer(waiting, self.deadline)
            except BrokenTransferError as error:
                if self.broken:
                    raise RoleLostError(f"{error}; an attempt just before broke too: {self.broken}") from error
                self.broken, waiting = str(error), self.begin(waiting)
                continue
            self.failed |= attempt.failed
            self.sent = attempt.sent or self.sent
            self.num_bytes, self.join_s = max(self.num_bytes, attempt.num_bytes), self.join_s + attempt.join_s
            for member, received in attempt.received.items():
                self._verify(member, attempt.sent, received)
            waiting = self.begin(m for m in waiting if m not in self.failed and m not in self.verified)

    def commit(self) -> list[Member]:
        """Has verified members finish and sample again; returns those that do."""
        finished = self._ask(self.verified, "finish_update", doing="loading weights")
        return list(self._ask(finished, "commit", self.version, doing="committing weights"))

    def _ask(self, members: Iterable[Member], method: str, *args: Any, doing: str) -> dict[Member, Any]:
        """Answers by member; those that give none are counted as failed."""
        call = ActorGroup(list(members)).call(method, *args, deadline=self.deadline.half(), doing=doing)
        answers, failed = call.gather()
        self.failed |= failed
        return answers

    def _verify(self, member: Member, sent: list[int], received: list[list[int]]) -> None:
        for process, sums in enumerate(received):
            if sums != sent:
                wrong = [i for i, (a, b) in enumerate(zip(sent, sums, strict=False)) if a != b]
                self.failed[member] = WeightSyncError(
                    f"{member}, process {process}: weight version {self.version} arrived corrupted in bucket(s) "
                    f"{wrong} of {len(sent)} ({len(sums)} received); it was not committed"
                )
                return
        self.verified.append(member)
