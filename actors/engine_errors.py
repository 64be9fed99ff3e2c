"""Why an engine did not start: vLLM's own error says only that one of its processes failed, and to see its output."""

import os
import re
import stat
from collections.abc import Iterator

POINTERS = re.compile(r"[Ss]ee (root cause|stack trace)|for root cause")
PROCESS = re.compile(r"^\((\w+ pid=\d+)\)")  # how vLLM begins the lines of its own processes
EXCEPTION = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit)\b: .*)$")
MOST_BYTES = 4 << 20  # of output that is looked at


class ErrorOutput:
    """What this process and its children write to stderr from here on, where that is a file (as in a Ray worker)."""

    def __init__(self) -> None:
        status = os.fstat(2)
        self._start = status.st_size if stat.S_ISREG(status.st_mode) else None

    def explain(self, error: BaseException) -> BaseException:
        """The error with the root cause that the output names; itself where it does not point there."""
        if self._start is None or not POINTERS.search(str(error)):
            return error
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(self._start)
            cause = root_cause(file.read(MOST_BYTES).decode(errors="replace"))
        return error if cause is None else RuntimeError(f"vLLM did not start: {cause}")


def root_cause(output: str) -> str | None:
    """The last exception that the first process to fail has written: what others write follows from it."""
    failed: str | None = None
    cause = None
    for process, exception in _exceptions(output):
        failed = failed or process
        if process == failed:
            cause = exception
    return cause


def _exceptions(output: str) -> Iterator[tuple[str, str]]:
    """(process, exception and message) of every line that ends a traceback, but for those that point to another."""
    for line in output.splitlines():
        found = EXCEPTION.search(line)
        if found and not POINTERS.search(line):
            process = PROCESS.match(line)
            yield process[1] if process else "", found[1]
