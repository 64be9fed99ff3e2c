"""Micro-batch plans: every sequence once, within budget, the same count on every rank, balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.packing import plan_micro_batches, sequence_cost, split_minibatches


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    spare=st.integers(0, 300),
)
def test_plan_invariants(lengths: list[int], num_ranks: int, spare: int) -> None:
    budget = max(lengths) + spare
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, token_budget=budget)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1, "ranks must agree on the number of micro-batches"
    everything = [i for rank in plan for micro in rank for i in micro]
    assert sorted(everything) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for rank in plan for micro in rank)


def test_plan_is_tight_and_balanced() -> None:
    lengths = [100] * 64
    plan = plan_micro_batches(lengths, num_ranks=4, token_budget=800)
    assert [len(rank) for rank in plan] == [2] * 4
    assert all(len(micro) == 8 for rank in plan for micro in rank)


def test_long_sequences_are_weighed_by_attention() -> None:
    # one long sequence costs more than its tokens in short ones: they must not share it out by token count
    lengths = [4000, *[100] * 40]
    plan = plan_micro_batches(lengths, num_ranks=2, token_budget=8000, hidden_size=64)
    (alone,) = [rank[0] for rank in plan if 0 in rank[0]]
    assert alone == [0]
    assert sequence_cost(4000, 64) > sum(sequence_cost(100, 64) for _ in range(40))


def test_fewer_sequences_than_ranks_leaves_empty_micro_batches() -> None:
    plan = plan_micro_batches([10], num_ranks=3, token_budget=16)
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1]


def test_a_sequence_over_budget_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="exceeds the budget"):
        plan_micro_batches([17], num_ranks=1, token_budget=16)


def test_minibatches_are_equal_and_complete() -> None:
    parts = split_minibatches([[3, 1], [0, 2]], 2)
    assert parts == [[3, 1], [0, 2]]
    with pytest.raises(AssertionError, match="do not split"):
        split_minibatches([[0, 1, 2]], 2)
