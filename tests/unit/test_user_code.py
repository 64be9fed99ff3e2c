"""Functions of the user's, by path: which file they come from, and when that file counts as another one."""

import sys
from pathlib import Path

import pytest

from rlhf.user_code import load_function, source_digest

POINT = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Point:  # looks its module up while that is imported
    x: int

def twice(x):
    return Point(2 * x)
"""


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for directory, value in (("a", 1), ("b", 2)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "mine.py").write_text(f"def f():\n    return {value}\n")
    a, b = (load_function(f"{tmp_path / name}/mine.py:f", "key") for name in "ab")
    assert (a(), b()) == (1, 2)


def test_a_file_in_the_home_directory_finds_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(POINT)
    twice = load_function("~/mine.py:twice", "key")
    assert twice(3).x == 6 and sys.modules[twice.__module__].twice is twice
    assert source_digest("~/mine.py:twice") == source_digest(f"{tmp_path}/mine.py:twice") is not None


def test_a_built_in_name_is_the_built_in_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shadow.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("shadow.f", "key")() == 1
    assert load_function("shadow.f", "key", built_in={"shadow.f": lambda: 2})() == 2


def test_the_digest_follows_the_file_s_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "digested.py"
    file.write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_function("digested.f", "key")
    first = source_digest("digested.f")
    assert first == source_digest(f"{file}:f") and first is not None
    file.write_text("def f():\n    return 2\n")
    assert source_digest("digested.f") not in (first, None)
    assert source_digest("time.time") is None, "there is no file"
