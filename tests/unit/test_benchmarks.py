"""The benchmarks run, in their tiny mode, and write what they measured. No figure is asserted."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.rollouts.engine import request_key
from benchmarks.common import PHASES, TrainRun, python_module
from benchmarks.lengths import named_index, ragged_length

ROOT = Path(__file__).resolve().parents[2]


def measured(module: str, model: Path | None, out: Path, *options: str, timeout_s: float = 280) -> dict[str, Any]:
    models = [str(model)] if model else []
    command = python_module(f"benchmarks.{module}", "--tiny", *models, *options, "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(out.read_text())


@pytest.mark.long
def test_bench_control(tmp_path: Path) -> None:
    rows = measured("bench_control", None, tmp_path / "control.json")["rows"]
    assert [(row["workers"], row["groups"]) for row in rows] == [(4, 32), (16, 32)]
    assert all(row[f"{part}_s"] > 0 for row in rows for part in ("hand_out", "schedule", "listen", "score", "publish"))
    assert all(row["calls"] > 0 and row["replaced"] > 0 for row in rows)


@pytest.mark.long
def test_bench_learner(tiny_model_dir: Path, tmp_path: Path) -> None:
    variants = measured("bench_learner", tiny_model_dir, tmp_path / "learner.json")["variants"]
    assert variants.keys() == {"zero3", "zero1"}
    assert all(result["tokens_per_s"] > 0 for result in variants.values())


@pytest.mark.long
def test_bench_rollout(tiny_model_dir: Path, tmp_path: Path) -> None:
    settings = ["logprobs=true", "--variant", "two", "workers=2", "idle_processes=1", "engine_args.block_size=64"]
    result = measured("bench_rollout", tiny_model_dir, tmp_path / "rollout.json", *settings)
    (row,) = result["rows"]
    assert row["variant"] == "two" and row["tokens_per_s"] > 0 and "hbm" not in row
    assert result["variants"]["two"].items() >= {"workers": 2, "logprobs": True, "sequences": 8}.items()


@pytest.mark.long
@pytest.mark.ray
def test_bench_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = measured("bench_step", tiny_model_dir, tmp_path / "step.json", "--lengths", "ragged")
    (ours,) = result["rows"]
    assert ours["side"] == "ours" and "ratio" not in result
    assert all(ours[name] > 0 for name in ("step_s", *(f"{phase}_s" for phase in PHASES)))
    # The lengths are imposed: of 2 x 4 completions per step, steps 2 and 3 count.
    imposed = [sum(ragged_length(8 * step + i, 8) for i in range(8)) for step in (1, 2)]
    assert result["completion_tokens"]["ours"] == imposed


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_bench_scaling(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = measured("bench_scaling", tiny_model_dir, tmp_path / "scaling.json", timeout_s=580)
    pool, overlap, recovery = result["rows"]
    assert (pool["part"], pool["rollout_gpus"], pool["sequences"], pool["efficiency"]) == ("separate", 1, 8, 1.0)
    assert overlap["part"] == "overlap" and overlap["async_step_s"] > 0 and overlap["overlap"] > 0
    assert recovery["part"] == "recovery" and recovery["recovery_s"] > recovery["step_s"]


PARENT = """
import subprocess
from benchmarks.common import python_module
process = subprocess.Popen(python_module("http.server", "0"))
print(process.pid, flush=True)
process.wait()
"""


def test_a_module_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    ends = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends, "it outlives what started it"
        time.sleep(0.05)


def test_ragged_lengths_have_the_median_and_the_bounds_they_say() -> None:
    drawn = [ragged_length(i, 1024) for i in range(4000)]
    assert abs(statistics.median(drawn) - 330) < 20
    assert min(drawn) >= 1 and max(drawn) == 1024
    assert drawn[:5] == [ragged_length(i, 1024) for i in range(5)] and len(set(drawn[:5])) > 1


def test_the_pools_requests_are_numbered_by_name_whichever_engine_gets_them() -> None:
    assert named_index(request_key(3, 5), group_size=8) == 29
    assert named_index(request_key(3, 5) + "-1f2e3d4c", group_size=8) == 29, "vLLM appends to the name"
    assert named_index("cmpl-7", group_size=8) is None


def test_a_step_lasts_from_end_to_end_without_evaluation() -> None:
    steps = [
        {"step": 1, "wall_s": 50.0, "time/generate_s": 30.0},
        {"step": 2, "wall_s": 60.0, "time/generate_s": 4.0, "time/evaluate_s": 3.0},
        {"step": 3, "wall_s": 65.0, "time/generate_s": 2.0},
        {"step": 4, "wall_s": 74.0, "time/generate_s": 3.0, "time/checkpoint_s": 1.0},
    ]
    done = TrainRun(steps, {})
    assert done.step_s() == 7.0  # of 7, 5 and 8
    assert done.median("time/generate_s") == 3.0
