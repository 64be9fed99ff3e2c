"""Checkpoints that are either complete or absent.

A checkpoint holds everything a run needs to resume: learner, critic, and the driver's own state (step, data position,
counters, controllers); and a description of the run, which ``rlhf.resume`` compares. It is written under a temporary
name. When every rank has written its part, the driver lists all files with their checksums and gives the directory its
name; only then are older ones deleted, and not before they have lost their names.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import CheckpointError, RlhfError, one_line
from rlhf.run_lock import RunLock, say

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "driver.json"
_MANIFEST = "complete.json"
_READERS = 8  # threads that verify checksums; each takes some 3 GB/s, if the disk gives it
_CHUNK_BYTES = 1 << 22


class FileSum(NamedTuple):
    """What a file must still be when it is read."""

    num_bytes: int
    crc32: int

    def add(self, data: Any) -> "FileSum":
        """With these bytes behind what is there."""
        return FileSum(self.num_bytes + memoryview(data).nbytes, zlib.crc32(data, self.crc32))

    @staticmethod
    def of(path: Path) -> "FileSum":
        """Reads the file."""
        summed = FileSum(0, 0)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                summed = summed.add(chunk)
        return summed


@dataclass(frozen=True)
class Written:
    """What it took to write a checkpoint's files, or some of them."""

    seconds: float
    files: dict[str, FileSum]  # by path, as they were written

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @staticmethod
    def together(parts: "Iterable[Written | None]") -> "Written | None":
        """Parts that are written at the same time; None if one of them (None) is not written yet."""
        parts = list(parts)
        written = [part for part in parts if part is not None]
        if len(written) < len(parts):
            return None
        files = {path: file for part in written for path, file in part.files.items()}
        return Written(max(part.seconds for part in written), files)


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    number: int  # counts the checkpoints of a run directory in the order in which they were written; no clock does
    files: dict[str, FileSum]  # by path inside the checkpoint

    @staticmethod
    def read(checkpoint: Path) -> "Manifest":
        """Raises CheckpointError if there is none, or it is damaged."""
        try:
            plain = json.loads((checkpoint / _MANIFEST).read_text())
            return Manifest(plain["number"], {name: FileSum(*numbers) for name, numbers in plain["files"].items()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{checkpoint}: not a complete checkpoint ({_MANIFEST}: {one_line(error)})"
            ) from error

    def check_sizes(self, directory: Path) -> None:
        """Raises CheckpointError unless all files are there, with their sizes."""
        for name, expected in self.files.items():
            path = directory / name
            if not path.is_file():
                raise CheckpointError(f"{directory}: {name} is missing")
            if (found := path.stat().st_size) != expected.num_bytes:
                raise CheckpointError(f"{directory}: {name} has {found} bytes instead of {expected.num_bytes}")

    def check(self, directory: Path) -> None:
        """Raises CheckpointError unless all files are what was written. Reads them all."""
        self.check_sizes(directory)
        with ThreadPoolExecutor(_READERS) as threads:
            try:
                found = list(threads.map(FileSum.of, [directory / name for name in self.files]))
            except OSError as error:
                raise CheckpointError(f"{directory}: cannot be read ({one_line(error)})") from error
        damaged = [name for name, file in zip(self.files, found, strict=True) if file != self.files[name]]
        if damaged:
            raise CheckpointError(f"{directory}: the checksum of {', '.join(damaged)} differs")


class CheckpointStore:
    """The checkpoints of one run directory: ``checkpoints/step-000010``.

    The newest is the one written last. That is not always the highest step: a run may start over, or resume an older
    checkpoint.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        keep: int,
        lock: RunLock | None = None,
        note: Callable[[str], None] = say,
    ) -> None:
        """``lock``: what holds the run directory, asked before anything is written; ``note`` reports to the user."""
        self.directory = Path(run_dir).resolve() / "checkpoints"
        self.keep, self._lock, self._note = keep, lock, note
        self.run: dict[str, Any] = {}  # from describe_run; stored in every checkpoint
        self.current: Path | None = None  # what this process last wrote, or resumed from
        self._whole: set[Path] = set()  # whose checksums this process knows to be right

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints on disk, newest last."""
        numbered = [(number, path) for path in self._directories() if (number := _number(path)) is not None]
        return [_step(path) for _, path in sorted(numbered)]

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def begin(self, step: int, state: dict[str, Any]) -> Path:
        """A directory with ``state``, for the roles' parts; nothing counts before ``complete``.

        Training may go on in between: what changes in ``state`` is not written. Raises CheckpointError.
        """
        self._check_lock()
        self.sweep()
        partial = self._partial(step)
        with writes_checkpoint(partial):
            partial.mkdir(parents=True)
            _write_synced(partial / _STATE, {**state, **self.run})
        return partial

    def complete(self, step: int, files: Mapping[str, FileSum]) -> None:
        """Puts everything in place at once: ``files`` is what the roles have written, by path.

        Raises CheckpointError, and leaves the checkpoints before as they are, if this process does not see all of it.
        """
        self._check_lock()
        partial, final, removed = self._partial(step), self.path(step), self.directory / ".removed"
        with writes_checkpoint(partial):
            within = {str(Path(path).relative_to(partial)): file for path, file in files.items()}
            number = 1 + max((_number(path) or 0 for path in self._directories()), default=0)
            manifest = Manifest(number, within | {_STATE: FileSum.of(partial / _STATE)})
            manifest.check_sizes(partial)  # a rank may have written to a disk of its own
            _write_synced(partial / _MANIFEST, {"number": number, "files": manifest.files})
            for directory in (path for path in partial.rglob("*") if path.is_dir()):
                sync_file(directory)
            put_in_place(partial, final, removed)
            sync_file(self.directory.parent)
        self.current = final
        self._whole.add(final)
        for old in self.steps()[: -self.keep]:  # moved first: what a crash leaves of a deletion would look complete
            self.path(old).rename(removed / self.path(old).name)
        shutil.rmtree(removed)

    def sweep(self) -> None:
        """Deletes what a run that died was still writing, or deleting."""
        for leftover in [*self.directory.glob(".partial-*"), *self.directory.glob(".removed")]:
            shutil.rmtree(leftover)

    def find(self, resume: str) -> Path | None:
        """The checkpoint that ``checkpoint.resume`` asks for: auto, none, or a directory.

        ``auto`` passes over what is damaged, and says so. Raises CheckpointError if there is nothing else, or if the
        directory is damaged.
        """
        if resume == "none":
            return None
        if resume == "auto":
            if self.current is None:  # else the run has asked before, and damage is told and looked for once
                self.current = self._newest_whole()
            return self.current
        path = Path(resume).resolve()
        try:
            self._check(path)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint.resume={resume}: {error}; use auto, none, or another one") from error
        self.current = path
        return path

    def holds(self, step: int) -> bool:
        """Whether this process last wrote ``step``, or resumed from it and took no step since."""
        return self.current == self.path(step)

    def describe_loss(self, step: int) -> str:
        """What a run that ends after ``step`` without saving loses."""
        if self.current is None:
            return f"there is no checkpoint, so {step} finished step(s) are lost"
        lost = step - read_state(self.current)["step"]
        return f"the last checkpoint is {self.current}; {lost} finished step(s) since are lost"

    def _directories(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]

    def _partial(self, step: int) -> Path:
        return self.directory / f".partial-{step:06d}"

    def _newest_whole(self) -> Path | None:
        numbers = {path: _number(path) for path in self._directories()}
        newest_first = sorted(numbers, key=lambda path: (numbers[path] is None, numbers[path], path), reverse=True)
        for path in newest_first:
            try:
                self._check(path)
            except CheckpointError as error:
                self._note(f"a checkpoint is passed over: {error}")
            else:
                return path
        if newest_first:
            raise CheckpointError(
                f"{self.directory}: none of the {len(newest_first)} checkpoint(s) there is whole; restore one, or "
                "start over with checkpoint.resume=none"
            )
        return None

    def _check(self, path: Path) -> None:
        if path not in self._whole:
            Manifest.read(path).check(path)
            self._whole.add(path)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _number(checkpoint: Path) -> int | None:
    """Its place in the order of writing; None if it is damaged."""
    try:
        return Manifest.read(checkpoint).number
    except CheckpointError:
        return None


def _write_synced(path: Path, plain: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(plain, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writes_checkpoint(directory: str | Path) -> Iterator[None]:
    """Turns what goes wrong while a checkpoint is written (a full disk, say) into one line."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory}: a checkpoint could not be written ({type(error).__name__}: {one_line(error)}); the one "
            "before is whole, and the same command resumes from there"
        ) from error


def put_in_place(partial: Path, final: Path, removed: Path) -> None:
    """Gives a directory that is complete its name; what had the name before is then in ``removed``."""
    sync_file(partial)
    shutil.rmtree(removed, ignore_errors=True)  # what a crash left there
    removed.mkdir()
    if final.exists():
        final.rename(removed / final.name)
    partial.rename(final)
    sync_file(final.parent)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's driver state and description of its run. Raises CheckpointError if the file is damaged."""
    try:
        return json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _STATE}: cannot be read ({error}); remove that checkpoint") from error


def sync_file(path: Path) -> None:
    """Makes a file's contents outlast a crash of the machine; of a directory, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
