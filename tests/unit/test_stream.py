"""The stream of groups: exact batches, bounded staleness, dynamic sampling, nothing lost or used twice."""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batch import Episode, Prompt, Rollout
from rlhf.config import Config
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import PromptReport, PromptSet
from rlhf.recipes import load_config
from rlhf.rewards.total import Scores
from rlhf.stream import GroupStream, choose_batch
from tests.fakes import Done

ROOT = Path(__file__).resolve().parents[2]
GROUP = 2


@cache
def config(size: int, *more: str, staleness: int = 0, tries: int = 0) -> Config:
    overrides = [
        f"algorithm.prompts_per_step={size}",
        f"algorithm.group_size={GROUP}",
        f"algorithm.dynamic_sampling_max_tries={tries}",
        f"rollout.max_staleness={staleness}",
        *more,
    ]
    return load_config(ROOT / "conf" / "grpo_tiny.yaml", overrides)


@dataclass
class Counting:
    """A prompt stream that counts up."""

    taken: int = 0

    def at(self, position: int) -> Prompt:
        return Prompt(id=position, token_ids=[1 + position], text="")

    def take(self, count: int) -> list[Prompt]:
        self.taken += count
        return [self.at(i) for i in range(self.taken - count, self.taken)]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@dataclass
class Pool:
    """Groups finish in an order of the test's choice; each carries the version at its submission."""

    random: Random
    version: int = 0
    groups: dict[int, list[Rollout]] = field(default_factory=dict)
    submitted: int = 0
    compared: list[tuple[int, list[int]]] = field(default_factory=list)  # of each call: prompts, and who is compared
    sampling: list[tuple[int, bool]] = field(default_factory=list)  # of each call: group size, and whether greedy

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        greedy: bool = False,
        with_logprobs: Collection[int] = (),
    ) -> list[int]:
        ids = range(self.submitted, self.submitted + len(prompts))
        self.submitted += len(prompts)
        self.compared.append((len(prompts), list(with_logprobs)))
        self.sampling.append((group_size, greedy))
        versions = np.full(1, self.version, np.int32)
        for i, prompt in zip(ids, prompts, strict=True):
            self.groups[i] = [Rollout(prompt, k, [5], versions, "stop") for k in range(group_size)]
        return list(ids)

    def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
        found = self.random.sample(sorted(ids), self.random.randint(1, min(3, len(ids))))
        return {i: self.groups.pop(i) for i in found}


@dataclass
class EveryThird:
    """Groups of prompts 0, 3, 6, ... have one good sample; all others are equal."""

    good: float = 1.0
    bad: float = 0.0
    others: float = 0.0  # rewards of groups without a good sample

    def score_groups(self, groups: Sequence[Sequence[Rollout]]) -> Done[list[Scores]]:
        return Done(
            [Scores({"right": [self.reward(rollout) for rollout in group]}, {"right": 1.0}) for group in groups]
        )

    def reward(self, rollout: Rollout) -> float:
        if rollout.prompt.id % 3:
            return self.others
        return self.good if rollout.sample_index == 0 else self.bad


def make(settings: Config, seed: int = 0, reward: EveryThird | None = None) -> tuple[GroupStream, Counting, Pool]:
    prompts, pool = Counting(), Pool(Random(seed))
    stream = GroupStream(prompts, pool, reward or EveryThird(), None, settings, nullcontext)  # type: ignore[arg-type]
    return stream, prompts, pool


def test_on_policy_takes_exactly_its_prompts_in_their_order() -> None:
    stream, prompts, pool = make(config(4))
    for step in range(3):
        pool.version = step
        batch = stream.next_batch(step)
        expected = [(p, k) for p in range(4 * step, 4 * step + 4) for k in range(GROUP)]
        assert [(r.prompt.id, r.sample_index) for r in batch.rollouts] == expected
        assert batch.packed.versions.unique().tolist() == [step]
        assert prompts.taken == 4 * step + 4
        assert len(batch.scores.given["right"]) == 8 and batch.ref_logprobs is None


def test_every_group_has_its_own_scores_and_reference_however_many_finish_together() -> None:
    reward: Any = SimpleNamespace(
        score_groups=lambda groups: Done(
            [Scores({"r": [10.0 * r.prompt.id + r.sample_index for r in group]}, {"r": 1.0}) for group in groups]
        )
    )
    reference: Any = SimpleNamespace(
        score=lambda batches: Done([torch.full((b.num_completion_tokens,), -float(b.tokens[0])) for b in batches])
    )
    prompts: Any = Counting()
    pool: Any = Pool(Random(0))
    stream = GroupStream(prompts, pool, reward, reference, config(8), nullcontext)
    batch = stream.next_batch(0)
    assert batch.scores.given["r"] == [10.0 * group + sample for group in range(8) for sample in range(GROUP)]
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [-1.0 - group for group in range(8) for _ in range(GROUP)]


def test_some_groups_of_some_steps_are_compared_with_the_learner_each_place_in_its_turn() -> None:
    def places(*overrides: str, first: int = 0, steps: int = 6, missed: Collection[int] = ()) -> list[list[int]]:
        stream, _, pool = make(config(4, *overrides))
        for step in range(first, first + steps):
            stream.next_batch(step)
            if pool.compared[-1][1] and step not in missed:
                stream.compared(step)
        return [found for _, found in pool.compared]

    assert places("checks.logprob_every_steps=1") == [[0], [1], [2], [3], [0], [1]]
    assert places("checks.logprob_every_steps=2") == [[0], [], [1], [], [2], []]
    assert places("checks.logprob_every_steps=2", first=3, steps=3) == [[0], [], [1]], "and the first, wherever it is"
    assert places("checks.logprob_every_steps=3", missed=(0, 1)) == [[0], [0], [0], [], [], [1]], "due until it is done"
    assert places("checks.logprob_every_steps=1", "checks.logprob_groups=2", steps=4) == [
        [0, 1],
        [2, 3],
        [1, 2],
        [0, 1],
    ]
    assert places("checks.logprob_every_steps=1", "checks.logprob_groups=9", steps=2) == [[0, 1, 2, 3]] * 2
    assert not any(places("checks.logprob_groups=0"))
    assert not any(places("rollout.logprobs=true")), "all carry them anyway"


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 10_000))
def test_no_token_is_too_old_and_every_prompt_is_used_once(staleness: int, size: int, seed: int) -> None:
    stream, prompts, pool = make(config(size, staleness=staleness), seed)
    used = []
    for step in range(12):
        pool.version = step
        batch = stream.next_batch(step)
        assert len(batch.rollouts) == size * GROUP
        assert step - int(batch.packed.versions.min()) <= staleness
        used += [r.prompt.id for r in batch.rollouts[::GROUP]]
        assert prompts.taken == size * (step + 1 + staleness), "it samples as far ahead as it may"
    assert len(set(used)) == len(used)
    left = stream.state_dict()["pending"]
    assert sorted(used + left) == list(range(prompts.taken)), "every prompt is used, or still under way"


def test_what_was_under_way_at_a_checkpoint_is_sampled_again() -> None:
    settings = config(2, staleness=2)
    stream, _, _ = make(settings, seed=3)
    used = {r.prompt.id for step in range(3) for r in stream.next_batch(step).rollouts}
    state = stream.state_dict()
    assert len(state["pending"]) == 4

    resumed, prompts, _ = make(settings, seed=4)
    resumed.load_state_dict(state)
    for step in range(3, 8):
        ids = {r.prompt.id for r in resumed.next_batch(step).rollouts}
        assert not ids & used
        used |= ids
    assert sorted(used | set(resumed.state_dict()["pending"])) == list(range(prompts.taken))


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(0, 10_000))
def test_a_run_that_is_killed_at_any_moments_trains_on_every_prompt_once_an_epoch(
    staleness: int, size: int, num_prompts: int, save_every: int, seed: int
) -> None:
    random, num_steps = Random(seed), 12
    texts, ids = [f"p{i}" for i in range(num_prompts)], [np.array([i], np.int32) for i in range(num_prompts)]
    prompts = PromptSet("test", texts, ids, None, {}, PromptReport(num_prompts, 0, 0, 1))

    def start(state: dict[str, Any] | None) -> tuple[GroupStream, Pool]:
        settings, pool = config(size, f"num_steps={num_steps}", staleness=staleness), Pool(Random(random.random()))
        taken = PromptStream(prompts, shuffle=True, seed=seed)
        stream = GroupStream(taken, pool, EveryThird(), None, settings, nullcontext)  # type: ignore[arg-type]
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        return stream, pool

    used: list[list[tuple[int, str]]] = []  # by step: what the weights were trained on, those of a checkpoint included
    (stream, pool), saved, kills = start(None), (0, None), 6
    while len(used) < num_steps:
        pool.version = step = len(used)
        batch = stream.next_batch(step)
        if kills and random.random() < 0.3:  # in this step
            kills -= 1
            (stream, pool), used = start(saved[1]), used[: saved[0]]
            continue
        used.append([(r.prompt.id, r.prompt.text) for r in batch.rollouts[::GROUP]])
        if len(used) % save_every == 0:
            saved = len(used), stream.state_dict()
    calm = PromptStream(prompts, shuffle=True, seed=seed).take(num_steps * size)
    assert sorted(group for of_step in used for group in of_step) == [(prompt.id, prompt.text) for prompt in calm]


def test_what_a_resumed_run_has_not_used_is_pending_when_it_is_saved_again() -> None:
    settings = config(2, staleness=2)
    stream, _, _ = make(settings)
    stream.next_batch(0)
    state = stream.state_dict()
    assert (state["prompts"], len(state["pending"])) == ({"taken": 6}, 4)

    resumed, _, _ = make(config(1))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state, "at once"
    used = [resumed.next_batch(step).rollouts[0].prompt.id for step in (1, 2)]
    assert used == state["pending"][:2], "in their order, before any new prompt"
    assert resumed.state_dict() == {"prompts": {"taken": 6}, "pending": state["pending"][2:]}


def test_nothing_is_sampled_for_steps_that_will_not_be() -> None:
    stream, prompts, _ = make(config(2, "num_steps=5", staleness=3))
    taken = []
    for step in range(5):
        assert len(stream.next_batch(step).rollouts) == 2 * GROUP
        taken.append(prompts.taken)
    assert taken == [8, 10, 10, 10, 10]
    assert stream.state_dict()["pending"] == []


def test_the_first_to_finish_are_taken_if_the_others_can_wait() -> None:
    assert choose_batch([5, 5, 5], [5, 5, 5], step=3, size=2) == {0, 1}
    assert choose_batch([5], [5, 5], step=4, size=2) is None, "not enough yet"


def test_what_is_due_now_is_waited_for() -> None:
    assert choose_batch([4, 4], [3], step=3, size=2) is None
    assert choose_batch([4, 4, 3], [], step=3, size=2) == {0, 2}


def test_groups_left_behind_must_fit_the_steps_they_have() -> None:
    # four due by step 4, two a step: two of them must go at step 3, though others finished first
    assert choose_batch([5, 5, 4], [4, 4, 4], step=3, size=2) is None
    assert choose_batch([5, 5, 4, 4], [4, 4], step=3, size=2) == {2, 3}


def test_equal_groups_are_replaced_exactly() -> None:
    stream, prompts, _ = make(config(4, tries=10))
    batch = stream.next_batch(0)
    assert all(r.prompt.id % 3 == 0 for r in batch.rollouts)
    assert batch.scores.given["right"] == [1.0, 0.0] * 4
    assert 10 <= prompts.taken < 4 + 10 * 4


def test_the_wait_for_a_groups_rewards_is_a_phase_of_its_own() -> None:
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield
        phases.append("")

    waits: Any = SimpleNamespace(
        score_groups=lambda groups: Done(EveryThird().score_groups(groups).value, lambda: phases.append("waited"))
    )
    fakes: tuple[Any, Any] = Counting(), Pool(Random(0))
    GroupStream(*fakes, waits, None, config(1, tries=1), phase).next_batch(0)
    assert phases[:3] == ["reward", "waited", ""]


def test_groups_are_judged_by_the_rewards_that_the_loss_sees() -> None:
    clipped = replace(config(4, tries=10).algorithm, reward_clip=0.5)
    stream, prompts, _ = make(replace(config(4, tries=10), algorithm=clipped), reward=EveryThird(good=3.0, bad=0.7))
    stream.next_batch(0)
    assert prompts.taken == 4 + 40, "3.0 and 0.7 are both clipped to 0.5: every group is equal, and none is left to try"


def test_groups_with_fewer_than_two_rewards_are_replaced() -> None:
    stream, _, _ = make(config(4, tries=10), reward=EveryThird(others=math.nan))
    assert all(r.prompt.id % 3 == 0 for r in stream.next_batch(0).rollouts)
    stream, prompts, _ = make(config(4, tries=1), reward=EveryThird(bad=math.nan, others=math.nan))
    stream.next_batch(0)
    assert prompts.taken == 8, "one reward in a group is compared with nothing"


@pytest.mark.parametrize(("credit", "taken"), [("turn", 3), ("episode", 4)])
def test_with_turn_credit_groups_are_equal_only_if_their_turns_are(credit: str, taken: int) -> None:
    """All sums are equal; those of prompts 1, 3, ... come from different turns."""
    settings = config(
        2,
        "algorithm.name=rloo",
        f"algorithm.credit={credit}",
        "environment.path=guess",
        "environment.max_context_tokens=256",
        "rollout.ignore_eos=false",
        tries=1,
    )
    stream, prompts, pool = make(settings, reward=EveryThird(good=0.0))
    submit = pool.submit

    def played(*args: Any, **kwargs: Any) -> list[int]:
        ids = submit(*args, **kwargs)
        for rollouts in pool.groups.values():
            for place, rollout in enumerate(rollouts):
                turns = [0.0, 1.0] if place and rollout.prompt.id % 2 else [1.0, 0.0]
                told = Episode(np.array([True, True]), [1, 1], turns, 0.0, "done", [], {})
                versions = np.zeros(2, np.int32)
                rollouts[place] = replace(rollout, token_ids=[5, 5], versions=versions, episode=told)
        return ids

    pool.submit = played  # type: ignore[method-assign]
    prompts.taken = 1
    batch = stream.next_batch(0)
    assert prompts.taken - 1 == taken, "two, and a replacement for each that is equal"
    if credit == "turn":
        assert [rollout.prompt.id for rollout in batch.rollouts] == [1, 1, 3, 3]


def test_out_of_tries_the_batch_is_filled_with_equal_groups() -> None:
    stream, prompts, _ = make(config(4, tries=1))
    batch = stream.next_batch(0)
    assert prompts.taken == 8, "one batch's worth of replacements"
    assert len(batch.rollouts) == len(batch.scores.given["right"]) == 8
    assert stream.state_dict()["pending"] == []


def test_a_mixed_up_group_is_a_bug() -> None:
    stream, _, pool = make(config(2))
    mixed = [Rollout(Prompt(9, [1], ""), 0, [5], np.zeros(1, np.int32), "stop")]
    pool.next_groups = lambda ids: {next(iter(ids)): mixed}  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="mixed up"):
        stream.next_batch(0)
