"""Which sequence goes into which micro-batch of which rank: pure arithmetic, the same on every rank.

Every rank gets the same NUMBER of micro-batches by construction (ZeRO-3 ranks that disagree on it hang), none exceeds
the token budget, and micro-batches that run at the same time cost about the same. If it saves enough, sequences of a
group share their prompt: it is computed once in each micro-batch that holds any of them.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.batch import TrainBatch  # imports torch, which planning does without

Span = tuple[int, int]  # number of consecutive tokens, and number of tokens that the last of them attends to

ATTENDED_AGAIN = 0.25  # budget for a token that is only attended to: its keys and values are copied
WORTH_SHARING = 0.15  # share of all tokens; saving less is assumed to cost more than it gains (benchmarks/RESULTS.md)
LARGEST_PIECE = 0.5  # of a micro-batch, or of a rank's share of the batch: larger groups are cut


@dataclass(frozen=True)
class Unit:
    """Neighbouring sequences that stay in one micro-batch."""

    members: range
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Its part of the token budget."""
        return math.ceil(sum(new + ATTENDED_AGAIN * (attended - new) for new, attended in self.spans))

    def cost(self, hidden_size: int) -> float:
        """Relative FLOPs of a layer: ``12 H^2 L + H L^2`` for a sequence of L tokens, up to a common factor.

        Kaplan et al. 2020, table 1; causal attention halves the quadratic term.
        """
        return sum(12.0 * hidden_size * new + attention_pairs(new, attended) for new, attended in self.spans)

    def pieces(self, max_tokens: float) -> list["Unit"]:
        """The unit, or parts of it, each of at most ``max_tokens`` or a single sequence."""
        if len(self.members) == 1 or self.tokens <= max_tokens:
            return [self]
        (prompt, _), *completions = self.spans
        lengths = [new for new, _ in completions]
        pieces, start = [], 0
        for end in range(1, len(lengths) + 1):
            longer = Unit(self.members[start : end + 1], prompt_spans(prompt, lengths[start : end + 1]))
            if end == len(lengths) or longer.tokens > max_tokens:
                pieces.append(Unit(self.members[start:end], prompt_spans(prompt, lengths[start:end])))
                start = end
        return pieces


def attention_pairs(new: int, attended: int) -> int:
    """Twice the token pairs in a span's causal attention: ``L^2`` for a whole sequence."""
    return new * (2 * attended - new)


def prompt_spans(prompt: int, completions: Sequence[int]) -> tuple[Span, ...]:
    """The spans of sequences with one prompt: a single sequence as a whole; else the prompt, then each completion."""
    if len(completions) == 1:
        return ((prompt + completions[0], prompt + completions[0]),)
    return ((prompt, prompt), *((length, prompt + length) for length in completions))


def worth_sharing(batch: "TrainBatch") -> bool:
    """Whether neighbours with the same prompt should compute it once, which means copying its keys and values."""
    repeated = sum(int(batch.prompt_lengths[run.start]) * (len(run) - 1) for run in batch.prompt_runs())
    return repeated > WORTH_SHARING * len(batch.tokens)


def whole_groups(batch: "TrainBatch", *, share_prompts: bool) -> list[Unit]:
    """Every sequence by itself or, with ``share_prompts``, all neighbours with the same prompt together."""
    runs = batch.prompt_runs() if share_prompts else [range(i, i + 1) for i in range(batch.num_sequences)]
    prompts, completions = batch.prompt_lengths.tolist(), batch.lengths_after_prompt.tolist()
    return [Unit(run, prompt_spans(prompts[run.start], completions[run.start : run.stop])) for run in runs]


def prompt_units(batch: "TrainBatch", *, share_prompts: bool, num_ranks: int, token_budget: int) -> list[Unit]:
    """``whole_groups``, cut into pieces small enough to fill all micro-batches of all ranks evenly."""
    groups = whole_groups(batch, share_prompts=share_prompts)
    share = sum(group.tokens for group in groups) / num_ranks
    max_tokens = LARGEST_PIECE * min(token_budget, share)
    return [piece for group in groups for piece in group.pieces(max_tokens)]


def batch_spans(batch: "TrainBatch") -> list[Span]:
    """The spans of a whole batch, taken as one micro-batch."""
    return [span for group in whole_groups(batch, share_prompts=worth_sharing(batch)) for span in group.spans]


def plan_micro_batches(
    units: Sequence[Unit], *, num_ranks: int, token_budget: int, hidden_size: int
) -> list[list[list[int]]]:
    """Assigns units to ranks and micro-batches.

    Args:
        units: cover all sequences, each exactly once.
        num_ranks: data-parallel ranks.
        token_budget: most tokens in a micro-batch; no unit may exceed it.
        hidden_size: the model's width, to weigh attention against the linear layers.

    Returns:
        ``plan[rank][k]``: the sequence indices of that rank's k-th micro-batch. Every rank has the same number of
        micro-batches; one may be empty only if there are fewer units than micro-batches.
    """
    assert units, "no sequence to plan for"
    tokens = [unit.tokens for unit in units]
    costs = [unit.cost(hidden_size) for unit in units]
    assert max(tokens) <= token_budget, f"{max(tokens)} tokens that stay together exceed the budget of {token_budget}"
    rounds = max(1, -(-sum(tokens) // (token_budget * num_ranks)))
    while (bins := _fill(tokens, costs, rounds * num_ranks, token_budget)) is None:
        rounds += 1
    bins.sort(key=lambda chosen: -sum(costs[u] for u in chosen))
    plan = [[sorted(bins[k * num_ranks + rank]) for k in range(rounds)] for rank in range(num_ranks)]
    return [[[i for u in chosen for i in units[u].members] for chosen in rank] for rank in plan]


def _fill(tokens: Sequence[int], costs: Sequence[float], num_bins: int, token_budget: int) -> list[list[int]] | None:
    """Longest first into the cheapest bin that has room (LPT); None if a unit fits no bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [token_budget] * num_bins
    cheapest = [(0.0, b) for b in range(num_bins)]  # a heap of (cost, bin)
    waiting: list[tuple[int, float, int]] = []  # bins without room for a unit this long: a heap of (-room, cost, bin)
    for unit in sorted(range(len(tokens)), key=lambda u: (-tokens[u], u)):
        while waiting and -waiting[0][0] >= tokens[unit]:
            _, spent, bin = heapq.heappop(waiting)
            heapq.heappush(cheapest, (spent, bin))
        while cheapest and room[cheapest[0][1]] < tokens[unit]:
            spent, bin = heapq.heappop(cheapest)
            heapq.heappush(waiting, (-room[bin], spent, bin))
        if not cheapest:
            return None
        spent, bin = cheapest[0]
        bins[bin].append(unit)
        room[bin] -= tokens[unit]
        heapq.heapreplace(cheapest, (spent + costs[unit], bin))
    return bins


def split_minibatches(order: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Cuts shuffled indices into ``num_minibatches`` lists of equal size."""
    assert len(order) % num_minibatches == 0, f"{len(order)} sequences do not split into {num_minibatches} mini-batches"
    size = len(order) // num_minibatches
    return [list(order[k * size : (k + 1) * size]) for k in range(num_minibatches)]
