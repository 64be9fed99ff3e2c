"""Buckets in Ray's object store. A separate module, because vLLM's processes import the other routes but not Ray."""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from actors.weights.channel import Sender
from rlhf.training.weights import TensorSpec

StoredBucket = tuple[tuple[TensorSpec, ...], ray.ObjectRef]
"""A bucket's layout and its bytes."""


class ObjectStoreSender(Sender):
    """Learner rank 0: stores every bucket."""

    def __init__(self) -> None:
        self.references: list[ray.ObjectRef] = []  # to what was sent, in order

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, data: Tensor) -> None:
        self.references.append(ray.put(data.numpy()))

    def drain(self) -> None:
        """Buckets are stored as they are sent."""

    def close(self) -> None:
        """Nothing is in flight."""


def fetch(buckets: Sequence[StoredBucket], timeout_s: float) -> Iterator[tuple[tuple[TensorSpec, ...], Any]]:
    """Each bucket's specs and bytes (a read-only NumPy array, uint8), one bucket at a time."""
    for specs, reference in buckets:
        yield specs, ray.get(reference, timeout=timeout_s)
