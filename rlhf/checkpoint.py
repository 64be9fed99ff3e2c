"""Checkpoints that are either complete or absent.

A checkpoint holds everything a run needs to resume: learner, critic, and the driver's own state (step, data position,
counters, controllers); and a description of the run, which ``rlhf.resume`` compares. It is written under a temporary
name and renamed when complete; only then are older ones deleted, and not before they have lost their names.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "driver.json"


class CheckpointStore:
    """The checkpoints of one run directory: ``checkpoints/step-000010``.

    The newest is the one written last. That is not always the highest step: a run may start over, or resume an older
    checkpoint.
    """

    def __init__(self, run_dir: str | Path, *, keep: int) -> None:
        self.directory = Path(run_dir).resolve() / "checkpoints"
        self.keep = keep
        self.run: dict[str, Any] = {}  # from describe_run; stored in every checkpoint
        self.current: Path | None = None  # what this process last wrote, or resumed from

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints on disk, newest last."""
        if not self.directory.is_dir():
            return []
        found = ((_NAME.fullmatch(p.name), p) for p in self.directory.iterdir())
        whole = [(read_state(p)["written_s"], int(match[1])) for match, p in found if match and (p / _STATE).is_file()]
        return [step for _, step in sorted(whole)]

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Yields a directory for the roles' parts; then adds ``state`` and puts everything in place at once."""
        partial = self.directory / f".partial-{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        (partial / _STATE).write_text(json.dumps({**state, **self.run, "written_s": time.time()}, indent=1))
        final, removed = self.path(step), self.directory / ".removed"
        shutil.rmtree(removed, ignore_errors=True)  # what a crash left there
        removed.mkdir()
        if final.exists():  # the same step again, after a resume from an older one
            final.rename(removed / final.name)
        partial.rename(final)
        self.current = final
        for old in self.steps()[: -self.keep]:  # moved first: what a crash leaves of a deletion would look complete
            self.path(old).rename(removed / self.path(old).name)
        shutil.rmtree(removed)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``checkpoint.resume`` asks for: auto, none, or a directory. Raises CheckpointError."""
        if resume == "none":
            return None
        if resume == "auto":
            steps = self.steps()
            self.current = self.path(steps[-1]) if steps else None
            return self.current
        path = Path(resume).resolve()
        if not (path / _STATE).is_file():
            raise CheckpointError(
                f"checkpoint.resume={resume}: not a complete checkpoint (no {_STATE}); use auto, none, or a "
                "step-... directory"
            )
        self.current = path
        return path

    def holds(self, step: int) -> bool:
        """Whether this process last wrote ``step``, or resumed from it and took no step since."""
        return self.current == self.path(step)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's driver state and description of its run. Raises CheckpointError if the file is damaged."""
    try:
        return json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _STATE}: cannot be read ({error}); remove that checkpoint") from error
