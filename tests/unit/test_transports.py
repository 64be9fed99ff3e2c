"""The driver's part in a weight session around fake processes: who is blamed when it breaks, and what is done anew."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from ray.exceptions import ActorDiedError

from actors.group import ActorGroup, Deadline, Member
from actors.rollouts.engine import Ready
from actors.weights import transports
from actors.weights.channel import TransferAbortedError
from actors.weights.transports import BrokenTransferError, SessionTransport, Transfer
from rlhf.errors import ActorError, RoleLostError
from rlhf.training.weights import TensorSpec
from tests.clock import Clock
from tests.fake_ray import CHECKSUM, IN_FLIGHT, FakeRay


class Setting:
    """A learner of two ranks and two workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch)
        ray = FakeRay(monkeypatch, self.clock)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends = {"weight_layout": [], "host_rendezvous": self.store.port, "join_weights": {}}
        sums = ([CHECKSUM], [])
        learner = [
            Member(ray.actor(**ends, send_weights=s), "learner", rank, "127.0.0.1") for rank, s in enumerate(sums)
        ]
        received = {"receive_session": [[CHECKSUM]]}
        self.members = {Member(ray.actor(**received), "rollout", rank, "127.0.0.1"): Ready(1) for rank in range(2)}
        self.learner = learner
        self.transport = SessionTransport(ActorGroup(learner), "broadcast")

    def answer(self, method: str, who: Mapping[str, Any]) -> None:
        """By a process's name in errors; the others answer as they do."""
        for member in [*self.learner, *self.members]:
            if (name := f"{member.role}[{member.rank}]") in who:
                member.handle.answers[method] = who[name]

    def transfer(self) -> Transfer:
        return self.transport.transfer(self.members, Deadline(64, "timeouts.publish_s").start())

    def sessions(self) -> list[str]:
        """Those that the learner was invited to."""
        return [rendezvous.name for _, rendezvous, _ in self.learner[0].handle.given("join_weights")]

    def told(self, session: str) -> str:
        """Why its processes left the session."""
        return dist.PrefixStore(session, self.store).get("off").decode()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(monkeypatch)


def ranks(members: Mapping[Member, Any]) -> list[int]:
    return [member.rank for member in members]


RESET = TransferAbortedError("Connection reset by peer")


def test_a_session_lasts_while_nothing_breaks(setting: Setting) -> None:
    for _ in range(2):
        moved = setting.transfer()
        assert moved.sent == [CHECKSUM] and list(moved.received.values()) == [[[CHECKSUM]]] * 2 and not moved.failed
    assert len(setting.sessions()) == 1


def spec(name: str, num_bytes: int) -> TensorSpec:
    return TensorSpec(name, "uint8", (num_bytes,), (num_bytes,), 0, 0, num_bytes)


def test_weights_that_never_change_are_sent_while_one_lacks_them(setting: Setting) -> None:
    layout = [(spec("q_proj.weight", 160),), (spec("q_proj.lora_A.weight", 32),), (spec("q_proj.lora_B.weight", 16),)]
    setting.answer("weight_layout", {"learner[0]": layout})
    first, second = setting.members
    for held, whole in (((False, False), True), ((True, False), True), ((True, True), False)):
        for member, has_frozen in zip((first, second), held, strict=True):
            setting.members[member] = Ready(1, has_frozen)
        moved = setting.transfer()
        assert moved.num_bytes == (208 if whole else 48)
        for member, method in ((setting.learner[0], "send_weights"), (first, "receive_session")):
            assert member.handle.given(method)[-1][1] is whole
    assert len(setting.sessions()) == 1, "it is the same session"


@pytest.mark.parametrize("who", ["learner[0]", "rollout[1]"])
@pytest.mark.parametrize("step", ["joining", "moving"])
def test_a_transfer_that_breaks_is_nobodys_fault_and_the_next_one_joins_anew(
    setting: Setting, who: str, step: str
) -> None:
    method = "join_weights" if step == "joining" else "send_weights" if who == "learner[0]" else "receive_session"
    setting.answer(method, {who: RESET})
    with pytest.raises(
        BrokenTransferError, match=r"^weights could not be moved \(broadcast\): Connection reset by peer$"
    ):
        setting.transfer()
    assert setting.told(setting.sessions()[0]) == "Connection reset by peer", "nobody waits for the others"
    works: Any = {"join_weights": {}, "send_weights": [CHECKSUM], "receive_session": [[CHECKSUM]]}
    setting.answer(method, {who: works[method]})
    assert ranks(setting.transfer().received) == [0, 1]
    first, second = setting.sessions()
    assert first != second


def test_a_dead_worker_is_blamed_and_not_those_who_noticed(setting: Setting) -> None:
    setting.answer("send_weights", {"learner[0]": RESET})
    setting.answer("receive_session", {"rollout[0]": RESET, "rollout[1]": ActorDiedError()})
    moved = setting.transfer()
    assert ranks(moved.failed) == [1] and not moved.received


def test_a_learner_that_hangs_in_a_transfer_is_lost(setting: Setting) -> None:
    setting.answer("send_weights", {"learner[0]": IN_FLIGHT})
    setting.answer("receive_session", {"rollout[0]": RESET})
    began_s = setting.clock.now_s
    with pytest.raises(
        RoleLostError, match=r"^learner\[0\] on 127\.0\.0\.1: still busy with moving weights .*timeouts"
    ):
        setting.transfer()
    assert setting.clock.now_s - began_s <= transports.GRACE_S


def test_what_a_learner_raises_is_raised(setting: Setting) -> None:
    setting.answer("send_weights", {"learner[1]": RuntimeError("out of memory")})
    with pytest.raises(ActorError, match=r"^learner\[1\] .* raised RuntimeError: out of memory") as caught:
        setting.transfer()
    assert not isinstance(caught.value, RoleLostError), "it would do so again"


@pytest.mark.parametrize(
    ("dies", "said"), [(True, "died while moving weights"), (False, "no route to host; it counts")]
)
def test_a_learner_that_cannot_be_reached_is_lost(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, dies: bool, said: str
) -> None:
    class CutOff(dist.PrefixStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("no route\nto host")

    monkeypatch.setattr(dist, "PrefixStore", CutOff)
    setting.answer("send_weights", {"learner[0]": ActorDiedError()} if dies else {})
    setting.answer("receive_session", {"rollout[0]": RESET})
    with pytest.raises(RoleLostError, match=rf"^learner\[0\] on 127\.0\.0\.1: .*{said}"):
        setting.transfer()
