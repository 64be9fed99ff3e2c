"""What the benchmarks give a peer, and read from it: with stand-ins for verl and OpenRLHF, which are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peers.openrlhf import said
from benchmarks.peers.text_reward import compute_score, reward_func
from benchmarks.peers.work import StepLog

ROOT = Path(__file__).resolve().parents[2]
WORK = ["--prompts=3", "--group=2", "--steps=3", "--completion=8", "--prompt-words=4", "--reference", "--gpus=2"]
VERL = """
import json, os, sys
given = dict(word.split("=", 1) for word in sys.argv[1:])
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(1, 4):
        data = {"timing_s/gen": float(step), "response_length/mean": 7.5, "given": given}
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
        print(f"(TaskRunner pid=1) step:{step} - timing_s/gen:{step}", flush=True)
"""
OPENRLHF = """
import sys
for step in range(1, 4):
    status = {"timing/generation": float(step), "response_length": 7.5, "loss": float("nan")}
    print(f"(PPOTrainer pid=1) \N{SPARKLES} Global step {step}: {status}", flush=True)
print(sys.argv[1:])
"""


def result_of(peer: str, module: str, source: str, directory: Path) -> dict[str, Any]:
    """What bench_step reads after the peer's module has run against a package of this source."""
    package, *inner, name = module.split(".")
    folder = directory.joinpath(package, *inner)
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    metadata = directory / f"{package}-9.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.8\n")
    out = directory / "result.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    command = [sys.executable, "-m", f"benchmarks.peers.{peer}", *WORK, f"--out={out}", "models/x", "--", "its.own=1"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("peer", "module", "source", "phase"),
    [
        ("verl", "verl.trainer.main_ppo", VERL, "gen"),
        ("openrlhf", "openrlhf.cli.train_ppo_ray", OPENRLHF, "generation"),
    ],
)
def test_a_peer_is_measured_from_its_second_step_on(
    peer: str, module: str, source: str, phase: str, tmp_path: Path
) -> None:
    result = result_of(peer, module, source, tmp_path)
    assert len(result.pop("step_s")) == 2
    assert result == {"completion_tokens": [45, 45], "phases_s": {phase: 2.5}, "version": "9.8"}


def test_a_peer_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('an error of its own')"]
    with pytest.raises(RuntimeError, match=r"exit code 1:\nan error of its own"):
        StepLog("step", tmp_path / "log").run(command, env={}, cwd=tmp_path, limit_s=60)


def test_a_peer_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    hangs = ["sleep", "600"]
    starts = f"import subprocess; child = subprocess.Popen({hangs}); print(child.pid, flush=True); child.wait()"
    log = StepLog(r"^\d+$", tmp_path / "log")
    with pytest.raises(RuntimeError, match="none after 8 s"):
        log.run([sys.executable, "-S", "-c", starts], env=dict(os.environ), cwd=tmp_path, limit_s=8)
    (child,) = map(int, log.said)
    assert (tmp_path / "log").read_text() == log.said[0], "also of a command that does not end by itself"
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_both_forms_of_the_reward_agree() -> None:
    given = reward_func(["in: red", "in: blue"], ["in: ", "in: "], None)
    assert given["rewards"].tolist() == pytest.approx([compute_score("", text, "") for text in ("red", "blue")])
    assert len(set(given["rewards"].tolist())) == 2


def test_a_number_that_is_none_is_not_read() -> None:
    assert said("x Global step 3: {'a/b': 1.5, 'timing/t': 3.2e-05, 'n': nan, 'last': -2.0}") == {
        "a/b": 1.5,
        "timing/t": 3.2e-05,
        "last": -2.0,
    }
