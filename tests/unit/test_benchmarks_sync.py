"""The benchmark of weight publishes runs, in its tiny mode, and writes what it measured."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

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
    assert row.keys() == {
        *("mode", "zero", "bucket_mib", "publish_s", "begin_s", "join_s", "transfer_s", "finish_s", "slowest_s"),
        *("first_gb", "gb", "gb_per_s", "learner_gib", "worker_gib", "loaded"),
    }
    assert (row["mode"], row["zero"], row["bucket_mib"]) == ("object-store", 3, 1)
    sizes = [tensor.nbytes for tensor in load_file(tiny_model_dir / "model.safetensors").values()]
    assert 0 <= row["gb"] * 1e9 - sum(sizes) < 16 * len(sizes), "the model, and padding"
    assert row["first_gb"] == row["gb"]
    assert row["gb_per_s"] * row["publish_s"] == pytest.approx(row["gb"])
    assert row["slowest_s"] >= row["publish_s"] >= row["transfer_s"] > 0 == row["join_s"], "the store needs no joining"
