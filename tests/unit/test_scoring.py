"""Scores of many groups: divided among replicas, joined again, each group's own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.proxies import JointCall, divide
from benchmarks.bench_learner import ragged_batch
from rlhf.errors import RewardError
from rlhf.models.loading import load_policy
from rlhf.rewards.model import RewardModel
from rlhf.training.scorer import FrozenScorer


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_every_item_goes_to_one_replica_in_order(items: list[int], count: int) -> None:
    divided = divide(items, count)
    assert [item for share in divided for item in share] == items
    assert len(divided) <= count
    assert all(divided) and (not divided or max(map(len, divided)) - min(map(len, divided)) <= 1)


@dataclass
class Answered:
    answer: list[dict[str, list[float]]]

    def result(self) -> list[dict[str, list[float]]]:
        return self.answer


def test_functions_and_models_join_group_by_group() -> None:
    functions = Answered([{"right": [1.0], "short": [0.5]}, {"right": [0.0], "short": [0.1]}])
    models = Answered([{"model": [2.0]}, {"model": [3.0]}])
    calls: list[Any] = [functions, models]
    assert JointCall(calls).result() == [
        {"right": [1.0], "short": [0.5], "model": [2.0]},
        {"right": [0.0], "short": [0.1], "model": [3.0]},
    ]


def test_a_frozen_model_scores_each_batch_as_if_it_came_alone(tiny_model_dir) -> None:
    model = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    scorer = FrozenScorer(model, token_budget=64, device=torch.device("cpu"))  # several micro-batches each
    batches = [ragged_batch(n, prompt_tokens=5, median=12, longest=24, vocab=500) for n in (3, 8, 1)]
    together = scorer.score(batches)
    assert [len(scores) for scores in together] == [batch.num_completion_tokens for batch in batches]
    for batch, scores in zip(batches, together, strict=True):
        assert torch.equal(scores, scorer.score([batch])[0])


def test_a_reward_model_that_gives_no_number_is_named(tiny_model_dir, monkeypatch) -> None:
    path = str(tiny_model_dir)
    model = RewardModel(path, torch.nn.Identity(), max_tokens=8, token_budget=64, device=torch.device("cpu"))  # type: ignore[arg-type]
    for bad in (torch.nan, torch.inf):
        scores = [torch.tensor([0.5, 1.0]), torch.tensor([2.0, bad])]
        monkeypatch.setattr(FrozenScorer, "score", lambda self, batches, scores=scores: scores)
        with pytest.raises(
            RewardError, match=rf"^reward\.model\.path={path}: it gave {bad} for a completion; look for"
        ):
            model.score_tokens([[[1, 2], [3]], [[4], [5]]])
    monkeypatch.setattr(FrozenScorer, "score", lambda self, batches: [torch.tensor([0.5, 1.0])])
    assert model.score_tokens([[[1, 2], [3]]]) == [[0.5, 1.0]]
