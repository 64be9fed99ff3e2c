"""What an environment gives for a turn: where it enters GAE, and a baseline for each turn that leaves no bias."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.algorithms import AdvantageInputs, make_algorithm
from rlhf.algorithms.advantages import leave_one_out_of_turns
from rlhf.batch import Episode, Prompt, Rollout, TrainBatch, pack
from rlhf.config import AlgorithmConfig
from rlhf.errors import ConfigError

NAN = math.nan


def batch_of(*episodes: tuple[Sequence[int], Sequence[float], float]) -> TrainBatch:
    """Of each episode: the tokens of its turns, their rewards, and its whole reward. Turns are a token apart."""
    rollouts = []
    for lengths, turn_rewards, _ in episodes:
        sampled = np.concatenate([[True] * n + [False] for n in lengths])
        told = Episode(sampled, list(lengths), list(turn_rewards), 0.0, "done", [], {})
        versions = np.zeros(sum(lengths), np.int32)
        rollouts.append(Rollout(Prompt(0, [1], ""), 0, [5] * len(sampled), versions, "stop", None, told))
    return pack(rollouts).with_(rewards=torch.tensor([reward for *_, reward in episodes]))


def advantages(batch: TrainBatch, **changes: Any) -> list[float]:
    algorithm = make_algorithm(AlgorithmConfig(prompts_per_step=1, **changes))
    done, _ = algorithm.assign_advantages(batch)
    assert done.advantages is not None
    return done.advantages.tolist()


def test_gae_sees_a_turn_s_reward_at_the_turn_s_last_token_and_the_rest_at_the_end() -> None:
    batch = batch_of(([2, 1], [0.5, -1.0], 2.0), ([1], [4.0], 1.0), ([1, 1], [9.0, 9.0], NAN))
    batch = batch.with_(old_logprobs=torch.zeros(6), values=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]))
    settings: dict[str, Any] = {"name": "ppo", "group_size": 3, "gamma": 0.5, "lam": 0.5, "whiten_advantages": False}
    # by token 0, 0.5 and -1 + (2 - 0.5 + 1); and 4 + (1 - 4)
    last = 1.5 - 1.0
    middle = 0.5 + 0.5 * 1.0 + 0.25 * last
    assert advantages(batch, **settings) == pytest.approx([0.25 * middle, middle, last, 1.0, 0.0, 0.0])
    # clipped to 1, of which -0.5 came before the end
    last = -1 + 1.5 - 1.0
    middle = 0.5 + 0.5 * 1.0 + 0.25 * last
    assert advantages(batch, reward_clip=1.0, **settings)[:3] == pytest.approx([0.25 * middle, middle, last])


def test_without_discount_turns_and_end_are_the_whole_reward() -> None:
    batch = batch_of(([2, 1], [0.5, -1.0], 2.0)).with_(old_logprobs=torch.zeros(3), values=torch.zeros(3))
    found = advantages(batch, name="ppo", group_size=1, gamma=1.0, lam=1.0, whiten_advantages=False)
    assert found == pytest.approx([2.0, 2.0, 1.5])


GROUP = [([2, 1], [1.0, 0.0], 3.0), ([1], [0.5], 0.5), ([1, 1, 2], [0.0, 1.0, -1.0], 4.0)]


def test_a_turn_is_compared_with_what_the_others_got_from_that_turn_on() -> None:
    """What they got is 3, 2; 0.5; and 4, 4, 3."""
    found = advantages(batch_of(*GROUP), name="rloo", credit="turn", group_size=3)
    assert found == pytest.approx([0.75, 0.75, 2 - 4 / 2, -3, 2.25, 4 - 2 / 2, 3, 3])
    whole = advantages(batch_of(*GROUP), name="rloo", group_size=3)
    assert whole == pytest.approx([0.75] * 3 + [-3] + [2.25] * 4)


def test_turn_credit_leaves_out_episodes_without_a_reward() -> None:
    first, (lengths, given, _), last = GROUP
    found = advantages(batch_of(first, (lengths, given, NAN), last), name="rloo", credit="turn", group_size=3)
    assert found == pytest.approx([3 - 4, 3 - 4, 2 - 4, 0, 4 - 3, 4 - 2, 3, 3])


@dataclass(frozen=True)
class Walk:
    """An episode of the bandit: the probability of each thing done, and its slope by each of the two parameters."""

    turn_rewards: list[float]
    end: float
    probabilities: list[float]
    slopes: list[tuple[float, float]]  # of the log-probability of each turn


def walks(stop: float, left: float) -> list[Walk]:
    """All episodes: stop at once with probability ``stop``; else go on, to the left with probability ``left``.

    Both are sigmoids of a parameter, so that the slope of log p is 1 - p, and that of log (1 - p) is -p.
    """
    return [
        Walk([0.3], 1.0, [stop], [(1 - stop, 0.0)]),
        Walk([-0.2, 0.5], 2.0, [1 - stop, left], [(-stop, 0.0), (0.0, 1 - left)]),
        Walk([-0.2, 0.0], -4.0, [1 - stop, 1 - left], [(-stop, 0.0), (0.0, -left)]),
    ]


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_turn_credit_is_unbiased_over_every_group_that_can_be_drawn(group_size: int) -> None:
    stop, left = 0.3, 0.8
    tree = walks(stop, left)
    groups = list(product(tree, repeat=group_size))
    batch = batch_of(
        *(
            ([1] * len(walk.turn_rewards), walk.turn_rewards, sum(walk.turn_rewards) + walk.end)
            for group in groups
            for walk in group
        )
    )
    assert batch.rewards is not None
    by_turn = iter(leave_one_out_of_turns(AdvantageInputs.of(batch, batch.rewards, group_size)).double().tolist())
    estimate = np.zeros(2)
    for group in groups:
        probability = math.prod(p for walk in group for p in walk.probabilities)
        slopes = [slope for walk in group for slope in walk.slopes]
        estimate += probability / group_size * sum(next(by_turn) * np.array(slope) for slope in slopes)
    # the slope of stop * 1.3 + (1 - stop) * (left * 2.3 + (1 - left) * -4.2)
    exact = [stop * (1 - stop) * (1.3 - (left * 2.3 - (1 - left) * 4.2)), (1 - stop) * left * (1 - left) * (2.3 + 4.2)]
    assert estimate == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("changes", [{"name": "grpo"}, {"name": "ppo"}, {"name": "rloo", "advantage": "mine.py:f"}])
def test_turn_credit_is_refused_where_it_would_not_be_used_or_scaled(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.credit=turn .* use it with algorithm\.name=rloo"):
        AlgorithmConfig(credit="turn", **changes)


def test_an_estimator_of_one_s_own_can_tell_what_was_sampled() -> None:
    batch = batch_of(*GROUP)
    assert batch.rewards is not None
    inputs = AdvantageInputs.of(batch, batch.rewards, 3)
    assert inputs.sampled is not None and inputs.tail_lengths is not None
    assert inputs.sampled.sum() == len(inputs.versions)
    assert (inputs.prompt_lengths + inputs.tail_lengths).sum() == len(inputs.tokens)
    assert inputs.turns is not None and inputs.turns.tolist() == [0, 0, 1, 0, 0, 1, 2, 2]
    assert inputs.turn_rewards is not None and inputs.turn_rewards.tolist() == [0, 1, 0, 0.5, 0, 1, 0, -1]
