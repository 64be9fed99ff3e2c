"""Buckets in a ring that the sender fills and its receivers map: CUDA IPC on one GPU, shared memory on CPU."""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from actors.weights.channel import NUM_SLOTS, Receiver, Ring, Sender, Session, wait_for_device


class SharedSender(Sender):
    """A learner rank, for the receivers on its GPU: it fills slots, they report when they have emptied them."""

    def __init__(self, session: Session, ring: Ring, place: str) -> None:
        self._session, self._ring, self._place = session, ring, place
        self._receivers: list[int] | None = None
        self._sent = 0

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        self._await_emptied(self._sent - NUM_SLOTS + 1)
        return self._ring.slot(bucket, num_bytes)

    def send(self, data: Tensor) -> None:
        wait_for_device(self._session, data.device, "packing weights")
        self._sent = self._session.count(f"filled/{self._place}", 1)

    def drain(self) -> None:
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
        """The ring belongs to the caller, who may reuse it."""


class SharedReceiver(Receiver):
    """A vLLM worker process on a learner rank's GPU."""

    def __init__(self, session: Session, receiver: int, device: torch.device, handles: Mapping[str, bytes]) -> None:
        self._place = place_of(device)
        assert self._place in handles, f"no learner rank shares {self._place} with this worker"
        self._session, self._receiver, self._emptied = session, receiver, 0
        self._ring = Ring(open_memory(handles[self._place], device))
        session.store.set(f"place/{receiver}", self._place)

    def buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
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


def place_of(device: torch.device) -> str:
    """Names the memory that a device's processes share: the UUID of a GPU, or simply 'cpu'."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def shareable_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Zeroed bytes (uint8) that other processes on the same device can map, and the handle to map them."""
    if device.type == "cpu":
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('rlhf-weights')}"
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8), path.encode()
    # CUDA IPC shares only plain segments; this process's others are expandable (actors.process_env.gpu_env).
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch._C._accelerator_setAllocatorSettings(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return memory, pickle.dumps(reduce_tensor(memory)[1])


def open_memory(handle: bytes, device: torch.device) -> Tensor:
    """Maps the memory of ``shareable_memory`` in another process."""
    if device.type == "cpu":
        path = Path(handle.decode())
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    args = list(pickle.loads(handle))
    args[6] = device.index  # the sender's device index means nothing in this process
    return rebuild_cuda_tensor(*args)
