"""A role's actors as one, and what becomes of a call when some of them die. The actors are fake."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

from actors.group import ActorGroup, Call, Deadline, Member
from actors.learner import LearnerActor
from actors.memory import memory_metrics
from actors.proxies import MAX_LOSSES, Replicas
from rlhf.config import TimeoutConfig
from rlhf.errors import ActorError, GpuMemoryError, RlhfError, RoleLostError
from rlhf.recipes import load_config
from tests.clock import Clock
from tests.fake_ray import IN_FLIGHT, FakeActor, FakeRay

CONF = Path(__file__).resolve().parents[2] / "conf"
BROKEN = RuntimeError("Connection closed by peer")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> FakeRay:
    return FakeRay(monkeypatch, clock)


def group_of(*actors: FakeActor, role: str = "learner") -> ActorGroup:
    return ActorGroup([Member(actor, role, rank, "10.0.0.1") for rank, actor in enumerate(actors)])


def update(group: ActorGroup) -> Call[list[Any]]:
    return group.call("update", deadline=Deadline(60.0, "timeouts.update_s"), doing="updating")


@pytest.mark.parametrize("answer", [ActorDiedError(), IN_FLIGHT, "done"])
def test_a_death_counts_for_more_than_the_connections_that_it_broke(fake_ray: FakeRay, answer: Any) -> None:
    """Whether the call of the dead one has ended with its death, not ended yet, or had an answer before."""
    survivor = fake_ray.actor(update=BROKEN, node="10.0.0.1")
    dead = fake_ray.actor(update=answer, node=ActorDiedError())
    with pytest.raises(RoleLostError, match=r"^learner\[1\] on 10\.0\.0\.1: died while updating"):
        update(group_of(survivor, dead)).result()


def test_an_error_that_nobody_died_of_is_raised_as_it_is(fake_ray: FakeRay, clock: Clock) -> None:
    raised = fake_ray.actor(update=BROKEN, node="10.0.0.1")
    waits = fake_ray.actor(update=IN_FLIGHT, node=IN_FLIGHT)
    started_s = clock.now_s
    with pytest.raises(ActorError, match=r"learner\[0\].*updating raised RuntimeError: Connection closed") as caught:
        update(group_of(raised, waits)).result()
    assert type(caught.value) is ActorError
    assert clock.now_s - started_s == 5.0, "for Ray to notice a death"


def test_memory_is_that_of_the_fullest_who_answers(fake_ray: FakeRay, clock: Clock) -> None:
    full = fake_ray.actor(memory_gib={"host": 2.0, "gpu": 30.0, "allocated": 20.0})
    fuller = fake_ray.actor(memory_gib={"host": 3.0, "gpu": 25.0, "allocated": 21.0})
    busy, dead = fake_ray.actor(memory_gib=IN_FLIGHT), fake_ray.actor(memory_gib=ActorDiedError())
    small = fake_ray.actor(memory_gib={"host": 1.0})
    started_s = clock.now_s
    found = memory_metrics([group_of(full, fuller), group_of(busy, dead, small, role="reward")])
    of_learner = {"host_gib": 3.0, "gpu_gib": 30.0, "allocated_gib": 21.0}
    assert found == {f"memory/learner/{kind}": gib for kind, gib in of_learner.items()} | {
        "memory/reward/host_gib": 1.0
    }
    assert clock.now_s - started_s == pytest.approx(0.2), "nobody is waited for longer"


@pytest.mark.parametrize(("error", "count"), [(GpuMemoryError("too small"), 2), (BROKEN, 1)])
def test_nobody_is_asked_after_an_error_of_our_own_or_without_peers(
    fake_ray: FakeRay, error: Exception, count: int
) -> None:
    actors = [fake_ray.actor(update=error, node=ActorDiedError()) for _ in range(count)]
    with pytest.raises(RlhfError) as caught:
        update(group_of(*actors)).result()
    assert not isinstance(caught.value, RoleLostError)
    assert not any(actor.given("node") for actor in actors)


# ---- actors without a state


class Reviving:
    """Replicas of a role, and what they do about their losses."""

    def __init__(self, fake_ray: FakeRay, *answers: Any) -> None:
        self.group = group_of(*(fake_ray.actor(score=answer) for answer in answers), role="reward")
        self.revived: list[tuple[int, str]] = []
        self.next: list[Any] = []  # the answers of those that will take a place
        self._ray = fake_ray
        self.replicas = Replicas(self.group, TimeoutConfig(), "computing rewards", self.revive)

    def revive(self, lost: Member, error: RoleLostError) -> None:
        self.revived.append((lost.rank, str(error)))
        fresh = self._ray.actor(score=self.next.pop(0))
        self.group.members[lost.rank] = Member(fresh, lost.role, lost.rank, "10.0.0.2")

    def given(self, rank: int) -> list[tuple[Any, ...]]:
        return self.group.members[rank].handle.given("score")


def test_what_a_dead_replica_has_not_answered_is_scored_by_the_one_in_its_place(fake_ray: FakeRay) -> None:
    reviving = Reviving(fake_ray, ["a"], ActorDiedError())
    reviving.next = [["b"]]
    first, second = reviving.replicas.score([1, 2]), reviving.replicas.score([3, 4])
    assert first.result() == first.result() == ["a", "b"]
    ((rank, why),) = reviving.revived
    assert rank == 1 and why.startswith("reward[1] on 10.0.0.1: died while computing rewards")
    assert second.result() == ["a", "b"], "sent to the one that died, too"
    assert len(reviving.revived) == 1, "it has been replaced already"
    assert reviving.given(0) == [([1],), ([3],)]
    assert reviving.given(1) == [([2],), ([4],)], "the new one's"


def test_replicas_that_die_one_after_the_other_are_given_up(fake_ray: FakeRay) -> None:
    reviving = Reviving(fake_ray, ActorDiedError())
    reviving.next = [ActorDiedError()] * MAX_LOSSES
    with pytest.raises(RoleLostError, match=r"^reward\[0\] on 10\.0\.0\.2: died while computing rewards"):
        reviving.replicas.score([1]).result()
    assert len(reviving.revived) == MAX_LOSSES


def test_an_answer_forgives_the_losses_before_it(fake_ray: FakeRay) -> None:
    reviving = Reviving(fake_ray, ActorDiedError())
    for _ in range(3):
        reviving.next = [*[ActorDiedError()] * (MAX_LOSSES - 1), ["a"]]
        assert reviving.replicas.score([1]).result() == ["a"]
        reviving.group.members[0].handle.answers["score"] = ActorDiedError()
    assert len(reviving.revived) == 3 * MAX_LOSSES


def test_an_error_of_a_reward_is_not_a_loss(fake_ray: FakeRay) -> None:
    reviving = Reviving(fake_ray, ValueError("bad"))
    with pytest.raises(ActorError, match="bad"):
        reviving.replicas.score([1]).result()
    assert not reviving.revived


# ---- a GPU that is too small


class Overflowing:
    """A learner that does not fit its GPU; ``engine`` is its own, too."""

    def __init__(self) -> None:
        self.engine = self

    def unpark_optimizer(self) -> None: ...

    def score(self, share: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 2 GiB")

    def update(self, share: Any) -> None:
        self.score(share)


@pytest.mark.parametrize("doing", ["scoring", "updating"])
def test_a_learner_without_enough_gpu_memory_names_the_keys_to_change(
    monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    config = load_config(CONF / "grpo_tiny.yaml", ["learner.micro_batch_tokens=500"])
    actor = LearnerActor(config, 1, 2)
    actor._learner, actor._decided = Overflowing(), config.learner
    monkeypatch.setattr(actor, "node", lambda: "10.0.0.1")
    with pytest.raises(GpuMemoryError) as caught:
        {"scoring": actor.score, "updating": actor.update}[doing](None)
    assert str(caught.value) == (
        f"learner[1] on 10.0.0.1: out of GPU memory while {doing} with learner.micro_batch_tokens=500 (CUDA out of "
        "memory. Tried to allocate 2 GiB); lower that or learner.logits_chunk_tokens, or raise "
        "learner.checkpointed_layers or learner.num_ranks"
    )
