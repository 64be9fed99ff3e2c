"""Buckets broadcast from learner rank 0 to every worker process: NCCL between GPUs, gloo on CPU."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from actors.weights.channel import NUM_SLOTS, Receiver, Ring, Sender, Session, TransferAbortedError
from rlhf.errors import one_line

T = TypeVar("T")

NEVER = timedelta(days=7)

_kept_groups: list[Any] = []  # gloo groups: they cannot abort, and their destructors wait for what is in flight


class BroadcastGroup:
    """A process group of the sender (rank 0) and all receivers, created when all have joined."""

    def __init__(self, session: Session, rank: int, device: torch.device) -> None:
        self._session = session
        world_size = session.rendezvous.num_receivers + 1
        session.count("members", 1)
        session.wait(lambda: session.count("members") == world_size, "waiting for all to join the broadcast")
        connecting = _in_thread(lambda: _connected_group(session, rank, world_size, device))
        try:
            session.wait(connecting.done, "connecting for the broadcast")
            with self._abort_if_broken():
                self._group, first = connecting.result()
            self.finish(first)
        except BaseException:
            connecting.add_done_callback(_close_late)
            raise

    def start(self, data: Tensor) -> Any:
        """Starts to broadcast ``data`` from rank 0, after the work queued on the current stream."""
        with self._abort_if_broken():
            return _broadcast(self._group, data)

    def finish(self, work: Any) -> None:
        """Waits until the data have arrived (or are sent). Only this host thread waits: a stream could not be freed."""
        self._session.wait(work.is_completed, "broadcasting weights")
        with self._abort_if_broken():
            work.wait()

    def close(self) -> None:
        """Drops all connections, including those to dead members, and frees streams from whatever was in flight."""
        _close(self._group)

    @contextlib.contextmanager
    def _abort_if_broken(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for any lost connection
            why = one_line(error)[:300]
            self._session.abort(why)
            raise TransferAbortedError(why) from error


def _in_thread(function: Callable[[], T]) -> "Future[T]":
    """Calls a function that may never return, in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights-connect", daemon=True).start()
    return future


def _connected_group(session: Session, rank: int, world_size: int, device: torch.device) -> tuple[Any, Any]:
    """The group, and its first broadcast, in which NCCL connects.

    Both libraries connect in calls that wait for every peer: if one dies there they may never return, and nothing can
    abort them.
    """
    store = dist.PrefixStore("group", session.connect())
    group = _process_group(store, rank, world_size, device, session.left_s)
    return group, _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))


def _broadcast(group: Any, data: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([data], options)


def _close(group: Any) -> None:
    if isinstance(group, dist.ProcessGroupGloo):
        _kept_groups.append(group)
    else:
        group.abort()


def _close_late(connecting: "Future[tuple[Any, Any]]") -> None:
    """Closes a group that nobody waits for any more, if it ever connects."""
    if connecting.exception() is None:
        _close(connecting.result()[0])


def _process_group(store: Any, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
    # Without torch's own time limit and error handling: it would end the whole process when a peer dies.
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


class BroadcastSender(Sender):
    """The learner's rank 0."""

    def __init__(self, session: Session, ring: Ring) -> None:
        self._group, self._ring = BroadcastGroup(session, 0, ring.memory.device), ring
        self._works: deque[Any] = deque()

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        if len(self._works) == NUM_SLOTS:
            self._group.finish(self._works.popleft())
        return self._ring.slot(bucket, num_bytes)

    def send(self, data: Tensor) -> None:
        self._works.append(self._group.start(data))

    def drain(self) -> None:
        while self._works:
            self._group.finish(self._works.popleft())

    def close(self) -> None:
        self._works.clear()
        self._group.close()


class BroadcastReceiver(Receiver):
    """A vLLM worker process."""

    def __init__(self, session: Session, receiver: int, device: torch.device, slot_bytes: int) -> None:
        self._group = BroadcastGroup(session, 1 + receiver, device)
        self._ring = Ring(torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=device))

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        coming: deque[Any] = deque()
        for bucket in range(len(sizes) + 1):
            if bucket < len(sizes):  # work queued on the current stream in the last round empties its slot
                coming.append(self._group.start(self._ring.slot(bucket, sizes[bucket])))
            if bucket > 0:
                self._group.finish(coming.popleft())
                yield self._ring.slot(bucket - 1, sizes[bucket - 1])

    def close(self) -> None:
        self._group.close()
