"""The mailbox between `rlhf scale` and a run: what it refuses, what becomes of requests, and what if it dies."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.control import REPLACED_PAUSE_S, ControlActor, RunControl
from rlhf.errors import ConfigError
from tests.clock import Clock
from tests.fake_ray import FakeActor, FakeRay

POOL = {"workers": [{"worker": 0}], "version": 3}


class Mailboxes:
    """Ray, as far as it makes named actors: a name is free when its actor has been killed, and dead for a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch)
        self._ray = FakeRay(monkeypatch, self.clock)
        self.actors: list[FakeActor] = []
        self.given: list[tuple[Any, ...]] = []
        self.killed: list[FakeActor] = []
        self.dies_at_s = 0.0  # the last mailbox, when it has been killed
        self._named: set[str] = set()
        context = SimpleNamespace(get_node_id=lambda: "ab" * 28)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray, "kill", lambda actor: self.killed.append(actor))
        monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=self._options))

    def _options(self, *, name: str, **_: Any) -> Any:
        def make(*args: Any) -> FakeActor:
            gone = self.actors[-1:] == self.killed[-1:] and self.clock.now_s >= self.dies_at_s
            if name in self._named and not gone:
                raise ValueError("the name is taken")
            self._named.add(name)
            self.given.append(args)
            self.actors.append(self._ray.actor(exchange={}))
            return self.actors[-1]

        return SimpleNamespace(remote=make)


@pytest.fixture
def mailboxes(monkeypatch: pytest.MonkeyPatch) -> Mailboxes:
    return Mailboxes(monkeypatch)


def polls(control: RunControl, mailboxes: Mailboxes, seconds: float, wanted: int) -> list[dict[str, int]]:
    """What a pool hears that asks every tenth of a second."""
    heard = []
    for _ in range(round(seconds / 0.1)):
        heard.append(control.poll(lambda: POOL, {"default": wanted}))
        mailboxes.clock.now_s += 0.1
    return [asked for asked in heard if asked]


def test_a_request_is_taken_once_and_the_pool_has_the_last_word() -> None:
    mailbox = ControlActor({"default": 1, "big": 2}, None, {})
    mailbox.scale("default", 3)
    assert mailbox.look() == ([], {"default": 3, "big": 2})
    assert mailbox.exchange(POOL, {"default": 1, "big": 2}, {}) == {"default": 3, "big": 2}
    assert mailbox.exchange(POOL, {"default": 2, "big": 2}, {}) == {}
    assert mailbox.look() == ([{"worker": 0}], {"default": 2, "big": 2}), "the run has gone back to 2"


def test_more_workers_than_places_are_refused_at_the_command() -> None:
    mailbox = ControlActor({"default": 2}, 2, {})
    with pytest.raises(ConfigError, match=r"^--rollout-workers=3: .* room for 2; ask for at most 2, or train with "):
        mailbox.scale("default", 3)
    with pytest.raises(ConfigError, match=r"^--kind=big: this run has default$"):
        mailbox.scale("big", 1)
    assert mailbox.exchange({"workers": []}, {"default": 2}, {}) == {}, "nothing was asked for"
    mailbox.scale("default", 2)
    ControlActor({"default": 2}, None, {}).scale("default", 1000)


def test_a_mailbox_that_dies_is_replaced_and_the_run_goes_on(mailboxes: Mailboxes) -> None:
    control = RunControl("mine", {"default": 1}, most=4, note=(notes := []).append)
    mailboxes.actors[0].answers["exchange"] = {"default": 3}
    assert polls(control, mailboxes, 0.3, wanted=1) == [{"default": 3}]
    mailboxes.actors[0].answers["exchange"] = ActorDiedError()
    assert polls(control, mailboxes, 1.0, wanted=3) == []
    assert mailboxes.given == [({"default": 1}, 4, {}), ({"default": 3}, 4, {})], "the new one knows what is wanted now"
    assert len(notes) == 1 and "died and was replaced" in notes[0]
    assert not mailboxes.actors[1].given("exchange"), "one that died at once would be replaced all the time"
    mailboxes.actors[1].answers["exchange"] = {"default": 2}
    assert polls(control, mailboxes, REPLACED_PAUSE_S, wanted=3)[0] == {"default": 2}
    assert mailboxes.actors[1].given("exchange")[0] == (POOL, {"default": 3}, {})


def test_a_mailbox_that_cannot_be_reached_is_replaced_when_it_is_dead(mailboxes: Mailboxes) -> None:
    control = RunControl("mine", {"default": 1}, most=None, note=(notes := []).append)
    mailboxes.actors[0].answers["exchange"] = ActorUnavailableError("the network is away", b"\0" * 16)
    mailboxes.dies_at_s = mailboxes.clock.now_s + 2
    assert polls(control, mailboxes, 4.0, wanted=1) == []
    assert len(mailboxes.actors) == 1 and mailboxes.killed == mailboxes.actors and not notes
    polls(control, mailboxes, REPLACED_PAUSE_S, wanted=1)
    assert len(mailboxes.actors) == 2 and len(notes) == 1


def test_a_second_run_of_the_name_is_refused(mailboxes: Mailboxes) -> None:
    RunControl("mine", {"default": 1}, most=None, note=print)
    with pytest.raises(ConfigError, match=r"^name=mine: a run of that name is already on this cluster"):
        RunControl("mine", {"default": 1}, most=None, note=print)


def test_who_asks_reads_what_the_run_left_and_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    mailbox = ControlActor({"default": 1}, None, {"step": 0, "phase": "start"})
    clock.now_s += 7
    assert mailbox.progress() == {
        "step": 0,
        "phase": "start",
        "pool": {"workers": []},
        "wanted": {"default": 1},
        "age_s": 7,
    }
    mailbox.exchange(POOL, {"default": 2}, {"step": 5})
    clock.now_s += 2
    assert mailbox.progress() == {"step": 5, "pool": POOL, "wanted": {"default": 2}, "age_s": 2}


def test_a_run_leaves_its_progress_with_its_pools_state(mailboxes: Mailboxes) -> None:
    steps = iter(range(9))
    control = RunControl("mine", {"default": 1}, most=None, note=print, progress=lambda: {"step": next(steps)})
    polls(control, mailboxes, 0.9, wanted=1)
    assert mailboxes.given == [({"default": 1}, None, {"step": 0})]
    assert [given[2] for given in mailboxes.actors[0].given("exchange")] == [{"step": 1}, {"step": 2}]
