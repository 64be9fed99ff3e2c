"""A process that does not answer says where it is stuck; a stopped one says nothing, and that is said of it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import stacks
from actors.group import Member
from rlhf.stacks import stacks_of

ROOT = Path(__file__).resolve().parents[2]
NAME = f"test-{os.getpid()}"

STUCK = """
import re, subprocess, sys, threading
from rlhf.stacks import answer_signals
answer_signals(sys.argv[1])

waits = threading.Event()

def waits_for_ever():
    waits.set()
    threading.Event().wait()

def holds_the_interpreter():
    waits.wait()
    print("up", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")

threading.Thread(target=waits_for_ever, daemon=True).start()
if sys.argv[2:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], ""])
holds_the_interpreter()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A stuck process of that name, and one that it has started."""
    command = [sys.executable, "-c", STUCK, NAME, STUCK]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    yield parent
    os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


def test_each_thread_of_a_stuck_process_and_of_its_child_is_seen_every_time(family: subprocess.Popen[str]) -> None:
    for _ in range(2):
        found = stacks_of([NAME, "nobody"])
        assert found.keys() == {NAME}
        nothing, *processes = re.split(r"^process (?=\d+, R \(running\))", found[NAME], flags=re.MULTILINE)
        assert nothing == "" and len(processes) == 2 and f"{family.pid}," in found[NAME]
        for text in processes:
            assert text.count("in holds_the_interpreter") == text.count("in waits_for_ever") == 1
    assert family.poll() is None, "being asked ends nobody"


def test_a_stopped_process_is_said_not_to_react(family: subprocess.Popen[str]) -> None:
    os.kill(family.pid, signal.SIGSTOP)
    texts = stacks_of([NAME])[NAME]
    (stopped,) = [line for line in texts.splitlines() if line.startswith(f"process {family.pid}, T (stopped), ")]
    assert stopped.endswith(": does not react to signals")
    assert texts.count("in holds_the_interpreter") == 1, "its child's"


def test_stacks_go_to_a_file_and_what_keeps_them_away_into_the_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stacks, "_directory", tmp_path)
    members = [Member(None, "learner", rank, "10.0.0.1") for rank in range(2)]
    monkeypatch.setattr(stacks, "collect", lambda asked: {member: f"of {member.rank}" for member in asked})
    told = stacks.kept(members)
    (file,) = tmp_path.iterdir()
    assert told == f"stacks: {file}"
    assert file.read_text() == "==== learner[0] on 10.0.0.1\nof 0\n==== learner[1] on 10.0.0.1\nof 1\n"
    stacks.keep_in(str(tmp_path / "not there"))
    assert stacks.kept(members).startswith("their stacks could not be had (FileNotFoundError: ")


def test_only_the_nodes_of_the_members_are_asked_and_all_if_one_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "NodeID": "one", "Alive": True},
        {"NodeManagerAddress": "10.0.0.2", "NodeID": "two", "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "NodeID": "gone", "Alive": False},
    ]
    asked: dict[str, list[str]] = {}
    cancelled: list[str] = []

    def ask(node_id: str, names: list[str]) -> str:
        asked[node_id] = names
        return node_id

    def wait(refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref == "one"], [ref for ref in refs if ref != "one"]

    monkeypatch.setattr(stacks, "_ask", ask)
    monkeypatch.setattr(stacks.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(stacks.ray, "wait", wait)
    monkeypatch.setattr(stacks.ray, "get", lambda ref, timeout: {"a": "stuck"})
    monkeypatch.setattr(stacks.ray, "cancel", lambda ref, force: cancelled.append(ref))

    def member(name: str, node: str) -> Member:
        handle = type("Handle", (), {"_actor_id": SimpleNamespace(hex=lambda: name)})()
        return Member(handle, name, 0, node)

    a, b, c = member("a", "10.0.0.1"), member("b", "10.0.0.1"), member("c", "10.0.0.3")
    ended = "none of its processes can be asked: it has ended, or not begun"
    assert stacks.collect([a, b]) == {a: "stuck", b: ended}
    assert asked == {"one": ["a", "b"]} and not cancelled
    assert stacks.collect([c]) == {c: "its node is gone"}
    late = "its node did not send them within 15 s"
    assert stacks.collect([member("d", "?")]).popitem()[1] == late
    assert asked["two"] == asked["one"] == ["d"] and cancelled == ["two"]
