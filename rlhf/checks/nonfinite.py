"""What a training loop does about numbers that are NaN or infinite: ``checks.on_nonfinite``."""

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
    "a lower optimizer.learning_rate, or more optimizer.warmup_steps, often helps; if it is one odd batch, "
    "checks.on_nonfinite=skip leaves it out"
)


@dataclass
class SkippedSteps:
    """Counts the training steps of which anything was left out, and ends the run where that must not go on."""

    checks: ChecksConfig
    total: int = 0
    in_a_row: int = 0

    def record(self, step: int, found: Sequence[str], note: Callable[[str], None]) -> Metrics:
        """``found``: what was not finite in training step ``step``, so that all or a part of it was not learnt from.

        Returns the metric ``checks/skipped_steps``, the total of the run, and tells the user by ``note``. Raises
        NonFiniteError as ``checks`` says.
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
                f"{what}. {self.in_a_row} steps in a row had to be left out, "
                f"checks.max_skipped_steps={self.checks.max_skipped_steps}; {HELP}"
            )
        note(f"{what}; left out ({self.in_a_row} in a row, {self.total} in all)")
        return {"checks/skipped_steps": self.total}

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]


def nonfinite_tensors(batch: TrainBatch, *names: str) -> list[str]:
    """Which of these tensors have NaN or infinite elements, and how many; those that the batch lacks are left out."""
    found = []
    for name in names:
        tensor: Tensor | None = getattr(batch, name)
        if tensor is not None and (count := int((~torch.isfinite(tensor)).sum())):
            found.append(f"{count} of {tensor.numel()} {name} are not finite")
    return found


def skip_report(results: Sequence[Metrics]) -> Metrics:
    """``skipped/*``: how many of a training step's optimiser steps were not taken, which was the first, and why.

    ``results``: of ``Engine.step``, in order. Empty where all were taken.
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
    """Takes a ``skip_report`` of ``who`` out of the metrics and puts it in words; empty where there is none."""
    if f"{prefix}skipped/count" not in metrics:
        return []
    count, first, loss, norm = (metrics.pop(f"{prefix}skipped/{n}") for n in ("count", "first", "loss", "grad_norm"))
    number = f"gradient norm is {norm:g}" if math.isfinite(loss) else f"loss is {loss:g}"
    others = f", and {count - 1:.0f} more were not taken" if count > 1 else ""
    return [f"the {who}'s {number} in optimiser step {first:.0f}{others}"]
