"""Calls to several actors at once: all answers or the first failure, or whoever answers in time."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from actors import stacks
from actors.group import ActorGroup, Deadline, RankActor
from rlhf.errors import ActorError, DeadlineError, RoleLostError

pytestmark = pytest.mark.ray


class Worker(RankActor):
    """Does as it is told."""

    def act(self, deed: str) -> str:
        if deed == "raise":
            raise ValueError("no")
        time.sleep(30 if deed == "hang" else 0)
        return deed


@pytest.fixture(scope="module")
def group(ray_session: None):
    handles = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(3)]
    located = ActorGroup.locate("worker", handles, Deadline(60, "timeouts.start_s")).result()
    yield located
    located.kill()


def act(group: ActorGroup, *deeds: str, seconds: float = 60.0):
    deadline = Deadline(seconds, "timeouts.score_s")
    return group.call_each("act", [(deed,) for deed in deeds], deadline=deadline, doing="acting")


def test_a_result_needs_every_answer(group: ActorGroup) -> None:
    assert act(group, "a", "b", "c").result() == ["a", "b", "c"]
    with pytest.raises(ActorError, match=r"worker\[1\] on .*: acting raised ValueError: no"):
        act(group, "a", "raise", "c").result()


def test_two_calls_are_awaited_as_one(group: ActorGroup) -> None:
    first, rest = ActorGroup(group.members[:1]), ActorGroup(group.members[1:])
    both = act(first, "a") | act(rest, "b", "raise")
    assert not both.wait()
    assert both.answers == dict(zip(group.members[:2], ["a", "b"], strict=True))
    assert both.failed.keys() == {group.members[2]}


class Peer(RankActor):
    """A rank of a gloo group of two, for ever in a collective."""

    def join(self, store: str, rank: int) -> int:
        import torch.distributed

        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        return os.getpid()

    def reduce(self) -> None:
        import torch.distributed

        tensor = torch.zeros(1 << 16)
        while True:
            torch.distributed.all_reduce(tensor)


def test_a_rank_that_dies_in_a_collective_is_lost_whatever_the_other_says(ray_session: None, tmp_path: Path) -> None:
    """Four deaths: the survivor's own error often comes before Ray knows of the death."""
    deadline = Deadline(120, "timeouts.start_s")
    handles = [ray.remote(Peer).options(num_cpus=0).remote() for _ in range(8)]
    for trial in range(4):
        pair = ActorGroup.locate("learner", handles[2 * trial : 2 * trial + 2], deadline).result()
        args = [(str(tmp_path / f"store{trial}"), rank) for rank in range(2)]
        pids = pair.call_each("join", args, deadline=deadline, doing="joining").result()
        call = pair.call("reduce", deadline=deadline, doing="updating")
        assert not call.wait(1.0) and not call.failed
        victim = trial % 2
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(RoleLostError, match=rf"^learner\[{victim}\] on \S+: died while updating"):
            call.result()
        pair.kill()


def test_a_running_deadline_is_shared_and_halved() -> None:
    deadline = Deadline(10, "timeouts.score_s").start()
    assert deadline.start() is deadline
    assert deadline.half().left_s == pytest.approx(5, abs=0.1)
    assert deadline.half().seconds == pytest.approx(5, abs=0.1)


def test_gathering_goes_on_without_those_that_fail_or_are_late(group: ActorGroup, tmp_path: Path) -> None:
    """The last: it leaves a worker busy."""
    stacks.keep_in(str(tmp_path))
    answers, failed = act(group, "a", "raise", "hang", seconds=2.0).gather()
    first, second, third = group.members
    assert answers == {first: "a"}
    assert isinstance(failed[second], ActorError) and isinstance(failed[third], DeadlineError)
    late = r"worker\[2\] on .*: still busy with acting after 2 s; raise timeouts.score_s if that is normal"
    with pytest.raises(DeadlineError, match=late):
        raise failed[third]
    (file,) = tmp_path.iterdir()
    assert str(failed[third]).endswith(f"; stacks: {file}")
    assert file.read_text().startswith(f"==== {third}\nprocess ") and "in act\n" in file.read_text()
