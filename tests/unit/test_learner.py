"""What policy and critic learn from a batch, token by token and by hand: on an engine whose model is a table."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from actors.group import ActorGroup, Member
from actors.proxies import LearnerGroup
from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig, TimeoutConfig
from rlhf.shares import PolicyPlanner, Share, part_of
from rlhf.training.engine import LossFn, add_stat
from rlhf.training.learner import BatchLearner, PolicyLearner, ValueLearner
from tests.fake_ray import FakeRay, Ref

NAN = math.nan
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7]
ENTROPY = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0, 2.0, 2.0, -2.0]


@dataclass(frozen=True)
class Step:
    """An optimiser step: the completion tokens of each micro-batch, and the gradient by each column of the table."""

    tokens: list[list[int]]
    gradients: list[list[float]]


class TableEngine:
    """One rank's engine. What its model says of a completion token is that token's row of a table.

    In ``batch`` a completion token's id is its place among them all: gradients by row are gradients by token.
    """

    def __init__(
        self,
        *columns: list[float],
        learning_rate: float = 0.0,
        micro_batch_tokens: int = 64,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.columns = [torch.tensor(column) for column in columns]
        self.config = SimpleNamespace(micro_batch_tokens=micro_batch_tokens)
        self.model = SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(hidden_size=8)))
        self.learning_rate, self.rank, self.world_size = learning_rate, rank, world_size
        self.steps: list[Step] = []
        self.metrics: list[dict[str, float]] = []  # of this rank's part of each

    def forward(self, micro_batches: Sequence[TrainBatch | None], pick: Any, *, share_prompts: bool) -> list[Tensor]:
        return [pick(output_of(self.columns, batch)) for batch in micro_batches if batch is not None]

    def release_gathered(self) -> None:
        pass

    def step(
        self, micro_batches: Sequence[TrainBatch | None], loss_fn: LossFn, *, share_prompts: bool
    ) -> dict[str, float]:
        """Down the plain gradient."""
        batches = [batch for batch in micro_batches if batch is not None]
        columns = [column.clone().requires_grad_() for column in self.columns]
        losses, stats = [0.0 * column.sum() for column in columns], {}
        for batch in batches:
            loss, parts = loss_fn(output_of(columns, batch), batch)
            losses.append(loss)
            for name, value in parts.items():
                add_stat(stats, name, value.item())
        gradients = torch.autograd.grad(total := torch.stack(losses).sum(), columns)
        self.columns = [c - self.learning_rate * g for c, g in zip(self.columns, gradients, strict=True)]
        self.steps.append(Step([answers(batch).tolist() for batch in batches], [g.tolist() for g in gradients]))
        self.metrics.append({**stats, "loss": total.item()})
        return {**self.metrics[-1], "grad_norm": 1.0, "learning_rate": 0.5, "skipped": 0.0}


def ranks_of(num_ranks: int, *columns: list[float], micro_batch_tokens: int = 64) -> list[TableEngine]:
    """The engines of a learner's ranks."""
    return [
        TableEngine(
            *(columns or (LOGPROBS, ENTROPY)), rank=rank, world_size=num_ranks, micro_batch_tokens=micro_batch_tokens
        )
        for rank in range(num_ranks)
    ]


def answers(batch: TrainBatch) -> Tensor:
    """int64 [N]: the completion tokens of a batch."""
    sequences = batch.tokens.split(batch.sequence_lengths.tolist())
    return torch.cat([tokens[n:] for tokens, n in zip(sequences, batch.prompt_lengths.tolist(), strict=True)])


def output_of(columns: list[Tensor], batch: TrainBatch) -> Any:
    """(log-probabilities, entropies), or the values of a critic, whose table has one column."""
    rows = [column[answers(batch)] for column in columns]
    return tuple(rows) if len(rows) > 1 else rows[0]


def batch(rewards: Sequence[float] | None = None, **tensors: Sequence[float] | Sequence[bool]) -> TrainBatch:
    """Two groups, of completions of 2 and 1, and of 3 and 1 tokens; the third was truncated."""
    return TrainBatch(
        tokens=torch.tensor([7, 0, 1, 7, 2, 8, 3, 4, 5, 8, 6]),
        prompt_lengths=torch.ones(4, dtype=torch.long),
        completion_lengths=torch.tensor([2, 1, 3, 1]),
        truncated=torch.tensor([False, False, True, False]),
        versions=torch.zeros(7, dtype=torch.int32),
        rewards=None if rewards is None else torch.tensor(rewards),
    ).with_(**{name: torch.tensor(values) for name, values in {"advantages": ADVANTAGES, **tensors}.items()})


def less(logs: Sequence[float], values: Sequence[float] = LOGPROBS) -> list[float]:
    return [value - log for value, log in zip(values, logs, strict=True)]


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"prompts_per_step": 2, "group_size": 2, **changes})


def policy(engine: Any, *, seed: int = 0, **changes: Any) -> PolicyLearner:
    return PolicyLearner(engine, config(**changes), seed=seed, max_completion_tokens=4)


def critic(engine: Any, *, seed: int = 0, **changes: Any) -> ValueLearner:
    return ValueLearner(engine, config(name="ppo", **changes), seed=seed, max_completion_tokens=4)


class Handle:
    """A rank as Ray shows it; what it is sent is a copy."""

    def __init__(self, learner: BatchLearner) -> None:
        self.received: list[Share] = []
        self._learner = learner

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: Ref(method, args, self._call(method, *args)))

    def _call(self, method: str, *shares: bytes) -> Any:
        if method == "planner":
            return pickle.loads(pickle.dumps(self._learner.planner))
        self.received += (given := [pickle.loads(share) for share in shares])
        return getattr(self._learner, method)(*given)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    monkeypatch.setattr(ray, "put", pickle.dumps)


def handles_of(*learners: BatchLearner) -> list[Handle]:
    return [Handle(learner) for learner in learners]


def group_of(handles: Sequence[Handle]) -> LearnerGroup:
    """What the driver talks to."""
    return LearnerGroup(
        ActorGroup([Member(h, "learner", rank, "10.0.0.1") for rank, h in enumerate(handles)]), TimeoutConfig()
    )


def update(learner: BatchLearner, of: TrainBatch, step: int = 0) -> dict[str, float]:
    """Of the only rank."""
    return group_of(handles_of(learner)).update(of, step).result()


def learn(
    of: TrainBatch, *, entropy: list[float] = ENTROPY, learning_rate: float = 0.0, **changes: Any
) -> tuple[list[Step], dict[str, float]]:
    """The optimiser steps of a policy's update, and its metrics."""
    engine = TableEngine(LOGPROBS, entropy, learning_rate=learning_rate)
    metrics = update(policy(engine, **changes), of)
    return engine.steps, metrics


def by_logprobs(of: TrainBatch, **changes: Any) -> list[float]:
    """The gradient of an update of one optimiser step."""
    (step,), _ = learn(of, **changes)
    return step.gradients[0]


# ---- what an optimiser step is made of


@pytest.mark.parametrize(("num_ranks", "micro_batch_tokens"), [(1, 64), (1, 4), (2, 64), (3, 4), (5, 64)])
def test_every_token_counts_once_however_it_is_spread(num_ranks: int, micro_batch_tokens: int) -> None:
    engines = ranks_of(num_ranks, micro_batch_tokens=micro_batch_tokens)
    learner = group_of(handles_of(*(policy(engine) for engine in engines)))
    learner.update(batch(), 0).result()
    gradients = [sum(parts) for parts in zip(*(e.steps[0].gradients[0] for e in engines), strict=True)]
    assert gradients == pytest.approx([-a / 7 for a in ADVANTAGES])
    expected = {"loss": -5 / 7, "ratio": 1, "approx_kl": 0, "entropy": 4, "clip_ratio/region_mean": 0}
    for name, value in expected.items():
        assert sum(engine.metrics[0].get(name, 0) for engine in engines) == pytest.approx(value), name
    assert learner.score(batch()).result().tolist() == pytest.approx(LOGPROBS)


SUMMED = ("loss", "ratio", "approx_kl", "entropy", "sampling/logprob_difference_mean", "value/clip_ratio")


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
@pytest.mark.parametrize(
    ("make", "columns", "changes"),
    [
        (policy, (LOGPROBS, ENTROPY), {"loss_type": "grpo", "top_entropy_quantile": 0.6}),
        (policy, (LOGPROBS, ENTROPY), {"name": "rloo", "loss_type": "rloo", "num_epochs": 3}),
        (policy, (LOGPROBS, ENTROPY), {"mask_truncated_completions": True, "num_minibatches": 2, "num_epochs": 2}),
        (policy, (LOGPROBS, ENTROPY), {"name": "ppo", "num_minibatches": 4, "num_epochs": 2}),
        (critic, ([0.2] * 7,), {"num_minibatches": 2, "num_epochs": 2}),
    ],
)
def test_several_optimiser_steps_are_the_same_on_any_number_of_ranks(
    make: Any, columns: Any, changes: dict[str, Any], num_ranks: int
) -> None:
    sampled = {"rollout_logprobs": [-1.0] * 7, "compared": [True, True, False, False, False, True, True]}
    of = batch([1.0, NAN, 0.0, 1.0], values=[0.5] * 7, returns=[1.0] * 7, **sampled)

    def steps_of(num_ranks: int) -> list[tuple[Any, dict[str, float]]]:
        """The gradient and the metrics of each optimiser step, over all ranks."""
        engines = ranks_of(num_ranks, *columns)
        learners = [make(engine, **changes) for engine in engines]
        group_of(handles_of(*learners)).update(of, 7).result()
        assert {len(engine.steps) for engine in engines} == {learners[0].config.steps_per_update}
        gradients = [
            torch.tensor([part.gradients for part in parts]).sum(0).flatten().tolist()
            for parts in zip(*(engine.steps for engine in engines), strict=True)
        ]
        metrics = [
            {name: sum((part.get(name, 0.0) for part in parts), 0.0) for name in SUMMED}
            for parts in zip(*(engine.metrics for engine in engines), strict=True)
        ]
        return list(zip(gradients, metrics, strict=True))

    whole = steps_of(1)
    assert any(any(gradient) for gradient, _ in whole)
    for (gradient, metrics), (expected, expected_metrics) in zip(steps_of(num_ranks), whole, strict=True):
        assert gradient == pytest.approx(expected, abs=1e-6)
        assert metrics == pytest.approx(expected_metrics, abs=1e-6)


def planner(*, num_ranks: int = 8, **changes: Any) -> PolicyPlanner:
    settings = config(prompts_per_step=32, **changes)
    return PolicyPlanner(
        num_ranks=num_ranks, token_budget=500, hidden_size=8, config=settings, seed=0, max_completion_tokens=100
    )


def test_a_rank_is_sent_its_own_sequences_once() -> None:
    """Whatever the number of epochs; the others' only where a shuffle brings them to it."""
    of = TrainBatch(
        tokens=torch.arange(64 * 101),
        prompt_lengths=torch.ones(64, dtype=torch.long),
        completion_lengths=torch.full((64,), 100),
        truncated=torch.zeros(64, dtype=torch.bool),
        versions=torch.zeros(64 * 100, dtype=torch.int32),
        advantages=torch.zeros(64 * 100),
        old_logprobs=torch.zeros(64 * 100),
    )

    whole = len(pickle.dumps(of))
    for plan in (planner().plan_update(of, 0), planner().plan_scoring(of)):
        shares = [plan.share(rank) for rank in range(8)]
        assert [share.rows.num_sequences for share in shares] == [8] * 8
        assert sorted(token for share in shares for token in share.rows.tokens.tolist()) == of.tokens.tolist()
        assert all(len(pickle.dumps(share)) < 1.5 * whole / 8 for share in shares), "its weights included"
    several = planner(num_epochs=9, num_minibatches=2).plan_update(of, 0)
    for rank in range(8):
        first_tokens = several.share(rank).rows.tokens[::101].tolist()
        assert 8 < len(first_tokens) == len(set(first_tokens)) < 64


def test_sequences_that_share_a_long_prompt_stay_together_to_compute_it_once() -> None:
    of = TrainBatch(  # four groups of two completions of 4 tokens each, of prompts of 8 tokens
        tokens=torch.arange(4).repeat_interleave(2 * 12),
        prompt_lengths=torch.full((8,), 8),
        completion_lengths=torch.full((8,), 4),
        truncated=torch.zeros(8, dtype=torch.bool),
        versions=torch.zeros(32, dtype=torch.int32),
        advantages=torch.zeros(32),
    )
    for plan in (planner(num_ranks=2).plan_update(of, 0), planner(num_ranks=2).plan_scoring(of)):
        shares = [plan.share(rank) for rank in range(2)]
        assert [step.share_prompts for share in shares for step in share.steps] == [True] * 2
        prompts = [share.rows.tokens[::12].tolist() for share in shares]
        assert all(first == second for rank in prompts for first, second in zip(rank[::2], rank[1::2], strict=True))


def test_a_batch_is_scored_beforehand_only_for_what_it_lacks() -> None:
    scored = batch(old_logprobs=LOGPROBS)
    assert not planner().needs_scores(batch()), "a single step's own forward gives the old log-probabilities"
    assert planner(num_epochs=2).needs_scores(batch())
    assert not planner(num_epochs=2).needs_scores(scored)
    assert planner(top_entropy_quantile=0.5).needs_scores(scored)
    assert not planner(top_entropy_quantile=0.5).needs_scores(batch(entropy_mask=[True] * 7))
    assert planner(num_epochs=2).with_scores(batch(), torch.zeros(7, 2)).entropy_mask is None, "all are trained on"
    assert part_of(scored, range(4)) is scored, "not copied"


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
def test_the_weight_of_a_token(rewards: list[float] | None, changes: dict[str, Any], expected: list[float]) -> None:
    found = by_logprobs(batch(rewards, advantages=[1.0] * 7), **changes)
    assert found == pytest.approx([-weight for weight in expected])


@pytest.mark.parametrize(
    ("rewards", "changes"), [(None, {"mask_truncated_completions": True}), ([0.0, 1.0, NAN, 1.0], {})]
)
def test_loss_and_metrics_are_of_the_tokens_that_count(rewards: list[float] | None, changes: dict[str, Any]) -> None:
    """The third completion, whose numbers are wild, does not."""
    half, two, wild = math.log(0.5), math.log(2), math.log(100)
    old = less([half, two, two, wild, -wild, wild, 0.0])
    reference = [*old[:3], -9.0, -9.0, -9.0, old[6]]
    of = batch(rewards, old_logprobs=old, ref_logprobs=reference, advantages=[-1.0, 1.0, -1.0, 9.0, -9.0, 9.0, 1.0])
    entropy = [1.0, 2.0, 3.0, 50.0, 50.0, 50.0, 6.0]
    (step,), metrics = learn(of, entropy=entropy, beta=0.1, kl_bias_correction=False, **changes)
    # k3 = 1 / r - 1 + log r, at r = 0.5, 2, 2, 1; its gradient 1 - 1 / r
    kl = (2 - 1 - two) + 2 * (0.5 - 1 + two)
    assert step.gradients[0] == pytest.approx([-0.1 / 4, 0.05 / 4, 2 / 4 + 0.05 / 4, 0, 0, 0, -1 / 4])
    assert metrics == pytest.approx(
        {
            "loss": (0.8 - 1.2 + 2 - 1 + 0.1 * kl) / 4,  # clipped below, clipped above, never clipped, as it is
            "ratio": (0.5 + 2 + 2 + 1) / 4,
            "approx_kl": 3 * two**2 / 2 / 4,
            "kl": kl / 4,
            "entropy": (1 + 2 + 3 + 6) / 4,
            "clip_ratio/low_mean": 1 / 4,
            "clip_ratio/high_mean": 1 / 4,
            "clip_ratio/region_mean": 2 / 4,
            "grad_norm": 1.0,
            "learning_rate": 0.5,
        },
        abs=1e-6,
    )


def test_without_any_reward_nothing_is_learnt_or_divided_by_zero() -> None:
    everything = {"beta": 0.1, "entropy_coef": 0.01, "rollout_correction": "sequence_truncate"}
    of = batch([NAN] * 4, ref_logprobs=less([0.1] * 7), rollout_logprobs=less([0.2] * 7))
    (step,), metrics = learn(of, **everything, importance_sampling_level="sequence")
    assert step.gradients == [[0] * 7] * 2
    assert not any(metrics[name] for name in ("loss", "ratio", "approx_kl", "kl", "entropy"))


@pytest.mark.parametrize(
    ("changes", "ratio", "advantage", "expected", "clipped"),
    [
        ({}, 1.1, 1.0, -1.1, 0),
        ({}, 1.3, 1.0, 0.0, 1),
        ({"epsilon_high": 0.4}, 1.3, 1.0, -1.3, 0),
        ({}, 0.7, -1.0, 0.0, 1),
        ({"epsilon_low": 0.4}, 0.7, -1.0, 0.7, 0),
        ({}, 9.0, -1.0, 9.0, 0),
        ({"delta": 4.0}, 9.0, -1.0, 0.0, 0),
        ({"dual_clip": 3.0}, 9.0, -1.0, 0.0, 0),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, 5.5, 1.0, -5.0, 1),
    ],
)
def test_the_clip_is_as_configured(
    changes: dict[str, Any], ratio: float, advantage: float, expected: float, clipped: int
) -> None:
    of = batch(old_logprobs=less([math.log(ratio)] * 7), advantages=[advantage] * 7)
    (step,), metrics = learn(of, **changes)
    assert step.gradients[0] == pytest.approx([expected / 7] * 7, rel=1e-5)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped)


def test_the_ratio_is_of_the_configured_level() -> None:
    # log-ratios with a mean of 0.1 in every completion
    of = batch(old_logprobs=less([0.3, -0.1, 0.1, 0.3, 0.0, 0.0, 0.1]), advantages=[1.0] * 7)
    whole = by_logprobs(of, importance_sampling_level="sequence")
    assert whole == pytest.approx([-math.exp(0.1) / 7] * 7)
    one, low = math.exp(0.1), math.exp(-0.1)  # exp(0.3) is clipped
    assert by_logprobs(of) == pytest.approx([-x / 7 for x in (0, low, one, 0, 1, 1, one)])
    # rloo: the completion as one action, of ratio exp(sum), and each of the four counts alike
    found = by_logprobs(of, name="rloo", loss_type="rloo", epsilon_high=0.5)
    assert found == pytest.approx([-math.exp(x) / 4 for x in (0.2, 0.2, 0.1, 0.3, 0.3, 0.3, 0.1)])


def test_the_kl_is_in_the_loss_unless_it_is_in_the_reward() -> None:
    gap = [0.1, -0.2, 0.3, 0.0, 0.5, -0.1, 0.2]
    of = batch(ref_logprobs=less(gap))
    (step,), metrics = learn(of, beta=0.5)
    # with the ratio the gradient of k3 is log(pi / ref) on-policy; bare it is 1 - ref / pi
    assert step.gradients[0] == pytest.approx([(0.5 * g - a) / 7 for a, g in zip(ADVANTAGES, gap, strict=True)])
    assert metrics["kl"] == pytest.approx(sum(math.exp(-g) - 1 + g for g in gap) / 7)
    bare = by_logprobs(of, beta=0.5, kl_bias_correction=False)
    assert bare == pytest.approx([(0.5 * (1 - math.exp(-g)) - a) / 7 for a, g in zip(ADVANTAGES, gap, strict=True)])
    for name in ("rloo", "ppo"):
        (step,), metrics = learn(of, name=name, beta=0.5)
        assert step.gradients[0] == pytest.approx([-a / 7 for a in ADVANTAGES]), name
        assert "kl" not in metrics


def test_entropy_is_rewarded() -> None:
    (step,), metrics = learn(batch([NAN, 0.0, 1.0, 1.0]), entropy_coef=0.3)
    assert step.gradients[1] == pytest.approx([0, 0, *[-0.3 / 5] * 5])
    # -(-1 + 2 + 2 + 2 - 2) / 5 of the surrogate; entropies 3 to 7
    assert metrics["loss"] == pytest.approx(-3 / 5 - 0.3 * 5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout_correction": "auto"}, [1, 1, 1, 1, 1, 1, 1]),
        ({"rollout_correction": "none"}, [1, 1, 1, 1, 1, 1, 1]),
        ({"rollout_correction": "token_truncate"}, [2, 0.5, 0.25, 1, 1, 1, 2]),
        ({"rollout_correction": "token_truncate", "rollout_correction_floor": 0.3}, [2, 0.5, 0.3, 1, 1, 1, 2]),
        ({"rollout_correction": "token_mask"}, [0, 0.5, 0.25, 1, 1, 1, 0]),
        ({"rollout_correction": "token_mask", "rollout_correction_floor": 0.3}, [0, 0.5, 0, 1, 1, 1, 0]),
        ({"rollout_correction": "sequence_truncate"}, [1.5, 1.5, 0.25, 1, 1, 1, 2]),
        ({"rollout_correction": "sequence_mask", "rollout_correction_cap": 10.0}, [1.5, 1.5, 0.25, 1, 1, 1, 9]),
    ],
)
def test_the_sampler_s_own_numerics_are_corrected(changes: dict[str, Any], expected: list[float]) -> None:
    gap = [math.log(ratio) for ratio in (3.0, 0.5, 0.25, 1.0, 1.0, 1.0, 9.0)]
    found = by_logprobs(batch(rollout_logprobs=less(gap)), **changes)
    assert found == pytest.approx([-a * x / 7 for a, x in zip(ADVANTAGES, expected, strict=True)], rel=1e-5)


# ---- several optimiser steps


def test_ratios_are_to_the_policy_before_the_first_step() -> None:
    # the first step moves every log-probability by 0.7 * advantage / 7
    steps, metrics = learn(batch(), num_epochs=2, learning_rate=0.7)
    first, second = (step.gradients[0] for step in steps)
    assert first == pytest.approx([-a / 7 for a in ADVANTAGES])
    up, down, far = math.exp(0.1), math.exp(-0.1), math.exp(-0.2)
    assert second == pytest.approx([-up / 7, -up / 7, down / 7, 0, 0, 0, 2 * far / 7]), "exp(0.2) is clipped"
    assert metrics["ratio"] == pytest.approx((1 + (2 * up + down + 3 * math.exp(0.2) + far) / 7) / 2)
    assert metrics["clip_ratio/high_mean"] == pytest.approx((0 + 3 / 7) / 2)
    assert metrics["approx_kl"] == pytest.approx((0 + (3 * 0.1**2 + 4 * 0.2**2) / 2 / 7) / 2)


def test_log_probabilities_that_are_there_are_not_scored_again() -> None:
    _, metrics = learn(batch(old_logprobs=less([math.log(1.1)] * 7)), num_epochs=2)
    assert metrics["ratio"] == pytest.approx(1.1)


def test_only_the_most_uncertain_of_the_tokens_that_count_are_trained_on() -> None:
    settings = {"top_entropy_quantile": 0.5, "mask_truncated_completions": True}
    (step,), metrics = learn(batch(), entropy=[0.1, 0.9, 0.5, 9.0, 9.0, 9.0, 0.7], **settings)
    assert step.gradients[0] == pytest.approx([0, -1 / 4, 0, 0, 0, 0, 2 / 4])
    assert metrics["ratio"] == pytest.approx(1), "of all four that count"
    # together with log-probabilities from before: theirs are not replaced
    of = batch(old_logprobs=less([math.log(1.1)] * 7))
    _, metrics = learn(of, entropy=[0.1, 0.9, 0.5, 9.0, 9.0, 9.0, 0.7], **settings)
    assert metrics["ratio"] == pytest.approx(1.1)


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_the_difference_to_the_sampler_is_of_all_tokens_compared(num_minibatches: int) -> None:
    of = batch(
        rollout_logprobs=less([0.1, -0.3, 5.0, NAN, NAN, NAN, 0.2]),
        compared=[True, True, False, False, False, False, True],
    )
    _, metrics = learn(of, num_minibatches=num_minibatches)
    assert metrics["sampling/logprob_difference_mean"] == pytest.approx((0.1 + 0.3 + 0.2) / 3)
    assert metrics["sampling/logprob_difference_max"] == pytest.approx(0.3)
    assert not any(name.startswith("sampling/") for name in learn(batch(), num_minibatches=num_minibatches)[1])


def test_policy_and_critic_see_the_same_mini_batches_shuffled_anew_for_every_epoch_and_step() -> None:
    settings = {"num_minibatches": 2, "num_epochs": 3}

    def sequences(learner: Any, engine: TableEngine, step: int) -> list[tuple[int, ...]]:
        engine.steps.clear()
        update(learner, batch(values=[0.0] * 7, returns=[0.0] * 7), step)
        return [tuple(sorted(t for tokens in taken.tokens for t in tokens)) for taken in engine.steps]

    def orders(seed: int) -> list[list[tuple[int, ...]]]:
        engines = TableEngine(LOGPROBS, ENTROPY), TableEngine(LOGPROBS)
        learners = policy(engines[0], seed=seed, **settings), critic(engines[1], seed=seed, **settings)
        seen = [[sequences(*pair, step) for pair in zip(learners, engines, strict=True)] for step in range(4)]
        assert all(of_policy == of_critic for of_policy, of_critic in seen)
        return [of_policy for of_policy, _ in seen]

    of_steps = orders(seed=5)
    for order in of_steps:
        epochs = [order[i : i + 2] for i in (0, 2, 4)]
        assert all(sorted(first + second) == list(range(7)) for first, second in epochs)
    assert any(order[0:2] != order[2:4] for order in of_steps), "each epoch shuffles anew"
    assert len({str(order) for order in of_steps}) == 4, "each training step shuffles anew"
    assert of_steps == orders(seed=5) != orders(seed=6)


def test_a_step_that_was_not_taken_has_no_part_in_the_metrics() -> None:
    results = [
        {"loss": 1.0, "gap_max": 3.0, "sampling/logprob_difference_mean": 0.5, "grad_norm": 2.0, "skipped": 0.0},
        {"loss": NAN, "gap_max": NAN, "sampling/logprob_difference_mean": NAN, "grad_norm": math.inf, "skipped": 1.0},
        {"loss": 3.0, "gap_max": 1.0, "sampling/logprob_difference_mean": 0.1, "grad_norm": 4.0, "skipped": 0.0},
    ]

    def metrics_of(*chosen: int) -> dict[str, float]:
        engine = TableEngine(LOGPROBS, ENTROPY)
        left = [dict(results[i]) for i in chosen]
        engine.step = lambda *_, **__: left.pop(0)  # type: ignore[method-assign]
        return update(policy(engine, num_epochs=len(chosen)), batch())

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


# ---- PPO: the names of its metrics, and its critic


def test_ppo_s_metrics_have_trl_s_names() -> None:
    _, metrics = learn(batch(), name="ppo")
    assert metrics.keys() == {
        *("loss/policy_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "val/ratio", "lr"),
        *("clip_ratio/low_mean", "clip_ratio/high_mean", "grad_norm"),
    }


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], [1 / 7] * 7),
        ([1.0, NAN, NAN, 1.0], [1 / 3, 1 / 3, 0, 0, 0, 0, 1 / 3]),
        ([NAN] * 4, [0] * 7),
    ],
)
def test_the_critic_learns_of_all_completions_with_a_reward(rewards: list[float], expected: list[float]) -> None:
    """Of truncated ones too, whatever the policy does with them."""
    engine = TableEngine([0.0] * 7)
    of = batch(rewards, values=[0.0] * 7, returns=[1.0] * 7)
    metrics = update(critic(engine, mask_truncated_completions=True), of)
    assert engine.steps[0].gradients[0] == pytest.approx([-weight for weight in expected])
    assert metrics["loss/value_avg"] == pytest.approx(0.5 * sum(expected))


def test_the_critic_s_regression_is_clipped_around_its_old_values() -> None:
    engine = TableEngine([1.0, 3.0, 1.5, 9.0, 9.0, 9.0, 2.5])
    of = batch(
        [1.0, 1.0, NAN, 1.0],
        values=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        returns=[2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0],
    )
    metrics = update(critic(engine, value_clip=0.2), of)
    # clipped to 1, 1.2, 1.2 and 1.2; squared errors 1, 1, 2.25, 0.25, clipped 1, 0.64, 1.44, 3.24
    assert engine.steps[0].gradients[0] == pytest.approx([-1 / 4, 1 / 4, 1.5 / 4, 0, 0, 0, 0])
    assert metrics == pytest.approx(
        {
            "loss/value_avg": 0.5 * (1 + 1 + 2.25 + 3.24) / 4,
            "val/clipfrac_avg": 1 / 4,
            "critic/grad_norm": 1.0,
            "critic/learning_rate": 0.5,
        }
    )
    assert group_of(handles_of(critic(engine))).score(of).result().tolist() == [1.0, 3.0, 1.5, 9.0, 9.0, 9.0, 2.5]
