"""Python code that a completion contains, run against tests in processes of their own."""

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlhf.rewards.functions import Completion, Values, completion_text

FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
STARTUP_CPU_S = 2  # of the interpreter, in addition to the time allowed
MAX_FILE_BYTES = 16 * 2**20

# Reads (code, tests, token, limits) from stdin, and prints the token only if all tests came to their end: code that
# calls exit() has passed nothing. The limits are its own, set before it runs anything.
RUNNER = """
import ctypes, json, os, resource, signal, sys
code, tests, token, cpu_s, memory, file_bytes = json.load(sys.stdin)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the one that waits for it
for limit, value in (("CPU", cpu_s), ("AS", memory), ("FSIZE", file_bytes), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
result = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
names = {"__name__": "solution"}
exec(compile(code, "solution.py", "exec"), names)
for test in tests:
    exec(compile(test, "test.py", "exec"), names)
result.write(token)
result.flush()
os._exit(0)  # threads that the code started do not count
"""


def python_tests(
    completions: Sequence[Completion],
    tests: Sequence[str | list[str] | None],
    timeout_s: float = 5.0,
    memory_mib: int = 1024,
    num_parallel: int = 8,
) -> Values:
    """1 where the last fenced Python block of the completion passes all its ``tests``, else 0; without a block 0.

    ``tests``: a column with Python source, or a list of such, that uses what the code defines and raises if it is
    wrong: ``assert add(1, 2) == 3``. None abstains. Code and tests run in one new process per completion, in an empty
    directory that is then removed, without the environment's variables, ended with its group after ``timeout_s``;
    memory, CPU time and the size of a file are bounded, and there is no network where the system lets a user have a
    network namespace of his own. At most ``num_parallel`` run at once: the group needs up to
    ceil(group_size / num_parallel) x ``timeout_s``, which must be below ``reward.function_timeout_s``.

    This holds what a model writes by mistake or to get reward cheaply. It is no sandbox: the code can read the files
    that this user can read, start processes that leave its group, and, if it looks for the interpreter's frames, pass
    any test. Run the workers in containers if that matters.
    """
    if timeout_s <= 0 or memory_mib < 1 or num_parallel < 1:
        raise ValueError("timeout_s, memory_mib and num_parallel must be positive")

    def value(completion: Completion, given: str | list[str] | None) -> float | None:
        if given is None:
            return None
        blocks = FENCE.findall(completion_text(completion))
        wanted = [given] if isinstance(given, str) else given
        if not wanted:
            raise ValueError("tests is an empty list, which anything would pass; use null where there are none")
        return float(bool(blocks) and _passes(blocks[-1], wanted, timeout_s, memory_mib * 2**20))

    with ThreadPoolExecutor(num_parallel) as threads:
        return list(threads.map(value, completions, tests))


def _passes(code: str, tests: list[str], timeout_s: float, memory_bytes: int) -> bool:
    token = secrets.token_hex()
    limits = (int(timeout_s) + STARTUP_CPU_S, memory_bytes, MAX_FILE_BYTES)
    with (
        tempfile.TemporaryFile() as printed,  # not a pipe: the size of a file is bounded
        tempfile.TemporaryDirectory(prefix="rlhf-tests-", ignore_cleanup_errors=True) as directory,
    ):
        process = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps([code, tests, token, *limits]).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        printed.seek(0)
        return printed.read(len(token) + 1) == token.encode()


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
