"""Where numbers go: JSON lines, TensorBoard, Weights & Biases; and files that are written completely or not at all."""

import importlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhf.errors import ConfigError, DataError


def write_atomically(path: Path, text: str) -> None:
    """Writes next to ``path`` and renames: readers see the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics as plain numbers, None where one is NaN or infinite: JSON cannot express those."""
    plain = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in plain.items()}


class JsonLines:
    """A ``.jsonl`` file of records that carry their ``step``; every line reaches the file before ``append`` returns.

    Lines of steps after ``keep_to_step`` are dropped on opening, because the run repeats those steps;
    ``num_dropped`` counts them. Raises DataError if the file is not what an earlier run wrote.
    """

    def __init__(self, path: Path, *, keep_to_step: float) -> None:
        self.num_dropped = _drop_after(path, keep_to_step) if path.exists() else 0
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_after(path: Path, step: float) -> int:
    """Rewrites the file without the lines of later steps, and without a last line cut short by a crash."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise DataError(f"{path}: line {number} is not a record with a step; move the file away") from error
            keep = False
        if keep:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))
    return len(lines) - len(kept)


class ScalarWriter(Protocol):
    """Something that plots curves."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under ``directory``; those of steps after ``keep_to_step`` from before a crash are hidden."""

    def __init__(self, directory: Path, *, keep_to_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

        self._writer = SummaryWriter(str(directory), purge_step=keep_to_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run named after the run directory. Its id is kept there, so a resumed run continues the same one.

    Raises ConfigError if the package is missing or W&B does not start.
    """

    def __init__(self, project: str, run_dir: Path) -> None:
        key = f"tracking.wandb_project={project}"
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{key} needs the package wandb, which is not installed; pip install wandb, or set it to null"
            ) from error
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), id=id_file.read_text(), resume="allow"
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"{key}: W&B did not start ({' '.join(str(error).split())}); run `wandb login`, or use "
                "WANDB_MODE=offline, or set it to null"
            ) from error
        # W&B drops records whose step goes back, as a resumed run's do; so our step is a metric of its own.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()
