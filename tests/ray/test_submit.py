"""`rlhf submit` against a real Ray head with its dashboard and token authentication, as its users run it."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.common import python_module

ROOT = Path(__file__).resolve().parents[2]
MARKER = "RLHF_TEST_HEAD"  # in the environment of every process that descends from the head
HEAD_TIMEOUT_S = 90.0
JOB_TIMEOUT_S = 240.0

FAST = [
    "learner.num_ranks=1",
    "algorithm.beta=0",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=2",
    "num_steps=1",
    "data.eval=null",
    "placement.device=cpu",
    "tracking.tensorboard=false",
    "tracking.progress=false",
    "checkpoint.save_final_model=false",
]

REWARD = """
from pathlib import Path
import actors

def where(completions, file, **columns):
    Path(file).write_text(actors.__file__)
    return [float(len(text)) for text in completions]
"""

ADVANTAGE = """
import torch

def ones(inputs):
    return torch.ones(len(inputs.rewards))
"""

LOSS = """
def reinforce(inputs):
    return -inputs.advantages * inputs.logprobs, {"advantage": inputs.advantages}
"""

pytestmark = pytest.mark.ray


@dataclass(frozen=True)
class Head:
    """A running Ray head: its dashboard, its cluster, the directory it started in and keeps sessions in, and a client's
    environment."""

    address: str
    cluster: str
    temp_dir: Path
    env: dict[str, str]

    def submit(self, *args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs `rlhf submit` on the tiny recipe."""
        return self.rlhf("submit", "--address", self.address, *args, cwd=cwd, **env)

    def rlhf(self, command: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the tiny recipe."""
        return subprocess.run(
            python_module("jobs.cli", command, "-c", str(ROOT / "conf" / "grpo_tiny.yaml"), *args),
            env=self.env | env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_TIMEOUT_S,
        )


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def end_descendants(marker: str) -> None:
    """Kills every process that carries the marker in its environment, wherever it sits in the process tree."""

    def carries(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARKER) == marker
        except psutil.Error:  # gone, or not ours to look at
            return False

    while left := [process for process in psutil.process_iter() if carries(process)]:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head node of its own, on ports of its own, that asks for a token."""
    temp_dir = Path(tempfile.mkdtemp(prefix="rlhf-head-"))  # short: Ray puts Unix sockets below it
    names = ["port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env = inherited | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONUNBUFFERED": "1"}
    bin_dir = str(Path(sys.executable).parent)
    head_env = env | {
        "PATH": os.pathsep.join([bin_dir, os.environ["PATH"]]),  # the job's `python`
        "RAY_AUTH_MODE": "token",
        MARKER: str(temp_dir),
    }
    command = python_module(
        *("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=8"),
        *(f"--temp-dir={temp_dir}", f"--object-store-memory={256 << 20}", "--node-ip-address=127.0.0.1"),
        *(f"--{name}={port}" for name, port in ports.items()),
    )
    log = temp_dir / "start.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=temp_dir, env=head_env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        await_port(ports["dashboard-port"], process, log)
        yield Head(f"http://127.0.0.1:{ports['dashboard-port']}", f"127.0.0.1:{ports['port']}", temp_dir, env)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        end_descendants(str(temp_dir))
        shutil.rmtree(temp_dir, ignore_errors=True)


def await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until something listens there."""
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"the Ray head did not come up:\n{log.read_text()}")


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A directory in which a command is given: its own functions, its data, and a model beside it."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "my_loss.py").write_text(LOSS)
    (directory / "my_data.jsonl").write_text("".join(f'{{"prompt": "say {word}"}}\n' for word in ("red", "blue")))
    (tmp_path / "model").symlink_to(tiny_model_dir)
    return directory


RELATIVE = ("model.path=../model", "data.train=my_data.jsonl", "run_dir=run", "algorithm.loss=my_loss.py:reinforce")


@pytest.mark.long
def test_job_trains_with_uploaded_code_and_shared_files(head: Head, project: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for package in ("rlhf", "actors", "jobs"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "my_rewards.py").write_text(REWARD)
    (code / "my_advantage.py").write_text(ADVANTAGE)
    seen = tmp_path / "seen.txt"

    reward = f"reward.functions=[{{path: my_rewards.where, kwargs: {{file: {seen}}}}}]"
    own = (reward, "algorithm.advantage=my_advantage.ones")
    done = head.submit(f"--working-dir={code}", *FAST, *RELATIVE, *own, cwd=project, RAY_ADDRESS="ray://x")

    assert done.returncode == 0, done.stdout
    assert (project / "run" / "summary.json").is_file()
    assert " succeeded" in done.stdout and "ray job stop --address" in done.stdout
    # what ran in the reward actor was the unpacked upload: neither this checkout nor the directory it came from
    assert Path(seen.read_text()).is_relative_to(head.temp_dir)
    metrics = json.loads((project / "run" / "metrics.jsonl").read_text())
    assert metrics["loss/advantage"] == 1, "the learner had both functions"


@pytest.mark.long
def test_what_is_relative_is_found_by_actors_that_start_elsewhere(head: Head, project: Path) -> None:
    (project / "my_rewards.py").write_text(REWARD)
    reward = f"reward.functions=[{{path: my_rewards.py:where, kwargs: {{file: {project / 'seen.txt'}}}}}]"
    cluster = {"RAY_ADDRESS": head.cluster, "RAY_AUTH_MODE": "token"}
    done = head.rlhf("train", *FAST, *RELATIVE, reward, cwd=project, **cluster)
    assert done.returncode == 0, done.stdout
    assert (project / "run" / "summary.json").is_file() and (project / "seen.txt").is_file()


def test_failing_job_shows_its_error_and_code(head: Head, tiny_model_dir: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nothing.jsonl"
    paths = [f"model.path={tiny_model_dir}", f"run_dir={tmp_path / 'run'}", f"data.train={missing}"]
    done = head.submit("--installed", *FAST, *paths)  # as it is, in the environment that runs these tests
    assert done.returncode == 2, done.stdout
    assert f"error: data.train={missing}" in done.stdout
    assert "failed with exit code 2" in done.stdout


def test_wrong_token_is_one_line(head: Head, tiny_model_dir: Path) -> None:
    done = head.submit(*FAST, f"model.path={tiny_model_dir}", RAY_AUTH_TOKEN="wrong")
    assert done.returncode == 1
    assert len(done.stdout.strip().splitlines()) == 1 and "asks for a token" in done.stdout
