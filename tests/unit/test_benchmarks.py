"""The benchmarks run, in their tiny mode, and write what they measured. No figure is asserted."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_bench_learner(tiny_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "learner.json"
    command = [sys.executable, "-m", "benchmarks.bench_learner", str(tiny_model_dir), "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    variants = json.loads(out.read_text())["variants"]
    assert variants.keys() == {"default", "zero1"}
    assert all(result["tokens_per_s"] > 0 for result in variants.values())
