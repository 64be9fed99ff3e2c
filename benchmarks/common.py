"""What the benchmarks share: a run of ``rlhf train`` read back, a table at the terminal, a JSON file."""

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from rlhf.recipes import load_config
from rlhf.tracking.tracker import OUTSIDE_STEPS

ROOT = Path(__file__).resolve().parents[1]
# of one training step, by their names in the metrics
PHASES = ("generate", "reward", "reference", "score", "advantage", "update", "publish")
TRAIN_SETTINGS = (  # nothing that only costs time, and no second attempt that would pass for the first
    "tracking.tensorboard=false",
    "tracking.completions_every_steps=0",
    "checkpoint.every_steps=0",
    "checkpoint.save_final_model=false",
    "checkpoint.max_restarts=0",
)
# a GPU recipe at its smallest, on a CPU
TINY_SETTINGS = (
    *("placement.device=cpu", "learner.compile=false"),
    *("learner.cpus_per_rank=1", "rollout.cpus_per_worker=1"),
)
END_S = 120.0  # for a run to end after SIGINT
LOG_WIDTH = 200  # of a table that does not go to a terminal
TAIL_CHARACTERS = 4000  # of a failed command's output

RUN_AS_CHILD = """
import runpy, sys
from rlhf.processes import end_with_parent
end_with_parent(int(sys.argv[1]))
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class TrainRun:
    """What a finished ``rlhf train`` wrote: a record per step (metrics.jsonl), and summary.json."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    def median(self, name: str) -> float:
        """The median of a metric over the steps from the second on; the first one compiles and captures."""
        return statistics.median(step[name] for step in self.steps[1:])

    def step_s(self) -> float:
        """Median seconds from one step's end to the next, less evaluations and checkpoints in between."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return statistics.median(
            after["wall_s"] - before["wall_s"] - sum(after.get(f"time/{phase}_s", 0.0) for phase in OUTSIDE_STEPS)
            for before, after in pairs
        )


def train(config: str, overrides: Sequence[str]) -> TrainRun:
    """Runs ``rlhf train`` with ``conf/<config>`` in its own process and directory, and reads what it recorded.

    Raises RuntimeError with the end of its output if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as directory:
        run(_train_command(config, overrides, directory))
        summary = json.loads((Path(directory) / "summary.json").read_text())
        return TrainRun(steps_of(Path(directory)), summary)


def rollout_share(config: str, overrides: Sequence[str]) -> int:
    """Completions per step and rollout worker of such a run."""
    return load_config(ROOT / "conf" / config, overrides).rollout_share


class BackgroundTrain:
    """``rlhf train`` in the background, to interfere with. Leaving the context ends it and whatever it started."""

    def __init__(self, config: str, overrides: Sequence[str]) -> None:
        self._config, self._overrides = config, overrides

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="rlhf-bench-")
        self._directory = Path(self._scratch.name)
        command = _train_command(self._config, self._overrides, self._scratch.name)
        with (self._directory / "output.log").open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGINT)  # it stops at the end of the step
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
            raise
        finally:
            self._scratch.cleanup()

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], timeout_s: float) -> list[dict[str, Any]]:
        """Waits until the records of its steps meet the condition; returns them. Raises RuntimeError if too late."""
        ends = time.monotonic() + timeout_s
        while not condition(steps := steps_of(self._directory)):
            if self._process.poll() is not None or time.monotonic() > ends:
                output = (self._directory / "output.log").read_text()[-TAIL_CHARACTERS:]
                raise RuntimeError(f"rlhf train ended or took more than {timeout_s:g} s; its output ends:\n{output}")
            time.sleep(0.05)
        return steps


def _train_command(config: str, overrides: Sequence[str], run_dir: str) -> list[str]:
    settings = [f"run_dir={run_dir}", *TRAIN_SETTINGS, *overrides]
    return python_module("jobs.cli", "train", "-c", str(ROOT / "conf" / config), *settings)


def python_module(name: str, *arguments: str) -> list[str]:
    """The command ``python -m name arguments``, for this process to start; it ends with it, even on SIGKILL."""
    return [sys.executable, "-c", RUN_AS_CHILD, str(os.getpid()), name, *arguments]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's finished steps."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def actor_pids(run: str, actor: str) -> list[int]:
    """Process ids of a run's actors of one class on this machine, including those still starting."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                is_actor = f"ray::{actor}".encode() in (entry / "cmdline").read_bytes()
                if is_actor and f"RLHF_RUN={run}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Runs a command from the repository's root with ``env`` on top. Raises RuntimeError with the end of its output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-TAIL_CHARACTERS:]}")


class PeakMemory:
    """The most memory in use on any GPU that this process may use, while the context lasts; read once a second.

    ``gib`` is None if there is no nvidia-smi.
    """

    def __init__(self) -> None:
        self.gib: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]  # MiB, a line per GPU
        if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={gpus}")
        while not self._ended.wait(1.0):
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            self.gib = max(self.gib or 0.0, max(map(float, answer.split())) / 1024)


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows as a table; its columns are their keys."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    console = Console()
    (console if console.is_terminal else Console(width=LOG_WIDTH)).print(table)


def write_json(out: Path | None, rows: Sequence[Row], **facts: Any) -> None:
    """Writes the rows, what they were measured on and ``facts`` to ``out``, if one is given."""
    if out:
        content = {"device": device_name(), "cpus": os.cpu_count(), "python": platform.python_version(), **facts}
        out.write_text(json.dumps({**content, "rows": list(rows)}, indent=1) + "\n")


def _cell(value: Any) -> str:
    """Three significant digits are what a measurement here is worth."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def device_name() -> str:
    """torch's name for this machine's first GPU, or 'cpu'; from a separate process, so that no context stays here."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
