"""`rlhf status` and Ray's metrics with real actors: what is asked, what is counted, and what Prometheus would read."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import ray

from actors.control import RunControl
from actors.group import ActorGroup, Deadline
from actors.health import role_health
from actors.metrics import RayMetrics
from actors.scorers import RewardActor
from benchmarks.common import python_module
from jobs.status import Looker

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]


def scrape(nodes: list[dict], name: str, within_s: float) -> dict[str, float]:
    """By its labels, what a node's endpoint says of a metric, as soon as it says anything."""
    (node,) = (node for node in nodes if node["Alive"])
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ends = time.monotonic() + within_s
    while True:
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line) for line in lines]
        if values := {match[1]: float(match[2]) for match in found if match}:
            return values
        assert time.monotonic() < ends, f"{name} is not among the {len(lines)} lines of {url}"
        time.sleep(0.5)


def test_what_a_run_measures_is_at_rays_endpoint(ray_session: None) -> None:
    RayMetrics("mine").write(3, {"reward": 0.5, "time/generate_s": 2.0, "time/update_s": 1.0})
    rewards = scrape(ray.nodes(), "ray_rlhf_reward", 60)
    assert [value for labels, value in rewards.items() if 'run="mine"' in labels] == [0.5]
    phases = scrape(ray.nodes(), "ray_rlhf_phase_seconds", 60)
    by_phase = {re.search('phase="(.*?)"', labels)[1]: value for labels, value in phases.items() if '"mine"' in labels}
    assert by_phase == {"generate": 2.0, "update": 1.0}


def test_a_run_is_seen_with_its_actors_and_who_of_them_died(ray_session: None, tiny_config, monkeypatch) -> None:
    config = tiny_config()
    handles = [ray.remote(RewardActor).remote(config) for _ in range(2)]
    group = ActorGroup.locate("reward", handles, Deadline(60, "timeouts.start_s")).result()
    control = RunControl(
        config.name, {"default": 1}, most=None, note=print, progress=lambda: {"step": 3, "directory": ""}
    )
    try:
        before = role_health(config.name)["rewards"]
        assert before.up >= 2 and before.memory_gib > 0.1
        victim = ray.get(handles[0].__ray_call__.remote(lambda actor: os.getpid()), timeout=30)
        psutil.Process(victim).kill()
        ends = time.monotonic() + 60
        while (after := role_health(config.name)["rewards"]).died == before.died:
            assert time.monotonic() < ends
            time.sleep(0.2)
        assert (after.up, after.died) == (before.up - 1, before.died + 1) and "died" in after.reason
        group.kill()
        while (killed := role_health(config.name)["rewards"]).up > before.up - 2:
            assert time.monotonic() < ends
            time.sleep(0.2)
        assert killed.died == after.died, "whom the run ends itself has not died"
        monkeypatch.setattr("jobs.status.joined", lambda address: contextlib.nullcontext())
        view = Looker(config.name, "auto").look()
        assert (view["state"], view["step"], view["pool"]) == ("running", 3, {"workers": []})
    finally:
        control.close()
        group.kill()
    assert role_health(config.name) == {}, "it is not on the cluster any more"


@pytest.mark.long
def test_a_run_is_followed_from_its_start_to_its_death(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "followed"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    sources = "data.mixture={words: {path: 'task:phrases', weight: 3}, others: {path: 'task:phrases'}}"
    train = [
        *python_module("jobs.cli", "train", "-c", "conf/grpo_tiny.yaml", f"model.path={tiny_model_dir}"),
        *("data.train=null", sources, f"run_dir={run_dir}", "name=followed", "num_steps=100000"),
        *("learner.num_ranks=1", "algorithm.beta=0", "placement.device=cpu", "checkpoint.every_steps=2"),
    ]
    log = tmp_path / "log"

    def status(*arguments: str) -> dict:
        command = python_module("jobs.cli", "status", "--json", *arguments)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with log.open("w") as output:
        process = subprocess.Popen(
            train, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    family: list[psutil.Process] = []
    try:
        ends = time.monotonic() + 150
        while not (run_dir / "checkpoints" / "step-000002").exists():
            assert time.monotonic() < ends and process.poll() is None, log.read_text()
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        address = re.search(r"on the Ray cluster at (\S+)", log.read_text())[1]
        view = status("--run", str(run_dir), "--address", address)
        assert view["state"] == "running" and view["num_steps"] == 100000
        assert view["step"] >= 2 and view["step_s"] > 0 and view["left_s"] > 0 and view["age_s"] < 30
        assert view["pool"]["version"] >= 2 and view["pool"]["workers"][0]["state"] == "live"
        assert {name: role["up"] for name, role in view["roles"].items()} == {"learner": 1, "rewards": 1, "rollout": 1}
        assert all(role["memory_gib"] > 0.1 for role in view["roles"].values())
        assert {"reward/by_source/words", "reward/by_source/others"} <= view["metrics"].keys()
        assert status("--address", address)["run"] == "followed", "it is the only one there"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        psutil.wait_procs(family, timeout=60)
        view = status("--run", str(run_dir))
        assert view["state"] == "killed" and view["step"] >= 2 and view["checkpoint_step"] >= 2
    finally:
        for one in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(timeout=30)
