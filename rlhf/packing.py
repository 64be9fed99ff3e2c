"""Which sequence goes into which micro-batch of which rank: pure arithmetic, the same on every rank.

Every rank gets the same NUMBER of micro-batches by construction (ranks of ZeRO-3 that disagree on it wait for each
other for ever), none exceeds the token budget, and micro-batches that run at the same time cost about the same.
Sequences of a group may share their prompt: then it is computed once in each micro-batch that holds some of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.batch import TrainBatch

Span = tuple[int, int]  # so many tokens in a row, and so many that the last of them attends to

ATTENDED_AGAIN = 0.25  # budget of a token that is only attended to: its keys and values are laid out once more
NO_BUDGET = 1 << 62  # tokens
PIECES = 4  # a piece of a group takes at most this part of a micro-batch: small enough to fill them evenly


@dataclass(frozen=True)
class Unit:
    """Neighbouring sequences that stay in one micro-batch."""

    members: range
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """What it takes of the token budget."""
        return math.ceil(sum(new + ATTENDED_AGAIN * (attended - new) for new, attended in self.spans))

    def cost(self, hidden_size: int) -> float:
        """Relative FLOPs: ``12 H`` per token for the linear layers, ``2`` per pair of tokens for attention, per layer.

        ``12 H^2 L + 2 L^2 H`` for a sequence of L tokens, up to a common factor (Kaplan et al. 2020, table 1; causal
        attention halves the square).
        """
        return sum(12.0 * hidden_size * new + 2.0 * attention_pairs(new, attended) for new, attended in self.spans)


def attention_pairs(new: int, attended: int) -> int:
    """Twice the pairs of tokens that causal attention of a span looks at: ``L^2`` for a whole sequence."""
    return new * (2 * attended - new)


def prompt_spans(prompt: int, completions: Sequence[int]) -> tuple[Span, ...]:
    """The spans of sequences with one prompt: of a single one itself, of several the prompt, then each completion."""
    if len(completions) == 1:
        return ((prompt + completions[0], prompt + completions[0]),)
    return ((prompt, prompt), *((length, prompt + length) for length in completions))


def prompt_units(batch: TrainBatch, *, share_prompts: bool, token_budget: int) -> list[Unit]:
    """Every sequence by itself; or, where ``share_prompts``, those with one prompt together, cut into handy pieces."""
    prompts, completions = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist()

    def unit(members: range) -> Unit:
        return Unit(members, prompt_spans(prompts[members[0]], [completions[i] for i in members]))

    if not share_prompts:
        return [unit(range(i, i + 1)) for i in range(batch.num_sequences)]
    units = []
    for run in batch.prompt_runs():
        start = run.start
        for end in run:
            if end > start and unit(range(start, end + 1)).tokens > token_budget // PIECES:
                units.append(unit(range(start, end)))
                start = end
        units.append(unit(range(start, run.stop)))
    return units


def batch_spans(batch: TrainBatch, *, share_prompts: bool) -> list[Span]:
    """The spans of a whole batch, were it one micro-batch."""
    return [
        span for unit in prompt_units(batch, share_prompts=share_prompts, token_budget=NO_BUDGET) for span in unit.spans
    ]


def plan_micro_batches(
    units: Sequence[Unit], *, num_ranks: int, token_budget: int, hidden_size: int = 1024
) -> list[list[list[int]]]:
    """Assigns units to ranks and micro-batches.

    Args:
        units: all sequences, each in one of them.
        num_ranks: data-parallel ranks.
        token_budget: most tokens in one micro-batch; no unit may take more.
        hidden_size: the model's width, to weigh attention against the linear layers.

    Returns:
        ``plan[rank][k]``: the sequence indices of that rank's k-th micro-batch. Every rank has the same number of
        micro-batches; one may be empty only where there are fewer units than ranks need.
    """
    assert units, "no sequence to plan for"
    tokens = [unit.tokens for unit in units]
    costs = [unit.cost(hidden_size) for unit in units]
    assert max(tokens) <= token_budget, f"a sequence of {max(tokens)} tokens exceeds the budget of {token_budget}"
    rounds = max(1, -(-sum(tokens) // (token_budget * num_ranks)))
    while (bins := _fill(tokens, costs, rounds * num_ranks, token_budget)) is None:
        rounds += 1
    bins.sort(key=lambda chosen: -sum(costs[u] for u in chosen))
    plan = [[sorted(bins[k * num_ranks + rank]) for k in range(rounds)] for rank in range(num_ranks)]
    return [[[i for u in chosen for i in units[u].members] for chosen in rank] for rank in plan]


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
