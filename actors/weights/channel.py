"""What a weight transfer is made of: a session that all its processes join, buckets in a small ring of buffers, and who
sends and receives them.

Everyone of a session meets in a TCPStore that learner rank 0 hosts, and every wait looks there for the word that the
transfer is off. So a receiver that died leaves nobody waiting, and nothing relies on a library's own time limits.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.errors import DeadlineError, WeightSyncError

NUM_SLOTS = 2  # one is on its way while the other is filled, or emptied
SPIN_S = 0.002  # a wait polls without a pause for so long, then with pauses
PAUSE_S = 0.0001
LOOK_S = 0.02  # how often a wait looks whether the transfer is off


class TransferAbortedError(WeightSyncError):
    """A transfer was given up; whoever raises this is not the one at fault. The message says what is known of that."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a session find each other."""

    address: str
    port: int
    name: str  # unique in the store
    num_receivers: int  # processes, numbered from 0


class Session:
    """One process's view of a rendezvous. ``renew`` before every transfer sets how long its waits may last."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        client = dist.TCPStore(
            rendezvous.address,
            rendezvous.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self.rendezvous = rendezvous
        self.store = dist.PrefixStore(rendezvous.name, client)
        self.renew(timeout_s)

    def renew(self, timeout_s: float) -> None:
        self._timeout_s, self._ends = timeout_s, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def wait(self, ready: Callable[[], bool], doing: str) -> None:
        """Returns once ``ready()``. Raises TransferAbortedError, or DeadlineError when the time is up."""
        started = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                if self.store.check(["off"]):
                    raise TransferAbortedError(self.store.get("off").decode())
                if now > self._ends:
                    raise DeadlineError(
                        f"weight transfer: still {doing} after {self._timeout_s:g} s; raise timeouts.publish_s if that "
                        "is normal"
                    )
            if now - started > SPIN_S:
                time.sleep(PAUSE_S)

    def abort(self, why: str) -> None:
        """Ends the session for everyone in it."""
        self.store.set("off", why)

    def count(self, key: str, add: int = 0) -> int:
        """A number that all processes share, after adding to it."""
        return self.store.add(key, add)


@dataclass(frozen=True)
class Ring:
    """A few equal slots of one buffer; bucket i lies in slot i mod NUM_SLOTS."""

    memory: Tensor  # uint8 [NUM_SLOTS * slot bytes]
    handles: Mapping[str, bytes] = field(default_factory=dict)  # to map it in other processes, by the place they are in

    def slot(self, bucket: int, num_bytes: int) -> Tensor:
        """The first ``num_bytes`` of the bucket's slot."""
        slot_bytes = len(self.memory) // NUM_SLOTS
        start = bucket % NUM_SLOTS * slot_bytes
        assert num_bytes <= slot_bytes, f"a bucket of {num_bytes} bytes does not fit a slot of {slot_bytes}"
        return self.memory[start : start + num_bytes]


class Sender(ABC):
    """A learner rank that sends buckets, one transfer after the other."""

    @abstractmethod
    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        """Where to put the bucket: uint8 [num_bytes]. Waits until what lay there is sent."""

    @abstractmethod
    def send(self, data: Tensor) -> None:
        """Begins to send what ``free_slot`` gave, after the current stream's work so far."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until all is sent."""

    @abstractmethod
    def close(self) -> None:
        """Leaves at once, whatever is on its way; the ring may be used again."""


class Receiver(ABC):
    """A worker process that receives buckets, one transfer after the other."""

    @abstractmethod
    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yields every bucket, uint8 [its size]; to be used in the current stream's order and before the next is asked
        for."""

    @abstractmethod
    def close(self) -> None:
        """Leaves at once, whatever is on its way."""


def wait_for_device(session: Session, device: torch.device, doing: str) -> None:
    """Waits until the current stream's work so far is done."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        session.wait(event.query, doing)
