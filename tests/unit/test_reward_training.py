"""The preference loss by hand, its pieces add up over micro-batches, pairs stay together, bad configurations."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.preference import preference_loss
from rlhf.batch import last_token_batch
from rlhf.errors import ConfigError
from rlhf.packing import plan_micro_batches
from rlhf.recipes import load_config, to_yaml
from rlhf.reward_config import RewardTrainingConfig
from rlhf.training.reward_learner import PairPlanner, pair_units

RECIPE = Path(__file__).parents[2] / "conf" / "reward_tiny.yaml"


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


SCORES, WEIGHTS = f64([2.0, 1.0, 0.5, 3.0]), f64([0.5] * 4)  # two pairs: won by 1, lost by 2.5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_is_the_bradley_terry_likelihood() -> None:
    loss, stats = preference_loss(SCORES, torch.zeros(4), WEIGHTS)
    assert loss.item() == pytest.approx(-(math.log(sigmoid(1)) + math.log(sigmoid(-2.5))) / 2)
    assert stats["accuracy"].item() == 0.5
    assert stats["margin"].item() == pytest.approx((1 - 2.5) / 2)
    assert stats["mean_reward"].item() == pytest.approx((2 + 1 + 0.5 + 3) / 4)
    _, stats = preference_loss(f64([1.0, 1.0]), torch.zeros(2), f64([1.0, 1.0]))
    assert stats["accuracy"].item() == 0, "a tie is not won"


def test_margin_asks_for_more() -> None:
    loss, stats = preference_loss(SCORES, f64([0.7, 0.7, 0, 0]), WEIGHTS)
    assert loss.item() == pytest.approx(-(math.log(sigmoid(0.3)) + math.log(sigmoid(-2.5))) / 2)
    assert stats["margin"].item() == pytest.approx((1 - 2.5) / 2), "the gap itself is reported, not what is asked of it"


def test_centring_penalises_the_pair_s_sum() -> None:
    plain, _ = preference_loss(SCORES, torch.zeros(4), WEIGHTS)
    centred, _ = preference_loss(SCORES, torch.zeros(4), WEIGHTS, center_coef=0.01)
    assert (centred - plain).item() == pytest.approx(0.01 * (3**2 + 3.5**2) / 2)


def test_gradient_by_hand() -> None:
    scores = SCORES.clone().requires_grad_()
    preference_loss(scores, torch.zeros(4), WEIGHTS)[0].backward()
    won, lost = -sigmoid(-1.0) / 2, -sigmoid(2.5) / 2  # d(-log sigmoid(x)) / dx = -sigmoid(-x), times the weight
    torch.testing.assert_close(scores.grad, f64([won, -won, lost, -lost]))


def test_micro_batches_add_up_to_the_whole() -> None:
    margins = f64([0.2, 0.2, 0, 0])
    whole_loss, whole = preference_loss(SCORES, margins, WEIGHTS, center_coef=0.1)
    parts = [preference_loss(SCORES[s], margins[s], WEIGHTS[s], center_coef=0.1) for s in (slice(0, 2), slice(2, 4))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item())
    for name, value in whole.items():
        assert sum(stats[name].item() for _, stats in parts) == pytest.approx(value.item())


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    spare=st.integers(0, 200),
)
def test_pairs_stay_together(lengths: list[tuple[int, int]], num_ranks: int, spare: int) -> None:
    budget = max(map(sum, lengths)) + spare
    flat = [length for pair in lengths for length in pair]
    plan = plan_micro_batches(pair_units(flat), num_ranks=num_ranks, token_budget=budget, hidden_size=64)
    assert len({len(rank) for rank in plan}) == 1, "ranks must agree on the number of micro-batches"
    micro_batches = [micro for rank in plan for micro in rank]
    assert sorted(i for micro in micro_batches for i in micro) == list(range(len(flat)))
    for micro in micro_batches:
        assert micro[1::2] == [i + 1 for i in micro[::2]] and all(i % 2 == 0 for i in micro[::2])
        assert sum(flat[i] for i in micro) <= budget


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_each_pair_is_sent_to_one_rank_with_its_weights(num_ranks: int) -> None:
    margins, weights = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], [0.125] * 6 + [0.0] * 2
    batch = last_token_batch([[5, 6, 7], [5] * 9, [8], [8, 9], [3] * 7, [3, 4], [2] * 4, [2]]).with_(
        margins=torch.tensor(margins), loss_weights=torch.tensor(weights)
    )
    planner = PairPlanner(num_ranks=num_ranks, token_budget=16, hidden_size=8)
    plan = planner.plan_update(batch, 0)
    seen = []
    for share in map(plan.share, range(num_ranks)):
        (step,) = share.steps
        assert step.num_tokens == 6
        for micro in filter(None, share.micro_batches(step)):
            assert micro.margins is not None and micro.loss_weights is not None
            assert torch.equal(micro.margins[::2], micro.margins[1::2]), "both of a pair"
            seen += zip(
                micro.sequence_lengths.tolist(), micro.margins.tolist(), micro.loss_weights.tolist(), strict=True
            )
    rows = zip(batch.sequence_lengths.tolist(), torch.tensor(margins).tolist(), weights, strict=True)
    assert sorted(seen) == sorted(rows)


def test_configuration_round_trips(tmp_path: Path) -> None:
    config = load_config(RECIPE, ["batch_pairs=7"], RewardTrainingConfig)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml", schema=RewardTrainingConfig) == config


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("learner.micro_batch_tokens=100", r"learner\.micro_batch_tokens=100 cannot hold one pair .* = 258 tokens"),
        ("batch_pairs=0", r"batch_pairs=0 must be at least 1"),
        ("rollout.num_workers=2", r"rollout: Key 'rollout' not in 'RewardTrainingConfig'"),
    ],
)
def test_a_bad_configuration_names_its_key(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(RECIPE, [override], RewardTrainingConfig)
