"""Micro-batch plans: every sequence once, within budget, the same count on every rank, balanced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batch import TrainBatch
from rlhf.packing import (
    Unit,
    attention_pairs,
    batch_spans,
    plan_micro_batches,
    prompt_units,
    split_minibatches,
    whole_groups,
    worth_sharing,
)


def whole(lengths: list[int]) -> list[Unit]:
    """A unit per sequence."""
    return [Unit(range(i, i + 1), ((length, length),)) for i, length in enumerate(lengths)]


def groups_batch(groups: list[tuple[int, list[int]]]) -> TrainBatch:
    """Groups of (prompt tokens, completion lengths), each prompt of tokens of its own."""
    prompts = torch.tensor([prompt for prompt, completions in groups for _ in completions])
    completions = torch.tensor([length for _, lengths in groups for length in lengths])
    tokens = [t for i, (prompt, lengths) in enumerate(groups) for n in lengths for t in [i] * prompt + [-1] * n]
    return TrainBatch(
        tokens=torch.tensor(tokens),
        prompt_lengths=prompts,
        completion_lengths=completions,
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        versions=torch.zeros(int(completions.sum()), dtype=torch.int32),
    )


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    spare=st.integers(0, 300),
)
def test_plan_invariants(lengths: list[int], num_ranks: int, spare: int) -> None:
    budget = max(lengths) + spare
    plan = plan_micro_batches(whole(lengths), num_ranks=num_ranks, token_budget=budget, hidden_size=64)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1, "ranks must agree on the number of micro-batches"
    everything = [i for rank in plan for micro in rank for i in micro]
    assert sorted(everything) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for rank in plan for micro in rank)


def test_plan_is_tight_and_balanced() -> None:
    lengths = [100] * 64
    plan = plan_micro_batches(whole(lengths), num_ranks=4, token_budget=800, hidden_size=64)
    assert [len(rank) for rank in plan] == [2] * 4
    assert all(len(micro) == 8 for rank in plan for micro in rank)


def test_sequences_that_do_not_pair_up_take_one_micro_batch_more() -> None:
    # 18 tokens would fit two micro-batches of 10
    assert plan_micro_batches(whole([6, 6, 6]), num_ranks=1, token_budget=10, hidden_size=64) == [[[0], [1], [2]]]


def test_micro_batches_that_run_at_the_same_time_cost_about_the_same() -> None:
    # longest first into the cheapest of four: 60, 50, 45 and 40 + 35, which costs most
    plan = plan_micro_batches(whole([60, 40, 35, 50, 45]), num_ranks=2, token_budget=100, hidden_size=64)
    assert list(zip(*plan, strict=True)) == [([1, 2], [0]), ([3], [4])]


def test_a_micro_batch_without_room_for_a_long_sequence_may_take_a_short_one() -> None:
    # at width 1, L tokens cost 12 L + L^2: 60 cost more than five times 15, which leave room for 5 more
    plan = plan_micro_batches(whole([60, *[15] * 6, 5]), num_ranks=2, token_budget=80, hidden_size=1)
    assert plan == [[[0, 6]], [[1, 2, 3, 4, 5, 7]]]


def test_long_sequences_are_weighed_by_attention() -> None:
    # one long sequence costs more than its tokens in short ones: they must not share it out by token count
    lengths = [4000, *[100] * 40]
    plan = plan_micro_batches(whole(lengths), num_ranks=2, token_budget=8000, hidden_size=64)
    (alone,) = [rank[0] for rank in plan if 0 in rank[0]]
    assert alone == [0]
    long, *short = whole(lengths)
    assert long.cost(64) == 4000 * (12 * 64 + 4000) > sum(unit.cost(64) for unit in short)


def test_fewer_sequences_than_ranks_leaves_empty_micro_batches() -> None:
    plan = plan_micro_batches(whole([10]), num_ranks=3, token_budget=16, hidden_size=64)
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1]


def test_a_sequence_over_budget_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="exceed the budget"):
        plan_micro_batches(whole([17]), num_ranks=1, token_budget=16, hidden_size=64)


def test_a_shared_prompt_counts_once_and_a_quarter_for_each_who_attends_to_it() -> None:
    batch = groups_batch([(8, [3, 5]), (4, [2])])
    units = whole_groups(batch, share_prompts=True)
    assert [unit.members for unit in units] == [range(2), range(2, 3)]
    assert units[0].spans == ((8, 8), (3, 11), (5, 13)) and units[1].spans == ((6, 6),)
    assert [unit.tokens for unit in units] == [8 + 3 + 5 + 2 * 2, 6]
    # every pair of tokens is looked at once: as often as by two whole sequences, less the prompt's own
    pairs = sum(attention_pairs(*span) for span in units[0].spans)
    assert pairs == 11 * 11 + 13 * 13 - 8 * 8
    assert units[0].cost(10) == 12 * 10 * 16 + pairs
    apart = whole_groups(batch, share_prompts=False)
    assert [unit.spans for unit in apart] == [((11, 11),), ((13, 13),), ((6, 6),)]


def test_prompts_are_shared_where_that_saves_a_good_part_of_the_tokens() -> None:
    assert worth_sharing(long_prompt := groups_batch([(8, [12] * 4)]))  # 24 of 80 tokens
    assert batch_spans(long_prompt) == [(8, 8), *[(12, 20)] * 4]
    assert not worth_sharing(long_answers := groups_batch([(8, [80] * 4)]))  # 24 of 352
    assert batch_spans(long_answers) == [(88, 88)] * 4
    assert not worth_sharing(groups_batch([(8, [1]), (8, [1]), (8, [1])])), "every prompt is another"
    assert worth_sharing(groups_batch([(3, [7, 6])]))  # 3 of 19
    assert not worth_sharing(groups_batch([(3, [7, 7])]))  # 3 of 20: no more than the copies cost


def test_large_groups_are_cut_into_pieces() -> None:
    batch = groups_batch([(10, [10] * 8)])
    units = prompt_units(batch, share_prompts=True, num_ranks=1, token_budget=100)  # 50 at most: 10 + 3 x (10 + 2.5)
    assert [unit.members for unit in units] == [range(3), range(3, 6), range(6, 8)]
    assert [unit.spans for unit in units][2] == ((10, 10), (10, 20), (10, 20))
    apart = prompt_units(batch, share_prompts=False, num_ranks=1, token_budget=100)
    assert [unit.members for unit in apart] == [range(i, i + 1) for i in range(8)]


def test_a_piece_is_as_large_as_may_be() -> None:
    (group,) = whole_groups(groups_batch([(10, [10] * 3)]), share_prompts=True)  # 10 + 3 x (10 + 2.5) tokens
    assert group.pieces(48) == [group]
    assert [piece.members for piece in group.pieces(35)] == [range(2), range(2, 3)]  # 10 + 2 x (10 + 2.5)
    assert group.pieces(5) == [Unit(range(i, i + 1), ((20, 20),)) for i in range(3)]


def test_a_group_is_spread_over_ranks_that_would_idle() -> None:
    batch = groups_batch([(10, [10] * 8)])  # 110 tokens: 27 for each of four ranks, and a sequence alone takes 20
    units = prompt_units(batch, share_prompts=True, num_ranks=4, token_budget=1000)
    plan = plan_micro_batches(units, num_ranks=4, token_budget=1000, hidden_size=64)
    assert [len(rank[0]) for rank in plan] == [2] * 4


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=12
    ),
    num_ranks=st.integers(1, 3),
    spare=st.integers(0, 200),
)
def test_plan_of_shared_prompts_keeps_the_budget(
    groups: list[tuple[int, list[int]]], num_ranks: int, spare: int
) -> None:
    batch = groups_batch(groups)
    budget = int(batch.sequence_lengths.max()) + spare
    units = prompt_units(batch, share_prompts=True, num_ranks=num_ranks, token_budget=budget)
    assert [i for unit in units for i in unit.members] == list(range(batch.num_sequences))
    plan = plan_micro_batches(units, num_ranks=num_ranks, token_budget=budget, hidden_size=64)
    assert len({len(rank) for rank in plan}) == 1, "ranks must agree on the number of micro-batches"
    micro_batches = [micro for rank in plan for micro in rank if micro]
    assert sorted(i for micro in micro_batches for i in micro) == list(range(batch.num_sequences))
    for micro in micro_batches:  # pieces of one group that meet again share the prompt too, and take less
        groups = whole_groups(batch.select(micro), share_prompts=True)
        spans = [span for group in groups for span in group.spans]
        assert sum(new + (attended - new) / 4 for new, attended in spans) <= budget


def test_minibatches_are_equal_and_complete() -> None:
    parts = split_minibatches([3, 1, 0, 2], 2)
    assert parts == [[3, 1], [0, 2]]
    with pytest.raises(AssertionError, match="do not split"):
        split_minibatches([0, 1, 2], 2)
