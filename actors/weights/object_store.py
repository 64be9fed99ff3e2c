"""Buckets in Ray's object store. A module of its own, because vLLM's processes, which know the other routes, do without
Ray."""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from actors.weights.channel import Sender
from rlhf.training.weights import TensorSpec

StoredBucket = tuple[tuple[TensorSpec, ...], ray.ObjectRef]
"""What lies where in a bucket, and its bytes."""


class ObjectStoreSender(Sender):
    """Learner rank 0: stores every bucket."""

    def __init__(self) -> None:
        self.references: list[ray.ObjectRef] = []  # of what was sent, in order

    def free_slot(self, bucket: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, data: Tensor) -> None:
        self.references.append(ray.put(data.numpy()))

    def drain(self) -> None:
        """A bucket is stored once it is sent."""

    def close(self) -> None:
        """Nothing is on its way."""


def fetch(buckets: Sequence[StoredBucket], timeout_s: float) -> Iterator[tuple[tuple[TensorSpec, ...], Any]]:
    """Each bucket's specs and bytes, one bucket at a time: a NumPy array (uint8) to be read only."""
    for specs, reference in buckets:
        yield specs, ray.get(reference, timeout=timeout_s)
