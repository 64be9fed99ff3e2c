"""The two ends of each route in one process: every bucket arrives, and each learner rank sends from its place."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from actors.weights import broadcast, routes
from actors.weights.channel import (
    NUM_SLOTS,
    Receiver,
    Rendezvous,
    Ring,
    Sender,
    Session,
    TransferAbortedError,
    host_store,
)
from actors.weights.routes import ROUTES, ObjectStore, SessionRoute, choose_route, session_route
from rlhf.planning.topology import Device
from rlhf.training.weights import TensorSpec

PATIENCE_S = 10.0  # ends a test that hangs
SLOT_BYTES = 6
BUCKETS = [torch.arange(first, first + size, dtype=torch.uint8) for first, size in ((10, 6), (20, 3), (30, 5))]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("address", "alone"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_a_store_at_the_loopback_address_listens_there_alone(address: str, alone: bool) -> None:
    store = host_store(address, PATIENCE_S)
    here = psutil.Process().net_connections("tcp")
    (at,) = [c.laddr.ip for c in here if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port]
    assert (at == "127.0.0.1") == alone
    Session(Rendezvous(address, store.port, "weights", 1), PATIENCE_S).store.set("who", "met")
    assert store.get("weights/who") == b"met"


@pytest.fixture
def join() -> Iterator[Callable[[], Session]]:
    """Sessions of one sender and one receiver, which meet in one store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: Session(Rendezvous("127.0.0.1", store.port, "weights", num_receivers=1), PATIENCE_S)


def send(sender: Sender) -> None:
    for i, bucket in enumerate(BUCKETS):
        slot = sender.free_slot(i, len(bucket))
        slot.copy_(bucket)
        sender.send(slot)
    sender.drain()


def receive(receiver: Receiver) -> list[Tensor]:
    return [data.clone() for data in receiver.buckets([len(bucket) for bucket in BUCKETS])]


@pytest.mark.parametrize("name", ["broadcast", "share"])
def test_every_bucket_arrives(join: Callable[[], Session], name: str) -> None:
    route = session_route(name)
    ring = route.ring(0, NUM_SLOTS * SLOT_BYTES, CPU)
    assert ring is not None and (ring.memory.dtype, ring.memory.tolist()) == (torch.uint8, [0] * NUM_SLOTS * SLOT_BYTES)
    arrived: list[Tensor] = []

    def work() -> None:
        session = join()
        try:
            receiver = route.receiver(session, 0, CPU, slot_bytes=SLOT_BYTES, handles=ring.handles)
            arrived.extend(receive(receiver))
            receiver.close()
        except BaseException as error:
            session.abort(repr(error))
            raise

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    sender = route.sender(join(), ring)
    send(sender)
    thread.join(PATIENCE_S)
    sender.close()
    assert [data.tolist() for data in arrived] == [bucket.tolist() for bucket in BUCKETS]


def test_a_peer_that_dies_while_connecting_leaves_nobody_waiting(
    join: Callable[[], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, released = threading.Event(), threading.Event()

    def process_group(*_: Any) -> None:
        """As a library does that waits for a peer which is gone."""
        connecting.set()
        assert released.wait(PATIENCE_S)
        raise RuntimeError("connection refused")

    monkeypatch.setattr(broadcast, "_process_group", process_group)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            session_route("broadcast").sender(join(), Ring(torch.zeros(8, dtype=torch.uint8)))
        except TransferAbortedError as error:
            raised.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    peer = join()
    peer.count("members", 1)
    assert connecting.wait(PATIENCE_S)
    peer.abort("rollout[0] died")
    sender.join(PATIENCE_S)
    assert [str(error) for error in raised] == ["rollout[0] died"] and not released.is_set()
    released.set()


def test_what_keeps_a_process_from_connecting_ends_the_session(
    join: Callable[[], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    def process_group(*_: Any) -> None:
        raise RuntimeError("gloo:\nconnection refused")

    monkeypatch.setattr(broadcast, "_process_group", process_group)
    peer = join()
    peer.count("members", 1)
    with pytest.raises(TransferAbortedError, match=r"^gloo: connection refused$"):
        session_route("broadcast").sender(join(), Ring(torch.zeros(8, dtype=torch.uint8)))
    with pytest.raises(TransferAbortedError, match=r"^gloo: connection refused$"):
        peer.wait(lambda: False, "waiting for nothing")


def test_a_lost_connection_to_the_store_is_nobodys_fault() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    session = Session(Rendezvous("127.0.0.1", store.port, "weights", num_receivers=1), PATIENCE_S)
    del store
    for use in (lambda: session.count("members", 1), lambda: session.wait(lambda: False, "waiting for nothing")):
        with pytest.raises(TransferAbortedError, match="the session's store cannot be reached"):
            use()


def test_the_object_store_keeps_every_bucket_and_a_fetch_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def get(stored: tuple[str, Any], *, timeout: float) -> Any:
        waits.append(timeout)
        return stored[1]

    monkeypatch.setattr(ray, "put", lambda value: ("stored", value))
    monkeypatch.setattr(ray, "get", get)
    route = ROUTES["object_store"]
    assert isinstance(route, ObjectStore)
    send(sender := route.sender())
    specs: Sequence[tuple[TensorSpec, ...]] = [(), (), ()]
    fetched = list(route.receiver(list(zip(specs, sender.references, strict=True)), 7.0))
    assert [data.tolist() for _, data in fetched] == [bucket.tolist() for bucket in BUCKETS]
    assert waits == [7.0] * 3


def test_only_rank_0_has_a_ring_to_broadcast_from() -> None:
    route = session_route("broadcast")
    assert route.ring(1, 8, CPU) is None
    ring = route.ring(0, 8, torch.device("meta"))
    assert ring is not None and ring.memory.is_meta, "on its device"


def test_each_ring_is_mapped_in_the_place_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(route: SessionRoute, device: torch.device) -> list[list[str]]:
        rings = [route.ring(rank, 8, device) for rank in range(3)]
        return [list(ring.handles) for ring in rings if isinstance(ring, Ring)]

    share = session_route("share")
    assert places(share, CPU) == [["cpu"], ["cpu/1"], ["cpu/2"]], "the first serves all receivers"
    asked: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(routes, "shareable_memory", lambda *args: (asked.append(args), (torch.zeros(8), b"handle"))[1])
    monkeypatch.setattr(routes, "place_of", lambda device: f"GPU-{device.index}")
    gpu = torch.device("cuda", 1)
    assert places(share, gpu) == [["GPU-1"]] * 3, "a rank sees one GPU"
    assert asked == [(8, gpu)] * 3


@pytest.mark.parametrize(
    ("device", "colocated", "expected"),
    [
        ("cpu", False, "object_store"),
        ("cpu", True, "object_store"),
        ("gpu", False, "broadcast"),
        ("gpu", True, "share"),
    ],
)
def test_the_route_follows_from_where_the_workers_are(device: Device, colocated: bool, expected: str) -> None:
    assert choose_route(device, colocated=colocated) == expected
