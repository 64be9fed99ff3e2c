"""The learner's end of a weight publish, on each of its ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from actors.weights.channel import NUM_SLOTS, Rendezvous, Ring, Sender, Session, TransferAbortedError, host_store
from actors.weights.object_store import StoredBucket
from actors.weights.routes import ObjectStore, session_route
from rlhf.models.packed import PackedModel
from rlhf.training.weights import Layout, TensorSpec, bucket_layout, bucket_size, checksum, pack_bucket, walk_buckets


class WeightSender:
    """Packs the weights into buckets and sends them. ``send`` and ``store`` are collective over the ranks.

    A route's ring, NUM_SLOTS buckets of device memory, is allocated when it is first joined, and kept.
    """

    def __init__(self, model: PackedModel, device: torch.device, bucket_bytes: int) -> None:
        self._model, self._device, self._rank = model, device, dist.get_rank()
        self.layout: Layout = bucket_layout(model, bucket_bytes)
        self._store: dist.TCPStore | None = None
        self._rings: dict[str, Ring | None] = {}  # by route
        self._session: Session | None = None
        self._sender: Sender | None = None  # for the session

    def host_rendezvous(self, address: str, timeout_s: float) -> int:
        """Opens the store in which all sessions meet; returns its port (rank 0)."""
        self._store = host_store(address, timeout_s)
        return self._store.port

    def join(self, route: str, rendezvous: Rendezvous, timeout_s: float) -> dict[str, bytes]:
        """Leaves the previous session and joins this one; returns the handles of this rank's ring, by place.

        Raises TransferAbortedError.
        """
        self._leave()
        if route not in self._rings:
            num_bytes = NUM_SLOTS * max(bucket_size(specs) for specs in self.layout)
            self._rings[route] = session_route(route).ring(self._rank, num_bytes, self._device)
        self._session = Session(rendezvous, timeout_s)
        if (ring := self._rings[route]) is None:
            return {}
        self._sender = session_route(route).sender(self._session, ring)
        return dict(ring.handles)

    def send(self, timeout_s: float) -> list[int]:
        """Sends every bucket to the current session; returns their checksums (rank 0; empty elsewhere).

        Raises TransferAbortedError, but only after the last gather.
        """
        assert self._session is not None, "join comes before send"
        self._session.renew(timeout_s)
        return self._send_all(self._sender)

    def store(self) -> list[tuple[StoredBucket, int]]:
        """Stores every bucket; returns each with its checksum (rank 0; empty elsewhere). For models on CPU."""
        sender = ObjectStore().sender() if self._rank == 0 else None
        sums = self._send_all(sender)
        return list(zip(zip(self.layout, sender.references, strict=True), sums, strict=True)) if sender else []

    def _send_all(self, sender: Sender | None) -> list[int]:
        """Returns checksums as ``send`` does. A rank without a sender only takes part in the gathers."""
        buckets = walk_buckets(self._model, self.layout)
        try:
            return self._pack_and_send(buckets, sender) if sender is not None else []
        except TransferAbortedError:
            self._leave()
            raise
        finally:
            for _ in buckets:  # gathers are collective: whatever happened here, the other ranks wait for this one
                pass

    def _pack_and_send(self, buckets: Iterable[tuple[Sequence[TensorSpec], list[Tensor]]], sender: Sender) -> list[int]:
        sums = []
        for bucket, (specs, pieces) in enumerate(buckets):
            data = pack_bucket(specs, pieces, sender.free_slot(bucket, bucket_size(specs)))
            sender.send(data)
            if self._rank == 0:
                sums.append(checksum(data))
        sender.drain()
        return torch.stack(sums).tolist() if sums else []

    def _leave(self) -> None:
        """Called at once when a transfer is aborted: a broadcast to a dead process holds the device."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
