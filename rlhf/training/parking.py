"""Parks optimiser state in host memory while another process needs the GPU.

DeepSpeed's own ``offload_states`` accepts only its FusedAdam at stage 3, does not exist at stage 0, and replaces the
tensors that it moves. Emptying their storages instead works the same way at every stage: every view of a storage stays
valid.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Parking:
    """Pinned host memory for a fixed set of tensors, kept between uses: pinning is slow."""

    def __init__(self) -> None:
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
        for number, storage in enumerate(self._storages):
            self._host_buffer(number, storage).copy_(_bytes_of(storage))  # to pinned memory; waits
            storage.resize_(0)

    def _host_buffer(self, number: int, storage: torch.UntypedStorage) -> Tensor:
        """The host's copy of a storage; allocated on first use, or when the storage's size has changed."""
        if number == len(self._host):
            self._host.append(torch.empty(0, dtype=torch.uint8))
        if len(self._host[number]) != storage.nbytes():
            pin = storage.device.type == "cuda"
            self._host[number] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return self._host[number]

    @torch.no_grad()
    def unpark(self) -> None:
        """Brings everything back. Does nothing if nothing is parked."""
        for host, storage in zip(self._host, self._storages, strict=False):
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host)
        self._storages, self._tensors = [], []

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the parked tensors are their host copies: enough to write a checkpoint."""
        shells = [tensor.data for tensor, _ in self._tensors]
        try:
            for tensor, number in self._tensors:
                values = self._host[number].view(tensor.dtype)
                tensor.data = values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            yield
        finally:
            for (tensor, _), shell in zip(self._tensors, shells, strict=True):
                tensor.data = shell


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
