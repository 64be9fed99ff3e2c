"""Python code that a model wrote, run in a process of its own with bounded time and memory. No sandbox: see below."""

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

STARTUP_CPU_S = 2  # of the interpreter, in addition to the time allowed
MAX_FILE_BYTES = 16 * 2**20

# Reads its orders from stdin, and writes the token only if all sources came to their end: code that calls exit() has
# not. The limits are its own, set before it runs anything.
RUNNER = """
import ctypes, json, os, resource, signal, sys, traceback
sources, token, proof, cpu_s, memory, file_bytes = json.load(sys.stdin)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the one that waits for it
for limit, value in (("CPU", cpu_s), ("AS", memory), ("FSIZE", file_bytes), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
result = os.fdopen(os.dup(proof), "w")
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, proof):
    os.dup2(null, fd)
names = {"__name__": "solution"}
try:
    for source in sources:
        exec(compile(source, "solution.py", "exec"), names)
    result.write(token)
    result.flush()
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
finally:
    os._exit(0)  # threads that the code started do not count
"""


@dataclass(frozen=True)
class Outcome:
    """What became of the code.

    ``completed``: it came to its end, without an exception or an exit. ``in_time``: it ended at all. ``printed``: to
    stdout and stderr, tracebacks included, at most as many bytes as were asked for.
    """

    completed: bool
    in_time: bool
    printed: str


def run_python(sources: Sequence[str], *, timeout_s: float, memory_bytes: int, max_printed_bytes: int = 0) -> Outcome:
    """Runs ``sources`` one after the other, with names in common, in one new process.

    It runs in an empty directory that is then removed, without the environment's variables, and is ended with its group
    after ``timeout_s``; memory, CPU time and the size of a file are bounded, and there is no network where the system
    lets a user have a network namespace of his own. Of what it prints the first ``max_printed_bytes`` are kept.

    This holds what a model writes by mistake or to get reward cheaply. It is no sandbox: the code can read the files
    that this user can read, start processes that leave its group, and, if it looks for the interpreter's frames, count
    as completed. Run the workers in containers if that matters.
    """
    token = secrets.token_hex()
    limits = (int(timeout_s) + STARTUP_CPU_S, memory_bytes, MAX_FILE_BYTES)
    with (
        tempfile.TemporaryFile() as proof,  # files, not pipes: their size is bounded
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryDirectory(prefix="rlhf-code-", ignore_cleanup_errors=True) as directory,
    ):
        process = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-u", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=printed if max_printed_bytes else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            pass_fds=(proof.fileno(),),
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory},
            start_new_session=True,
        )
        in_time = True
        try:
            orders = [list(sources), token, proof.fileno(), *limits]
            process.communicate(json.dumps(orders).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        for file in (proof, printed):
            file.seek(0)
        completed = in_time and proof.read(len(token) + 1) == token.encode()
        return Outcome(completed, in_time, printed.read(max_printed_bytes).decode(errors="replace"))


@functools.cache
def _without_network() -> tuple[str, ...]:
    """The command that runs another in a network namespace of its own, which has no interface; (): not permitted."""
    command = ("unshare", "--user", "--map-current-user", "--net")
    if shutil.which("unshare") is None:
        return ()
    try:
        permitted = subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return ()
    return command if permitted else ()
