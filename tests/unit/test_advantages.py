"""GAE, group baselines and whitening, against arithmetic done by hand."""

import math
from dataclasses import fields

import pytest
import torch

from rlhf.algorithms.advantages import (
    AdvantageInputs,
    clip_rewards,
    gae,
    group_normalized,
    leave_one_out,
    place_scores,
    reinforce_plus_plus_baseline,
    whiten,
)
from rlhf.algorithms.grpo import zero_variance_groups
from rlhf.batch import TrainBatch


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


def test_gae_by_hand():
    # gamma = 0.9, lam = 0.5, so gamma * lam = 0.45. Values and rewards at padding must not matter.
    rewards = f64([[0.0, 0.0, 1.0], [0.5, 2.0, 99.0]])
    values = f64([[0.2, 0.4, 0.6], [0.3, 0.1, 99.0]])
    advantages, returns = gae(rewards, values, MASK, gamma=0.9, lam=0.5)
    a2 = 1.0 - 0.6  # the value after the last token is 0
    a1 = (0.0 + 0.9 * 0.6 - 0.4) + 0.45 * a2
    a0 = (0.0 + 0.9 * 0.4 - 0.2) + 0.45 * a1
    b1 = 2.0 - 0.1
    b0 = (0.5 + 0.9 * 0.1 - 0.3) + 0.45 * b1
    torch.testing.assert_close(advantages, f64([[a0, a1, a2], [b0, b1, 0.0]]))
    torch.testing.assert_close(returns, f64([[a0 + 0.2, a1 + 0.4, a2 + 0.6], [b0 + 0.3, b1 + 0.1, 0.0]]))


def test_gae_bootstraps_truncated_rows():
    # Row 0 was cut and the critic expects 0.8 beyond it; row 1 ended. The bootstrap enters at each row's last token.
    rewards = f64([[0.0, 0.0, 1.0], [0.5, 2.0, 99.0]])
    values = f64([[0.2, 0.4, 0.6], [0.3, 0.1, 99.0]])
    advantages, _ = gae(rewards, values, MASK, gamma=0.9, lam=0.5, bootstrap_values=f64([0.8, 0.0]))
    a2 = 1.0 + 0.9 * 0.8 - 0.6
    a1 = (0.0 + 0.9 * 0.6 - 0.4) + 0.45 * a2
    a0 = (0.0 + 0.9 * 0.4 - 0.2) + 0.45 * a1
    torch.testing.assert_close(advantages[0], f64([a0, a1, a2]))
    short, _ = gae(rewards, values, MASK, gamma=0.9, lam=0.5, bootstrap_values=f64([0.0, 0.8]))
    b1 = 2.0 + 0.9 * 0.8 - 0.1
    b0 = (0.5 + 0.9 * 0.1 - 0.3) + 0.45 * b1
    torch.testing.assert_close(short[1], f64([b0, b1, 0.0]))


def test_gae_with_lambda_one_is_discounted_return_minus_value():
    rewards, values = f64([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]), f64([[0.2, 0.4, 0.6], [0.3, 0.1, 0.0]])
    _, returns = gae(rewards, values, MASK, gamma=0.5, lam=1.0)
    expected = [[1.0 + 0.5 * 2.0 + 0.25 * 3.0, 2.0 + 0.5 * 3.0, 3.0], [4.0 + 0.5 * 5.0, 5.0, 0.0]]
    torch.testing.assert_close(returns, f64(expected))


def test_gae_of_a_single_token():
    advantages, returns = gae(f64([[2.0]]), f64([[0.5]]), torch.tensor([[True]]), gamma=0.9, lam=0.5)
    assert (advantages.tolist(), returns.tolist()) == ([[1.5]], [[2.0]])


def test_place_scores_at_the_last_token():
    rewards, scores = f64([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]]), torch.tensor([10.0, 20.0], dtype=torch.float32)
    expected = f64([[0.1, 0.2, 10.3], [0.4, 20.5, 0.0]])
    torch.testing.assert_close(place_scores(rewards, scores, MASK), expected)


def test_place_scores_one_after_the_last_token_where_there_is_padding():
    rewards, scores = f64([[0.1, 0.2, 0.3], [0.4, 0.0, 0.0]]), f64([10.0, 20.0])
    mask, expected = torch.tensor([[1, 1, 1], [1, 0, 0]]), f64([[0.1, 0.2, 10.3], [0.4, 20.0, 0.0]])
    torch.testing.assert_close(place_scores(rewards, scores, mask, after_last=True), expected)


def test_group_normalized_by_hand():
    rewards = f64([1.0, 3.0, 2.0, 8.0])  # groups (1, 3) and (2, 8): means 2 and 5
    # Bessel-corrected: sqrt((1 + 1) / 1) and sqrt((9 + 9) / 1); over the batch mean 3.5, squares 6.25 .25 2.25 20.25.
    std_0, std_1, std_batch = math.sqrt(2), math.sqrt(18), math.sqrt((6.25 + 0.25 + 2.25 + 20.25) / 3)
    by_group = [-1 / (std_0 + 1e-4), 1 / (std_0 + 1e-4), -3 / (std_1 + 1e-4), 3 / (std_1 + 1e-4)]
    torch.testing.assert_close(group_normalized(rewards, 2, scale="group"), f64(by_group))
    by_batch = [x / (std_batch + 1e-4) for x in (-1, 1, -3, 3)]
    torch.testing.assert_close(group_normalized(rewards, 2, scale="batch"), f64(by_batch))
    torch.testing.assert_close(group_normalized(rewards, 2, scale="none"), f64([-1.0, 1.0, -3.0, 3.0]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_zero_and_no_nan(scale):
    assert torch.equal(group_normalized(torch.full((4,), 0.5), 2, scale=scale), torch.zeros(4))


def test_leave_one_out_by_hand():
    rewards = f64([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    expected = [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2, 0 - (0 + 3) / 2, 0 - (0 + 3) / 2, 3 - (0 + 0) / 2]
    torch.testing.assert_close(leave_one_out(rewards, 3), f64(expected))


def test_reinforce_plus_plus_baseline_by_hand():
    rewards = f64([1.0, 3.0, 2.0, 8.0])
    # Centred on the groups: -1, 1, -3, 3. Their mean is 0, their Bessel-corrected variance (1 + 1 + 9 + 9) / 3.
    std = math.sqrt(20 / 3 + 1e-8)
    expected = f64([-1 / std, 1 / std, -3 / std, 3 / std])
    torch.testing.assert_close(reinforce_plus_plus_baseline(rewards, 2), expected)


def test_whiten_by_hand():
    x, mask = f64([[1.0, 99.0], [2.0, 6.0]]), torch.tensor([[1, 0], [1, 1]])
    # Unmasked 1, 2, 6: mean 3, Bessel-corrected variance (4 + 1 + 9) / 2 = 7.
    std = math.sqrt(7 + 1e-8)
    torch.testing.assert_close(whiten(x, mask), f64([[-2 / std, 0.0], [-1 / std, 3 / std]]))
    kept_mean = f64([[3 - 2 / std, 0.0], [3 - 1 / std, 3 + 3 / std]])
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), kept_mean)
    assert whiten(f64([5.0, 5.0]), torch.ones(2)).tolist() == [0.0, 0.0]


def test_whiten_refuses_a_single_value():
    with pytest.raises(ValueError, match="at least 2 unmasked values, got 1"):
        whiten(torch.randn(3), torch.tensor([0, 1, 0]))


NAN = math.nan
# groups of three: one missing; two missing; all missing; none missing
MISSING = [1.0, NAN, 3.0, NAN, 7.0, NAN, NAN, NAN, NAN, 2.0, 8.0, 5.0]


def test_group_normalized_leaves_out_missing_rewards():
    std_0, std_3 = math.sqrt((1 + 1) / 1), math.sqrt((9 + 9 + 0) / 2)  # of (1, 3) and (2, 8, 5)
    # of all that are given: 1, 3, 7, 2, 8, 5; mean 26 / 6, squared deviations by hand
    std_batch = math.sqrt(sum((x - 26 / 6) ** 2 for x in (1, 3, 7, 2, 8, 5)) / 5)
    centred = [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0, 3.0, 0.0]
    by_group = [x / ((std_0 if i < 3 else std_3) + 1e-4) for i, x in enumerate(centred)]
    torch.testing.assert_close(group_normalized(f64(MISSING), 3, scale="none"), f64(centred))
    torch.testing.assert_close(group_normalized(f64(MISSING), 3, scale="group"), f64(by_group))
    by_batch = f64([x / (std_batch + 1e-4) for x in centred])
    torch.testing.assert_close(group_normalized(f64(MISSING), 3, scale="batch"), by_batch)


def test_leave_one_out_leaves_out_missing_rewards():
    expected = [1 - 3, 0, 3 - 1, 0, 0, 0, 0, 0, 0, 2 - (8 + 5) / 2, 8 - (2 + 5) / 2, 5 - (2 + 8) / 2]
    torch.testing.assert_close(leave_one_out(f64(MISSING), 3), f64(expected))


def test_reinforce_plus_plus_baseline_leaves_out_missing_rewards():
    # Centred: -1, 1; 0 for the one alone; -3, 3, 0. Six values of mean 0, squares 1 + 1 + 9 + 9, over 6 - 1.
    std = math.sqrt(20 / 5 + 1e-8)
    expected = [-1 / std, 0, 1 / std, 0, 0, 0, 0, 0, 0, -3 / std, 3 / std, 0]
    torch.testing.assert_close(reinforce_plus_plus_baseline(f64(MISSING), 3), f64(expected))
    std = math.sqrt((1 + 1) / 1 + 1e-8)  # of -1 and 1, the only two
    two = reinforce_plus_plus_baseline(f64([NAN, NAN, 1.0, 3.0]), 2)
    torch.testing.assert_close(two, f64([0, 0, -1 / std, 1 / std]))


ESTIMATORS = [
    *(lambda r, s=s: group_normalized(r, 2, scale=s) for s in ("group", "batch", "none")),
    lambda r: leave_one_out(r, 2),
    lambda r: reinforce_plus_plus_baseline(r, 2),
]


@pytest.mark.parametrize("advantages_of", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[NAN] * 4, [NAN, 1.0, NAN, NAN], [2.0, NAN, NAN, 5.0]])
def test_without_two_rewards_in_a_group_there_is_no_advantage(advantages_of, rewards):
    assert torch.equal(advantages_of(torch.tensor(rewards)), torch.zeros(4))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_whole_groups_give_the_same_bits_as_the_plain_formula(scale):
    rewards = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    groups = rewards.reshape(-1, 8)
    divisor = {"group": groups.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    expected = (groups - groups.mean(1, keepdim=True)) / divisor
    assert torch.equal(group_normalized(rewards, 8, scale=scale), expected.flatten())


def test_groups_that_teach_nothing():
    rewards = [1.0, 1.0, 1e4, 1e4 + 0.01, NAN, 7.0, NAN, NAN]
    assert zero_variance_groups(torch.tensor(rewards), 2).tolist() == [True, False, True, True]
    assert zero_variance_groups(torch.tensor([NAN, 1.0, 2.0, NAN, 1.0, 1.0]), 3).tolist() == [False, True]


def test_clipping_keeps_missing_rewards():
    torch.testing.assert_close(
        clip_rewards(f64([-3.0, 0.5, NAN, 9.0]), 2.0), f64([-2.0, 0.5, NAN, 2.0]), equal_nan=True
    )
    assert clip_rewards(f64([9.0]), None).tolist() == [9.0]


@pytest.mark.parametrize("advantages_of", [leave_one_out, reinforce_plus_plus_baseline])
def test_groups_must_be_whole_and_hold_two(advantages_of):
    with pytest.raises(ValueError, match="group_size must be >= 2"):
        advantages_of(torch.randn(4), 1)
    with pytest.raises(ValueError, match="group_size=3 does not divide the 4 rewards"):
        advantages_of(torch.randn(4), 3)


def test_group_normalized_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="group_size must be >= 2"):
        group_normalized(torch.randn(4), 1, scale="group")
    with pytest.raises(ValueError, match="group_size=3 does not divide the 4 rewards"):
        group_normalized(torch.randn(4), 3, scale="group")
    with pytest.raises(ValueError, match="'std' is unknown; use group, batch or none"):
        group_normalized(torch.randn(4), 2, scale="std")


def test_an_estimator_is_given_the_tensors_of_the_batch():
    names = [field.name for field in fields(AdvantageInputs) if field.name not in ("rewards", "group_size")]
    of = TrainBatch(**{name: torch.zeros(2) for name in names})
    inputs = AdvantageInputs.of(of, rewards := torch.ones(2), 2)
    assert inputs.rewards is rewards and inputs.group_size == 2
    assert all(getattr(inputs, name) is getattr(of, name) for name in names)
