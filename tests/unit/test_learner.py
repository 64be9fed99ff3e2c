"""Which tokens have a part in the losses: none of a completion without reward, whatever else is masked."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig
from rlhf.training.learner import BatchLearner, PolicyLearner, ValueLearner

NO_ENGINE: Any = None  # what is computed here needs none


def batch(rewards: list[float] | None) -> TrainBatch:
    """Completions of 2, 1, 3 and 1 tokens; the third was truncated."""
    generator = torch.Generator().manual_seed(0)
    logprobs = {
        name: -torch.rand(7, generator=generator) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    return TrainBatch(
        tokens=torch.zeros(11, dtype=torch.long),
        prompt_lengths=torch.ones(4, dtype=torch.long),
        completion_lengths=torch.tensor([2, 1, 3, 1]),
        truncated=torch.tensor([False, False, True, False]),
        versions=torch.zeros(7, dtype=torch.int32),
        rewards=None if rewards is None else torch.tensor(rewards),
        advantages=torch.ones(7),
        returns=torch.ones(7),
        values=torch.zeros(7),
        **logprobs,
    )


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(prompts_per_step=2, group_size=2, **changes)


def policy(**changes: Any) -> PolicyLearner:
    return PolicyLearner(NO_ENGINE, config(**changes), seed=0, max_completion_tokens=4)


def steps_of(learner: BatchLearner, of: TrainBatch, monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The optimiser steps of an update, with their weights."""
    taken: list[TrainBatch] = []
    monkeypatch.setattr(learner, "_optimise", lambda steps, make_loss: taken.extend(steps) or {})
    learner.update(of, 0)  # type: ignore[attr-defined]
    return taken


NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "changes", "expected"),
    [
        (None, {}, [1 / 7] * 7),
        ([1.0, 0.0, 0.0, 1.0], {}, [1 / 7] * 7),
        ([NAN, 0.0, 0.0, 1.0], {}, [0, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5]),
        ([NAN, 0.0, 0.0, 1.0], {"mask_truncated_completions": True}, [0, 0, 1 / 2, 0, 0, 0, 1 / 2]),
        ([NAN, 0.0, NAN, 1.0], {"loss_type": "grpo"}, [0, 0, 1 / 4, 0, 0, 0, 1 / 4]),
        ([1.0, NAN, NAN, 1.0], {"loss_type": "dr_grpo"}, [1 / 16, 1 / 16, 0, 0, 0, 0, 1 / 16]),
        ([NAN, NAN, 1.0, NAN], {"mask_truncated_completions": True}, [0] * 7),
        ([NAN] * 4, {}, [0] * 7),
    ],
)
def test_policy_weights_of_completions_without_reward_are_zero(monkeypatch, rewards, changes, expected) -> None:
    (step,) = steps_of(policy(**changes), batch(rewards), monkeypatch)
    assert step.loss_weights is not None
    assert step.loss_weights.tolist() == pytest.approx(expected)


def test_critic_weights_of_completions_without_reward_are_zero(monkeypatch) -> None:
    for rewards, expected in (
        ([1.0, 0.0, 0.0, 1.0], [1 / 7] * 7),
        ([1.0, NAN, NAN, 1.0], [1 / 3, 1 / 3, 0, 0, 0, 0, 1 / 3]),
        ([NAN] * 4, [0] * 7),
    ):
        learner = ValueLearner(NO_ENGINE, config(), seed=0, max_completion_tokens=4)
        (step,) = steps_of(learner, batch(rewards), monkeypatch)
        assert step.loss_weights is not None
        assert step.loss_weights.tolist() == pytest.approx(expected)
        loss, stats = learner._loss(torch.zeros(7), step)
        assert loss.item() == pytest.approx(0.5 * sum(expected))
        assert stats["value/clip_ratio"].isfinite()


EVERYTHING = {
    "beta": 0.1,
    "entropy_coef": 0.01,
    "rollout_correction": "sequence_truncate",
    "importance_sampling_level": "sequence",
}


def loss_of(rewards: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and stats; with the gradient of log-probabilities and entropies among the stats."""
    learner = policy(**EVERYTHING)
    (step,) = steps_of(learner, batch(rewards), monkeypatch)
    assert step.loss_weights is not None
    logprobs = torch.full((7,), -0.7, requires_grad=True)
    entropy = torch.full((7,), 2.0, requires_grad=True)
    loss, stats = learner._loss((logprobs, entropy), step, int((step.loss_weights != 0).sum()), 0)
    by_logprobs, by_entropy = torch.autograd.grad(loss, (logprobs, entropy))
    return loss, {**stats, "by_logprobs": by_logprobs, "by_entropy": by_entropy}


def test_loss_stats_and_gradient_are_those_of_the_completions_with_a_reward(monkeypatch) -> None:
    loss, stats = loss_of([1.0, 0.0, NAN, 1.0], monkeypatch)
    assert not stats["by_logprobs"][3:6].any() and not stats["by_entropy"][3:6].any()
    assert stats["by_logprobs"][:3].all() and stats["by_entropy"][:3].all()
    assert stats["entropy"].item() == pytest.approx(2.0)
    # as if the third had never been sampled
    learner = policy(**EVERYTHING)
    (step,) = steps_of(learner, batch([1.0, 0.0, 0.0, 1.0]).select([0, 1, 3]), monkeypatch)
    without, stats_without = learner._loss((torch.full((4,), -0.7), torch.full((4,), 2.0)), step, 4, 0)
    assert loss.item() == pytest.approx(without.item())
    for name, value in stats_without.items():
        assert stats[name].item() == pytest.approx(value.item()), name


def test_without_any_reward_nothing_is_divided_by_zero(monkeypatch) -> None:
    loss, stats = loss_of([NAN] * 4, monkeypatch)
    assert loss.item() == 0.0
    assert all(not value.any() for value in stats.values()), stats


def test_policy_and_critic_see_the_same_mini_batches_in_every_step() -> None:
    whole = batch(None).with_(tokens=torch.arange(11))
    settings = {"num_minibatches": 2, "num_epochs": 3}
    learners = [
        kind(NO_ENGINE, config(**settings), seed=5, max_completion_tokens=4) for kind in (PolicyLearner, ValueLearner)
    ]
    orders = []
    for step in range(4):
        policy, critic = ([part.tokens.tolist() for part in learner._steps(whole, step)] for learner in learners)
        assert policy == critic and len(policy) == 6
        orders.append(policy)
    assert len({str(order) for order in orders}) == 4, "each training step shuffles anew"


def test_a_step_that_was_not_taken_has_no_part_in_the_metrics() -> None:
    results = [
        {"loss": 1.0, "gap_max": 3.0, "sampling/logprob_difference_mean": 0.5, "grad_norm": 2.0, "skipped": 0.0},
        {"loss": NAN, "gap_max": NAN, "sampling/logprob_difference_mean": NAN, "grad_norm": math.inf, "skipped": 1.0},
        {"loss": 3.0, "gap_max": 1.0, "sampling/logprob_difference_mean": 0.1, "grad_norm": 4.0, "skipped": 0.0},
    ]

    def metrics_of(*chosen: int) -> dict[str, float]:
        left = [dict(results[i]) for i in chosen]
        engine: Any = SimpleNamespace(step=lambda *_, **__: left.pop(0))
        learner = PolicyLearner(engine, config(), seed=0, max_completion_tokens=4)
        learner._micro_batches = lambda *_, **__: []  # type: ignore[method-assign]
        part = batch(None).with_(loss_weights=torch.ones(7))
        return learner._optimise([part] * len(left), lambda _: NO_ENGINE)

    assert metrics_of(0, 2) == {
        "loss": 2.0,
        "gap_max": 3.0,
        "sampling/logprob_difference_mean": pytest.approx(0.3),
        "grad_norm": 3.0,
    }
    report = {"skipped/count": 1, "skipped/first": 2, "skipped/loss": pytest.approx(NAN, nan_ok=True)}
    report["skipped/grad_norm"] = math.inf
    assert metrics_of(0, 1, 2) == {"loss": 2.0, "gap_max": 3.0, "grad_norm": 3.0, **report}
    assert math.isnan(metrics_of(1)["loss"])
