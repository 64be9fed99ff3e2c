"""The parts of a weight transfer: a session that all its processes join, a small ring of buffers for buckets, and the
interfaces of senders and receivers.

A session's processes meet in a TCPStore hosted by learner rank 0, and every wait checks there whether the transfer was
aborted. So a dead receiver leaves no process waiting, and nothing relies on a library's own time limits.
"""

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.process_env import LOOPBACK
from rlhf.errors import DeadlineError, WeightSyncError, one_line

NUM_SLOTS = 2  # one is in flight while the other is filled or emptied
SPIN_S = 0.002  # a wait polls without pauses for this long, then with pauses
PAUSE_S = 0.0001
LOOK_S = 0.02  # how often a wait checks whether the transfer was aborted


class TransferAbortedError(WeightSyncError):
    """A transfer was aborted, through no fault of the process that raises this. The message gives the known cause."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a session find each other."""

    address: str
    port: int
    name: str  # unique in the store
    num_receivers: int  # processes, numbered from 0


def host_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A store that lives in this process, at an address of its node, on a free port.

    It listens on all interfaces, as torch's stores do; at the loopback address, on that interface alone.
    """
    timeout = timedelta(seconds=timeout_s)
    if address != LOOPBACK:
        return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    listening = listener.detach()  # the store closes it
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
    )


class Session:
    """One process's view of a rendezvous. ``renew`` before every transfer sets how long its waits may last."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self.rendezvous = rendezvous
        self.renew(timeout_s)
        self.store = self.connect()

    def connect(self) -> Any:
        """The session's store over a connection of its own. Calls over one connection take turns, so a library that
        blocks in one would keep others from looking whether the transfer was aborted."""
        at, timeout = self.rendezvous, timedelta(seconds=self.left_s)
        client = dist.TCPStore(at.address, at.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore(at.name, client)

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
                with self._reaching_the_store():
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
        """Ends the session for all its processes."""
        with self._reaching_the_store():
            self.store.set("off", why)

    def count(self, key: str, add: int = 0) -> int:
        """Adds to a number that all processes share, and returns it."""
        with self._reaching_the_store():
            return self.store.add(key, add)

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        """A connection that breaks is nobody's fault."""
        try:
            yield
        except dist.DistError as error:
            raise TransferAbortedError(f"the session's store cannot be reached: {one_line(error)[:300]}") from error


@dataclass(frozen=True)
class Ring:
    """NUM_SLOTS equal slots of one buffer; bucket i uses slot i mod NUM_SLOTS."""

    memory: Tensor  # uint8 [NUM_SLOTS * slot bytes]
    handles: Mapping[str, bytes] = field(default_factory=dict)  # for other processes to map it, by their place

    def slot(self, bucket: int, num_bytes: int) -> Tensor:
        """The first ``num_bytes`` of the bucket's slot."""
        slot_bytes = len(self.memory) // NUM_SLOTS
        start = bucket % NUM_SLOTS * slot_bytes
        assert num_bytes <= slot_bytes, f"a bucket of {num_bytes} bytes does not fit a slot of {slot_bytes}"
        return self.memory[start : start + num_bytes]


class Sender(ABC):
    """A learner rank that sends buckets, one transfer after another."""

    @abstractmethod
    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        """Where to put the bucket: uint8 [num_bytes]. Waits until the slot's previous bucket is sent."""

    @abstractmethod
    def send(self, data: Tensor) -> None:
        """Starts to send what ``free_slot`` returned, after the work queued on the current stream."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until all is sent."""

    @abstractmethod
    def close(self) -> None:
        """Leaves at once, whatever is in flight; the ring may be reused."""


class Receiver(ABC):
    """A worker process that receives buckets, one transfer after another."""

    @abstractmethod
    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yields every bucket, uint8 [its size]. Use it on the current stream, before asking for the next."""

    @abstractmethod
    def close(self) -> None:
        """Leaves at once, whatever is in flight."""


def wait_for_device(session: Session, device: torch.device, doing: str) -> None:
    """Waits until the work queued on the current stream is done."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        session.wait(event.query, doing)
