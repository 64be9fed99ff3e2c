"""Publishing the learner's weights to the rollout pool: three transports, one protocol.

begin (workers stop serving) -> transfer -> finish (they report checksums) -> compare -> commit (they serve again).
A version is committed only when every worker reports the learner's own checksums.

* CPU: buckets through Ray's object store (shared memory on one node, the network between nodes).
* GPU, colocated: buckets by CUDA IPC handle, one at a time.
* GPU, separate: buckets broadcast over NCCL from learner rank 0 to every worker process.
"""

from collections.abc import Iterator
from typing import Any

import ray

from actors.group import ActorGroup, Deadline
from actors.transport import broadcast, ipc_handle, join_broadcast_group
from rlhf.engine import Engine
from rlhf.errors import WeightSyncError
from rlhf.weights import Bucket, TensorSpec, bucket_layout, checksum, gathered_buckets

Layout = list[tuple[TensorSpec, ...]]


class WeightSender:
    """The learner's end, on each of its ranks. Every method is collective over the ranks."""

    def __init__(self, engine: Engine, bucket_bytes: int) -> None:
        self._engine, self._bucket_bytes = engine, bucket_bytes
        self._buckets: Iterator[Bucket | None] | None = None
        self._group: Any = None
        self._in_flight: Bucket | None = None

    def layout(self) -> Layout:
        return bucket_layout(self._engine.model, self._bucket_bytes)

    def _gather(self, *, materialise: bool) -> Iterator[Bucket | None]:
        self._engine.release_gathered()
        return gathered_buckets(self._engine.model, self._bucket_bytes, materialise=materialise)

    def to_object_store(self) -> list[tuple[tuple[TensorSpec, ...], Any, int]]:
        """(specs, object reference of the bytes, checksum) per bucket, from rank 0."""
        stored = []
        for bucket in self._gather(materialise=self._engine.rank == 0):
            if bucket is not None:
                stored.append((bucket.specs, ray.put(bucket.data.numpy()), checksum(bucket.data)))
        return stored

    def next_ipc(self) -> tuple[tuple[TensorSpec, ...], tuple[str, bytes], int] | None:
        """(specs, (GPU UUID, handle), checksum) of the next bucket; None after the last.

        The bucket stays alive until the following call, by which time its receivers have copied it.
        """
        self._buckets = self._buckets or self._gather(materialise=True)
        self._in_flight = next(self._buckets, None)
        if self._in_flight is None:
            self._buckets = None
            return None
        return self._in_flight.specs, ipc_handle(self._in_flight.data), checksum(self._in_flight.data)

    def join_broadcast(self, address: str, port: int, world_size: int, timeout_s: float) -> None:
        """Rank 0 hosts and joins the NCCL group of the workers."""
        if self._engine.rank == 0:
            self._group = join_broadcast_group(address, port, 0, world_size, timeout_s)

    def broadcast(self) -> list[int]:
        """Sends every bucket; returns their checksums (rank 0; empty elsewhere)."""
        sums = []
        for bucket in self._gather(materialise=self._engine.rank == 0):
            if bucket is not None:
                broadcast(self._group, bucket.data)
                sums.append(checksum(bucket.data))
        return sums


class ObjectStoreTransport:
    """CPU: the whole model passes through the object store, a bucket per object."""

    def __init__(self, learner: ActorGroup, workers: ActorGroup, deadline: Deadline) -> None:
        self._learner, self._workers, self._deadline = learner, workers, deadline

    def transfer(self) -> list[int]:
        """Moves the weights; returns the learner's checksums."""
        answers = self._learner.call("send_object_store", deadline=self._deadline, doing="gathering weights").result()
        for specs, reference, _ in answers[0]:
            self._workers.call_each(
                "receive",
                [([specs], reference)] * len(self._workers.members),
                deadline=self._deadline,
                doing="receiving weights",
            ).result()
        return [sum_ for _, _, sum_ in answers[0]]


class IpcTransport:
    """GPU, colocated: every learner rank shows the workers on its GPU a bucket at a time."""

    def __init__(self, learner: ActorGroup, workers: ActorGroup, deadline: Deadline) -> None:
        self._learner, self._workers, self._deadline = learner, workers, deadline

    def transfer(self) -> list[int]:
        sums: list[int] = []
        while True:
            shown = self._learner.call("send_ipc", deadline=self._deadline, doing="gathering weights").result()
            if shown[0] is None:
                return sums
            handles = dict(handle for _, handle, _ in shown)
            self._workers.call(
                "receive", [shown[0][0]], None, handles, deadline=self._deadline, doing="receiving weights"
            ).result()
            sums.append(shown[0][2])


class NcclTransport:
    """GPU, separate: one broadcast per bucket from learner rank 0 to every worker process."""

    def __init__(self, learner: ActorGroup, workers: ActorGroup, deadline: Deadline, processes_per_worker: int) -> None:
        self._learner, self._workers, self._deadline = learner, workers, deadline
        address, root = learner.members[0].node, learner.members[0].handle
        port = ray.get(root.free_port.remote(), timeout=deadline.seconds)
        world = 1 + processes_per_worker * len(workers.members)
        joining = learner.call(
            "join_broadcast", address, port, world, deadline.seconds, deadline=deadline, doing="joining NCCL"
        )
        infos = [
            (
                {
                    "address": address,
                    "port": port,
                    "first_rank": 1 + i * processes_per_worker,
                    "world_size": world,
                    "timeout_s": deadline.seconds,
                },
            )
            for i in range(len(workers.members))
        ]
        workers.call_each("join_broadcast", infos, deadline=deadline, doing="joining NCCL").result()
        joining.result()
        self._layout = learner.call("weight_layout", deadline=deadline, doing="describing weights").result()[0]

    def transfer(self) -> list[int]:
        receiving = self._workers.call("receive", self._layout, deadline=self._deadline, doing="receiving weights")
        sums = self._learner.call("send_broadcast", deadline=self._deadline, doing="sending weights").result()[0]
        receiving.result()
        return sums


Transport = ObjectStoreTransport | IpcTransport | NcclTransport


def publish(version: int, transport: Transport, workers: ActorGroup, deadline: Deadline) -> None:
    """Gives every worker the learner's weights as ``version``. Raises WeightSyncError if any received others."""
    workers.call("begin_update", deadline=deadline, doing="preparing for new weights").result()
    sent = transport.transfer()
    received = workers.call("finish_update", deadline=deadline, doing="loading weights").result()
    for member, processes in zip(workers.members, received, strict=True):
        for process, sums in enumerate(processes):
            if sums != sent:
                wrong = [i for i, (a, b) in enumerate(zip(sent, sums, strict=False)) if a != b]
                raise WeightSyncError(
                    f"{member}, process {process}: weight version {version} arrived changed in bucket(s) {wrong} of "
                    f"{len(sent)} ({len(sums)} received); it was not committed"
                )
    workers.call("commit", version, deadline=deadline, doing="committing weights").result()
