"""Python stacks of processes that do not answer: they write them themselves when signalled, whatever they wait for.

Python's faulthandler writes them from the signal's handler, so a process that holds the interpreter, or waits in a
collective, answers too. It writes into memory of its own that others open through /proc: no file is left behind, and a
process that has not asked for the signal, which would end it, is never sent one.
"""

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR1  # neither Ray nor vLLM uses it; libkineto takes SIGUSR2
PREFIX = "rlhf-stacks:"
REACT_S = 3.0  # for a process to write; it is stopped, or waits for the kernel, if it has not begun by then
POLL_S = 0.05
QUIET_POLLS = 6  # nothing more for so many: it has written all

_answers: set[int] = set()  # this process's id; a fork has one of its own


def answer_signals(name: str = "") -> None:
    """From now on this process writes the stacks of its threads on SIGNAL.

    ``name``: by which ``stacks_of`` finds it; processes that it starts are found through it and need none.
    """
    if os.getpid() in _answers:
        return
    _answers.add(os.getpid())
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(SIGNAL, file=nowhere)  # before anybody can find this process
        memory = os.memfd_create(f"{PREFIX}{os.getpid()}:{name}")
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, file=memory, all_threads=True)


@dataclass(frozen=True)
class _Process:
    """One process of this machine that answers."""

    pid: int
    name: str
    memory: Path

    def state(self) -> str:
        """The kernel's word for what it does, such as 'S (sleeping)' or 'T (stopped)'."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("State:"))

    def title(self) -> str:
        """Its command line, shortened."""
        return Path(f"/proc/{self.pid}/cmdline").read_text().replace("\0", " ").replace("\n", " ").strip()[:100]


def stacks_of(names: Collection[str]) -> dict[str, str]:
    """By name, the stacks of the processes of this machine that bear it, and of those that they started.

    Names that no process bears are left out. Takes at most about REACT_S, however many there are.
    """
    families: dict[str, list[_Process]] = {}
    for process in _answering():
        bearer = process.name if process.name in names else _ancestor(process.pid, names)
        if bearer is not None:
            families.setdefault(bearer, []).append(process)
    written = _written([process for family in families.values() for process in family])
    return {name: "\n".join(written[process] for process in family) for name, family in families.items()}


def _answering() -> list[_Process]:
    """The processes of this user that have called ``answer_signals``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            memory = next(filter(None, (_memory(link) for link in (directory / "fd").iterdir())), None)
        except OSError:  # it has ended, or belongs to someone else
            continue
        if memory is not None:
            pid, _, name = memory[1].partition(":")
            if pid == directory.name:  # else a fork that holds its parent's
                found.append(_Process(int(pid), name, memory[0]))
    return found


def _memory(link: Path) -> tuple[Path, str] | None:
    """An open file with 'pid:name' if it is the memory for stacks."""
    try:
        target = os.readlink(link)
    except FileNotFoundError:  # it was closed meanwhile
        return None
    _, found, rest = target.partition(f"memfd:{PREFIX}")
    return (link, rest.removesuffix(" (deleted)")) if found else None


def _ancestor(pid: int, names: Collection[str]) -> str | None:
    """Which of ``names`` a process above this one bears."""
    try:
        # after the command, which is in parentheses and may hold anything: state, parent
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        links = list(Path(f"/proc/{parent}/fd").iterdir()) if parent > 1 else []
    except OSError:
        return None
    for link in links:
        if (memory := _memory(link)) is not None and (name := memory[1].partition(":")[2]) in names:
            return name
    return _ancestor(parent, names) if parent > 1 else None


def _written(processes: Collection[_Process]) -> dict[_Process, str]:
    """What each writes; all of them are asked at once."""
    texts: dict[_Process, str] = {}
    sizes: dict[_Process, list[int]] = {}
    for process in processes:
        try:
            os.truncate(process.memory, 0)
            os.kill(process.pid, SIGNAL)
            sizes[process] = []
        except OSError:
            texts[process] = f"process {process.pid}: has ended\n"
    ends = time.monotonic() + REACT_S
    while sizes and time.monotonic() < ends:
        time.sleep(POLL_S)
        for process, seen in list(sizes.items()):
            try:
                seen.append(process.memory.stat().st_size)
            except OSError:
                texts[process] = f"process {process.pid}: has ended\n"
                del sizes[process]
                continue
            if seen[-1] and seen[-QUIET_POLLS:] == seen[-1:] * QUIET_POLLS:
                texts[process] = _read(process)
                del sizes[process]
    return texts | {process: _read(process) for process in sizes}


def _read(process: _Process) -> str:
    try:
        head = f"process {process.pid}, {process.state()}, {process.title()}"
        stacks = process.memory.read_bytes().decode(errors="replace").strip()
    except OSError:
        return f"process {process.pid}: has ended\n"
    return f"{head}\n{stacks}\n" if stacks else f"{head}: does not react to signals\n"
