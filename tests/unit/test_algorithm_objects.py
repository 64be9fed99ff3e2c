"""The algorithms as the loop sees them: rewards in, one advantage per token out."""

import pytest
import torch

from rlhf.algorithms import make_algorithm
from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig


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


def test_ppo_by_hand() -> None:
    algorithm = make_algorithm(
        AlgorithmConfig(name="ppo", prompts_per_step=4, group_size=1, gamma=1.0, lam=1.0, whiten_advantages=False)
    )
    done, metrics = algorithm.assign_advantages(batch(old_logprobs=torch.zeros(7), values=torch.full((7,), 0.5)))
    # no reference, no discount: every return is the score, every advantage the score less the value
    assert done.returns is not None and done.advantages is not None
    assert done.returns.tolist() == [1, 1, 3, 0, 0, 0, 4]
    assert done.advantages.tolist() == [0.5, 0.5, 2.5, -0.5, -0.5, -0.5, 3.5]
    assert metrics["objective/scores"] == 2.0
