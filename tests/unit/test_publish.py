"""The publish protocol around fake actors: who is committed, who has failed, and who is asked what."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from ray.exceptions import ActorDiedError

from actors.group import Deadline, Member
from actors.rollouts.engine import Ready
from actors.weights.publish import PublishResult, publish
from actors.weights.transports import BrokenTransferError, Transfer
from rlhf.errors import ActorError, DeadlineError, RoleLostError, UnwrittenWeightsError, WeightSyncError
from tests.clock import Clock
from tests.fake_ray import IN_FLIGHT, FakeRay

STEPS = {
    "begin_update": "preparing for new weights",
    "finish_update": "loading weights",
    "commit": "committing weights",
}
SENT = [4, 5]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[Member]:
    """Three workers; the second has two engine processes."""
    fake_ray = FakeRay(monkeypatch, clock)
    return [Member(fake_ray.actor(begin_update=Ready(1 + (i == 1))), "rollout", i, "10.0.0.1") for i in range(3)]


@dataclass
class Scripted:
    """A transport whose every attempt takes 10 s, 4 of them to join. ``attempts``: (who fails, what others receive)."""

    clock: Clock
    attempts: list[tuple[set[int], dict[int, list[list[int]]]]] = field(default_factory=list)
    asked: list[dict[int, int]] = field(default_factory=list)  # number of processes, by rank
    left_s: list[float] = field(default_factory=list)
    breaks: list[bool] = field(default_factory=list)  # whether an attempt breaks through nobody's fault

    def transfer(self, members: Mapping[Member, Ready], deadline: Deadline) -> Transfer:
        self.asked.append({member.rank: ready.processes for member, ready in members.items()})
        self.left_s.append(deadline.left_s)
        assert deadline.left_s > 0, "attempts without end"
        self.clock.now_s += 10
        if self.breaks and self.breaks.pop(0):
            raise BrokenTransferError(f"connection {len(self.asked)} was reset")
        everything = {m.rank: [SENT] * ready.processes for m, ready in members.items()}
        failing, arrived = self.attempts.pop(0) if self.attempts else (set[int](), everything)
        failed = {m: RoleLostError(f"{m}: died") for m in members if m.rank in failing}
        received = {m: arrived[m.rank] for m in members if m.rank in arrived}
        return Transfer(SENT if received else [], received, failed, 800 if received else 0, join_s=4.0)


def run(transport: Scripted, members: list[Member]) -> PublishResult:
    return publish(7, transport, members, Deadline(64, "timeouts.publish_s"))


def ranks(members: tuple[Member, ...] | dict[Member, object]) -> list[int]:
    return [member.rank for member in members]


def test_every_member_begins_finishes_and_commits_the_version(clock: Clock, members: list[Member]) -> None:
    result = run(transport := Scripted(clock), members)
    assert ranks(result.committed) == [0, 1, 2] and not result.failed and not result.broken
    assert transport.asked == [{0: 1, 1: 2, 2: 1}]
    assert (result.checksums, result.num_bytes) == (SENT, 800)
    assert result.seconds == {"begin": 0, "join": 4, "transfer": 6, "finish": 0}
    for member in members:
        assert [(ref.method, *ref.args) for ref in member.handle.calls] == [
            ("begin_update",),
            ("finish_update",),
            ("commit", 7),
        ]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("misdeed", ["raises", "dies", "hangs"])
def test_who_fails_at_a_step_is_not_committed_and_the_others_are(
    clock: Clock, members: list[Member], step: str, misdeed: str
) -> None:
    answers = {"raises": UnwrittenWeightsError("lm_head"), "dies": ActorDiedError(), "hangs": IN_FLIGHT}
    members[1].handle.answers[step] = answers[misdeed]
    result = run(Scripted(clock), members)
    assert ranks(result.committed) == [0, 2] and ranks(result.failed) == [1]
    expected = {"raises": UnwrittenWeightsError, "dies": RoleLostError, "hangs": DeadlineError}
    error = result.failed[members[1]]
    assert type(error) is expected[misdeed] and (misdeed == "raises" or f" {STEPS[step]}" in str(error))
    assert members[1].handle.order(*STEPS) == list(STEPS)[: list(STEPS).index(step) + 1], "it is asked nothing more"


def test_a_late_worker_takes_half_of_the_time_left(clock: Clock, members: list[Member]) -> None:
    for member, step in zip(members, STEPS, strict=True):
        member.handle.answers[step] = IN_FLIGHT
    result = run(transport := Scripted(clock), members)
    assert transport.left_s == [32], "of 64 s, the rest is for the others"
    assert result.seconds == {"begin": 32, "join": 4, "transfer": 6, "finish": 11 + 5.5}
    assert not result.committed and ranks(result.failed) == [0, 1, 2]


@pytest.mark.parametrize(
    ("received", "said"),
    [
        ([SENT, [4, 6]], r"process 1: weight version 7 arrived corrupted in bucket\(s\) \[1\] of 2 \(2 received\)"),
        ([[9, 9], SENT], r"process 0: weight version 7 arrived corrupted in bucket\(s\) \[0, 1\] of 2 \(2 received\)"),
        ([SENT, [4]], r"process 1: weight version 7 arrived corrupted in bucket\(s\) \[\] of 2 \(1 received\)"),
    ],
)
def test_other_weights_than_were_sent_are_not_committed(
    clock: Clock, members: list[Member], received: list[list[int]], said: str
) -> None:
    result = run(Scripted(clock, [(set(), {0: [SENT], 1: received, 2: [SENT]})]), members)
    assert ranks(result.committed) == [0, 2]
    with pytest.raises(WeightSyncError, match=said):
        raise result.failed[members[1]]
    assert members[1].handle.order(*STEPS) == ["begin_update"]


def test_a_transfer_that_broke_off_is_repeated_without_its_cause(clock: Clock, members: list[Member]) -> None:
    transport = Scripted(clock, [({0}, {}), (set(), {1: [SENT, SENT]}), ({2}, {})])
    result = run(transport, members)
    assert transport.asked == [{0: 1, 1: 2, 2: 1}, {1: 2, 2: 1}, {2: 1}]
    assert ranks(result.committed) == [1] and ranks(result.failed) == [0, 2]
    assert (result.checksums, result.num_bytes) == (SENT, 800), "of the attempt that moved something"
    assert (result.seconds["join"], result.seconds["transfer"]) == (12, 18)
    assert [member.handle.order("begin_update") for member in members] == [["begin_update"] * n for n in (1, 2, 3)]


def test_a_transfer_that_breaks_with_nobody_at_fault_is_repeated(clock: Clock, members: list[Member]) -> None:
    transport = Scripted(clock, [({2}, {0: [SENT]})], breaks=[False, True])
    result = run(transport, members)
    assert transport.asked == [{0: 1, 1: 2, 2: 1}, {1: 2}, {1: 2}], "with all that it was to reach"
    assert ranks(result.committed) == [0, 1] and result.broken == "connection 2 was reset"
    assert members[1].handle.order("begin_update") == ["begin_update"] * 3, "whatever has arrived of the weights"


def test_a_transfer_that_breaks_twice_is_for_a_restart_to_mend(clock: Clock, members: list[Member]) -> None:
    transport = Scripted(clock, breaks=[True, True])
    with pytest.raises(RoleLostError, match=r"^connection 2 was reset; an attempt just before broke too: connection 1"):
        run(transport, members)
    assert not any(member.handle.order("commit") for member in members)


def test_who_cannot_begin_again_has_failed(clock: Clock, members: list[Member]) -> None:
    transport = Scripted(clock, [({0}, {})])
    broken = members[2].handle

    def transfer(waiting: Mapping[Member, int], deadline: Deadline) -> Transfer:
        broken.answers["begin_update"] = RuntimeError("out of memory")
        return Scripted.transfer(transport, waiting, deadline)

    transport.transfer = transfer  # type: ignore[method-assign]
    result = run(transport, members)
    assert ranks(result.committed) == [1] and sorted(ranks(result.failed)) == [0, 2]
    assert transport.asked[1:] == [{1: 2}]


def test_nobody_is_left_to_move_weights_to(clock: Clock, members: list[Member]) -> None:
    result = run(transport := Scripted(clock), [])
    assert not transport.asked and not result.committed and not result.failed


def test_the_learners_failure_is_raised(clock: Clock, members: list[Member]) -> None:
    class Broken(Scripted):
        def transfer(self, members: Mapping[Member, int], deadline: Deadline) -> Transfer:
            raise ActorError("learner[0]: moving weights raised")

    with pytest.raises(ActorError, match="learner"):
        run(Broken(clock), members)
    assert members[0].handle.order(*STEPS) == ["begin_update"]
