"""How bytes cross from the learner's processes to vLLM's: buckets in a small ring of buffers, broadcast or shared.

Everyone of a session meets in a TCPStore that learner rank 0 hosts, and every wait looks there for the word that the
transfer is off. So a receiver that died leaves nobody waiting, and nothing relies on a library's own time limits.

* ``BroadcastSender``/``BroadcastReceiver``: NCCL between GPUs (gloo on CPU), from learner rank 0 to every process.
* ``SharedSender``/``SharedReceiver``: the sender's ring itself, mapped by every receiver on its GPU (on CPU: its node).
"""

import contextlib
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlhf.errors import DeadlineError, WeightSyncError

NUM_SLOTS = 2  # one is on its way while the other is filled, or emptied
SPIN_S = 0.002  # a wait polls without a pause for so long, then with pauses
PAUSE_S = 0.0001
LOOK_S = 0.02  # how often a wait looks whether the transfer is off
NEVER = timedelta(days=7)

_kept_groups: list[Any] = []  # of gloo: it cannot abort, and its destructor waits for what is on its way


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


class Ring:
    """A few equal slots of one buffer; bucket i lies in slot i mod NUM_SLOTS."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # uint8 [NUM_SLOTS * slot bytes]

    def slot(self, bucket: int, num_bytes: int) -> Tensor:
        """The first ``num_bytes`` of the bucket's slot."""
        slot_bytes = len(self.memory) // NUM_SLOTS
        start = bucket % NUM_SLOTS * slot_bytes
        assert num_bytes <= slot_bytes, f"a bucket of {num_bytes} bytes does not fit a slot of {slot_bytes}"
        return self.memory[start : start + num_bytes]


class BroadcastGroup:
    """A process group of the sender (rank 0) and all receivers; made once all have come."""

    def __init__(self, session: Session, rank: int, device: torch.device) -> None:
        self._session = session
        world_size = session.rendezvous.num_receivers + 1
        session.count("members", 1)
        session.wait(lambda: session.count("members") == world_size, "waiting for all to join the broadcast")
        store = dist.PrefixStore("group", session.store)
        with self._broken_means_off():
            self._group = _process_group(store, rank, world_size, device, session.left_s)
        try:  # NCCL connects at the first use
            self.finish(self.start(torch.zeros(1, dtype=torch.uint8, device=device)))
        except BaseException:
            self.close()
            raise

    def start(self, data: Tensor) -> Any:
        """Begins to broadcast ``data`` from rank 0, after what the current stream has been given so far."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._broken_means_off():
            return self._group.broadcast([data], options)

    def finish(self, work: Any) -> None:
        """Waits until the data are there (or sent). Nothing but this host thread waits: a stream could not be freed."""
        self._session.wait(work.is_completed, "broadcasting weights")
        with self._broken_means_off():
            work.wait()

    def close(self) -> None:
        """Drops the connections, also those to dead members, and frees the streams of whatever was on its way."""
        if isinstance(self._group, dist.ProcessGroupGloo):
            _kept_groups.append(self._group)
        else:
            self._group.abort()

    @contextlib.contextmanager
    def _broken_means_off(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for any lost connection
            why = " ".join(str(error).split())[:300]
            self._session.abort(why)
            raise TransferAbortedError(why) from error


def _process_group(store: Any, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
    # Without its own time limit and error handling: torch would end the whole process for a peer's death.
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


class BroadcastSender:
    """The learner's rank 0."""

    def __init__(self, session: Session, ring: Ring) -> None:
        self._group, self._ring = BroadcastGroup(session, 0, ring.memory.device), ring
        self._works: deque[Any] = deque()

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        """Where to put the bucket; waits until what lay there is sent."""
        if len(self._works) == NUM_SLOTS:
            self._group.finish(self._works.popleft())
        return self._ring.slot(bucket, num_bytes)

    def send(self, data: Tensor) -> None:
        """Begins to send what ``free_slot`` gave, after the current stream's work so far."""
        self._works.append(self._group.start(data))

    def drain(self) -> None:
        """Waits until all is sent."""
        while self._works:
            self._group.finish(self._works.popleft())

    def close(self) -> None:
        self._works.clear()
        self._group.close()


class BroadcastReceiver:
    """A vLLM worker process."""

    def __init__(self, session: Session, receiver: int, device: torch.device, slot_bytes: int) -> None:
        self._group = BroadcastGroup(session, 1 + receiver, device)
        self._ring = Ring(torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=device))

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yields every bucket; to be used in the current stream's order and before the next is asked for."""
        coming: deque[Any] = deque()
        for bucket in range(len(sizes) + 1):
            if bucket < len(sizes):  # its slot was emptied by what the current stream was given in the last round
                coming.append(self._group.start(self._ring.slot(bucket, sizes[bucket])))
            if bucket > 0:
                self._group.finish(coming.popleft())
                yield self._ring.slot(bucket - 1, sizes[bucket - 1])

    def close(self) -> None:
        self._group.close()


class SharedSender:
    """A learner rank, for the receivers on its GPU: it fills slots, they say when they have emptied them."""

    def __init__(self, session: Session, ring: Ring, place: str) -> None:
        self._session, self._ring, self._place = session, ring, place
        self._receivers: list[int] | None = None
        self._sent = 0

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        """As BroadcastSender's."""
        self._await_emptied(self._sent - NUM_SLOTS + 1)
        return self._ring.slot(bucket, num_bytes)

    def send(self, data: Tensor) -> None:
        """As BroadcastSender's."""
        wait_for_device(self._session, data.device, "packing weights")
        self._sent = self._session.count(f"filled/{self._place}", 1)

    def drain(self) -> None:
        """Waits until every receiver has emptied every slot."""
        self._await_emptied(self._sent)

    def _await_emptied(self, count: int) -> None:
        if self._receivers is None:
            places = {r: self._session.store.get(f"place/{r}") for r in range(self._session.rendezvous.num_receivers)}
            self._receivers = [r for r, place in places.items() if place.decode() == self._place]
        for receiver in self._receivers:
            self._session.wait(
                lambda r=receiver: self._session.count(f"emptied/{r}") >= count, "waiting for rollout workers to copy"
            )

    def close(self) -> None:
        """The ring is the caller's, who may use it again."""


class SharedReceiver:
    """A vLLM worker process on a learner rank's GPU."""

    def __init__(self, session: Session, receiver: int, device: torch.device, handles: dict[str, bytes]) -> None:
        self._place = place_of(device)
        assert self._place in handles, f"no learner rank shares {self._place} with this worker"
        self._session, self._receiver, self._emptied = session, receiver, 0
        self._ring = Ring(open_memory(handles[self._place], device))
        session.store.set(f"place/{receiver}", self._place)

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """As BroadcastReceiver's."""
        for bucket, num_bytes in enumerate(sizes):
            self._session.wait(
                lambda: self._session.count(f"filled/{self._place}") > self._emptied,
                "waiting for the learner's weights",
            )
            data = self._ring.slot(bucket, num_bytes)
            yield data
            wait_for_device(self._session, data.device, "copying weights")
            self._emptied = self._session.count(f"emptied/{self._receiver}", 1)

    def close(self) -> None:
        del self._ring


Sender = BroadcastSender | SharedSender
Receiver = BroadcastReceiver | SharedReceiver


def wait_for_device(session: Session, device: torch.device, doing: str) -> None:
    """Waits until the current stream's work so far is done."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        session.wait(event.query, doing)


def place_of(device: torch.device) -> str:
    """Which memory a device's processes share: the UUID of a GPU; on CPU simply 'cpu'."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def shareable_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Zeroed bytes (uint8) that other processes on the same device can map, and the handle to do so."""
    if device.type == "cpu":
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('rlhf-weights')}"
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8), path.encode()
    # CUDA IPC hands out plain segments only; this process's others may grow (actors.cluster.gpu_env).
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch._C._accelerator_setAllocatorSettings(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return memory, pickle.dumps(reduce_tensor(memory)[1])


def open_memory(handle: bytes, device: torch.device) -> Tensor:
    """The memory of ``shareable_memory`` in another process."""
    if device.type == "cpu":
        path = Path(handle.decode())
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    args = list(pickle.loads(handle))
    args[6] = device.index  # the sender's device index means nothing in this process
    return rebuild_cuda_tensor(*args)
