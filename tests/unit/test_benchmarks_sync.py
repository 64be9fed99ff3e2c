"""The benchmark of weight publishes runs, in its tiny mode, and writes what it measured. No figure is asserted."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.common import python_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.ray
def test_bench_sync(tiny_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    command = python_module("benchmarks.bench_sync", "--tiny", str(tiny_model_dir), "--zero", "3", "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["mode"] == "object-store" and row["zero"] == 3
    assert row["publish_s"] >= row["transfer_s"] > 0 and row["gb_per_s"] > 0
