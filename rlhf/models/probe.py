"""Does a loaded model give the same numbers packed as unpacked? Checked once at start on the real weights, in a second.

A family whose attention, rotary frequencies, logits or layers need something that packing does not provide would
silently be trained on wrong numbers. Here it is refused before the first step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.batch import TrainBatch
from rlhf.errors import ConfigError
from rlhf.models.inputs import WholeSequence, packed_inputs
from rlhf.models.packed import PackedModel, PolicyModel

# The largest mean difference that rounding explains: log-probabilities in nats; scores relative to their size if that
# is above 1. In bfloat16, models with widely spread weights show 0.01 to 0.04 nats.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
WINDOW = 8  # every sliding window is narrowed to this, so that it cuts even short sequences
PROMPTS, COMPLETIONS = (12, 12, 7), (9, 14, 21)  # tokens; the first two sequences share their prompt


@torch.no_grad()
def check_packing(forward: Callable[[Any], Any], model: PackedModel, device: torch.device, *, key: str) -> None:
    """Compares packed passes, without and with a shared prompt, to transformers' eager attention and LM head.

    ``forward`` runs ``model`` in evaluation mode: the model itself, or a DeepSpeed engine around it (then collective).
    Raises ConfigError, naming ``key``, if they differ by more than ``TOLERANCE``.
    """
    batch = probe_batch(model.lm.config)
    # nothing is compiled for shapes and windows that never recur
    with narrow_windows(model.lm), torch.compiler.set_stance("force_eager"):
        with model.as_loaded():
            own = torch.cat(
                [_own_scores(forward, model, batch.select([i]), device) for i in range(batch.num_sequences)]
            )
        for share_prompts in (False, True):
            packed = forward(packed_inputs(batch, device, share_prompts=share_prompts))
            scores = _comparable(packed, model, batch)
            scale = 1.0 if isinstance(model, PolicyModel) else own.abs().clamp(min=1)
            difference = ((scores - own).abs() / scale).mean().item()
            if not difference <= TOLERANCE[model.lm.dtype]:  # NaN included
                how = "sharing a prompt" if share_prompts else "packed together"
                raise ConfigError(
                    f"{key}: {type(model.lm).__name__} gives other numbers for sequences {how} than for each by itself "
                    f"(mean difference {difference:.2g}; rounding explains {TOLERANCE[model.lm.dtype]:g}), so it would "
                    "be trained on wrong ones; use a model of another family (docs/models.md)"
                )


def _own_scores(
    forward: Callable[[Any], Any], model: PackedModel, sequence: TrainBatch, device: torch.device
) -> Tensor:
    """One sequence's log-probabilities over its completion, or its score before the last token; on the CPU."""
    logits = forward(WholeSequence(sequence.tokens[:-1].to(device)))
    if not isinstance(model, PolicyModel):
        return logits.flatten().float().cpu()
    completion = slice(int(sequence.prompt_lengths) - 1, None)
    log_p = (logits[0, completion].float() / model.temperature).log_softmax(-1)
    targets = sequence.tokens[completion][1:].to(device)
    return log_p.gather(-1, targets[:, None])[:, 0].cpu()


def _comparable(output: Any, model: PackedModel, batch: TrainBatch) -> Tensor:
    """The same numbers from a packed pass."""
    if isinstance(model, PolicyModel):
        return output[0].cpu()
    return output.cpu()[batch.completion_lengths.cumsum(0) - 1]


def probe_batch(config: Any) -> TrainBatch:
    """Three short sequences of random tokens, without special ones."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    usable = [token for token in range(min(config.vocab_size, 1000)) if token not in special]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.tensor(usable)[torch.randint(len(usable), (count,), generator=generator)]

    shared = draw(PROMPTS[0])
    prompts = [shared, shared, draw(PROMPTS[2])]
    num_sequences = len(PROMPTS)
    return TrainBatch(
        tokens=torch.cat([t for prompt, n in zip(prompts, COMPLETIONS, strict=True) for t in (prompt, draw(n))]),
        prompt_lengths=torch.tensor(PROMPTS),
        completion_lengths=torch.tensor(COMPLETIONS),
        truncated=torch.zeros(num_sequences, dtype=torch.bool),
        versions=torch.zeros(sum(COMPLETIONS), dtype=torch.int32),
    )


@contextmanager
def narrow_windows(lm: nn.Module) -> Iterator[None]:
    """Narrows every sliding window to WINDOW tokens, for the model's own masks and for ours."""
    owners = {id(owner): owner for module in lm.modules() for owner in (module, getattr(module, "config", None))}
    windows = [(owner, getattr(owner, "sliding_window", None)) for owner in owners.values()]
    before = [(owner, window) for owner, window in windows if isinstance(window, int)]
    for owner, window in before:
        setattr(owner, "sliding_window", min(window, WINDOW))  # noqa: B010 (modules and configurations alike)
    try:
        yield
    finally:
        for owner, window in before:
            setattr(owner, "sliding_window", window)  # noqa: B010
