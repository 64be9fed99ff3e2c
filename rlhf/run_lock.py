"""One run per run directory: a file there says which process holds it, and that it is alive.

The file is created exclusively, which network file systems do, too. Its holder touches it every BEAT_S seconds. Who
finds it there asks the kernel about a process of the same machine. Clocks of two machines are not compared: a holder on
another machine has ended if the file does not change for SILENT_S. If it was only silent (its file system hung, say),
it finds out before it writes its next checkpoint.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from rlhf.errors import CheckpointError, ConfigError

NAME = "run.lock"
BEAT_S = 10.0
SILENT_S = 60.0
SEEN_S = 60.0  # network file systems may show a new file so late
say = partial(print, flush=True)


@dataclass(frozen=True)
class Holder:
    """A process that holds, or held, a run directory."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=lambda: _this_machine())
    pid: int = field(default_factory=os.getpid)
    began: int | None = field(default_factory=lambda: _began(os.getpid()))  # in the kernel's ticks: pids are used again
    since: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(" ", "seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """Whether the kernel can be asked about it."""
        return self.machine == _this_machine()

    @property
    def is_running(self) -> bool:
        assert self.is_here
        return self.began is not None and _began(self.pid) == self.began


class RunLock:
    """Holds a run directory, which it creates. Use as a context manager, around everything that reads or writes there.

    Raises ConfigError if another process holds it.
    """

    def __init__(self, run_dir: str | Path, note: Callable[[str], None] = say) -> None:
        """``note`` reports to the user."""
        self.directory = Path(run_dir).resolve()
        self._path, self._note = self.directory / NAME, note
        self._self = Holder()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._is_new = not self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            while not _create(self._path, self._self):
                self._take_over()
        except OSError as error:
            raise ConfigError(f"run_dir={self.directory}: cannot be written to ({error}); choose another") from error
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._is_ours():
            self._path.unlink()
        if self._is_new:
            with contextlib.suppress(OSError):  # it is not empty
                self.directory.rmdir()

    def check(self) -> None:
        """Raises CheckpointError if this process does not hold the directory any more."""
        if not self._is_ours():
            raise CheckpointError(
                f"run_dir={self.directory}: {read_holder(self.directory) or 'nobody'} holds it by now, because this "
                f"process gave no sign of life for {SILENT_S:g} s or {NAME} was deleted; it writes nothing more there"
            )

    def _is_ours(self) -> bool:
        holder = read_holder(self.directory)
        return holder is not None and holder.token == self._self.token

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the file system hangs, or the file is gone: check() finds out
                if self._is_ours():
                    os.utime(self._path)

    def _take_over(self) -> None:
        """Removes the lock of a process that has ended. Raises ConfigError if it has not."""
        holder = read_holder(self.directory)
        if holder is not None and holder.is_here:
            alive = holder.is_running
        else:
            self._note(f"{self.directory}: held by {holder or 'somebody'}; {SILENT_S:g} s for a sign of life")
            alive = shows_life(self.directory, SILENT_S)
        if alive:
            raise ConfigError(
                f"run_dir={self.directory}: another run is using it ({read_holder(self.directory) or 'just started'}); "
                "stop that run, or choose another name or run_dir"
            )
        aside = self._path.with_name(f"{NAME}.{self._self.token}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return  # somebody else did
        taken = _read(aside)
        aside.unlink()
        if taken is not None and taken != holder:  # who was faster has taken over and holds it
            _create(self._path, taken)
            return
        self._note(f"{self.directory}: taken over from {holder or 'somebody'}, which has ended")


def shows_life(run_dir: str | Path, for_s: float) -> bool:
    """Watches a run's lock for so many seconds. One that goes away shows life, too: its holder has just ended."""
    path = Path(run_dir) / NAME
    first, ends_s = _version(path), time.monotonic() + for_s
    while time.monotonic() < ends_s:
        time.sleep(1.0)
        if _version(path) != first:
            return True
    return False


def read_holder(run_dir: str | Path) -> Holder | None:
    """Who holds a run directory; None if nobody does, or it cannot be read just now."""
    return _read(Path(run_dir) / NAME)


def sees_token(run_dir: str | Path, token: str) -> bool:
    """Whether this process sees the lock with that token; waits SEEN_S for it."""
    ends_s = time.monotonic() + SEEN_S
    while True:
        holder = read_holder(run_dir)
        if holder is not None and holder.token == token:
            return True
        if time.monotonic() > ends_s:
            return False
        time.sleep(1.0)


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _create(path: Path, holder: Holder) -> bool:
    """Whether the lock is now this holder's; False if there is one."""
    try:
        with path.open("x") as file:
            json.dump(asdict(holder), file)
    except FileExistsError:
        return False
    return True


def _version(path: Path) -> Any:
    """Changes with every touch. Opened first: network file systems then ask the server."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _this_machine() -> str:
    """Differs wherever process ids mean something else: between machines, their boots, and containers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _began(pid: int) -> int | None:
    """When a process of this machine began, in ticks since boot; None if there is none, or nobody has reaped it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
