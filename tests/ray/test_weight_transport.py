"""Sessions of small real processes, without vLLM: members come and go, die and hang in the middle of a transfer.

gloo stands in for NCCL, memory of the node for a GPU's; everything above is what runs on GPUs.
"""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError
from torch import nn

from actors.group import ActorGroup, Deadline, Member, RankActor
from actors.weights import broadcast
from actors.weights.channel import Rendezvous, Session, TransferAbortedError
from actors.weights.load_plan import LoadPlan
from actors.weights.publish import PublishResult, publish
from actors.weights.routes import ROUTES
from actors.weights.sender import WeightSender
from actors.weights.transports import SessionTransport
from rlhf.errors import ActorError, DeadlineError, RoleLostError, WeightSyncError
from rlhf.training.weights import bucket_size, checksum, from_plain

pytestmark = pytest.mark.ray

BUCKET_BYTES = 40_000
NUM_BUCKETS = 21
NEVER_S = 1e5  # a deadline that nobody may wait for: the test would not end


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ParameterDict({"embed": torch.randn(2000, 64), **{f"layer{i}": torch.randn(64, 99) for i in range(12)}})


class TinyLearner(RankActor):
    """One rank that holds a few weights."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.model = make_model(0)
        self.sender = WeightSender(self.model, torch.device("cpu"), BUCKET_BYTES)  # type: ignore[arg-type]

    def change(self, seed: int) -> None:
        self.model.load_state_dict(make_model(seed).state_dict())

    def weight_layout(self) -> Any:
        return self.sender.layout

    def host_rendezvous(self, timeout_s: float) -> int:
        return self.sender.host_rendezvous(self.node(), timeout_s)

    def join_weights(self, *args: Any) -> Any:
        return self.sender.join(*args)

    def send_weights(self, timeout_s: float) -> list[int]:
        return self.sender.send(timeout_s)


class TinyWorker(RankActor):
    """Receives as a vLLM worker does, and can be told to misbehave at some bucket of the next transfer."""

    def __init__(self) -> None:
        self.model = make_model(99).requires_grad_(False)
        self.misdeed, self.bucket, self.joined = "", -1, 0  # 'die', 'hang', ... at this bucket; sessions joined
        self.receiver: Any = None
        self.version = -1

    def misbehave(self, misdeed: str, bucket: int) -> None:
        self.misdeed, self.bucket = misdeed, bucket

    def be_good(self) -> None:
        self.misdeed, self.bucket, self.version, self.joined = "", -1, -1, 0
        self.model.load_state_dict(make_model(99).state_dict())

    def begin_update(self) -> int:
        return 1

    def join_weights(self, info: dict[str, Any]) -> None:
        self.joined += 1
        if self.misdeed == "die joining":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.misdeed == "die connecting":  # its peers are in gloo's own calls by then, or on their way there
            broadcast._process_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.layout = from_plain(info["layout"])
        self.sizes = [bucket_size(specs) for specs in self.layout]
        self.plan = LoadPlan(self.model, self.load, self.layout)
        self.session = Session(Rendezvous(**info["rendezvous"]), info["timeout_s"])
        self.receiver = ROUTES[info["route"]].receiver(
            self.session,
            info["first_receiver"],
            torch.device("cpu"),
            slot_bytes=max(self.sizes),
            handles=info["handles"],
        )

    def load(self, weights: Any) -> None:
        for name, tensor in weights:
            self.model[name].copy_(tensor)  # type: ignore[index]

    def receive_session(self, timeout_s: float) -> list[list[int]]:
        self.session.renew(timeout_s)
        try:
            return [self.take_all()]
        except TransferAbortedError:
            self.receiver.close()
            self.receiver = None
            raise

    def take_all(self) -> list[int]:
        sums = []
        for i, (specs, data) in enumerate(zip(self.layout, self.receiver.buckets(self.sizes), strict=True)):
            if i == self.bucket:
                if self.misdeed == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.misdeed == "hang":
                    time.sleep(60)
                if self.misdeed == "raise":
                    raise ValueError("no room for this weight")
                if self.misdeed in ("flap", "flap always"):
                    self.misdeed = self.misdeed if self.misdeed == "flap always" else ""
                    self.session.abort("Connection reset by peer")
                    raise TransferAbortedError("Connection reset by peer")
                if self.misdeed == "change":
                    data = data.clone()
                    data[5] ^= 1
            for target, rows in self.plan.copies(specs, data):
                target.copy_(rows)
            sums.append(int(checksum(data)))
        return sums

    def finish_update(self) -> None: ...

    def commit(self, version: int) -> None:
        self.version = version

    def holds(self, seed: int) -> tuple[int, bool, int]:
        """(committed version, whether every parameter equals the learner's, sessions joined)."""
        expected = make_model(seed).state_dict()
        same = all(torch.equal(expected[name], p) for name, p in self.model.named_parameters())
        return self.version, same, self.joined


@pytest.fixture(scope="module")
def learner(ray_session: None) -> Iterator[ActorGroup]:
    handle = ray.remote(TinyLearner).options(num_cpus=0).remote()
    group = ActorGroup.locate("learner", [handle], Deadline(60, "timeouts.start_s")).result()
    yield group
    group.kill()


@pytest.fixture(scope="module")
def workers_alive(ray_session: None) -> Iterator[list[Any]]:
    """Handles of three workers, for all tests: a process costs seconds."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def workers(workers_alive: list[Any]) -> list[Member]:
    """Three workers that behave, those that died or hang replaced."""
    answers = {handle.be_good.remote(): handle for handle in workers_alive}
    if answers:
        ray.wait(list(answers), num_returns=len(answers), timeout=5)
    for ref, handle in answers.items():
        try:
            ray.get(ref, timeout=0)
        except (RayActorError, GetTimeoutError):
            ray.kill(handle)
            workers_alive.remove(handle)
    workers_alive += [ray.remote(TinyWorker).options(num_cpus=0).remote() for _ in range(3 - len(workers_alive))]
    return ActorGroup.locate("rollout", workers_alive, Deadline(120, "timeouts.start_s")).result().members


@pytest.fixture(params=["broadcast", "share"])
def transport(request: pytest.FixtureRequest, learner: ActorGroup) -> SessionTransport:
    return SessionTransport(learner, request.param)


def run(version: int, transport: SessionTransport, workers: list[Member], seconds: float = 60.0) -> PublishResult:
    """Publishes weights that no version before had."""
    ray.get(transport._learner.members[0].handle.change.remote(version), timeout=60)
    return publish(version, transport, workers, Deadline(seconds, "timeouts.publish_s"))


def held(workers: list[Member], version: int) -> list[tuple[int, bool, int]]:
    return ray.get([m.handle.holds.remote(version) for m in workers], timeout=60)


def test_all_weights_arrive_and_the_session_lasts(transport: SessionTransport, workers: list[Member]) -> None:
    for version in range(3):
        result = run(version, transport, workers)
        assert set(result.committed) == set(workers) and not result.failed
        assert held(workers, version) == [(version, True, 1)] * 3
        assert result.seconds.keys() == {"begin", "join", "transfer", "finish"}
    assert 0 <= result.num_bytes - 4 * (2000 * 64 + 12 * 64 * 99) < 16 * 32, "padding only"
    assert len(transport._layout) == NUM_BUCKETS


def test_members_come_and_go_between_publishes(transport: SessionTransport, workers: list[Member]) -> None:
    first, second, third = workers
    for version, members in enumerate(([first, second], workers, [third], [])):
        assert set(run(version, transport, members).committed) == set(members)
    assert held(workers, 1) == [(1, True, 2), (1, True, 2), (2, False, 2)]
    assert held([third], 2) == [(2, True, 2)]


@pytest.mark.parametrize(
    ("misdeed", "bucket"), [("die", 7), ("die", NUM_BUCKETS - 1), ("raise", 0), ("raise", 7), ("die joining", 0)]
)
def test_others_go_on_without_one_that_fails(
    transport: SessionTransport, workers: list[Member], misdeed: str, bucket: int
) -> None:
    if misdeed != "die joining":
        run(0, transport, workers)
    ray.get(workers[1].handle.misbehave.remote(misdeed, bucket), timeout=60)
    result = run(1, transport, workers, seconds=NEVER_S)
    assert set(result.committed) == {workers[0], workers[2]} and result.failed.keys() == {workers[1]}
    with pytest.raises(ActorError, match="no room for this weight" if misdeed == "raise" else r"rollout\[1\].*died"):
        raise result.failed[workers[1]]
    survivors = [workers[0], workers[2]]
    assert [state[:2] for state in held(survivors, 1)] == [(1, True)] * 2
    run(2, transport, survivors)
    assert [state[:2] for state in held(survivors, 2)] == [(2, True)] * 2


def test_others_go_on_without_one_that_dies_while_all_connect(learner: ActorGroup, workers: list[Member]) -> None:
    """Its peers wait for it in calls that cannot be aborted, and learner rank 0 is not blamed."""
    ray.get(workers[1].handle.misbehave.remote("die connecting", 0), timeout=60)
    result = run(1, SessionTransport(learner, "broadcast"), workers, seconds=NEVER_S)
    assert result.failed.keys() == {workers[1]}, result.failed
    assert set(result.committed) == {workers[0], workers[2]}
    assert [state[:2] for state in held([workers[0], workers[2]], 1)] == [(1, True)] * 2


def test_a_connection_that_breaks_once_is_made_anew(transport: SessionTransport, workers: list[Member]) -> None:
    ray.get(workers[1].handle.misbehave.remote("flap", 7), timeout=60)
    result = run(1, transport, workers, seconds=NEVER_S)
    assert set(result.committed) == set(workers) and not result.failed
    assert "Connection reset by peer" in result.broken
    assert held(workers, 1) == [(1, True, 2)] * 3, "all have joined another session"
    ray.get(workers[1].handle.misbehave.remote("flap always", 7), timeout=60)
    with pytest.raises(RoleLostError, match="Connection reset by peer; an attempt just before broke too"):
        run(2, transport, workers, seconds=NEVER_S)


def test_one_that_hangs_is_late_and_the_others_have_time_left(
    transport: SessionTransport, workers: list[Member]
) -> None:
    ray.get(workers[2].handle.misbehave.remote("hang", 3), timeout=60)
    result = run(4, transport, workers, seconds=12.0)
    assert set(result.committed) == set(workers[:2])
    assert [state[:2] for state in held(workers[:2], 4)] == [(4, True)] * 2
    with pytest.raises(DeadlineError, match=r"rollout\[2\] .*moving weights.*timeouts.publish_s"):
        raise result.failed[workers[2]]


def test_changed_bytes_are_not_committed(transport: SessionTransport, workers: list[Member]) -> None:
    ray.get(workers[0].handle.misbehave.remote("change", 7), timeout=60)
    result = run(5, transport, workers)
    assert set(result.committed) == set(workers[1:])
    with pytest.raises(WeightSyncError, match=r"rollout\[0\].*version 5 arrived corrupted in bucket\(s\) \[7\] of 21"):
        raise result.failed[workers[0]]
    assert held(workers[:1], 5)[0][0] == -1


def test_a_learner_that_dies_is_raised(ray_session: None, transport: SessionTransport, workers: list[Member]) -> None:
    class Mortal(TinyLearner):
        def send_weights(self, timeout_s: float) -> list[int]:
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    handle = ray.remote(Mortal).options(num_cpus=0).remote()
    group = ActorGroup.locate("learner", [handle], Deadline(60, "timeouts.start_s")).result()
    with pytest.raises(ActorError, match=r"learner\[0\] .*died"):
        run(6, SessionTransport(group, transport._route), workers)


def test_an_abort_survives_pickling() -> None:
    import pickle

    assert isinstance(pickle.loads(pickle.dumps(TransferAbortedError("why"))), WeightSyncError)
