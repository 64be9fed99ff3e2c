"""A checkpoint is whole or absent; old ones go only after their successor is there."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf.checkpoint import CheckpointStore, Written, read_state
from rlhf.errors import CheckpointError


def write(store: CheckpointStore, step: int) -> None:
    with store.writing(step, {"step": step}) as directory:
        (directory / "learner").write_text(str(step))


def test_newest_whole_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.find("auto") is None
    for step in (5, 10, 15):
        write(store, step)
    assert store.steps() == [10, 15]
    found = store.find("auto")
    assert found is not None
    assert read_state(found)["step"] == 15


def test_a_checkpoint_holds_its_state_and_its_run_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=2)
    store.run = {"config": {"seed": 3}}
    (store.directory / ".partial-000005").mkdir(parents=True)
    (store.directory / ".partial-000005" / "of an interrupted write").touch()
    for other in ("step-7", "notes", "step-000008"):  # the last without a state
        (store.directory / other).mkdir()
    write(store, 5)
    state = read_state(store.path(5))
    assert state.pop("written_s") > 0 and state == {"step": 5, "config": {"seed": 3}}
    assert sorted(file.name for file in store.path(5).iterdir()) == ["driver.json", "learner"]
    assert not list(store.directory.glob(".partial*"))
    assert store.steps() == [5] and store.path(5) == tmp_path / "run" / "checkpoints" / "step-000005"


def test_a_damaged_state_is_one_line(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5)
    (store.path(5) / "driver.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"step-000005/driver\.json: cannot be read \(.*\); remove that checkpoint"
    ):
        store.find("auto")


def test_a_run_that_starts_anew_keeps_its_own(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, keep=2)
    write(old, 90)
    write(old, 100)
    new = CheckpointStore(tmp_path, keep=2)
    assert new.find("none") is None and not new.holds(100), "it is another run's"
    write(new, 7)
    assert new.holds(7)
    assert new.steps() == [100, 7], "the newest is the one written last"
    assert CheckpointStore(tmp_path, keep=2).find("auto") == new.path(7)
    write(new, 100)
    assert new.steps() == [7, 100]


@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_goes_on_holds_what_it_went_on_from_in_its_own_directory(tmp_path: Path, named: bool) -> None:
    write(CheckpointStore(tmp_path, keep=2), 5)
    store = CheckpointStore(tmp_path, keep=2)
    assert not store.holds(5)
    assert store.find(str(store.path(5)) if named else "auto") == store.path(5)
    assert store.holds(5) and not store.holds(6)
    other = CheckpointStore(tmp_path / "other", keep=2)
    assert other.find(str(store.path(5))) == store.path(5)
    assert not other.holds(5)


def test_an_interrupted_write_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 5)
    with pytest.raises(KeyboardInterrupt), store.writing(10, {"step": 10}) as directory:
        (directory / "critic").write_text("half")
        raise KeyboardInterrupt
    store.path(20).mkdir()
    assert store.steps() == [5], "and the older one is still there"
    write(store, 10)
    assert store.steps() == [10]
    assert sorted(path.name for path in store.path(10).iterdir()) == ["driver.json", "learner"]


def test_the_same_step_can_be_written_again_and_is_there_until_it_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5)
    for written in ("old", "new"):
        with store.writing(5, {"step": 5, "written": written}) as directory:
            assert (store.path(5) / "learner").read_text() == "5", "the one before"
            (directory / "learner").write_text("5")
    assert store.steps() == [5] and read_state(store.path(5))["written"] == "new"
    with pytest.raises(KeyboardInterrupt), store.writing(5, {"step": 5}):
        raise KeyboardInterrupt
    assert read_state(store.path(5))["written"] == "new"


@pytest.mark.parametrize("step", [5, 10])
def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Whether it gives way to the same step or to a later one."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 5)

    def die_after_one_file(path: Path, **_: Any) -> None:
        for learner in path.rglob("learner"):
            learner.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", die_after_one_file)
        write(store, step)
    assert store.steps() == [step] and (store.path(step) / "learner").read_text() == str(step)
    write(store, step)
    assert sorted(path.name for path in store.directory.iterdir()) == [store.path(step).name]


def test_resume_modes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 5)
    write(store, 6)
    assert store.find("none") is None
    assert store.find(str(store.path(5))) == store.path(5) and store.holds(5)
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume=.*not a complete checkpoint"):
        store.find(str(tmp_path / "elsewhere"))


def test_the_state_is_as_of_the_beginning_of_the_write(tmp_path: Path) -> None:
    store, counts = CheckpointStore(tmp_path, keep=1), [1]
    with store.writing(5, {"step": 5, "counts": counts}):
        counts.append(2)
    assert read_state(store.path(5))["counts"] == [1]


def test_what_was_written_together_took_as_long_as_the_slowest() -> None:
    assert Written.together([Written(1.5, 100), Written(2.5, 10)]) == Written(2.5, 110)
    assert Written.together([Written(1.5, 100), None]) is None
