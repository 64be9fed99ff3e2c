"""Sessions of small real processes, without vLLM: members come and go, die and hang in the middle of a transfer.

gloo stands in for NCCL, memory of the node for a GPU's; everything above is what runs on GPUs (tests/gpu).
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from actors.group import ActorGroup, Deadline, Member
from actors.weights.channel import TransferAbortedError
from actors.weights.transports import SessionTransport
from rlhf.errors import ActorError, DeadlineError, RoleLostError, WeightSyncError
from tests.tiny_weights import NEVER_S, NUM_BUCKETS, TinyLearner, TinyWorker, held, run

pytestmark = pytest.mark.ray


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
        def send_weights(self, timeout_s: float, frozen: bool) -> list[int]:
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    handle = ray.remote(Mortal).options(num_cpus=0).remote()
    group = ActorGroup.locate("learner", [handle], Deadline(60, "timeouts.start_s")).result()
    with pytest.raises(ActorError, match=r"learner\[0\] .*died"):
        run(6, SessionTransport(group, transport._route), workers)


def test_an_abort_survives_pickling() -> None:
    import pickle

    assert isinstance(pickle.loads(pickle.dumps(TransferAbortedError("why"))), WeightSyncError)
