"""Copies of tensors' storages in host memory that is kept between uses."""

import torch
from torch import Tensor


class HostBuffers:
    """Host copies of storages, by number from 0. The memory is pinned for those of a GPU, which is slow, and reused."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # uint8, one per number

    @torch.no_grad()
    def copy(self, number: int, storage: torch.UntypedStorage) -> Tensor:
        """The storage's bytes, uint8, valid until this number is used again. Waits for the device."""
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[number]) != storage.nbytes():
            pin = storage.device.type == "cuda"
            self._buffers[number] = torch.empty(0, dtype=torch.uint8)  # first: the old and the new one may not both fit
            self._buffers[number] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return self._buffers[number].copy_(bytes_of(storage))


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """uint8, in the storage's own memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def view_like(tensor: Tensor, data: Tensor) -> Tensor:
    """What ``tensor`` is to its storage, in ``data``, a copy of that storage's bytes."""
    return data.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
