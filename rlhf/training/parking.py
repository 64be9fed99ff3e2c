"""Parks optimiser state in host memory while another process needs the GPU.

DeepSpeed's own ``offload_states`` accepts only its FusedAdam at stage 3, does not exist at stage 0, and replaces the
tensors that it moves. Emptying their storages instead works the same way at every stage: every view of a storage stays
valid.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhf.training.host_memory import HostMemory, bytes_of, view_like


class Parking:
    """Host memory for a fixed set of a device's tensors, kept between uses."""

    def __init__(self, device: torch.device) -> None:
        self._memory = HostMemory(device)
        self._host: list[Tensor] = []  # uint8, one per storage
        self._storages: list[torch.UntypedStorage] = []
        self._tensors: list[tuple[Tensor, int]] = []  # with the number of each one's storage

    @property
    def parked(self) -> bool:
        return bool(self._storages)

    @torch.no_grad()
    def park(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors' storages to the host and frees them. The tensors must not be used until ``unpark``."""
        assert not self.parked
        numbers: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            if number == len(self._storages):
                self._storages.append(storage)
            self._tensors.append((tensor, number))
        self._memory.clear()
        for storage in self._storages:
            self._host.append(self._memory.copy(storage))
            storage.resize_(0)

    @torch.no_grad()
    def unpark(self) -> None:
        """Brings everything back. Does nothing if nothing is parked."""
        for host, storage in zip(self._host, self._storages, strict=True):
            storage.resize_(len(host))
            bytes_of(storage).copy_(host)
        self._host, self._storages, self._tensors = [], [], []

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the parked tensors are their host copies: enough to write a checkpoint."""
        shells = [tensor.data for tensor, _ in self._tensors]
        try:
            for tensor, number in self._tensors:
                tensor.data = view_like(tensor, self._host[number])
            yield
        finally:
            for (tensor, _), shell in zip(self._tensors, shells, strict=True):
                tensor.data = shell
