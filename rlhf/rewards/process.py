"""Sync reward functions in a process of their own, one call at a time, in its main thread.

There ``signal.alarm`` works, which many answer checkers use for timeouts; and code that never releases the interpreter,
such as a runaway ``re``, can be killed. The process imports this module and the functions' own, but not torch.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.processes import end_with_parent
from rlhf.rewards.loading import RewardFunction, resolve
from rlhf.stacks import answer_signals

# Not multiprocessing: its children import the main module again, and may not have processes of their own.
COMMAND = (
    "import sys; pipe, parent, *sys.path = sys.argv[1:]; del sys.argv[1:]; "
    "from rlhf.rewards.process import serve; serve(int(pipe), int(parent))"
)

LOADED = ""  # the child's first answer if nothing is wrong

Spec = tuple[str, str, str]
"""A function's name, path and key: what it takes to load it."""


class FunctionProcess:
    """Calls sync functions in a child process, started when first needed, and replaced if it ended.

    The child ends with this process, or when this object is closed or deleted. Thread-safe: groups take turns.
    """

    def __init__(self, functions: Sequence[RewardFunction], *, timeout_s: float, start_timeout_s: float) -> None:
        """``timeout_s``: for one call; ``start_timeout_s``: for starting the child and loading the functions in it."""
        self._functions = list(functions)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._turn = threading.Lock()  # held by the group whose functions run
        self._starter = ThreadPoolExecutor(1, "reward-process")  # its thread stays: see end_with_parent
        self._child: Child | None = None

    def start(self) -> None:
        """Starts the child, if there is any function, so that no call waits for it. Raises ConfigError if a function
        cannot be loaded there, else as ``score`` does."""
        with self._turn:
            if self._functions:
                self._living_child()

    def score(self, calls: Sequence[tuple[RewardFunction, dict[str, Any]]], num_rows: int) -> dict[str, list[float]]:
        """One list [num_rows] per function, by name; NaN where it abstained. Calls run one by one.

        Raises RewardError (a function raised, did not return one finite number or None per row, or ended its process)
        or DeadlineError.
        """
        with self._turn:
            return {function.name: self._call(function, arguments, num_rows) for function, arguments in calls}

    def close(self) -> None:
        """Ends the child; waits for a call in progress."""
        with self._turn:
            self._end_child()

    def _call(self, function: RewardFunction, arguments: dict[str, Any], num_rows: int) -> list[float]:
        child = self._living_child()
        try:
            answer = child.ask((function.name, arguments, num_rows), self._timeout_s)
        except TimeoutError:
            self._end_child()
            raise function.late(num_rows, self._timeout_s) from None
        except ChildProcessError as error:
            self._end_child()
            raise RewardError(
                f"{function} ended its process ({error}) on {num_rows} completions; fix it, or give it more memory"
            ) from None
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer

    def _living_child(self) -> "Child":
        if self._child is not None and self._child.is_alive:
            return self._child
        self._end_child()
        self._child = self._starter.submit(Child).result()
        names = ", ".join(function.name for function in self._functions)
        specs: list[Spec] = [(f.name, f.path, f.key) for f in self._functions]
        try:
            answer = self._child.ask(specs, self._start_timeout_s)
        except TimeoutError:
            self._end_child()
            raise DeadlineError(
                f"reward.functions: the process of {names} did not load them within timeouts.start_s="
                f"{self._start_timeout_s:g}; raise that, or make their modules load faster"
            ) from None
        except ChildProcessError as error:
            self._end_child()
            raise RewardError(
                f"reward.functions: the process of {names} ended ({error}) while it loaded them; fix their modules"
            ) from None
        if answer != LOADED:
            self._end_child()
            raise ConfigError(answer)
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class Child:
    """The parent's end of one child process."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        pipe = theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(pipe), str(os.getpid()), *map(str, sys.path)],
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach it, and what it starts can be killed with it
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Its answer to a message. Raises TimeoutError, or ChildProcessError saying how it ended; the child is then
        dead.

        Killing it at the deadline ends every wait: to send, for the answer, and for the rest of the answer.
        """
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._kill()

        watchdog = threading.Timer(timeout_s, stop)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._connection.send(message)
            received = self._connection.recv()
        except (EOFError, OSError):  # the pipe is closed, perhaps in the middle of an answer
            received = None
        finally:
            watchdog.cancel()
            watchdog.join()
        if received is not None and not late.is_set():
            return received
        exit_code = self.end()
        if late.is_set() and exit_code == -signal.SIGKILL:
            raise TimeoutError
        raise ChildProcessError(describe_exit(exit_code))

    def end(self) -> int:
        """Kills it, if it is still alive, and what it started; returns its exit code."""
        self._kill()
        exit_code = self._process.wait()
        self._connection.close()
        return exit_code

    def _kill(self) -> None:
        if self._process.returncode is None:  # else its process id may have been reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def describe_exit(exit_code: int) -> str:
    """'exit code 3', or 'exit code -11, Segmentation fault'."""
    return f"exit code {exit_code}" + ("" if exit_code >= 0 else f", {signal.strsignal(-exit_code)}")


def serve(pipe: int, parent: int) -> None:
    """The child: loads the functions that the first message names, then calls them on request until the pipe closes."""
    end_with_parent(parent)
    heed_sigterm_in_children()
    answer_signals()
    os.set_inheritable(pipe, False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it will be killed: nothing may remain in a buffer
    connection = Connection(pipe)
    try:
        specs: list[Spec] = connection.recv()
        functions = {name: RewardFunction(name, 0.0, resolve(path, key), path, key=key) for name, path, key in specs}
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(LOADED)
    while True:
        try:
            name, arguments, num_rows = connection.recv()
        except EOFError:
            return
        connection.send(answer(functions[name], arguments, num_rows))


def heed_sigterm_in_children() -> None:
    """A scheduler's SIGTERM does not end this process, which the run needs to finish its step; functions can end with
    it what they start."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of Python's is not inherited by other programs
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see actors/connect.py


def answer(function: RewardFunction, arguments: dict[str, Any], num_rows: int) -> list[float] | str:
    """The function's scores, or an error message."""
    try:
        values = function.call(**arguments)
    except BaseException as error:  # SystemExit included: it would end this process silently
        traceback.print_exc()
        return str(function.raised(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left set would hit another function
    try:
        return function.checked(values, num_rows)
    except RewardError as error:
        return str(error)
