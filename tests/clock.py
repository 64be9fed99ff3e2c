"""A clock that stands still: time passes only where a test says so."""

import time

import pytest


class Clock:
    """``time.monotonic`` and ``time.perf_counter``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: self.now_s)
