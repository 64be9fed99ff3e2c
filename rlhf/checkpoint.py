"""Checkpoints that are either whole or absent.

One checkpoint holds everything a run needs to go on: learner, critic, and the driver's own state (step, data position,
counters, controllers). It is written under a temporary name and renamed when complete; older ones go only afterwards.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "driver.json"


class CheckpointStore:
    """The checkpoints of one run directory: ``checkpoints/step-000010``, newest last."""

    def __init__(self, run_dir: str | Path, *, keep: int) -> None:
        self.directory = Path(run_dir).resolve() / "checkpoints"
        self.keep = keep
        self.last_written: Path | None = None  # by this process

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints on disk, ascending."""
        if not self.directory.is_dir():
            return []
        found = ((_NAME.fullmatch(p.name), p) for p in self.directory.iterdir())
        return sorted(int(match[1]) for match, p in found if match and (p / _STATE).is_file())

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Gives a directory to write the roles' parts into; ``state`` joins them, then all appear at once."""
        partial = self.directory / f".partial-{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        (partial / _STATE).write_text(json.dumps(state, indent=1))
        final = self.path(step)
        if final.exists():  # the same step again, after a resume from an older one
            shutil.rmtree(final)
        partial.rename(final)
        self.last_written = final
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))

    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``checkpoint.resume`` asks for: auto, none, or a directory. Raises CheckpointError."""
        if resume == "none":
            return None
        if resume == "auto":
            steps = self.steps()
            return self.path(steps[-1]) if steps else None
        path = Path(resume).resolve()
        if not (path / _STATE).is_file():
            raise CheckpointError(
                f"checkpoint.resume={resume}: not a whole checkpoint (no {_STATE}); use auto, none, or a "
                "step-... directory"
            )
        return path


def read_state(path: Path) -> dict[str, Any]:
    """The driver's state in a checkpoint."""
    return json.loads((path / _STATE).read_text())
