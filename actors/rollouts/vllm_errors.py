"""Why an engine did not start: vLLM's own error says only that one of its processes failed, and to see its output."""

import os
import re
import stat
from collections.abc import Iterator

POINTERS = re.compile(r"[Ss]ee (root cause|stack trace)|for root cause")
PROCESS = re.compile(r"^\((\w+ pid=\d+)\)")  # how vLLM starts its processes' lines of output
EXCEPTION = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit)\b: .*)$")
MOST_BYTES = 4 << 20  # of output to search


class ErrorOutput:
    """What this process and its children print from now on, if that goes to files (as in a Ray worker)."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}  # by file descriptor: vLLM's own log goes to stdout
        for descriptor in (1, 2):
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                self._starts[descriptor] = status.st_size

    def explain(self, error: Exception) -> RuntimeError:
        """A picklable error (vLLM's own may not be), with the cause from the output where vLLM only points there."""
        cause = root_cause(self._read()) if POINTERS.search(str(error)) else None
        return RuntimeError(f"vLLM did not start: {cause or f'{type(error).__name__}: {error}'}")

    def _read(self) -> str:
        pieces = []
        for descriptor, start in self._starts.items():
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                file.seek(start)
                pieces.append(file.read(MOST_BYTES).decode(errors="replace"))
        return "\n".join(pieces)


def root_cause(output: str) -> str | None:
    """The last exception written by the first process to fail; what others write follows from it."""
    failed: str | None = None
    cause = None
    for process, exception in _exceptions(output):
        failed = failed or process
        if process == failed:
            cause = exception
    return cause


def _exceptions(output: str) -> Iterator[tuple[str, str]]:
    """(process, exception and message) of every line that ends a traceback, except those that point to another."""
    for line in output.splitlines():
        found = EXCEPTION.search(line)
        if found and not POINTERS.search(line):
            process = PROCESS.match(line)
            yield process[1] if process else "", found[1]
