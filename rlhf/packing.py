"""Which sequence goes into which micro-batch of which rank: pure arithmetic, the same on every rank.

Every rank gets the same NUMBER of micro-batches by construction (ranks of ZeRO-3 that disagree on it wait for each
other for ever), none exceeds the token budget, and micro-batches that run at the same time cost about the same.
"""

from collections.abc import Sequence


def sequence_cost(length: int, hidden_size: int) -> float:
    """Relative FLOPs of one sequence: ``12 H`` per token for the linear layers, ``2 L`` for attention, all per layer.

    ``12 H^2 L + 2 L^2 H`` up to a common factor (Kaplan et al. 2020, table 1; causal attention halves the square).
    """
    return length * (12 * hidden_size + 2 * length)


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, token_budget: int, hidden_size: int = 1024, unit: int = 1
) -> list[list[list[int]]]:
    """Assigns sequences to ranks and micro-batches.

    Args:
        lengths: tokens of each sequence.
        num_ranks: data-parallel ranks.
        token_budget: most tokens in one micro-batch; no sequence may be longer.
        hidden_size: the model's width, to weigh attention against the linear layers.
        unit: so many neighbouring sequences stay in one micro-batch (2 for preference pairs).

    Returns:
        ``plan[rank][k]``: the sequence indices of that rank's k-th micro-batch. Every rank has the same number of
        micro-batches; one may be empty only where there are fewer sequences than ranks need.
    """
    assert lengths, "no sequence to plan for"
    assert len(lengths) % unit == 0, f"{len(lengths)} sequences are no whole number of units of {unit}"
    members = [range(start, start + unit) for start in range(0, len(lengths), unit)]
    tokens = [sum(lengths[i] for i in unit_members) for unit_members in members]
    costs = [sum(sequence_cost(lengths[i], hidden_size) for i in unit_members) for unit_members in members]
    assert max(tokens) <= token_budget, f"a sequence of {max(tokens)} tokens exceeds the budget of {token_budget}"
    rounds = max(1, -(-sum(tokens) // (token_budget * num_ranks)))
    while (bins := _fill(tokens, costs, rounds * num_ranks, token_budget)) is None:
        rounds += 1
    bins.sort(key=lambda units: -sum(costs[u] for u in units))
    plan = [[sorted(bins[k * num_ranks + rank]) for k in range(rounds)] for rank in range(num_ranks)]
    return [[[i for u in units for i in members[u]] for units in rank] for rank in plan]


def _fill(tokens: Sequence[int], costs: Sequence[float], num_bins: int, token_budget: int) -> list[list[int]] | None:
    """Longest first into the cheapest bin that has room (LPT); None if a unit fits no bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled, spent = [0] * num_bins, [0.0] * num_bins
    for unit in sorted(range(len(tokens)), key=lambda u: (-tokens[u], u)):
        roomy = [b for b in range(num_bins) if filled[b] + tokens[unit] <= token_budget]
        if not roomy:
            return None
        best = min(roomy, key=lambda b: (spent[b], b))
        bins[best].append(unit)
        filled[best] += tokens[unit]
        spent[best] += costs[unit]
    return bins


def split_minibatches(groups: Sequence[Sequence[int]], num_minibatches: int) -> list[list[int]]:
    """Deals indices, given as shuffled units, into ``num_minibatches`` lists of equal size."""
    flat = [i for unit in groups for i in unit]
    assert len(flat) % num_minibatches == 0, f"{len(flat)} sequences do not split into {num_minibatches} mini-batches"
    size = len(flat) // num_minibatches
    return [flat[k * size : (k + 1) * size] for k in range(num_minibatches)]
