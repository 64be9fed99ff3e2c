"""What a run's directory tells of it, whether it goes on or not: without Ray, and without loading a checkpoint."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from jobs.trained import CONFIG, is_run
from rlhf.checkpoint import CheckpointStore
from rlhf.errors import DataError, one_line
from rlhf.run_lock import BEAT_S, Holder, read_holder, shows_life

State = Literal["running", "completed", "interrupted", "killed", "failed", "empty"]
RUNS = Path("runs")  # where a run is looked for by its name
TAIL_BYTES = 1 << 18  # of a file of records; its last one is shorter


@dataclass(frozen=True)
class RunFiles:
    """A run by its files. ``metrics`` and ``evaluation`` are the last records, empty if there are none."""

    directory: str
    name: str
    state: State
    why: str  # what the state means here
    step: int
    num_steps: int | None  # None: of a reward model's training, which counts epochs
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint_step: int | None = None  # of the newest

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_directory(run: str) -> Path | None:
    """The directory of a run, given that or its name; None if there is none here."""
    return next((path for path in (Path(run).expanduser(), RUNS / run) if is_run(str(path))), None)


def read_run_files(directory: Path) -> RunFiles:
    """What is in a run's directory. Raises DataError if its recipe cannot be read."""
    try:
        recipe = OmegaConf.load(directory / CONFIG)
    except Exception as error:  # OmegaConf re-exports no common base of YAML's errors
        raise DataError(f"{directory / CONFIG}: not valid YAML: {one_line(error)}") from error
    recipe = recipe if isinstance(recipe, DictConfig) else OmegaConf.create({})
    metrics, evaluation = (last_record(directory / f"{name}.jsonl") for name in ("metrics", "eval"))
    step = metrics.get("step", 0)
    state, why = _state(directory, step)
    return RunFiles(
        str(directory.resolve()),
        str(recipe.get("name") or directory.name),
        state,
        why,
        step,
        recipe.get("num_steps"),
        metrics,
        evaluation,
        next(reversed(CheckpointStore(directory, keep=1).steps()), None),
    )


def last_record(path: Path) -> dict[str, Any]:
    """The last whole line of a file of records; {} if there is none."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line break is being written
    return json.loads(lines[-1]) if lines else {}


def _state(directory: Path, step: int) -> tuple[State, str]:
    """How the run is, and a sentence on it; ``step``: the last one on record."""
    holder = read_holder(directory)
    if holder is not None:
        if _is_alive(directory, holder):
            return "running", str(holder)
        return "killed", f"{holder}, ended without a word: killed, or its machine went down"
    summary = _read_summary(directory)
    if summary.get("status") in ("completed", "interrupted") and summary.get("steps", 0) >= step:
        meaning = {"completed": "all steps are made", "interrupted": "it was asked to stop, and has saved"}
        return summary["status"], meaning[summary["status"]]
    if not step:
        return "empty", "it has ended before its first step, or was never started"
    return "failed", f"it ended with an error after step {step}; what it printed says which"


def _is_alive(directory: Path, holder: Holder) -> bool:
    """One on another machine shows life by touching its lock."""
    return holder.is_running if holder.is_here else shows_life(directory, 1.5 * BEAT_S)


def _read_summary(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
