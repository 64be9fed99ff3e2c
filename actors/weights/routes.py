"""The routes that weights may take from the learner to rollout workers, and which of them a run takes.

A route is one class here and its line in ``ROUTES``. How it moves buckets is in the module that it imports from.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from actors.weights.broadcast import BroadcastReceiver, BroadcastSender
from actors.weights.channel import Receiver, Ring, Sender, Session
from actors.weights.share import SharedReceiver, SharedSender, place_of, shareable_memory
from rlhf.planning.topology import Device
from rlhf.training.weights import TensorSpec

if TYPE_CHECKING:
    from actors.weights.object_store import ObjectStoreSender, StoredBucket


class SessionRoute(ABC):
    """Sender and receivers move buckets among themselves, in a session that lasts until the members change.

    Learner ranks send, every process of a worker's engine receives.
    """

    needs_handles: ClassVar[bool] = False  # receivers map the senders' rings, so they join after the learner

    @abstractmethod
    def ring(self, rank: int, num_bytes: int, device: torch.device) -> Ring | None:
        """What a learner rank sends from, kept for later sessions; None for a rank that sends nothing."""

    @abstractmethod
    def sender(self, session: Session, ring: Ring) -> Sender:
        """The sending end, on a learner rank that has a ring."""

    @abstractmethod
    def receiver(
        self, session: Session, number: int, device: torch.device, *, slot_bytes: int, handles: Mapping[str, bytes]
    ) -> Receiver:
        """The end of receiver ``number``. ``handles``: of all learner ranks' rings, if the route needs them."""


class Broadcast(SessionRoute):
    """NCCL between GPUs (gloo on CPU), from learner rank 0 to every process."""

    def ring(self, rank: int, num_bytes: int, device: torch.device) -> Ring | None:
        return Ring(torch.zeros(num_bytes, dtype=torch.uint8, device=device)) if rank == 0 else None

    def sender(self, session: Session, ring: Ring) -> Sender:
        return BroadcastSender(session, ring)

    def receiver(
        self, session: Session, number: int, device: torch.device, *, slot_bytes: int, handles: Mapping[str, bytes]
    ) -> Receiver:
        return BroadcastReceiver(session, number, device, slot_bytes)


class Share(SessionRoute):
    """Every learner rank's ring, mapped by the processes on its GPU (on CPU: on its node)."""

    needs_handles = True

    def ring(self, rank: int, num_bytes: int, device: torch.device) -> Ring:
        memory, handle = shareable_memory(num_bytes, device)
        # On CPU all ranks are in one place, and the first serves all receivers.
        place = place_of(device) if device.type == "cuda" or rank == 0 else f"cpu/{rank}"
        return Ring(memory, {place: handle})

    def sender(self, session: Session, ring: Ring) -> Sender:
        (place,) = ring.handles
        return SharedSender(session, ring, place)

    def receiver(
        self, session: Session, number: int, device: torch.device, *, slot_bytes: int, handles: Mapping[str, bytes]
    ) -> Receiver:
        return SharedReceiver(session, number, device, handles)


class ObjectStore:
    """Ray's object store (shared memory on one node, the network between nodes), from learner rank 0.

    No session: the learner stores all buckets, then each worker's actor fetches them and hands them to its engine.
    Imports Ray late: vLLM's processes import this module too.
    """

    def sender(self) -> "ObjectStoreSender":
        """The sending end, on learner rank 0."""
        from actors.weights.object_store import ObjectStoreSender

        return ObjectStoreSender()

    def receiver(
        self, buckets: Sequence["StoredBucket"], timeout_s: float
    ) -> Iterator[tuple[tuple[TensorSpec, ...], Any]]:
        """The receiving end, in a worker's actor: see object_store.fetch."""
        from actors.weights.object_store import fetch

        return fetch(buckets, timeout_s)


ROUTES: dict[str, SessionRoute | ObjectStore] = {
    "broadcast": Broadcast(),
    "share": Share(),
    "object_store": ObjectStore(),
}


def session_route(name: str) -> SessionRoute:
    """The route of this name, which must be one that moves buckets in a session."""
    route = ROUTES[name]
    assert isinstance(route, SessionRoute), f"{name} needs no session"
    return route


def choose_route(device: Device, *, colocated: bool) -> str:
    """The name of the route to workers on this device. ``colocated``: they share the learner's GPUs."""
    if device == "cpu":
        return "object_store"
    return "share" if colocated else "broadcast"
