"""The failures of tests/ray/test_weight_transport.py with NCCL: a learner on one GPU, a worker on another."""

import contextlib
from collections.abc import Iterator

import pytest
import ray
import torch

from actors.group import ActorGroup, Deadline, Member
from actors.weights.transports import SessionTransport
from rlhf.errors import DeadlineError, RoleLostError
from tests.tiny_weights import NEVER_S, TinyLearner, TinyWorker, held, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
START_S = 120.0


@pytest.fixture(scope="module")
def transport() -> Iterator[SessionTransport]:
    with ray.init(num_cpus=4, include_dashboard=False):
        handle = ray.remote(TinyLearner).options(num_cpus=0, num_gpus=1).remote()
        group = ActorGroup.locate("learner", [handle], Deadline(START_S, "timeouts.start_s")).result()
        yield SessionTransport(group, "broadcast")


@contextlib.contextmanager
def new_worker() -> Iterator[list[Member]]:
    handle = ray.remote(TinyWorker).options(num_cpus=0, num_gpus=1).remote()
    yield ActorGroup.locate("rollout", [handle], Deadline(START_S, "timeouts.start_s")).result().members
    ray.kill(handle)


@pytest.fixture
def workers(transport: SessionTransport) -> Iterator[list[Member]]:
    with new_worker() as members:
        yield members


def misbehave(workers: list[Member], misdeed: str, bucket: int) -> None:
    ray.get(workers[0].handle.misbehave.remote(misdeed, bucket), timeout=60)


def test_weights_arrive(transport: SessionTransport, workers: list[Member]) -> None:
    for version in range(3):
        assert run(version, transport, workers).committed == tuple(workers)
        assert held(workers, version) == [(version, True, 1)]


@pytest.mark.parametrize(("misdeed", "bucket"), [("die connecting", 0), ("die joining", 0), ("die", 7)])
def test_a_worker_that_dies_is_at_fault_and_the_learner_is_not(
    transport: SessionTransport, workers: list[Member], misdeed: str, bucket: int
) -> None:
    misbehave(workers, misdeed, bucket)
    result = run(10, transport, workers, seconds=NEVER_S)
    assert result.failed.keys() == set(workers) and not result.committed
    ray.kill(workers[0].handle)
    with new_worker() as others:  # the learner is not left in NCCL
        assert run(20, transport, others).committed == tuple(others)
        assert held(others, 20) == [(20, True, 1)]


def test_a_connection_that_breaks_once_is_made_anew(transport: SessionTransport, workers: list[Member]) -> None:
    misbehave(workers, "flap", 7)
    result = run(30, transport, workers, seconds=NEVER_S)
    assert result.committed == tuple(workers) and "Connection reset by peer" in result.broken
    assert held(workers, 30) == [(30, True, 2)]
    misbehave(workers, "flap always", 7)
    with pytest.raises(RoleLostError, match="Connection reset by peer; an attempt just before broke too"):
        run(31, transport, workers, seconds=NEVER_S)


def test_a_worker_that_hangs_is_late_and_the_learner_goes_on(
    transport: SessionTransport, workers: list[Member]
) -> None:
    misbehave(workers, "hang", 3)
    with pytest.raises(DeadlineError, match=r"rollout\[0\] .*moving weights.*timeouts.publish_s"):
        raise run(40, transport, workers, seconds=12.0).failed[workers[0]]
