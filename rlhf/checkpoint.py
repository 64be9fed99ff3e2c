"""Checkpoints that are either whole or absent.

One checkpoint holds everything a run needs to go on: learner, critic, and the driver's own state (step, data position,
counters, controllers); and what the run was, which ``rlhf.resume`` compares. It is written under a temporary name and
renamed when complete; older ones go only afterwards.
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

    The newest is the one written last. That is not always the highest step: a run may start anew, or from an older one.
    """

    def __init__(self, run_dir: str | Path, *, keep: int) -> None:
        self.directory = Path(run_dir).resolve() / "checkpoints"
        self.keep = keep
        self.run: dict[str, Any] = {}  # what describe_run says of the run, for every checkpoint it writes
        self.current: Path | None = None  # what this process wrote last, or went on from

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints on disk, the newest last."""
        if not self.directory.is_dir():
            return []
        found = ((_NAME.fullmatch(p.name), p) for p in self.directory.iterdir())
        whole = [(read_state(p)["written_s"], int(match[1])) for match, p in found if match and (p / _STATE).is_file()]
        return [step for _, step in sorted(whole)]

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Gives a directory to write the roles' parts into; ``state`` joins them, then all appear at once."""
        partial = self.directory / f".partial-{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        (partial / _STATE).write_text(json.dumps({**state, **self.run, "written_s": time.time()}, indent=1))
        final = self.path(step)
        if final.exists():  # the same step again, after a resume from an older one
            shutil.rmtree(final)
        partial.rename(final)
        self.current = final
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))

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
                f"checkpoint.resume={resume}: not a whole checkpoint (no {_STATE}); use auto, none, or a "
                "step-... directory"
            )
        self.current = path
        return path

    def holds(self, step: int) -> bool:
        """Whether this process wrote ``step`` last, or went on from it and made no step since."""
        return self.current == self.path(step)


def read_state(path: Path) -> dict[str, Any]:
    """The driver's state in a checkpoint, and what its run was. Raises CheckpointError where the file is damaged."""
    try:
        return json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _STATE}: cannot be read ({error}); remove that checkpoint") from error
