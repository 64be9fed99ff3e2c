"""`rlhf doctor --address`: every node of a cluster is examined, and gloo runs between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_every_node_is_examined_and_one_that_hangs_is_named(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "ray" / "doctor.py"), str(tmp_path)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["nodes"])) == 2
    assert found["collectives"] == ["gloo, 2 nodes"]
    assert not [line for line in found["fails"] if "examined" in line or "see" in line or "all-reduce" in line]
    assert all(any(line.startswith("raylet: ") for line in ports) for ports in found["ports"])
    assert found["answered"] == [True] and found["late"] == [[True, "no answer after 3 s"]]
    assert list(tmp_path.iterdir()) == []
