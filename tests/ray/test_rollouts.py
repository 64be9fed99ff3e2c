"""The rollout pool under real Ray, around fake engines, which start in seconds and misbehave on cue."""

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.control import RunControl, find_run
from actors.group import Deadline, Member
from actors.placement import Placement
from actors.rollouts.engine import MakeEngine
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.pool import RolloutPool
from actors.weights.transports import Transfer
from rlhf.batch import Prompt, Rollout
from rlhf.config import Config
from rlhf.errors import ActorError
from rlhf.planning.topology import plan_topology
from tests.fake_engine import FakeEngine, fake_spec, origin
from tests.ray.chaos import until

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [Prompt(i, [1, 2, i], f"prompt {i}", columns={"answer": i}) for i in range(8)]
SMALL = ("learner.num_ranks=1", "algorithm.beta=0")


class OneBucket:
    """A transport without a learner."""

    def transfer(self, members: Mapping[Member, int], deadline: Deadline) -> Transfer:
        data = np.arange(10, dtype=np.uint8)
        buckets = [((), ray.put(data))]
        received = {m: ray.get(m.handle.receive_objects.remote(buckets, deadline.left_s), timeout=60) for m in members}
        return Transfer([int(data.sum())], received, {}, data.nbytes)


@contextlib.contextmanager
def fake_pool(
    config: Config, notes: list[str], *, shares_gpus: bool = False, make_engine: MakeEngine = FakeEngine
) -> Iterator[RolloutPool]:
    """A pool whose workers are real actors with fake engines, serving version 1."""
    topology = plan_topology(config, "cpu")
    env = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    spec = dataclasses.replace(fake_spec(), config=config.rollout)
    with contextlib.ExitStack() as stack:
        placement = stack.enter_context(Placement(topology, timeout_s=60))
        factory = WorkerFactory(config, topology, placement, lambda slot: env, lambda kind: spec, make_engine)
        wanted = {"default": config.rollout.num_workers}
        control = RunControl(config.name, wanted, most=factory.num_places, note=notes.append)
        stack.callback(control.close)
        pool = RolloutPool(config, factory, control, shares_gpus=shares_gpus, note=notes.append)
        stack.callback(pool.close)
        pool.launch()
        pool.await_started()
        pool.connect(OneBucket())
        pool.publish(1)
        yield pool


def sample(pool: RolloutPool, group_size: int) -> list[list[Rollout]]:
    """A group of every prompt, in their order."""
    return take(pool, pool.submit(PROMPTS, group_size=group_size))


def take(pool: RolloutPool, ids: list[int]) -> list[list[Rollout]]:
    """These groups, in their order."""
    groups: dict[int, list[Rollout]] = {}
    while waiting := set(ids) - groups.keys():
        groups |= pool.next_groups(waiting)
    return [groups[i] for i in ids]


def check(groups: list[list[Rollout]], version: int) -> None:
    """Every completion belongs to its prompt and its place in the group, and was sampled from ``version``."""
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for index, rollout in enumerate(group):
            assert rollout.prompt is prompt and rollout.sample_index == index
            assert {origin(token)[1:] for token in rollout.token_ids} == {(prompt.id, index)}
            assert set(rollout.versions.tolist()) == {version}


def ask_engine(member: Member, question: Callable[[FakeEngine], Any]) -> Any:
    return ray.get(member.handle.__ray_call__.remote(lambda actor: actor._loop.call(question)), timeout=60)


def added(member: Member) -> set[str]:
    """The requests that its engine was given."""
    return {call[1] for call in ask_engine(member, lambda engine: engine.calls) if call[0] == "add"}


def test_groups_come_back_whole_with_their_own_prompts(ray_session: None, tiny_config) -> None:
    with fake_pool(tiny_config(*SMALL, "rollout.num_workers=2"), notes := []) as pool:
        check(sample(pool, group_size=3), version=1)
        for member in pool.members():
            assert added(member), "both of them sampled"
        pool.publish(2)
        check(sample(pool, group_size=3), version=2)
    assert not notes


def test_workers_sleep_until_the_next_publish(ray_session: None, tiny_config) -> None:
    with fake_pool(tiny_config(*SMALL), notes := [], shares_gpus=True) as pool:
        check(sample(pool, group_size=2), version=1)
        pool.sleep()
        pool.publish(2)
        check(sample(pool, group_size=2), version=2)
        assert ("sleep",) in ask_engine(pool.members()[0], lambda engine: engine.calls)
    assert not notes


def test_a_death_loses_no_group_and_changes_no_completion(ray_session: None, tiny_config) -> None:
    """One of two workers dies with half of its completions sampled; the other has not begun."""
    with fake_pool(tiny_config(*SMALL, "rollout.num_workers=2"), notes := []) as pool:
        dies, lives = pool.members()
        ask_engine(dies, lambda engine: engine.allow(2))
        ask_engine(lives, lambda engine: engine.allow(0))
        ids = pool.submit(PROMPTS, group_size=3)
        until(lambda: set(ask_engine(dies, FakeEngine.running_tokens).values()) == {2}, 30, "two of four tokens each")
        held = added(dies)
        pid = ray.get(dies.handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=60)
        os.kill(pid, signal.SIGKILL)
        until(lambda: held <= added(lives), 60, "what it held being given to the other")
        ask_engine(lives, lambda engine: engine.allow(1000))
        check(take(pool, ids), version=1)
        until(lambda: len(pool.members()) == 2, 60, "a new worker")
        assert dies not in pool.members()
    assert len(notes) == 1 and "died" in notes[0], notes


def test_a_group_that_no_worker_survives_ends_the_run(ray_session: None, tiny_config) -> None:
    config = tiny_config(*SMALL, "rollout.max_failures=2", "rollout.max_num_seqs=3")  # a group at a time
    poisoned = functools.partial(FakeEngine, poison=3)
    message = r"2 workers in a row failed while sampling prompt 3 \(rollout.max_failures\); .*this group is poison"
    with fake_pool(config, notes := [], make_engine=poisoned) as pool, pytest.raises(ActorError, match=message):
        sample(pool, group_size=3)
    assert len(notes) == 2, notes


def test_a_worker_that_hangs_in_a_step_is_replaced(ray_session: None, tiny_config) -> None:
    with fake_pool(tiny_config(*SMALL, "rollout.num_workers=2", "timeouts.worker_silence_s=3"), notes := []) as pool:
        ask_engine(pool.members()[0], FakeEngine.hang)
        check(sample(pool, group_size=3), version=1)
    assert len(notes) == 1 and "silent for 3 s (timeouts.worker_silence_s)" in notes[0], notes


def test_a_mailbox_that_dies_is_replaced_and_found_again(ray_session: None, tiny_config) -> None:
    config = tiny_config(*SMALL)
    with fake_pool(config, notes := []) as pool:
        killed = ray.get(find_run(config.name).__ray_call__.remote(lambda actor: os.getpid()), timeout=60)
        os.kill(killed, signal.SIGKILL)
        until(lambda: notes, 60, "another one")
        check(sample(pool, group_size=3), version=1)
        ray.get(find_run(config.name).scale.remote("default", 2), timeout=60)
        until(lambda: len(pool.members()) == 2, 60, "the worker that was asked for")
    assert len(notes) == 2 and "died and was replaced" in notes[0], notes


def test_a_worker_that_received_other_weights_never_serves_them(ray_session: None, tiny_config) -> None:
    with fake_pool(tiny_config(*SMALL, "rollout.num_workers=2"), notes := []) as pool:
        bad, good = pool.members()
        ask_engine(bad, FakeEngine.corrupt)
        pool.publish(2)
        assert "weight version 2 arrived corrupted in bucket(s) [0] of 1" in notes[0]
        assert bad not in pool.members() and good in pool.members()
        check(sample(pool, group_size=3), version=2)
    assert len(notes) == 1, notes


def test_what_a_slow_worker_holds_is_done_by_another_and_then_dropped(ray_session: None, tiny_config) -> None:
    config = tiny_config(*SMALL, "rollout.num_workers=2", "rollout.max_num_seqs=3", "rollout.max_completion_tokens=20")
    with fake_pool(config, notes := []) as pool:
        slow, fast = pool.members()
        ask_engine(slow, lambda engine: engine.slow_down(2.0))
        ask_engine(fast, lambda engine: engine.slow_down(0.04))
        check(sample(pool, group_size=3), version=1)  # one group at a time for each of the two
        until(lambda: not ask_engine(slow, FakeEngine.running_tokens), 10, "the slow worker being idle")
        calls = ask_engine(slow, lambda engine: engine.calls)
        held = added(slow)
    aborted = [set(call[1:]) for call in calls if call[0] == "abort"]
    assert held == aborted[0], "it never finished what it had"
    assert not notes
