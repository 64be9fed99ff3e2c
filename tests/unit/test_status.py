"""`rlhf status`: what is read from a run's directory, what is asked of its mailbox, and what is shown of both."""

import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from rich.console import Console

import jobs.status
from actors.control import NAMESPACE, control_name
from actors.health import RoleHealth, death
from actors.metrics import FIGURES, RayMetrics
from jobs.run_directory import last_record, read_run_files
from jobs.status import Looker, render, status
from rlhf.errors import ClusterError, ConfigError
from rlhf.run_lock import NAME, Holder, RunLock
from tests.clock import Clock
from tests.fake_ray import FakeActor, FakeRay

Reason = ActorDiedErrorContext.Reason
WORKER = {"worker": 0, "kind": "default", "state": "live", "node": "10.0.0.7", "version": 4, "samples": 12}
POOL = {
    "workers": [WORKER],
    "version": 4,
    "queued_groups": 3,
    "unfinished_groups": 8,
    "replaced_workers": 1,
    "asleep": False,
    "episodes": None,
}
REPORT = {
    "directory": "/nowhere/mine",
    "step": 4,
    "num_steps": 20,
    "phase": "generate",
    "phase_s": 5.0,
    "step_s": 3.0,
    "left_s": 48.0,
    "wall_s": 60.0,
    "metrics": {
        "step": 4,
        "reward": 0.25,
        "kl": 0.01,
        "tokens_per_s": 1234.5,
        "time/update_s": 2.0,
        "staleness/max": 1,
    },
    "evaluation": {"step": 0, "eval/reward": 0.125},
    "notes": [{"at": "2026-01-01 12:00:00+00:00", "note": "rollout pool: replacing a worker: it died"}],
    "pool": POOL,
    "wanted": {"default": 2},
    "age_s": 2.0,
}
Write = Callable[..., Path]


@pytest.fixture
def run_dir(tmp_path: Path) -> Write:
    """Writes the directory of a run of 20 steps with these files."""

    def write(*, steps: int = 0, summary: dict[str, Any] | None = None, lock: Holder | None = None) -> Path:
        directory = tmp_path / "mine"
        directory.mkdir(exist_ok=True)
        (directory / "config.yaml").write_text("name: mine\nnum_steps: 20\n")
        rows = [{"step": step, "reward": step / 10} for step in range(1, steps + 1)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
        (directory / "eval.jsonl").write_text(json.dumps({"step": 0, "eval/reward": 0.125}) + "\n")
        if summary:
            (directory / "summary.json").write_text(json.dumps(summary))
        if lock:
            (directory / NAME).write_text(json.dumps(asdict(lock)))
        return directory

    return write


class Cluster:
    """A cluster with one run on it, as a command finds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch)
        self.control: FakeActor = FakeRay(monkeypatch, self.clock).actor(progress=REPORT)
        self.names = ["mine"]
        self.joined, self.left, self.is_there = 0, 0, True
        monkeypatch.setattr(ray, "init", self._join)
        monkeypatch.setattr(ray, "shutdown", self._leave)
        monkeypatch.setattr(ray, "get_actor", self._find)
        monkeypatch.setattr(ray.util, "list_named_actors", self._list)
        monkeypatch.setattr(
            jobs.status, "role_health", lambda run: {"learner": RoleHealth(up=2, died=1, reason="gone")}
        )

    def _join(self, **_: Any) -> None:
        if not self.is_there:
            raise ConnectionError("nobody is there")
        self.joined += 1

    def _leave(self) -> None:
        self.left += 1

    def _find(self, name: str, namespace: str) -> FakeActor:
        if (name, namespace) not in [(control_name(run), NAMESPACE) for run in self.names]:
            raise ValueError(name)
        return self.control

    def _list(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": control_name(run), "namespace": NAMESPACE} for run in self.names]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def shown(view: dict[str, Any]) -> str:
    page = io.StringIO()
    Console(width=120, file=page).print(render(view))
    return page.getvalue()


# By its files


@pytest.mark.parametrize(
    ("files", "state", "why"),
    [
        ({"steps": 20, "summary": {"status": "completed", "steps": 20}}, "completed", "all steps are made"),
        ({"steps": 7, "summary": {"status": "interrupted", "steps": 7}}, "interrupted", "has saved"),
        ({"steps": 9, "summary": {"status": "interrupted", "steps": 7}}, "failed", "an error after step 9"),
        ({"steps": 3}, "failed", "an error after step 3"),
        ({}, "empty", "before its first step"),
        ({"steps": 3, "lock": Holder(began=1)}, "killed", "ended without a word"),
    ],
)
def test_a_directory_says_how_its_run_ended(
    run_dir: Write, cluster: Cluster, files: dict[str, Any], state: str, why: str
) -> None:
    view = Looker(str(run_dir(**files)), "auto").look()
    assert (view["run"], view["state"], view["step"]) == ("mine", state, files.get("steps", 0))
    assert why in view["why"] and cluster.joined == 0, "a run that has ended is not looked for"
    text = shown(view)
    assert f"mine: {state}" in text and f"{view['step']} of 20" in text
    assert "0.125 in the evaluation after step 0" in text


def test_a_run_on_another_machine_shows_life_by_touching_its_lock(
    run_dir: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_dir(steps=3, lock=Holder(machine="another", host="elsewhere"))
    watched: list[float] = []
    for alive, state in ((True, "running"), (False, "killed")):
        monkeypatch.setattr(
            "jobs.run_directory.shows_life", lambda path, for_s, alive=alive: watched.append(for_s) or alive
        )
        assert read_run_files(directory).state == state
    assert all(10 < seconds < 60 for seconds in watched), "longer than between two touches"


def test_the_last_whole_record_counts(tmp_path: Path) -> None:
    file = tmp_path / "records"
    assert last_record(file) == {}
    for text, expected in (("", {}), ('{"a": 1', {}), ('{"a": 1}\n', {"a": 1}), ('{"a": 1}\n{"a": 2}\n{"a', {"a": 2})):
        file.write_text(text)
        assert last_record(file) == expected
    file.write_text("".join(f'{{"step": {step}, "x": "{"y" * 100}"}}\n' for step in range(5000)))
    assert last_record(file)["step"] == 4999, "without reading the whole file"


# By its mailbox


def test_a_run_in_progress_is_asked_through_its_mailbox(cluster: Cluster) -> None:
    view = Looker("mine", "auto").look()
    assert view["state"] == "running" and view["step"] == 4
    assert view["phase_s"] == 7.0 and view["left_s"] == 46.0, "two seconds have passed since it told"
    assert cluster.joined == cluster.left == 1
    text = shown(view)
    for part in (
        "4 of 20, 3 s each, 46 s left",
        "generate for 7 s",
        "0.25; 0.125 in the evaluation after step 0",
        "version 4; tokens of the last step at most 1 behind",
        "3 queued, 8 unfinished",
        "2 default wanted; 1 replaced so far",
        "update 2.0 s",
        "10.0.0.7",
        "gone",
        "replacing a worker: it died",
    ):
        assert part in text
    assert "silent" not in text
    cluster.control.answers["progress"] = REPORT | {"age_s": 99.0}
    assert "the run last told how it is 2 min ago" in shown(Looker("mine", "auto").look())


def test_a_name_is_needed_only_among_several_runs(cluster: Cluster) -> None:
    assert Looker(None, "auto").look()["run"] == "mine"
    cluster.names = ["mine", "other"]
    with pytest.raises(ConfigError, match=r"^--run: there are several runs on this cluster \(mine, other\); give"):
        Looker(None, "auto").look()
    cluster.names = []
    with pytest.raises(ConfigError, match=r"^--run: no run is on this cluster; give a run's name, or its directory"):
        Looker(None, "auto").look()
    with pytest.raises(ConfigError, match=r"^--run=mine: no such run on this cluster; running now: none"):
        Looker("mine", "auto").look()
    assert cluster.joined == cluster.left


def test_a_run_whose_cluster_is_not_here_is_shown_by_its_files(run_dir: Write, cluster: Cluster) -> None:
    directory = run_dir(steps=3, lock=Holder())
    with pytest.raises(ClusterError):
        cluster.is_there = False
        Looker("mine", "auto").look()
    view = Looker(str(directory), "auto").look()
    assert view["state"] == "running" and view["step"] == 3
    assert "from its files alone: --address=auto: this machine cannot join" in " ".join(shown(view).split())


def test_watching_ends_with_the_run_and_every_look_leaves_the_cluster(
    run_dir: Write, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_dir(steps=3)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            lock.__exit__()

    monkeypatch.setattr("jobs.status.time.sleep", pause)
    lock = RunLock(directory)
    lock.__enter__()
    status(str(directory), address="auto", as_json=True, every_s=5.0)
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [view["state"] for view in views] == ["running", "running", "failed"] and pauses == [5.0, 5.0]
    assert views[0]["pool"] == POOL and views[0]["roles"]["learner"]["up"] == 2
    assert cluster.joined == cluster.left == 2


def test_watching_by_name_ends_when_the_run_has_left_the_cluster(cluster: Cluster) -> None:
    looker = Looker("mine", "auto")
    assert looker.look()["state"] == "running"
    cluster.names = []
    assert looker.look()["state"] == "ended"


def test_a_run_on_a_shared_directory_is_found_there_by_its_name(run_dir: Write, cluster: Cluster) -> None:
    directory = run_dir(steps=3)
    cluster.control.answers["progress"] = REPORT | {"directory": str(directory)}
    looker = Looker("mine", "auto")
    assert looker.look()["state"] == "running"
    assert looker.look()["state"] == "failed", "its directory is here, and nobody holds it"


# Deaths


def test_a_death_that_the_run_wanted_is_none() -> None:
    def died(reason: int, message: str) -> str:
        return death(
            ActorDeathCause(actor_died_error_context=ActorDiedErrorContext(reason=reason, error_message=message))
        )

    assert died(Reason.WORKER_DIED, "the worker\n died") == "the worker died"
    assert died(Reason.NODE_DIED, "its node") == "its node"
    for reason in (Reason.RAY_KILL, Reason.OUT_OF_SCOPE, Reason.REF_DELETED, Reason.OWNER_DIED):
        assert died(reason, "killed") == ""
    cause = ActorDeathCause()
    cause.runtime_env_failed_context.error_message = "no pip"
    assert death(cause) == "no pip"


# Prometheus


def test_gauges_have_the_main_figures_and_leave_out_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, ...], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
            self._name, self._labels = name, labels

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self._labels)
            told[self._name, *tags.values()] = value

    monkeypatch.setattr("actors.metrics._gauge", Gauge)
    writer = RayMetrics("mine")
    writer.write(1, {"reward": 0.5, "kl": float("nan"), "time/start_s": 30.0, "time/update_s": 2.0, "unknown": 1.0})
    assert told == {
        ("rlhf_reward", "mine"): 0.5,
        ("rlhf_phase_seconds", "mine", "start"): 30.0,
        ("rlhf_phase_seconds", "mine", "update"): 2.0,
        ("rlhf_step_seconds", "mine"): 2.0,
        ("rlhf_step", "mine"): 1.0,
    }
    writer.write(2, {"reward": 0.75, "time/update_s": 1.0})
    assert told["rlhf_phase_seconds", "mine", "start"] == 0.0, "the second step did not start anything"
    writer.write(2, {"eval/reward": 0.625})
    assert told["rlhf_eval_reward", "mine"] == 0.625 and told["rlhf_phase_seconds", "mine", "update"] == 1.0
    assert told["rlhf_reward", "mine"] == 0.75
    names = [name for name, _ in FIGURES.values()]
    assert {name for name in names if names.count(name) > 1} == {"rlhf_kl"}, "one figure has two names of ours"
