"""Sync reward functions in their own process: alarms work there, and what hangs or dies is named and replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import RewardFunctionConfig
from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.rewards import RewardFunction, load_reward_functions
from rlhf.rewards.process import LOADED, FunctionProcess

ROOT = Path(__file__).resolve().parents[2]

MODULE = """
import json, os, re, signal, subprocess, sys, threading

def where(completions):
    in_main_thread = threading.current_thread() is threading.main_thread()
    return [float(os.getpid()), float(in_main_thread), float("torch" in sys.modules)]

def with_alarm(completions):
    # as math-verify limits its time: SIGALRM interrupts what would never end
    def ring(signum, frame):
        raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            signal.pause()
    except TimeoutError:
        return [0.5 for _ in completions]

def forgets_its_alarm(completions):
    signal.setitimer(signal.ITIMER_REAL, 1000)
    return [0.0 for _ in completions]

def seconds_to_alarm(completions):
    return [signal.getitimer(signal.ITIMER_REAL)[0] for _ in completions]

def has_a_child_of_its_own(completions):
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [float(n) for n in pool.map(len, completions)]

def greedy(completions, answer):
    completions.clear()
    answer.clear()
    return [0.0, 0.0]

def counts(completions, answer, bonus=0):
    return [float(len(completions)), float(len(answer)) + bonus]

def runaway(completions):
    return [float(bool(re.fullmatch("(a+)+b", c))) for c in completions]

def hangs_with_a_child(completions, answer):
    child = subprocess.Popen(["sleep", "600"])
    with open(answer[0], "w") as file:
        file.write(str(child.pid))
    child.wait()

def is_told_to_end(completions):
    os.kill(os.getpid(), signal.SIGTERM)
    program = subprocess.Popen(["sleep", "600"])
    started, tell = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.write(tell, b"!")
        signal.pause()
    os.read(started, 1)
    program.terminate()
    os.kill(fork, signal.SIGTERM)
    return [float(program.wait(10)), float(os.waitpid(fork, 0)[1])]

def exits(completions):
    os._exit(3)

def crashes(completions):
    os.kill(os.getpid(), signal.SIGSEGV)

def dies_but_leaves_a_child(completions):
    if os.fork() == 0:
        signal.pause()
    os._exit(3)

def boom(completions):
    raise KeyError("two\\nlines")

def leaves(completions):
    sys.exit(3)

def deep(completions):
    return [json.loads("no")]

def unpicklable(completions):
    return lambda: 0

def not_a_number(completions):
    return [1.0, float("nan")]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RewardFunction]:
    file = tmp_path_factory.mktemp("rewards") / "sync_rewards.py"
    file.write_text(MODULE)
    names = [line.split("(")[0].removeprefix("def ") for line in MODULE.splitlines() if line.startswith("def ")]
    loaded = load_reward_functions([RewardFunctionConfig(f"{file}:{name}") for name in names])
    return {function.name: function for function in loaded}


@pytest.fixture(scope="module")
def process(functions: dict[str, RewardFunction]) -> Iterator[FunctionProcess]:
    process = FunctionProcess(list(functions.values()), timeout_s=60, start_timeout_s=60)
    yield process
    process.close()


@pytest.fixture
def hasty(functions: dict[str, RewardFunction]) -> Iterator[FunctionProcess]:
    process = FunctionProcess(list(functions.values()), timeout_s=1, start_timeout_s=60)
    yield process
    process.close()


TWO = {"completions": ["a", "bc"]}


def score(process: FunctionProcess, function: RewardFunction, arguments: dict[str, Any] = TWO) -> list[float]:
    return process.score([(function, arguments)], 2)[function.name]


def test_functions_run_in_the_main_thread_of_another_process_without_torch(process, functions) -> None:
    ((pid, in_main_thread, has_torch),) = process.score([(functions["where"], TWO)], 3).values()
    assert pid != os.getpid()
    assert (in_main_thread, has_torch) == (1.0, 0.0)


def test_an_alarm_interrupts_what_would_never_end(process, functions) -> None:
    assert score(process, functions["with_alarm"]) == [0.5, 0.5]


def test_a_forgotten_alarm_does_not_hit_the_next_function(process, functions) -> None:
    assert score(process, functions["forgets_its_alarm"]) == [0.0, 0.0]
    assert score(process, functions["seconds_to_alarm"]) == [0.0, 0.0]


def test_functions_may_have_processes_of_their_own(process, functions) -> None:
    assert score(process, functions["has_a_child_of_its_own"]) == [1.0, 2.0]


def test_a_scheduler_s_sigterm_does_not_end_it_and_functions_can_end_their_own_processes(functions) -> None:
    """Although a local cluster's processes, such as the one that starts it, have SIGTERM blocked."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with closing(FunctionProcess(list(functions.values()), timeout_s=60, start_timeout_s=60)) as process:
            assert score(process, functions["is_told_to_end"]) == [-signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_functions_do_not_disturb_each_other_through_their_arguments(process, functions) -> None:
    arguments = {"completions": ["a", "b"], "answer": ["1", "2"]}
    calls = [(functions["greedy"], arguments), (functions["counts"], {**arguments, "bonus": 10})]
    assert process.score(calls, 2) == {"greedy": [0.0, 0.0], "counts": [2.0, 12.0]}


def test_a_runaway_regex_is_killed_at_the_deadline_and_the_next_call_works(hasty, functions) -> None:
    with pytest.raises(DeadlineError) as caught:
        score(hasty, functions["runaway"], {"completions": ["a" * 60, "b"]})
    assert "reward function runaway (reward.functions[" in str(caught.value)
    assert "did not finish 2 completions within reward.function_timeout_s=1; raise that" in str(caught.value)
    assert score(hasty, functions["runaway"], {"completions": ["aab", "c"]}) == [1.0, 0.0]


def test_what_a_hanging_function_started_ends_with_it(hasty, functions, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(DeadlineError, match="hangs_with_a_child"):
        score(hasty, functions["hangs_with_a_child"], {**TWO, "answer": [str(file)]})
    await_end(int(file.read_text()))


@pytest.mark.parametrize(("name", "how"), [("exits", "exit code 3"), ("crashes", "exit code -11, Segmentation fault")])
def test_a_function_that_ends_its_process_is_named_and_the_next_call_works(process, functions, name, how) -> None:
    with pytest.raises(RewardError) as caught:
        score(process, functions[name])
    assert f"reward function {name} (reward.functions[" in str(caught.value)
    assert f"ended its process ({how}) on 2 completions" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert score(process, functions["with_alarm"]) == [0.5, 0.5]


def test_a_process_that_dies_between_two_calls_is_replaced(process, functions) -> None:
    score(process, functions["with_alarm"])
    child = process._child._process
    child.kill()
    child.wait(timeout=30)
    assert score(process, functions["with_alarm"]) == [0.5, 0.5]


def test_a_dead_process_is_known_at_the_deadline_where_its_child_keeps_the_pipe(hasty, functions) -> None:
    with pytest.raises(RewardError, match=r"dies_but_leaves_a_child .* ended its process \(exit code 3\)"):
        score(hasty, functions["dies_but_leaves_a_child"])


@pytest.mark.parametrize(
    ("name", "message", "line"),  # counted from that of its def
    [
        ("boom", "raised KeyError: 'two\\nlines'", 1),
        ("leaves", "raised SystemExit: 3", 1),
        ("deep", "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 1),
        ("unpicklable", "returned a function; return a list with one number per completion", 0),
        ("not_a_number", "returned nan for completion 1; return a finite number or None", 0),
    ],
)
def test_what_a_function_does_wrong_is_named_with_its_line_and_its_process_lives_on(
    process, functions, name, message, line
) -> None:
    score(process, functions["with_alarm"])
    child = process._child
    with pytest.raises(RewardError) as caught:
        score(process, functions[name])
    assert f"reward function {name} (reward.functions[" in str(caught.value)
    line += 1 + MODULE.splitlines().index(f"def {name}(completions):")
    assert str(caught.value).endswith(f"{message} (at sync_rewards.py:{line})")
    assert process._child is child and child.is_alive


def test_a_traceback_goes_where_the_parent_s_errors_go(functions, capfd) -> None:
    own = FunctionProcess([functions["boom"]], timeout_s=60, start_timeout_s=60)
    with closing(own), pytest.raises(RewardError):
        score(own, functions["boom"])
    assert "in boom" in capfd.readouterr().err


STARTS = """
import os, sys
if "pytest" not in sys.modules:
    {in_the_child}

def score(completions):
    return [0.0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("in_the_child", "error", "message"),
    [
        (
            "os._exit(7)",
            RewardError,
            r"the process of score ended \(exit code 7\) while it loaded them; fix their modules",
        ),
        ("1 / 0", ConfigError, r"path=.*:score: importing it failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_fails_in_the_process_alone_is_known_at_its_start(
    tmp_path: Path, in_the_child: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "starts.py").write_text(STARTS.format(in_the_child=in_the_child))
    loaded = load_reward_functions([RewardFunctionConfig(f"{tmp_path}/starts.py:score")])
    with pytest.raises(error, match=message):
        FunctionProcess(loaded, timeout_s=60, start_timeout_s=60).start()


def test_loading_and_each_call_have_their_own_deadlines(functions, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, float]] = []

    class Answers:
        is_alive = True

        def ask(self, message: Any, timeout_s: float) -> Any:
            asked.append((message, timeout_s))
            return LOADED if isinstance(message, list) else [1.0, 2.0]

        def end(self) -> None:
            pass

    monkeypatch.setattr("rlhf.rewards.process.Child", Answers)
    where, boom = functions["where"], functions["boom"]
    process = FunctionProcess([where, boom], timeout_s=3, start_timeout_s=7)
    assert process.score([(where, TWO), (boom, {})], 2) == {"where": [1.0, 2.0], "boom": [1.0, 2.0]}
    load = [(f.name, f.path, f.key) for f in (where, boom)]
    assert asked == [(load, 7), (("where", TWO, 2), 3), (("boom", {}, 2), 3)]


def test_starting_has_a_deadline(functions) -> None:
    process = FunctionProcess([functions["boom"]], timeout_s=60, start_timeout_s=1e-3)
    with pytest.raises(DeadlineError, match=r"process of boom did not load them within timeouts\.start_s=0\.001"):
        process.start()


PARENT = """
import sys
from rlhf.config import RewardFunctionConfig
from rlhf.rewards import load_reward_functions
from rlhf.rewards.process import FunctionProcess

loaded = load_reward_functions([RewardFunctionConfig(sys.argv[1])])
process = FunctionProcess(loaded, timeout_s=60, start_timeout_s=60)
process.start()
print(process._child._process.pid, flush=True)
process.score([(loaded[0], {"completions": ["a" * 60]})], 1)
"""


def test_a_busy_child_ends_when_its_parent_is_killed(functions) -> None:
    command = [sys.executable, "-c", PARENT, functions["runaway"].path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    await_end(child)


def await_end(pid: int) -> None:
    ends = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < ends, f"{pid} outlives what started it"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether it is more than a zombie that nobody has waited for."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
