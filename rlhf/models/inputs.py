"""A packed batch as model inputs: one row of tokens, where each sequence begins, and what it attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.batch import TrainBatch, to_device
from rlhf.packing import Unit, whole_groups


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on its device: spans of tokens, each attending to itself and perhaps to a prompt before it.

    T tokens, B spans, N completion tokens. A span is a whole sequence; or, where sequences share their prompt, the
    prompt, or a completion that attends to it.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], within each sequence
    borders: Tensor  # int32 [B + 1]: where spans start; the last entry is T
    key_borders: Tensor  # int32 [B + 1]: the same for what they attend to
    max_length: int
    max_keys: int
    predictors: Tensor  # int64 [N]: the position whose hidden state predicts each completion token
    targets: Tensor  # int64 [N]: the completion tokens themselves, without what was only observed
    attended: Tensor | None  # int64 [K]: the tokens each span attends to, concatenated; None: only its own


@dataclass(frozen=True)
class WholeSequence:
    """One sequence by itself, for a model in its original form (``PackedModel.as_loaded``): int64 ``[L]``."""

    tokens: Tensor


def packed_inputs(batch: TrainBatch, device: torch.device, *, share_prompts: bool = False) -> PackedInputs:
    """The model inputs of a packed batch. ``share_prompts``: neighbours with the same prompt compute it once.

    Two sequences that share the prompt (10, 11), with the completions (12) and (13, 14); bars separate the spans:

        batch.tokens   10 11 12   10 11 13 14
        place           0  1  2    0  1  3  4       where in the row each token is computed

        tokens         10 11 | 12 | 13 14           the row: the prompt once, then each completion
        positions       0  1 |  2 |  2  3
        borders         0  2  3  5
        attended        0  1 |  0  1  2 |  0  1  3  4   a completion attends to the prompt, then to itself
        key_borders     0  2  5  9                  borders of the spans in ``attended``

        targets        12   13 14
        predictors      1    1  3                   the prompt's last token predicts both first tokens
    """
    groups = whole_groups(batch, share_prompts=share_prompts)
    lengths = batch.sequence_lengths
    positions = torch.arange(len(batch.tokens)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    after_prompt = positions >= batch.prompt_lengths.repeat_interleave(lengths)
    completion = (after_prompt if batch.sampled is None else batch.sampled).nonzero(as_tuple=True)[0]
    computed, place = _places(batch, groups, positions, after_prompt)
    spans = [span for group in groups for span in group.spans]
    num_tokens, num_keys = torch.tensor(spans).unbind(1)
    shared = len(spans) > len(groups)
    parts = [
        batch.tokens[computed],
        positions[computed],
        _borders(num_tokens),
        _borders(num_keys),
        place[completion - 1],
        batch.tokens[completion],
        _attended(batch, groups, place) if shared else place[:0],
    ]
    whole = to_device(torch.cat(parts), device)  # in one copy
    tokens, positions, borders, key_borders, predictors, targets, attended = whole.split([len(p) for p in parts])
    return PackedInputs(
        tokens=tokens,
        positions=positions,
        borders=borders.int(),
        key_borders=key_borders.int(),
        max_length=int(num_tokens.max()),
        max_keys=int(num_keys.max()),
        predictors=predictors,
        targets=targets,
        attended=attended if shared else None,
    )


def _places(
    batch: TrainBatch, groups: Sequence[Unit], positions: Tensor, after_prompt: Tensor
) -> tuple[Tensor, Tensor]:
    """Where each token of a batch is computed: prompt tokens in the first sequence of their group, others in their own.

    All arguments and results are per token of the batch: ``positions`` int64 and ``after_prompt`` bool; returns
    whether a token is computed in its own sequence, bool, and its place in the row of computed tokens, int64.
    """
    lengths, index = batch.sequence_lengths, torch.arange(len(batch.tokens))
    starts = lengths.cumsum(0) - lengths
    first = torch.tensor([group.members.start for group in groups for _ in group.members])
    source = torch.where(after_prompt, index, starts[first].repeat_interleave(lengths) + positions)
    computed = source == index
    return computed, (computed.cumsum(0) - 1)[source]


def _borders(lengths: Tensor) -> Tensor:
    """int64 [B] -> [B + 1]: where each of B spans starts, and where the last one ends."""
    return F.pad(lengths.cumsum(0), (1, 0))


def _attended(batch: TrainBatch, groups: Sequence[Unit], place: Tensor) -> Tensor:
    """What the spans attend to, concatenated: a shared prompt to itself, every other span to a whole sequence."""
    sequences = place.split(batch.sequence_lengths.tolist())
    found = []
    for group in groups:
        if len(group.members) > 1:
            found.append(sequences[group.members.start][: batch.prompt_lengths[group.members.start]])
        found += sequences[group.members.start : group.members.stop]
    return torch.cat(found)
