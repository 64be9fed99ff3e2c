"""A packed batch as a model takes it: one row of tokens, where sequences begin in it, and what each attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.batch import TrainBatch, to_device
from rlhf.packing import Unit, whole_groups


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on its device: spans of tokens, each attending to its own and perhaps to a prompt before it.

    T tokens, B spans, N completion tokens. A span is a whole sequence; or, where sequences share their prompt, the
    prompt, or a completion that attends to it.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], within each sequence
    borders: Tensor  # int32 [B + 1], where spans start; the last entry is T
    key_borders: Tensor  # int32 [B + 1], the same of what they attend to
    max_length: int
    max_keys: int
    predictors: Tensor  # int64 [N]: the position whose hidden state predicts each completion token
    targets: Tensor  # int64 [N]: the completion tokens themselves
    attended: Tensor | None  # int64 [K]: the tokens that the spans attend to, one span after the other; None: its own


@dataclass(frozen=True)
class WholeSequence:
    """One sequence by itself, for a model as it was loaded (``PackedModel.as_loaded``): int64 ``[L]``."""

    tokens: Tensor


def packed_inputs(batch: TrainBatch, device: torch.device, *, share_prompts: bool = False) -> PackedInputs:
    """The model inputs of a packed batch. ``share_prompts``: neighbours with the same prompt compute it once."""
    groups = whole_groups(batch, share_prompts=share_prompts)
    lengths, indices = batch.sequence_lengths, torch.arange(batch.num_sequences)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(len(batch.tokens)) - starts.repeat_interleave(lengths)
    is_completion = positions >= batch.prompt_lengths.repeat_interleave(lengths)
    completion = is_completion.nonzero(as_tuple=True)[0]

    # The first of a group computes the prompt. place: where each token of the whole sequences is computed.
    first = torch.tensor([group.members.start for group in groups for _ in group.members])
    own = is_completion | (first == indices).repeat_interleave(lengths)
    place = own.cumsum(0) - 1
    place[~own] = place[(starts[first].repeat_interleave(lengths) + positions)[~own]]

    spans = [span for group in groups for span in group.spans]
    num_tokens, num_keys = torch.tensor(spans).unbind(1)
    shared = len(spans) > len(groups)
    parts = [
        batch.tokens[own],
        positions[own],
        F.pad(num_tokens.cumsum(0), (1, 0)),
        F.pad(num_keys.cumsum(0), (1, 0)),
        place[completion - 1],
        batch.tokens[completion],
        _attended(batch, groups, place) if shared else place[:0],
    ]
    whole = to_device(torch.cat(parts), device)  # in one copy
    tokens, own_positions, borders, key_borders, predictors, targets, attended = whole.split([len(p) for p in parts])
    return PackedInputs(
        tokens=tokens,
        positions=own_positions,
        borders=borders.int(),
        key_borders=key_borders.int(),
        max_length=int(num_tokens.max()),
        max_keys=int(num_keys.max()),
        predictors=predictors,
        targets=targets,
        attended=attended if shared else None,
    )


def _attended(batch: TrainBatch, groups: Sequence[Unit], place: Tensor) -> Tensor:
    """What the spans attend to: a whole sequence each, and before those of a group with a shared prompt the prompt."""
    sequences = place.split(batch.sequence_lengths.tolist())
    found = []
    for group in groups:
        if len(group.members) > 1:
            found.append(sequences[group.members.start][: batch.prompt_lengths[group.members.start]])
        found += sequences[group.members.start : group.members.stop]
    return torch.cat(found)
