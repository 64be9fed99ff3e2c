"""The benchmarks run, in their tiny mode, and write what they measured: what must be known of it is asserted."""

import json
import math
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.rollouts.engine import request_key
from benchmarks import bench_scaling
from benchmarks.bench_learner import ragged_batch
from benchmarks.bench_rollout import phrases
from benchmarks.common import PHASES, TrainRun, python_module
from benchmarks.lengths import named_index, ragged_length
from rlhf.packing import batch_spans
from rlhf.planning.costs import update_flops
from rlhf.planning.shapes import read_shape

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


def test_bench_turns(tmp_path: Path) -> None:
    (row,) = measured("bench_turns", None, tmp_path / "turns.json")["rows"]
    assert (row["workers"], row["turns"]) == (2, 64) and row["driver_s"] > 0


@pytest.mark.long
def test_bench_learner(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = measured("bench_learner", tiny_model_dir, tmp_path / "learner.json")
    batch = ragged_batch(16, 8, 12, 24, vocab=512)
    assert result["tokens"] == len(batch.tokens) == 16 * 8 + batch.num_completion_tokens
    assert result["variants"].keys() == {"zero3", "zero1"}
    shape = read_shape(str(tiny_model_dir))
    assert shape is not None
    flops = update_flops(shape, batch_spans(batch), batch.num_completion_tokens)
    for row in result["variants"].values():
        assert row.keys() == {"first_s", "grad_norm", "update_s", "tokens_per_s", "tflops", "mfu", "peak_gib"}
        assert row["tokens_per_s"] * row["update_s"] == pytest.approx(len(batch.tokens))
        assert row["tflops"] * row["update_s"] == pytest.approx(flops / 1e12)
        assert math.isnan(row["mfu"]) and math.isnan(row["peak_gib"]), "of a GPU"
    zero3, zero1 = result["variants"].values()
    assert zero3["grad_norm"] == pytest.approx(zero1["grad_norm"], rel=1e-4), "the same work"


@pytest.mark.long
def test_bench_rollout(tiny_model_dir: Path, tmp_path: Path) -> None:
    settings = ["logprobs=true", "--variant", "two", "workers=2", "idle_processes=1", "engine_args.block_size=64"]
    result = measured("bench_rollout", tiny_model_dir, tmp_path / "rollout.json", *settings)
    (row,) = result["rows"]
    assert row.keys() == {"variant", "generate_s", "min_s", "max_s", "tokens_per_s", "prompt_tokens", "start_s"}
    assert row["variant"] == "two" and row["min_s"] == row["generate_s"] == row["max_s"], "a single repeat"
    assert row["tokens_per_s"] * row["generate_s"] == pytest.approx(8 * 8)
    assert row["prompt_tokens"] == statistics.fmean(len(p.token_ids) for p in phrases(str(tiny_model_dir), 2, 4))
    assert result["variants"]["two"].items() >= {"workers": 2, "logprobs": True, "sequences": 8}.items()


@pytest.mark.long
@pytest.mark.ray
def test_bench_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = measured("bench_step", tiny_model_dir, tmp_path / "step.json", "--lengths", "ragged")
    (ours,) = result["rows"]
    phases = {f"{phase}_s" for phase in PHASES}
    assert ours.keys() == {"side", "step_s", "peak_gpu_gib", "version", *phases}
    assert ours["side"] == "ours" and result["ratios"] == {}
    # the medians of steps 2 and 3 are their means, so they add up; what is left is between the phases
    assert all(ours[name] > 0 for name in phases) and sum(ours[name] for name in phases) < ours["step_s"]
    # The lengths are imposed: of 2 x 4 completions per step, steps 2 and 3 count.
    imposed = [sum(ragged_length(8 * step + i, 8) for i in range(8)) for step in (1, 2)]
    assert result["completion_tokens"]["ours"] == imposed


@pytest.mark.long
@pytest.mark.ray
def test_bench_scaling_sees_a_killed_worker_replaced(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = measured("bench_scaling", tiny_model_dir, tmp_path / "scaling.json", "--parts", "recovery")
    (row,) = result["rows"]
    assert (row["part"], row["rollout_gpus"], row["learner_gpus"]) == ("recovery", 1, 1)
    assert row["start_s"] > 0 and row["recovery_s"] >= row["longest_step_s"] > row["step_s"] > 0


def trained(*, ends_s: list[float], mean_length: float = 0.0, **phases_s: float) -> TrainRun:
    """A run whose steps ended then and spent the same on their phases; the first one, which does not count, more."""
    figures = {f"time/{phase}_s": seconds for phase, seconds in (dict.fromkeys(PHASES, 0.0) | phases_s).items()}
    steps: list[dict[str, Any]] = [
        {"wall_s": end_s, "completions/mean_length": mean_length, "pool/busy_s": 0.5, **figures} for end_s in ends_s
    ]
    steps[0] |= dict.fromkeys(figures, 100.0)
    return TrainRun(steps, {})


def scaling(monkeypatch: pytest.MonkeyPatch, *runs: TrainRun) -> tuple[bench_scaling.Scaling, list[list[str]]]:
    """A benchmark of three GPUs whose runs have ended like these; and what they were told."""
    told, left = [], list(runs)

    def train(config: str, overrides: list[str]) -> TrainRun:
        told.append(overrides)
        return left.pop(0)

    monkeypatch.setattr(bench_scaling, "train", train)
    facts = {"gpus": 3, "prompts": 2, "group": 4, "completion": 128, "steps": 3, "staleness": 1, "engines": 2}
    return bench_scaling.Scaling(Namespace(model="m", settings=[], counts=[], **facts)), told


def test_the_efficiency_of_a_pool_is_of_its_tokens_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trained(ends_s=[200, 202, 204], mean_length=100, generate=1, update=0.5, publish=0.25)
    two = trained(ends_s=[200, 203, 206], mean_length=100, generate=1.25, update=1, publish=0.25)
    bench, told = scaling(monkeypatch, one, two)
    alone, both = bench.separate()
    assert alone == {
        **{"part": "separate", "rollout_gpus": 1, "engines": 1, "learner_gpus": 1, "sequences": 8, "step_s": 2},
        **{"generate_s": 1, "engine_s": 0.5, "update_s": 0.5, "publish_s": 0.25, "tokens_per_s": 800, "efficiency": 1},
    }
    assert (both["sequences"], both["tokens_per_s"], both["efficiency"]) == (16, 1280, 0.8)
    for workers, overrides in enumerate(told, start=1):
        wanted = {f"rollout.num_workers={workers}", f"algorithm.prompts_per_step={2 * workers}", "num_steps=3"}
        assert wanted | {"rollout.max_num_seqs=8", "placement.mode=separate"} <= set(overrides)


def test_overlap_is_of_the_longer_half_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turns = trained(ends_s=[200, 209, 218], generate=4, reward=0.5, reference=0.5, score=1, update=2, publish=1)
    at_once = trained(ends_s=[200, 206, 212])
    bench, told = scaling(monkeypatch, in_turns, at_once, in_turns, at_once)
    row, _ = bench.overlap()
    assert row == {
        **{"part": "overlap", "rollout_gpus": 1, "learner_gpus": 1, "generate_s": 4, "train_s": 5},
        **{"sync_step_s": 9, "async_step_s": 6, "speedup": 1.5, "overlap": 5 / 6},
    }
    assert ["rollout.max_staleness=1" in overrides for overrides in told] == [False, True] * 2


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
