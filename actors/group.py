"""A role's ranks as one: dispatch to all, collect from all, with deadlines and errors that name who and where."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rlhf.errors import ActorError, DeadlineError, RlhfError, RoleLostError

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One actor of a group and what errors call it."""

    handle: Any
    role: str
    rank: int
    node: str  # IP address

    def __str__(self) -> str:
        return f"{self.role}[{self.rank}] on {self.node}"


@dataclass(frozen=True)
class Deadline:
    """How long a wait may take, and the config key that says so."""

    seconds: float
    key: str


class Call(Generic[T]):
    """Calls in flight on several actors; ``result`` waits for all and folds their answers into one."""

    def __init__(
        self, refs: Sequence[tuple[Member, Any]], doing: str, deadline: Deadline, fold: Callable[[list[Any]], T]
    ) -> None:
        self._refs, self._doing, self._fold = list(refs), doing, fold
        self._deadline = deadline
        self._ends = time.monotonic() + deadline.seconds

    def result(self) -> T:
        """Waits for every rank; the first failure is raised at once, not after the others' deadlines."""
        return self._answer

    @cached_property
    def _answer(self) -> T:
        owners = {ref: member for member, ref in self._refs}
        pending, answers = list(owners), {}
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, self._ends - time.monotonic()))
            if not ready:
                late = ", ".join(str(owners[ref]) for ref in pending)
                raise DeadlineError(
                    f"{late}: still busy with {self._doing} after {self._deadline.seconds:g} s; raise "
                    f"{self._deadline.key} if that is normal"
                )
            for ref in ready:
                answers[ref] = fetch(ref, owners[ref], self._doing)
        return self._fold([answers[ref] for ref in owners])


def fetch(ref: Any, member: Member, doing: str, timeout_s: float = 60.0) -> Any:
    """The value of a finished call. Our own errors pass through; others become ActorError with who, where, what."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlhfError):
            raise cause from None
        summary = " ".join(str(cause).split())[:500]
        trace = str(error)  # the traceback of the process it happened in
        raise ActorError(f"{member}: {doing} raised {type(cause).__name__}: {summary}\n{trace}") from None
    except GetTimeoutError:
        raise DeadlineError(f"{member}: the result of {doing} did not arrive within {timeout_s:g} s") from None
    except RayError as error:  # the process, its node or the object's owner is gone
        raise RoleLostError(f"{member}: died while {doing}: {_why(error)}") from None


def _why(error: RayError) -> str:
    """Ray's reason for a death, without its preamble and its guesses."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rpartition("The actor is dead because ")[2].partition(" Some common causes")[0][:300]


class ActorGroup:
    """The ranks of one role."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    @classmethod
    def locate(cls, role: str, handles: Sequence[Any], deadline: Deadline) -> "Call[ActorGroup]":
        """Asks every actor where it is; the group is there once all have answered."""
        unplaced = [Member(handle, role, rank, "?") for rank, handle in enumerate(handles)]
        return cls(unplaced).call(
            "node",
            deadline=deadline,
            doing="starting its process",
            fold=lambda nodes: cls([Member(m.handle, role, m.rank, n) for m, n in zip(unplaced, nodes, strict=True)]),
        )

    def call(
        self,
        method: str,
        *args: Any,
        deadline: Deadline,
        doing: str,
        fold: Callable[[list[Any]], Any] = lambda answers: answers,
    ) -> Call[Any]:
        """``method(*args)`` on every rank. Arguments are stored once and shared."""
        stored = [ray.put(arg) if _is_large(arg) else arg for arg in args]
        refs = [(member, getattr(member.handle, method).remote(*stored)) for member in self.members]
        return Call(refs, doing, deadline, fold)

    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        deadline: Deadline,
        doing: str,
        fold: Callable[[list[Any]], Any] = lambda answers: answers,
    ) -> Call[Any]:
        """``method(*args[rank])`` on each rank that has arguments."""
        refs = [
            (member, getattr(member.handle, method).remote(*given))
            for member, given in zip(self.members, args, strict=False)
        ]
        return Call(refs, doing, deadline, fold)

    def rotated(self, turn: int) -> "ActorGroup":
        """The same members, another one first."""
        start = turn % len(self.members)
        return ActorGroup([*self.members[start:], *self.members[:start]])

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.handle)


def _is_large(arg: Any) -> bool:
    return not isinstance(arg, str | int | float | bool | dict | tuple | type(None))


class RankActor:
    """What every actor of ours can say about itself."""

    concurrent_calls: ClassVar[int] = 1  # of one actor; more than one makes it threaded

    def node(self) -> str:
        """The IP address of the node it runs on."""
        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        """A TCP port that was free on this node a moment ago."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def peak_memory_gib(self) -> dict[str, float]:
        """The most this process has held: resident on the host, and reserved on its GPU if it has one."""
        import resource

        import torch

        peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available():
            peak["gpu"] = torch.cuda.max_memory_reserved() / 2**30
        return peak

    def device_name(self) -> str:
        """torch's name of its GPU, or 'cpu'."""
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES as this process sees it."""
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES", "")
