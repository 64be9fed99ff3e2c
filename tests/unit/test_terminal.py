"""What a person sees of a run on a terminal, 80 and 140 characters wide: a real one, and a run over nothing."""

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
RUN = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
from types import SimpleNamespace
from jobs.runs import stops_at_step_end, summarise
from rlhf.config import TrackingConfig
from rlhf.tracking import Tracker

run_dir, seen = sys.argv[1], int(sys.argv[2])
tracker = Tracker(TrackingConfig(tensorboard=False), run_dir, num_steps=300, tokenizer=None)
checkpoint = SimpleNamespace(grace_s=60)
loop = SimpleNamespace(
    step=3, evaluations={}, stop_requested=0, tracker=tracker, best=None, config=SimpleNamespace(checkpoint=checkpoint)
)
for step in (1, 2, 3):
    with tracker.phase("generate"), tracker.phase("update"):
        pass
    metrics = {"reward": step / 4, "kl": 0.0125, "learning_rate": 1e-6, "time/generate_s": 7.25, "time/update_s": 3.5}
    tracker.log_step(step, metrics | {"time/a_phase_with_a_long_name_s": 100.0}, num_tokens=1000)
with stops_at_step_end(loop), tracker.phase("update"):
    while not loop.stop_requested:
        signal.pause()
    os.read(seen, 1)
summarise(loop, 300, None, "cpu", {"learner": {"host": 1.5}})
"""


@contextmanager
def terminal(
    width: int, run_dir: Path
) -> Iterator[tuple[Screen, int, Callable[[str | None], None], Callable[[], None]]]:
    """A run on a terminal: its screen, the keyboard, what reads until a text is on it (None: to the end), and what lets
    the run go on."""
    screen = Screen(width)
    keyboard, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    seen, tell = os.pipe()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8"}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(run_dir), str(seen)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=[seen],
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)

    def read_until(text: str | None) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while text is None or not any(text in line for line in screen.lines):
            assert select.select([keyboard], [], [], ends_s - time.monotonic())[0], screen.lines
            try:
                written = os.read(keyboard, 1 << 16)
            except OSError:  # the run has ended
                assert text is None, screen.lines
                return
            screen.feed(written.decode())
            assert time.monotonic() < ends_s, screen.lines

    try:
        yield screen, keyboard, read_until, lambda: os.close(tell)
    finally:
        run.kill()
        run.wait()
        os.close(keyboard)
        os.close(seen)


@pytest.mark.parametrize("width", [80, 140])
def test_step_lines_stay_ctrl_c_is_acknowledged_and_the_table_is_whole(width: int, tmp_path: Path) -> None:
    with terminal(width, tmp_path) as (screen, keyboard, read_until, go_on):
        read_until(" left update ")
        os.write(keyboard, b"\x03")
        read_until("stops at once")
        *steps, bar, curve, told = [line for line in screen.lines if line]
        assert [line.split("  ")[:4] for line in steps] == [
            [f"step {step}/300", f"reward {step / 4:.4g}", "kl 0.0125", "lr 1e-06"] for step in (1, 2, 3)
        ]
        assert all(len(line) <= width and (width > 80 or line.endswith("…")) for line in steps), "one line each"
        assert " step 3/300 " in bar and " left update " in bar
        assert curve == "  reward ▁▅█ 0.75"
        assert told == "stopping at the end of this step, with a checkpoint; Ctrl-C again stops at once"
        go_on()
        read_until(None)
        lines = [line for line in screen.lines if line]
    assert lines[:3] == steps
    top, bottom = (next(i for i, line in enumerate(lines) if line.startswith(corner)) for corner in "┌└")
    assert "run interrupted after 3 steps" in lines[top - 1]
    assert all(line.startswith("│") and line.endswith("│") for line in lines[top + 1 : bottom])
    assert lines[bottom + 1 :] == ["stopped after step 3 of 300; the same command resumes from there"]
