"""The learner's end of a weight publish, on each of its ranks."""

from datetime import timedelta
from typing import Literal

import ray
import torch
import torch.distributed as dist

from actors.weights.channel import (
    NUM_SLOTS,
    BroadcastSender,
    Rendezvous,
    Ring,
    Sender,
    Session,
    SharedSender,
    TransferAbortedError,
    place_of,
    shareable_memory,
)
from rlhf.models.packed import PackedModel
from rlhf.training.weights import Layout, TensorSpec, bucket_layout, bucket_size, checksum, pack_bucket, walk_buckets

Route = Literal["broadcast", "share"]


class WeightSender:
    """Packs the weights into buckets and sends them. ``send`` and ``to_object_store`` are collective over the ranks.

    The ring of buckets is made at the first ``join`` and kept: NUM_SLOTS buckets of device memory.
    """

    def __init__(self, model: PackedModel, device: torch.device, bucket_bytes: int) -> None:
        self._model, self._device, self._rank = model, device, dist.get_rank()
        self.layout: Layout = bucket_layout(model, bucket_bytes)
        self._store: dist.TCPStore | None = None
        self._ring: Ring | None = None
        self._handle = b""
        self._session: Session | None = None
        self._sender: Sender | None = None

    def host_rendezvous(self, address: str, timeout_s: float) -> int:
        """Opens the store in which all sessions meet; returns its port (rank 0)."""
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return self._store.port

    def join(self, rendezvous: Rendezvous, route: Route, timeout_s: float) -> tuple[str, bytes]:
        """Leaves the session before and joins this one; returns (place, handle) of the ring for those who share it.

        Only rank 0 broadcasts. Raises TransferAbortedError.
        """
        self._leave()
        # On CPU all ranks are in one place: there the first serves all receivers.
        place = place_of(self._device) if self._device.type == "cuda" or self._rank == 0 else f"cpu/{self._rank}"
        self._session = Session(rendezvous, timeout_s)
        if route == "share":
            self._sender = SharedSender(self._session, self._make_ring(route), place)
        elif self._rank == 0:
            self._sender = BroadcastSender(self._session, self._make_ring(route))
        return place, self._handle

    def _make_ring(self, route: Route) -> Ring:
        num_bytes = NUM_SLOTS * max(bucket_size(specs) for specs in self.layout)
        if route == "share" and not self._handle:
            memory, self._handle = shareable_memory(num_bytes, self._device)
            self._ring = Ring(memory)
        elif self._ring is None:
            self._ring = Ring(torch.zeros(num_bytes, dtype=torch.uint8, device=self._device))
        return self._ring

    def _leave(self) -> None:
        """At once when a transfer is off: a broadcast to the dead holds the device."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def send(self, timeout_s: float) -> list[int]:
        """Sends every bucket to the session joined last; returns their checksums (rank 0; empty elsewhere).

        Raises TransferAbortedError, but not before the last gather: the other ranks take part in all of them.
        """
        assert self._session is not None, "join comes before send"
        self._session.renew(timeout_s)
        sums: list[torch.Tensor] = []
        aborted = ""
        for bucket, (specs, pieces) in enumerate(walk_buckets(self._model, self.layout)):
            if self._sender is None:
                continue
            try:
                data = pack_bucket(specs, pieces, self._sender.free_slot(bucket, bucket_size(specs)))
                self._sender.send(data)
            except TransferAbortedError as error:
                aborted = str(error)
                self._leave()
                continue
            if self._rank == 0:
                sums.append(checksum(data))
        if aborted:
            raise TransferAbortedError(aborted)
        try:
            if self._sender is not None:
                self._sender.drain()
        except TransferAbortedError:
            self._leave()
            raise
        return torch.stack(sums).tolist() if sums else []

    def to_object_store(self) -> list[tuple[tuple[TensorSpec, ...], ray.ObjectRef, int]]:
        """(specs, the bytes, checksum) per bucket, from rank 0; for models on CPU."""
        stored = []
        for specs, pieces in walk_buckets(self._model, self.layout):
            if self._rank == 0:
                data = pack_bucket(specs, pieces, torch.empty(bucket_size(specs), dtype=torch.uint8))
                stored.append((specs, ray.put(data.numpy()), int(checksum(data))))
        return stored
