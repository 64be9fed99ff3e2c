"""A checkpoint is whole or absent; old ones go only after their successor is there."""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf import checkpoint
from rlhf.checkpoint import CheckpointStore, FileSum, Written, read_state
from rlhf.errors import CheckpointError
from tests.fakes import save


def test_newest_whole_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.find("auto") is None
    for step in (5, 10, 15):
        save(store, step)
    assert store.steps() == [10, 15]
    found = CheckpointStore(tmp_path, keep=2).find("auto")
    assert found is not None
    assert read_state(found)["step"] == 15


def test_a_checkpoint_holds_its_state_and_its_run_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=2)
    store.run = {"config": {"seed": 3}}
    (store.directory / ".partial-000005").mkdir(parents=True)
    (store.directory / ".partial-000005" / "of an interrupted write").touch()
    (store.directory / ".removed" / "step-000001").mkdir(parents=True)
    for other in ("step-7", "notes", "step-000008"):  # the last without a state
        (store.directory / other).mkdir()
    save(store, 5)
    assert read_state(store.path(5)) == {"step": 5, "config": {"seed": 3}}
    assert sorted(file.name for file in store.path(5).iterdir()) == ["complete.json", "driver.json", "learner"]
    assert not list(store.directory.glob(".*"))
    assert store.steps() == [5] and store.path(5) == tmp_path / "run" / "checkpoints" / "step-000005"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    first, *rest = path.read_bytes()
    path.write_bytes(bytes([first ^ 1, *rest]))


DAMAGES = [
    (lambda path: (path / "learner").unlink(), "learner is missing"),
    (lambda path: truncate(path / "learner"), "learner has 1 bytes instead of 2"),
    (lambda path: flip_a_bit(path / "learner"), "the checksum of learner differs"),
    (lambda path: truncate(path / "driver.json"), r"driver\.json has \d+ bytes instead of \d+"),
    (lambda path: flip_a_bit(path / "driver.json"), r"the checksum of driver\.json differs"),
    (lambda path: truncate(path / "complete.json"), r"not a complete checkpoint \(complete\.json: .*\)"),
    (lambda path: (path / "complete.json").write_text("[]"), r"not a complete checkpoint \(complete\.json: .*\)"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    save(CheckpointStore(tmp_path, keep=2), 5)
    save(CheckpointStore(tmp_path, keep=2), 10)
    notes: list[str] = []
    store = CheckpointStore(tmp_path, keep=2, note=notes.append)
    damage(store.path(10))
    for _ in range(2):  # as the command begins, and as its loop does
        assert store.find("auto") == store.path(5) and store.holds(5)
    (note,) = notes
    assert re.fullmatch(f"a checkpoint is passed over: {re.escape(str(store.path(10)))}: {said}", note)
    with pytest.raises(CheckpointError, match=rf"^checkpoint\.resume=.*step-000010: {said}; use auto, none, or"):
        store.find(str(store.path(10)))
    damage(store.path(5)) if "has 1" not in said else (store.path(5) / "learner").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoint"):
        CheckpointStore(tmp_path, keep=2, note=notes.append).find("auto")


def test_a_part_that_the_driver_does_not_see_makes_no_checkpoint(tmp_path: Path) -> None:
    """A rank's, on a node that does not share the run directory: by its own account it has written everything."""
    store = CheckpointStore(tmp_path / "run", keep=1)
    save(store, 5)
    for problem in ("is missing", "has 1 bytes instead of 2"):
        directory = store.begin(10, {})
        elsewhere = tmp_path / problem / "learner"
        elsewhere.parent.mkdir()
        elsewhere.write_text("10")
        if "bytes" in problem:
            (directory / "learner").write_text("1")
        written = {str(directory / "learner"): FileSum.of(elsewhere)}
        with pytest.raises(CheckpointError, match=f"partial-000010: learner {problem}"):
            store.complete(10, written)
        assert store.steps() == [5] and store.holds(5)


def test_the_newest_is_the_one_written_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, now_s in ((5, 3e9), (10, 2e9), (7, 1e9)):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        save(CheckpointStore(tmp_path, keep=2), step)
        os.utime(store.path(step), (now_s, now_s))
    assert store.steps() == [10, 7]
    assert store.find("auto") == store.path(7)


@pytest.mark.parametrize("syscall", ["mkdir", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syscall: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 5)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, syscall, full)
        said = r"^[^\n]*/\.partial-000010: a checkpoint could not be written \(OSError: .*No space left[^\n]*$"
        with pytest.raises(CheckpointError, match=said):
            save(store, 10)
    assert store.find("auto") == store.path(5)
    save(store, 10)
    assert store.steps() == [10]


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = CheckpointStore(tmp_path, keep=1), list[str]()
    fsync, rename = os.fsync, Path.rename

    def logged(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", logged)
    monkeypatch.setattr(Path, "rename", renamed)
    engine = store.begin(5, {}) / "learner" / "engine"
    engine.mkdir(parents=True)
    store.complete(5, {})
    at = events.index("rename .partial-000005")
    assert set(events[:at]) == {"driver.json", "complete.json", "learner", "engine", ".partial-000005"}
    assert events[at + 1 :] == ["checkpoints", tmp_path.name]


def test_a_run_that_starts_anew_keeps_its_own(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, keep=2)
    save(old, 90)
    save(old, 100)
    new = CheckpointStore(tmp_path, keep=2)
    assert new.find("none") is None and not new.holds(100), "it is another run's"
    save(new, 7)
    assert new.holds(7)
    assert new.steps() == [100, 7], "the newest is the one written last"
    assert CheckpointStore(tmp_path, keep=2).find("auto") == new.path(7)
    save(new, 100)
    assert new.steps() == [7, 100]


@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_goes_on_holds_what_it_went_on_from_in_its_own_directory(tmp_path: Path, named: bool) -> None:
    save(CheckpointStore(tmp_path, keep=2), 5)
    store = CheckpointStore(tmp_path, keep=2)
    assert not store.holds(5)
    assert store.find(str(store.path(5)) if named else "auto") == store.path(5)
    assert store.holds(5) and not store.holds(6)
    other = CheckpointStore(tmp_path / "other", keep=2)
    assert other.find(str(store.path(5))) == store.path(5)
    assert not other.holds(5)


def test_an_interrupted_write_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 5)
    (store.begin(10, {"step": 10}) / "critic").write_text("half")
    store.path(20).mkdir()
    assert store.steps() == [5], "and the older one is still there"
    save(store, 10)
    assert store.steps() == [10]
    assert sorted(path.name for path in store.path(10).iterdir()) == ["complete.json", "driver.json", "learner"]


def test_the_same_step_can_be_written_again_and_is_there_until_it_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 5)
    for written in ("old", "new"):
        store.begin(5, {})
        assert (store.path(5) / "learner").read_text() == "5", "the one before"
        save(store, 5, written=written)
    assert store.steps() == [5] and read_state(store.path(5))["written"] == "new"
    store.begin(5, {})
    assert read_state(store.path(5))["written"] == "new"


@pytest.mark.parametrize("step", [5, 10])
def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Whether it gives way to the same step or to a later one."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 5)

    def die_after_one_file(path: Path, **_: Any) -> None:
        for learner in path.rglob("learner"):
            learner.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", die_after_one_file)
        save(store, step)
    for finish in (store.sweep, lambda: save(store, step)):
        assert store.steps() == [step] and (store.path(step) / "learner").read_text() == str(step)
        finish()
        assert [path.name for path in store.directory.iterdir()] == [store.path(step).name]


def test_a_run_reads_all_of_a_checkpoint_once_and_never_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path, read = CheckpointStore(tmp_path, keep=1), tmp_path / "checkpoints" / "step-000005", list[str]()
    save(store, 5)
    of = FileSum.of
    monkeypatch.setattr(FileSum, "of", lambda path: read.append(path.name) or of(path))
    assert store.find(str(path)) == path and not read
    resumed = CheckpointStore(tmp_path, keep=1)
    assert resumed.find(str(path)) == resumed.find(str(path)) == path
    assert sorted(read) == ["driver.json", "learner"]


def test_a_files_sum_is_that_of_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 4)
    (tmp_path / "file").write_bytes(b"123456789")
    assert FileSum.of(tmp_path / "file") == FileSum(9, 0xCBF43926), "the check value of CRC-32"


def test_what_a_run_that_ends_unsaved_loses(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.describe_loss(12) == "there is no checkpoint, so 12 finished step(s) are lost"
    save(store, 10)
    assert store.describe_loss(12) == f"the last checkpoint is {store.path(10)}; 2 finished step(s) since are lost"


def test_resume_modes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 5)
    save(store, 6)
    assert store.find("none") is None
    assert store.find(str(store.path(5))) == store.path(5) and store.holds(5)
    message = r"checkpoint\.resume=.*not a complete checkpoint \(complete\.json: .*No such file.*use auto, none"
    with pytest.raises(CheckpointError, match=message):
        store.find(str(tmp_path / "elsewhere"))


def test_the_state_is_as_of_the_beginning_of_the_write(tmp_path: Path) -> None:
    store, counts = CheckpointStore(tmp_path, keep=1), [1]
    store.begin(5, {"step": 5, "counts": counts})
    counts.append(2)
    store.complete(5, {})
    assert read_state(store.path(5))["counts"] == [1]


def test_what_was_written_together_took_as_long_as_the_slowest() -> None:
    one, other = FileSum(100, 1), FileSum(10, 2)
    together = Written.together([Written(1.5, {"a": one}), Written(2.5, {"b": other})])
    assert together == (whole := Written(2.5, {"a": one, "b": other})) and whole.num_bytes == 110
    assert Written.together([Written(1.5, {}), None]) is None
