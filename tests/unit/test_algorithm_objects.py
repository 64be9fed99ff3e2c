"""The algorithms as the loop sees them: rewards in, one advantage per token out."""

import math
from typing import get_args

import pytest
import torch

from rlhf.algorithms import Algorithm, make_algorithm
from rlhf.batch import TrainBatch
from rlhf.config import ALGORITHMS, AlgorithmConfig, AlgorithmName


def batch(**tensors: torch.Tensor) -> TrainBatch:
    return TrainBatch(
        tokens=torch.zeros(11, dtype=torch.long),
        prompt_lengths=torch.ones(4, dtype=torch.long),
        completion_lengths=torch.tensor([2, 1, 3, 1]),
        truncated=torch.tensor([False, False, True, False]),
        versions=torch.zeros(7, dtype=torch.int32),
        rewards=torch.tensor([1.0, 3.0, 0.0, 4.0]),
    ).with_(**tensors)


def config(name: str, **changes: object) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, prompts_per_step=2, group_size=2, **changes)  # type: ignore[arg-type]


def advantages(name: str, **changes: object) -> list[float]:
    done, _ = make_algorithm(config(name, **changes)).assign_advantages(batch())
    assert done.advantages is not None
    return done.advantages.tolist()


def test_every_algorithm_has_its_facts_and_its_object() -> None:
    assert ALGORITHMS.keys() == set(get_args(AlgorithmName))
    needing = {name for name in ALGORITHMS if make_algorithm(config(name, beta=0.1)).needs_old_logprobs}
    assert needing == {name for name, facts in ALGORITHMS.items() if facts.kl == "reward"}


def test_rloo_compares_with_the_others_of_the_group() -> None:
    assert advantages("rloo") == [-2, -2, 2, -4, -4, -4, 4]


def test_grpo_without_scaling_is_dr_grpo() -> None:
    assert advantages("grpo", scale_rewards="none") == [-1, -1, 1, -2, -2, -2, 2]


def test_rewards_are_clipped_first() -> None:
    assert advantages("rloo", reward_clip=2.0) == [-1, -1, 1, -2, -2, -2, 2]


def test_reinforce_pp_whitens_over_the_batch() -> None:
    # group baselines leave -1, 1, -2, 2: mean 0, Bessel variance 10 / 3
    scale = (10 / 3) ** 0.5
    assert advantages("reinforce_pp") == pytest.approx([x / scale for x in (-1, -1, 1, -2, -2, -2, 2)])


def test_rloo_subtracts_the_kl_of_the_whole_completion() -> None:
    algorithm = make_algorithm(config("rloo", beta=0.5, kl_estimator="k1"))
    assert algorithm.needs_old_logprobs
    old, ref = torch.full((7,), -1.0), torch.full((7,), -2.0)  # k1 is 1 per token: 2, 1, 3, 1 per completion
    done, metrics = algorithm.assign_advantages(batch(old_logprobs=old, ref_logprobs=ref))
    # rewards become 0, 2.5, -1.5, 3.5
    assert done.advantages is not None
    assert done.advantages.tolist() == [-2.5, -2.5, 2.5, -5, -5, -5, 5]
    assert metrics["kl"] == 1.75


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))])
def test_the_kl_in_the_reward_is_the_estimator_s(estimator: str, kl: float) -> None:
    of = batch(old_logprobs=torch.full((7,), -1.0), ref_logprobs=torch.full((7,), -2.0), values=torch.zeros(7))
    for name, key in (("rloo", "kl"), ("ppo", "objective/kl")):
        _, metrics = make_algorithm(config(name, beta=0.5, kl_estimator=estimator)).assign_advantages(of)
        assert metrics[key] == pytest.approx(kl * 7 / 4), name


def test_grpo_s_rewards_are_not_less_the_kl() -> None:
    """It is in the loss."""
    of = batch(old_logprobs=torch.full((7,), -1.0), ref_logprobs=torch.full((7,), -2.0))
    for name in ("grpo", "reinforce_pp"):
        done, metrics = make_algorithm(config(name, beta=0.5)).assign_advantages(of)
        assert done.advantages is not None
        assert done.advantages.tolist() == advantages(name)
        assert "kl" not in metrics


def test_ppo_by_hand() -> None:
    values = [0.2, 0.4, 0.6, 0.3, 0.1, 0.5, 0.7]
    kl = [0.1, 0.2, 0.3, -0.1, 0.4, 0.0, 0.5]
    of = batch(
        rewards=torch.tensor([-5.0, 3.0, 0.0, 4.0]),
        old_logprobs=torch.full((7,), -1.0),
        ref_logprobs=-1.0 - torch.tensor(kl),
        values=torch.tensor(values),
    )
    settings = {"reward_clip": 2.0, "missing_eos_penalty": 1.0, "whiten_advantages": False}
    algorithm = make_algorithm(config("ppo", gamma=0.9, lam=0.5, beta=0.5, **settings))
    done, metrics = algorithm.assign_advantages(of)
    # clipped to -2, 2, 0, 2, and the third was cut: scores -2, 2, -1, 2; gamma * lam = 0.45
    a1 = (-0.1 - 2) - 0.4
    a0 = (-0.05 + 0.9 * 0.4 - 0.2) + 0.45 * a1
    b0 = (-0.15 + 2) - 0.6
    c2 = (0.0 - 1) - 0.5
    c1 = (-0.2 + 0.9 * 0.5 - 0.1) + 0.45 * c2
    c0 = (0.05 + 0.9 * 0.1 - 0.3) + 0.45 * c1
    d0 = (-0.25 + 2) - 0.7
    expected = [a0, a1, b0, c0, c1, c2, d0]
    assert done.advantages is not None and done.returns is not None
    assert done.advantages.tolist() == pytest.approx(expected)
    assert done.returns.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])
    kl_per_sequence = (0.3 + 0.3 + 0.3 + 0.5) / 4
    assert metrics == pytest.approx(
        {
            "objective/kl": kl_per_sequence,
            "objective/entropy": (2 + 1 + 3 + 1) / 4,
            "objective/scores": (-2 + 2 - 1 + 2) / 4,
            "objective/rlhf_reward": 1 / 4 - 0.5 * kl_per_sequence,
            "objective/non_score_reward": -0.5 * kl_per_sequence,
            "objective/kl_coef": 0.5,
        }
    )


def test_ppo_resumes_with_the_beta_it_had() -> None:
    of = batch(old_logprobs=torch.full((7,), -1.0), ref_logprobs=torch.full((7,), -2.0), values=torch.zeros(7))

    def fresh() -> Algorithm:
        return make_algorithm(config("ppo", gamma=1.0, lam=1.0, beta=0.5, kl_target=1.0, kl_horizon=8))

    before, after = fresh(), fresh()
    before.adapt(of)  # 1.75 nats per completion: the error is clipped to 0.2, for four of a horizon of eight
    after.load_state_dict(before.state_dict())
    for algorithm in (before, after):
        done, metrics = algorithm.assign_advantages(of)
        assert done.returns is not None
        assert metrics["objective/kl_coef"] == pytest.approx(0.55)
        assert done.returns.tolist() == pytest.approx([1 - 1.1, 1 - 0.55, 3 - 0.55, -1.65, -1.1, -0.55, 4 - 0.55])


MISSING_FIRST = torch.tensor([math.nan, 3.0, 0.0, 4.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
def test_a_completion_without_reward_has_no_advantage(name: str) -> None:
    missing = batch(rewards=MISSING_FIRST)
    done, metrics = make_algorithm(config(name, reward_clip=2.0)).assign_advantages(missing)
    assert done.advantages is not None
    # the second is alone in its group; the others are clipped to 0 and 2
    low, high = {"grpo": (-1, 1), "rloo": (-2, 2), "reinforce_pp": (-1, 1)}[name]
    # grpo: 1 / sqrt(2); reinforce_pp: centred 0, -1, 1 have variance 2 / (3 - 1)
    scale = {"grpo": 2**0.5 + 1e-4, "rloo": 1.0, "reinforce_pp": 1.0}[name]
    expected = [0, 0, 0, low / scale, low / scale, low / scale, high / scale]
    assert done.advantages.tolist() == pytest.approx(expected)
    assert metrics["advantages/abs_mean"] == pytest.approx((0 + 2 * high / scale) / 3)


def test_the_kl_of_a_completion_without_reward_is_not_measured() -> None:
    old, ref = torch.full((7,), -1.0), torch.full((7,), -2.0)  # k1 is 1 per token: 2, 1, 3, 1 per completion
    missing = batch(old_logprobs=old, ref_logprobs=ref, rewards=MISSING_FIRST)
    done, metrics = make_algorithm(config("rloo", beta=0.5, kl_estimator="k1")).assign_advantages(missing)
    # rewards become nan, 2.5, -1.5, 3.5
    assert done.advantages is not None
    assert done.advantages.tolist() == [0, 0, 0, -5, -5, -5, 5]
    assert metrics["kl"] == pytest.approx(5 / 3)


def ppo(**changes: object) -> AlgorithmConfig:
    return AlgorithmConfig(name="ppo", prompts_per_step=4, group_size=1, gamma=1.0, lam=1.0, **changes)  # type: ignore[arg-type]


def test_ppo_leaves_completions_without_reward_out() -> None:
    old, ref = torch.full((7,), -1.0), torch.full((7,), -3.0)  # k1 is 2 per token
    values = torch.full((7,), 0.5)
    missing = batch(old_logprobs=old, ref_logprobs=ref, values=values, rewards=MISSING_FIRST)
    algorithm = make_algorithm(ppo(beta=0.25, kl_target=1.0, kl_horizon=10, missing_eos_penalty=1.0))
    done, metrics = algorithm.assign_advantages(missing)
    # -0.5 per token; the third was cut and pays 1: scores 3, -1, 4; their returns to go:
    returns = [0, 0, 2.5, -2.5, -2.0, -1.5, 3.5]
    assert done.returns is not None and done.advantages is not None
    assert done.returns.tolist() == pytest.approx(returns)
    kept = [r - 0.5 for r in returns[2:]]  # five advantages: 2, -3, -2.5, -2, 3; mean -0.5
    mean = sum(kept) / 5
    std = (sum((x - mean) ** 2 for x in kept) / 4) ** 0.5
    assert done.advantages.tolist() == pytest.approx([0, 0, *((x - mean) / std for x in kept)])
    assert metrics["objective/scores"] == pytest.approx((3 - 1 + 4) / 3)
    assert metrics["objective/kl"] == pytest.approx((2 + 6 + 2) / 3)
    assert metrics["objective/entropy"] == pytest.approx((1 + 3 + 1) / 3)
    assert metrics["objective/rlhf_reward"] == pytest.approx(2 - 0.25 * 10 / 3)
    assert algorithm.state_dict()["beta"] == 0.25, "it moves once the policy has learnt"
    algorithm.adapt(missing)
    # 10 / 3 is far above the target: the error is clipped to 0.2, for three samples of a horizon of ten
    assert algorithm.state_dict()["beta"] == pytest.approx(0.25 * (1 + 0.2 * 3 / 10))


@pytest.mark.parametrize("whiten", [True, False])
def test_ppo_without_any_reward_learns_nothing(whiten: bool) -> None:
    missing = batch(
        old_logprobs=torch.zeros(7),
        ref_logprobs=torch.ones(7),
        values=torch.ones(7),
        rewards=torch.full((4,), math.nan),
    )
    algorithm = make_algorithm(ppo(beta=0.25, kl_target=1.0, whiten_advantages=whiten))
    done, metrics = algorithm.assign_advantages(missing)
    assert done.advantages is not None and done.returns is not None
    assert done.advantages.tolist() == done.returns.tolist() == [0.0] * 7
    assert math.isnan(metrics["objective/scores"])
    algorithm.adapt(missing)
    assert algorithm.state_dict()["beta"] == 0.25, "no measurement, no change"


@pytest.mark.parametrize(
    ("last_reward", "expected"),
    [(math.nan, [0.0] * 7), (4.0, [0, 0, -math.sqrt(1 / 2), 0, 0, 0, math.sqrt(1 / 2)])],
)
def test_ppo_cannot_whiten_a_single_token(last_reward: float, expected: list[float]) -> None:
    rewards = torch.tensor([math.nan, 3.0, math.nan, last_reward])
    missing = batch(old_logprobs=torch.zeros(7), values=torch.ones(7), rewards=rewards)
    done, _ = make_algorithm(ppo()).assign_advantages(missing)
    assert done.advantages is not None
    assert done.advantages.tolist() == pytest.approx(expected)
