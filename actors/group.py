"""A role's ranks as one: dispatch to all, collect from all, with deadlines and errors that name who and where."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors import stacks
from rlhf.errors import ActorError, DeadlineError, RlhfError, RoleLostError

T = TypeVar("T")
PEER_S = 5.0  # for Ray to notice a death that others have noticed by a broken connection


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
    """How long a wait may take, and the config key that sets it. Each call starts it, unless it is running already."""

    seconds: float
    key: str
    ends: float | None = None  # time.monotonic(); None: not started

    def start(self) -> "Deadline":
        """A copy that counts from now; itself if it has already started."""
        return self if self.ends is not None else Deadline(self.seconds, self.key, time.monotonic() + self.seconds)

    def half(self) -> "Deadline":
        """Expires when half of the time left is gone, so that one late worker leaves time for the others."""
        return Deadline(self.left_s / 2, self.key).start()

    @property
    def left_s(self) -> float:
        assert self.ends is not None, "the deadline has not started"
        return max(0.0, self.ends - time.monotonic())


class Call(Generic[T]):
    """One call in flight on each of several members.

    ``result`` is for callers that need every answer: it raises the first failure. ``gather`` is for those that can do
    without some members: it returns the answers and the failures. ``wait``, ``answers`` and ``failed`` are for those
    with their own rules.
    """

    def __init__(
        self, refs: Sequence[tuple[Member, Any]], doing: str, deadline: Deadline, fold: Callable[[list[Any]], T]
    ) -> None:
        """``fold`` turns all members' answers, in the order of ``refs``, into the result."""
        self._members = [member for member, _ in refs]
        self._pending = {ref: member for member, ref in refs}
        self._doing, self._deadline, self._fold = doing, deadline.start(), fold
        self.answers: dict[Member, Any] = {}
        self.failed: dict[Member, RlhfError] = {}

    def result(self) -> T:
        """Waits for every member; the first failure is raised at once, not after the others' deadlines."""
        return self._folded

    @cached_property
    def _folded(self) -> T:
        self.wait(until_failure=True)
        for error in self.failed.values():
            raise self._cause_of(error) from None
        if self._pending:
            raise self._late(self._pending.values(), stacks.kept(self._pending.values()))
        return self._fold([self.answers[member] for member in self._members])

    def _cause_of(self, error: RlhfError) -> RlhfError:
        """The death of a member, if there is one, rather than what its peers raised when it broke their connection."""
        if type(error) is not ActorError or len(self._members) == 1:
            return error
        asked = Call([(m, m.handle.node.remote()) for m in self._members], self._doing, Deadline(PEER_S, ""), list)
        asked.wait(until_failure=True)  # one that hangs does not answer
        return next(iter(asked.failed.values()), error)

    def gather(self) -> tuple[dict[Member, Any], dict[Member, RlhfError]]:
        """Waits for every member; returns the answers, and the errors of those that failed or are late."""
        self.wait()
        self.give_up()
        return self.answers, self.failed

    def wait(self, timeout_s: float | None = None, *, until_failure: bool = False) -> bool:
        """Waits for all to end, until the deadline or for ``timeout_s``. Returns whether all have answered."""
        ends = time.monotonic() + (self._deadline.left_s if timeout_s is None else timeout_s)
        while self._pending and not (until_failure and self.failed):
            ready = wait_for_some(list(self._pending), max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for ref in ready:
                member = self._pending.pop(ref)
                try:
                    self.answers[member] = fetch(ref, member, self._doing)
                except RlhfError as error:
                    self.failed[member] = error
        return not self._pending and not self.failed

    def give_up(self) -> None:
        """Counts members that have not answered as failed."""
        if not self._pending:
            return
        where = stacks.kept(self._pending.values())
        self.failed |= {member: self._late([member], where) for member in self._pending.values()}
        self._pending.clear()

    def __or__(self, other: "Call[Any]") -> "Call[T]":
        """Both calls as one, under this one's deadline."""
        both = Call([], self._doing, self._deadline, self._fold)
        both._members = [*self._members, *other._members]
        both._pending = self._pending | other._pending
        both.answers, both.failed = self.answers | other.answers, self.failed | other.failed
        return both

    def _late(self, members: Iterable[Member], where: str) -> DeadlineError:
        return DeadlineError(
            f"{', '.join(map(str, members))}: still busy with {self._doing} after {self._deadline.seconds:g} s; raise "
            f"{self._deadline.key} if that is normal; {where}"
        )


def wait_for_some(refs: Sequence[Any], timeout_s: float, *, linger_s: float = 0.0) -> list[Any]:
    """The calls that have ended, after at least one has or the timeout; waits for others for ``linger_s`` more.

    All together, because each question costs Ray time for each call that is still in flight.
    """
    ready, rest = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    return ready + (ray.wait(rest, num_returns=len(rest), timeout=linger_s)[0] if rest and ready else [])


def fetch(ref: Any, member: Member, doing: str, timeout_s: float = 60.0) -> Any:
    """The value of a finished call. Our own errors pass through; others become ActorError with who, where and what."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlhfError):
            raise cause from None
        summary = " ".join(str(cause).split())[:500]
        trace = str(error)  # the traceback from the process that raised it
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
        """Asks every actor for its node; the result is the group."""
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
        """``method(*args)`` on every rank. Large arguments are stored once and shared."""
        stored = tuple(ray.put(arg) if _is_large(arg) else arg for arg in args)
        every = [stored] * len(self.members)
        return self.call_each(method, every, deadline=deadline, doing=doing, fold=fold)

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

    def first(self) -> "ActorGroup":
        """Rank 0 alone."""
        return ActorGroup(self.members[:1])

    def kill(self) -> None:
        for member in self.members:
            ray.kill(member.handle)


class Lodgers(ActorGroup):
    """A role whose ranks live in the actors of another, which have a method of its name."""

    def __init__(self, role: str, hosts: ActorGroup) -> None:
        super().__init__([replace(member, role=role) for member in hosts.members])
        self._role, self._hosts = role, hosts

    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        deadline: Deadline,
        doing: str,
        fold: Callable[[list[Any]], Any] = lambda answers: answers,
    ) -> Call[Any]:
        return super().call_each(
            self._role, [(method, *given) for given in args], deadline=deadline, doing=doing, fold=fold
        )

    def first(self) -> "ActorGroup":
        return Lodgers(self._role, self._hosts.first())


def _is_large(arg: Any) -> bool:
    return not isinstance(arg, str | int | float | bool | dict | tuple | type(None))


def host_memory_gib() -> dict[str, float]:
    """What this process holds on the host now."""
    return {"host": psutil.Process().memory_info().rss / 2**30}


class RankActor:
    """What each of our actors can report about itself."""

    concurrent_calls: ClassVar[int] = 1  # per actor; more than one makes it threaded
    _most_reserved: int = 0  # bytes of its GPU, when it was last asked

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # not __init__, which subclasses have without calling this one
        stacks.answer_as_actor()
        return super().__new__(cls)

    def node(self) -> str:
        """The IP address of the node it runs on."""
        return ray.util.get_node_ip_address()

    def memory_gib(self) -> dict[str, float]:
        """What this process holds on the host; and the most that it has reserved and allocated on its GPU, if it uses
        one, since it was last asked."""
        import torch

        if not torch.cuda.is_initialized():
            return host_memory_gib()
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._most_reserved = max(self._most_reserved, reserved)
        return host_memory_gib() | {"gpu": reserved / 2**30, "allocated": allocated / 2**30}

    def peak_memory_gib(self) -> dict[str, float]:
        """The most this process has ever held: resident on the host, and reserved on its GPU if it uses one."""
        import resource

        peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        return peak | ({"gpu": self._most_reserved / 2**30} if "gpu" in self.memory_gib() else {})

    def device_name(self) -> str:
        """torch's name for its GPU, or 'cpu'."""
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES as this process sees it."""
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES", "")
