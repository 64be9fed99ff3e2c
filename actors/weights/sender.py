"""The learner's end of a weight publish, on each of its ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from actors.weights.channel import NUM_SLOTS, Rendezvous, Ring, Sender, Session, TransferAbortedError, host_store
from actors.weights.object_store import StoredBucket
from actors.weights.routes import ObjectStore, session_route
from rlhf.models.packed import PackedModel
from rlhf.training.weights import (
    Layout,
    TensorSpec,
    Weight,
    bucket_size,
    checksum,
    first_adapter_bucket,
    named_weights,
    pack_bucket,
    publish_layout,
    walk_buckets,
    weights_apart,
)


class WeightSender:
    """Packs the weights into buckets and sends them. ``send`` and ``store`` are collective over the ranks.

    A route's ring, NUM_SLOTS buckets of device memory, is allocated when it is first joined, and kept.
    """

    def __init__(
        self, model: PackedModel, device: torch.device, bucket_bytes: int, *, adapters_apart: bool = False
    ) -> None:
        """``adapters_apart``: adapters are sent as they are, after the weights that they belong to; else each weight
        is sent with its adapter added."""
        self._model, self._device, self._rank = model, device, dist.get_rank()
        self._apart = adapters_apart
        self.layout: Layout = publish_layout(self._weights(), bucket_bytes)
        self._store: dist.TCPStore | None = None
        self._rings: dict[str, Ring | None] = {}  # by route
        self._session: Session | None = None
        self._sender: Sender | None = None  # for the session

    def _weights(self) -> dict[str, Weight]:
        return weights_apart(self._model) if self._apart else named_weights(self._model)

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

    def send(self, timeout_s: float, *, frozen: bool) -> list[int]:
        """Sends the buckets to the current session; returns their checksums (rank 0; empty elsewhere).

        ``frozen``: also those of weights that never change, which are there if adapters are apart. Raises
        TransferAbortedError, but only after the last gather.
        """
        assert self._session is not None, "join comes before send"
        self._session.renew(timeout_s)
        return self._send_all(self._part(frozen), self._sender)

    def store(self, *, frozen: bool) -> list[tuple[StoredBucket, int]]:
        """Stores the buckets (see ``send``); returns each with its checksum (rank 0; empty elsewhere). For models on
        CPU."""
        sender, part = ObjectStore().sender() if self._rank == 0 else None, self._part(frozen)
        sums = self._send_all(part, sender)
        return list(zip(zip(part, sender.references, strict=True), sums, strict=True)) if sender else []

    def _part(self, frozen: bool) -> Layout:
        return self.layout if frozen else self.layout[first_adapter_bucket(self.layout) :]

    def _send_all(self, layout: Layout, sender: Sender | None) -> list[int]:
        """Returns checksums as ``send`` does. A rank without a sender only takes part in the gathers."""
        buckets = walk_buckets(self._weights(), layout)
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
