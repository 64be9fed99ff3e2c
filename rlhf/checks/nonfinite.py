"""What a training loop does about NaN and infinite numbers: ``checks.on_nonfinite``."""

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.batch import TrainBatch
from rlhf.config import ChecksConfig
from rlhf.errors import NonFiniteError
from rlhf.roles import Metrics

HELP = (
    "a lower optimizer.learning_rate or more optimizer.warmup_steps often helps; checks.on_nonfinite=skip skips "
    "a single bad batch"
)


@dataclass
class SkippedSteps:
    """Counts the training steps with anything skipped, and ends the run if that must not continue."""

    checks: ChecksConfig
    total: int = 0
    in_a_row: int = 0

    def record(self, step: int, found: Sequence[str], note: Callable[[str], None]) -> Metrics:
        """``found``: what was not finite in training step ``step``, so that all or part of it was skipped.

        Returns the metric ``checks/skipped_steps``, the total of the run, and informs the user through ``note``. Raises
        NonFiniteError as configured in ``checks``.
        """
        if not found:
            self.in_a_row = 0
            return {"checks/skipped_steps": self.total}
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        what = f"step {step}: {'; '.join(found)}"
        if self.checks.on_nonfinite == "stop":
            raise NonFiniteError(f"{what}. Nothing of this step was published or saved; {HELP}")
        if self.in_a_row > self.checks.max_skipped_steps:
            raise NonFiniteError(
                f"{what}. {self.in_a_row} steps in a row were skipped, more than "
                f"checks.max_skipped_steps={self.checks.max_skipped_steps}; {HELP}"
            )
        note(f"{what}; skipped ({self.in_a_row} in a row, {self.total} in total)")
        return {"checks/skipped_steps": self.total}

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]


def nonfinite_tensors(batch: TrainBatch, *names: str) -> list[str]:
    """Which of these tensors have NaN or infinite elements, and how many; those that the batch lacks are ignored."""
    found = []
    for name in names:
        tensor: Tensor | None = getattr(batch, name)
        if tensor is not None and (count := int((~torch.isfinite(tensor)).sum())):
            found.append(f"{count} of {tensor.numel()} {name} are not finite")
    return found


def skip_report(results: Sequence[Metrics]) -> Metrics:
    """``skipped/*``: how many of a training step's optimiser steps were skipped, which was the first, and why.

    ``results``: from ``Engine.step``, in order. Empty if none was skipped.
    """
    skipped = [number for number, result in enumerate(results, start=1) if result["skipped"]]
    if not skipped:
        return {}
    first = results[skipped[0] - 1]
    return {
        "skipped/count": len(skipped),
        "skipped/first": skipped[0],
        "skipped/loss": first["loss"],
        "skipped/grad_norm": first["grad_norm"],
    }


def take_skip_report(metrics: MutableMapping[str, float], who: str, prefix: str = "") -> list[str]:
    """Removes the ``skip_report`` of ``who`` from the metrics and puts it in words; empty if there is none."""
    if f"{prefix}skipped/count" not in metrics:
        return []
    count, first, loss, norm = (metrics.pop(f"{prefix}skipped/{n}") for n in ("count", "first", "loss", "grad_norm"))
    number = f"gradient norm is {norm:g}" if math.isfinite(loss) else f"loss is {loss:g}"
    others = f", and {count - 1:.0f} more were skipped" if count > 1 else ""
    return [f"the {who}'s {number} in optimiser step {first:.0f}{others}"]
