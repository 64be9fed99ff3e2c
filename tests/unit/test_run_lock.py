"""A run directory has one run at a time; what a dead one left is taken over."""

import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster import ActorCluster
from actors.group import ActorGroup, Deadline, Member
from actors.learner import CriticActor
from rlhf import run_lock
from rlhf.checkpoint import CheckpointStore
from rlhf.errors import CheckpointError, ConfigError
from rlhf.run_lock import Holder, RunLock, read_holder, sees_token
from tests.clock import Clock
from tests.fake_ray import FakeRay
from tests.fakes import save

HOLD_AND_DIE = "import os, sys; from rlhf.run_lock import RunLock; RunLock(sys.argv[1]).__enter__(); os._exit(9)"
PATIENCE_S = 10.0


def leave(run_dir: Path, holder: Holder) -> Path:
    """The lock of another process."""
    run_dir.mkdir(exist_ok=True)
    path = run_dir / "run.lock"
    path.write_text(json.dumps(asdict(holder)))
    return path


def elsewhere(**given: Any) -> Holder:
    return Holder(host="node7", machine="another boot of another machine", **given)


@pytest.fixture
def seconds_pass(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Sleeping moves the clock, and calls what is in this list, once each."""
    clock, events = Clock(monkeypatch), list[Callable[[], None]]()

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if events:
            events.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    return events


def test_a_second_run_is_told_who_holds_the_directory_and_touches_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    with RunLock(run_dir):
        held = (run_dir / "run.lock").read_bytes()
        message = rf"^run_dir=.*/run: another run is using it \(process {os.getpid()} on .*, since .*\); stop that run"
        with mmap.mmap(-1, 1 << 20), pytest.raises(ConfigError, match=message), RunLock(run_dir):
            raise AssertionError("two runs in one directory")
        assert [path.read_bytes() for path in run_dir.iterdir()] == [held]
    assert not run_dir.exists(), "nothing was written there"
    with RunLock(run_dir):
        (run_dir / "metrics.jsonl").touch()
    with RunLock(run_dir):
        pass
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_what_a_killed_run_held_is_taken_over_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD_AND_DIE, tmp_path])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    dead = read_holder(tmp_path)
    assert dead is not None and dead.pid == process.pid
    reused = replace(dead, pid=os.getpid())  # another process has its number by now
    for holder in (dead, dead, reused):
        leave(tmp_path, holder)
        notes: list[str] = []
        with RunLock(tmp_path, notes.append) as lock:
            lock.check()
        assert notes == [f"{tmp_path}: taken over from {holder}, which has ended"]
        assert process.wait(timeout=60) == 9, "only the first time was it there, to be reaped"


@pytest.mark.parametrize("readable", [True, False])
def test_a_run_on_another_machine_is_watched_for_a_sign_of_life(
    tmp_path: Path, seconds_pass: list[Callable[[], None]], readable: bool
) -> None:
    """Its pid says nothing here, nor does its clock."""
    holder = elsewhere(pid=os.getpid())
    path, told = leave(tmp_path, holder), str(holder)
    if not readable:  # it died between creating the file and writing it
        path.write_text("")
        told = "somebody"
    notes: list[str] = []
    began_s = time.monotonic()
    with RunLock(tmp_path, notes.append) as lock:
        lock.check()
        assert time.monotonic() - began_s == run_lock.SILENT_S
    assert notes == [
        f"{tmp_path}: held by {told}; 60 s for a sign of life",
        f"{tmp_path}: taken over from {told}, which has ended",
    ]

    path = leave(tmp_path, elsewhere())
    os.utime(path, (1, 1))
    seconds_pass += [lambda: None, lambda: os.utime(path, (2, 2))]
    with pytest.raises(ConfigError, match=r"another run is using it \(.* on node7"), RunLock(tmp_path, notes.append):
        pass


def test_a_name_that_reads_like_the_state_of_a_dead_process_is_not_taken_for_it(tmp_path: Path) -> None:
    name = Path("/proc/self/comm")
    own = name.read_text()
    name.write_text("rlhf) Z 1")
    try:
        with RunLock(tmp_path), pytest.raises(ConfigError, match="another run is using it"), RunLock(tmp_path):
            pass
    finally:
        name.write_text(own)


def test_the_holder_shows_life_until_it_ends_whatever_its_file_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime, failures = os.utime, [OSError("stale file handle")]

    def fail_once(path: Path, *times: tuple[int, int]) -> None:
        if failures and not times:
            raise failures.pop()
        utime(path, *times)

    monkeypatch.setattr(os, "utime", fail_once)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.001)
    with RunLock(tmp_path) as lock:
        path = tmp_path / "run.lock"
        for _ in range(2):
            os.utime(path, (1, 1))
            ends_s = time.monotonic() + PATIENCE_S
            while path.stat().st_mtime == 1 and time.monotonic() < ends_s:
                pass
            assert path.stat().st_mtime != 1
        lock.check()


def test_a_run_that_was_silent_for_too_long_writes_nothing_more(tmp_path: Path) -> None:
    notes: list[str] = []
    with RunLock(tmp_path, notes.append) as lock:
        store = CheckpointStore(tmp_path, keep=1, lock=lock)
        save(store, 5)
        store.begin(10, {})
        path = leave(tmp_path, elsewhere())
        taken = f"^run_dir={re.escape(str(tmp_path))}: process .* on node7.* holds it by now"
        with pytest.raises(CheckpointError, match=taken):
            store.complete(10, {})
        with pytest.raises(CheckpointError, match=taken):
            store.begin(15, {})
        assert store.steps() == [5]
        assert (store.directory / ".partial-000010").is_dir(), "the other run's, for all that this one knows"
    assert path.is_file(), "and it leaves the other's lock alone"
    path.unlink()
    with pytest.raises(CheckpointError, match="nobody holds it by now"):
        lock.check()


def test_of_two_runs_that_find_a_dead_one_s_lock_one_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leave(tmp_path, Holder(pid=os.getpid(), began=0))  # of a process that has ended
    rename, faster = Path.rename, Holder()

    def late(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        leave(tmp_path, faster)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(ConfigError, match="another run is using it"), RunLock(tmp_path, list[str]().append):
        pass
    assert read_holder(tmp_path) == faster and [path] == list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run_dir=.*/file/run: cannot be written to \(.*\); choose another$"):
        RunLock(tmp_path / "file" / "run").__enter__()


# ---- a directory that not all nodes share


def test_a_rank_that_does_not_see_the_run_directory_says_which_node_it_is_on(
    tmp_path: Path, seconds_pass: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank: Any = CriticActor(None, 1, 2)
    monkeypatch.setattr(rank, "node", lambda: "10.0.0.2")
    with RunLock(tmp_path):
        holder = read_holder(tmp_path)
        assert holder is not None
        rank.check_run_dir(str(tmp_path), holder.token)
        for other in ("another disk's", "of the run before"):
            run_dir = tmp_path if "run" in other else tmp_path / "empty"
            token = "new" if "run" in other else holder.token
            with pytest.raises(ConfigError, match=rf"^run_dir={run_dir}: critic\[1\] on node 10\.0\.0\.2 does not see"):
                rank.check_run_dir(str(run_dir), token)


def test_a_run_directory_may_be_seen_late(tmp_path: Path, seconds_pass: list[Callable[[], None]]) -> None:
    seconds_pass += [lambda: None, lambda: leave(tmp_path, elsewhere(token="new")) and None]
    assert sees_token(tmp_path, "new") and not sees_token(tmp_path, "newer")


def test_all_ranks_that_write_checkpoints_look_for_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray = FakeRay(monkeypatch)
    actors = {role: [fake_ray.actor() for _ in range(2)] for role in ("learner", "critic", "reward")}
    cluster: Any = ActorCluster.__new__(ActorCluster)
    cluster._config, cluster._deadline = SimpleNamespace(run_dir=str(tmp_path)), Deadline(5.0, "timeouts.start_s")
    cluster._groups = {
        role: ActorGroup([Member(handle, role, rank, "10.0.0.1") for rank, handle in enumerate(handles)])
        for role, handles in actors.items()
    }
    cluster._check_run_dir()
    assert not actors["learner"][0].calls, "no run holds it"
    with RunLock(tmp_path):
        holder = read_holder(tmp_path)
        cluster._locate({})  # once the processes are there
    assert holder is not None
    asked = {role: [actor.given("check_run_dir") for actor in group] for role, group in actors.items()}
    assert asked == {role: [[(str(tmp_path), holder.token)]] * 2 for role in ("learner", "critic")} | {
        "reward": [[]] * 2
    }
    actors["critic"][1].answers["check_run_dir"] = ConfigError("run_dir=...: critic[1] on node 10.0.0.1 does not see")
    with RunLock(tmp_path), pytest.raises(ConfigError, match="does not see"):
        cluster._check_run_dir()
