"""Reward functions: the built-in ones, loading by name and path, calling under a deadline, checking, combining."""

import asyncio
import functools
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batch import Prompt
from rlhf.config import RewardFunctionConfig
from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.rewards import RewardFunction, RewardFunctions, combine, load_reward_functions
from rlhf.rewards.functions import (
    contains_answer,
    even_tokens,
    exact_match,
    format_regex,
    last_number,
    length_penalty,
    number_match,
)

MODULE = """
counter = 0
constant = 3

def score(completions, **kwargs):
    return [float(len(c)) for c in completions]

def plus(completions, answer, bonus=0.0):
    return [float(a) + bonus for a in answer]

async def later(prompts, **kwargs):
    return [0.5 for _ in prompts]

def nothing(answer):
    return [0.0 for _ in answer]

def positional(prompts, /):
    return [0.0 for _ in prompts]
"""


@pytest.fixture
def module_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def module_on_path(module_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(module_file.parent))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def load(*paths: str, **kwargs: Any) -> list[RewardFunction]:
    return load_reward_functions([RewardFunctionConfig(path=path, kwargs=kwargs) for path in paths])


def together(*calls: Callable[..., Any], timeout_s: float = 5.0) -> RewardFunctions:
    functions = [RewardFunction(getattr(c, "__name__", "object"), 1.0, c, key="reward.functions[0]") for c in calls]
    return RewardFunctions(functions, timeout_s=timeout_s)


def plain(n: int = 2) -> list[Prompt]:
    return [Prompt(i, [i], f"prompt {i}", columns={"answer": str(i), "level": i}) for i in range(n)]


def chat(n: int = 2) -> list[Prompt]:
    return [Prompt(p.id, p.token_ids, p.text, [{"role": "user", "content": p.text}], p.columns) for p in plain(n)]


def score_two(call: Callable[..., Any], timeout_s: float = 5.0) -> list[float]:
    scores = together(call, timeout_s=timeout_s).submit(plain(), ["a", "b"], [[1], [2, 3]]).result()
    return next(iter(scores.values()))


# ---- built-in functions


def test_exact_match() -> None:
    assert exact_match([" 7\n", "8", "7 ", "x"], ["7", "7", 7, None]) == [1.0, 0.0, 1.0, None]
    assert exact_match([[{"role": "assistant", "content": "7"}]], ["7"]) == [1.0]


def test_contains_answer_wants_whole_words() -> None:
    texts = ["it is 7.", "it is 17", "a (b) c", "7"]
    assert contains_answer(texts, ["7", "7", "(b)", None]) == [1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 7.", "7"),
        ("1,234.50 apples", "1234.50"),
        ("5-3", "3"),
        ("5 - 3 = -2", "-2"),
        ("\N{MINUS SIGN}4", "-4"),
        ("$-5", "-5"),
        (".5", "0.5"),
        ("1, 2, 3,", "3"),
        ("#### 42\n", "42"),
        ("none", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_number_match() -> None:
    texts = ["so 1,000", "1000.0", "2 or 3", "no", "3"]
    assert number_match(texts, ["1000", 1000, 2.0, "1", None]) == [1.0, 1.0, 0.0, 0.0, None]
    assert number_match(["3.14"], ["3.1416"], tolerance=0.01) == [1.0]
    assert number_match(["3.14"], ["3.1416"], tolerance=0.001) == [0.0]
    with pytest.raises(ValueError, match="answer 'seven' holds no number"):
        number_match(["7"], ["seven"])


def test_even_tokens() -> None:
    assert even_tokens([[2, 3, 4, 6], [1], []]) == [0.75, 0.0, 0.0]


def test_length_penalty_is_soft_then_full() -> None:
    ids = [[0] * n for n in (4, 6, 7, 10, 12)]  # max 10, buffer 4: free up to 6
    assert length_penalty(ids, max_tokens=10, buffer_tokens=4) == [0.0, 0.0, -0.25, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer_tokens=11 must be from 1 to max_tokens=10"):
        length_penalty(ids, max_tokens=10, buffer_tokens=11)


def test_format_regex_matches_the_whole_text() -> None:
    texts = ["<think>a\nb</think> 7 ", "x <think></think> 7", "7"]
    assert format_regex(texts, regex="<think>.*</think> \\d+") == [1.0, 0.0, 0.0]


# ---- loading


def test_loading_by_name_dotted_path_and_file(module_on_path: str, module_file: Path) -> None:
    functions = load("exact_match", f"{module_on_path}.later", f"{module_file}:score")
    assert [f.name for f in functions] == ["exact_match", "later", "score"]
    assert [f.is_async for f in functions] == [False, True, False]
    assert functions[2].call is load(f"{module_file}:score")[0].call  # one module per file


def test_names_are_unique_and_weights_and_kwargs_are_kept() -> None:
    configs = [RewardFunctionConfig("format_regex", weight=w, kwargs={"regex": "a" * w}) for w in (1, 2, 3)]
    functions = RewardFunctions(load_reward_functions(configs), timeout_s=5)
    assert functions.weights() == {"format_regex": 1.0, "format_regex_2": 2.0, "format_regex_3": 3.0}
    assert functions.submit(plain(1), ["aa"], [[1]]).result() == {
        "format_regex": [0.0],
        "format_regex_2": [1.0],
        "format_regex_3": [0.0],
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exactmatch", "reward.functions[0].path=exactmatch is no built-in function (contains_answer, even_tokens, "),
        ("exactmatch", "use one of them, package.module.function, or path/to/file.py:function"),
        (".x", "is no built-in function"),
        ("nowhere.to.be", "no module 'nowhere'; install it, add its directory to PYTHONPATH, or use path/to/file.py:"),
        ("my_rewards.sub.f", "no module 'my_rewards.sub'"),
        ("my_rewards.absent", "the module has no 'absent'; its callables are later, nothing, plus, positional, score"),
        ("my_rewards.constant", "my_rewards.constant is a int, not callable; name a function"),
        ("my_rewards.nothing", "it takes none of prompts, completions, completion_ids by keyword; write it as fn("),
        ("my_rewards.positional", "it takes none of prompts, completions, completion_ids by keyword"),
        ("broken.f", "importing it failed: ZeroDivisionError: division by zero; correct the module"),
        ("needs.f", "importing it failed: ModuleNotFoundError: No module named 'not_installed'"),
        ("{dir}/broken.py:f", "importing it failed: ZeroDivisionError"),
        ("{dir}/syntax.py:f", "importing it failed: SyntaxError"),
        ("{dir}/absent.py:f", "absent.py; give its full path"),
        ("builtins.dict", "its signature cannot be read"),
    ],
)
def test_what_cannot_be_loaded(path: str, message: str, module_on_path: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "needs.py").write_text("import not_installed")
    (tmp_path / "syntax.py").write_text("def f(:")
    with pytest.raises(RewardError) as caught:
        load("exact_match", path.format(dir=tmp_path))
    assert message.replace("functions[0]", "functions[1]") in str(caught.value)
    assert str(caught.value).startswith("reward.functions[1].path=")
    assert "\n" not in str(caught.value)
    assert not any(name.startswith("rlhf_reward_broken") for name in sys.modules)


def test_kwargs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        load("length_penalty", max_token=3)
    assert str(caught.value) == (
        "reward.functions[0].kwargs.max_token is no argument of length_penalty; it has max_tokens, buffer_tokens"
    )
    with pytest.raises(ConfigError, match=r"kwargs\.prompts would hide what the loop passes as 'prompts'; remove it"):
        load("exact_match", prompts=[])


def test_a_missing_column_is_known_before_the_first_batch() -> None:
    functions = RewardFunctions(load("number_match"), timeout_s=5)
    functions.check_columns(["answer"])
    with pytest.raises(RewardError, match=r"path=number_match: number_match needs an argument 'answer', which is no "):
        functions.check_columns(["solution", "level"])
    with pytest.raises(RewardError, match=r"column of the data \(it has none\); rename a column, or set it in kwargs"):
        functions.submit([Prompt(0, [1], "a")], ["b"], [[2]]).result()


# ---- calling


def test_plain_data_is_passed_as_strings_with_its_columns() -> None:
    seen: dict[str, Any] = {}

    def spy(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0]

    together(spy).submit(plain(), ["a", "b"], [[1], [2, 3]]).result()
    assert seen == {
        "prompts": ["prompt 0", "prompt 1"],
        "completions": ["a", "b"],
        "completion_ids": [[1], [2, 3]],
        "answer": ["0", "1"],
        "level": [0, 1],
    }


def test_chats_are_passed_as_messages() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    together(spy).submit(chat(1), ["a"], [[1]]).result()
    assert seen["prompts"] == [[{"role": "user", "content": "prompt 0"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}]]


def test_configured_kwargs_win_over_columns_and_none_abstains(module_file: Path) -> None:
    functions = RewardFunctions(load(f"{module_file}:plus", bonus=10.0), timeout_s=5)
    assert functions.submit(plain(), ["a", "b"], [[1], [2]]).result() == {"plus": [10.0, 11.0]}

    def level_of(completions: Any, level: Any) -> list[float]:
        return [level] * len(completions)

    fixed = RewardFunctions([RewardFunction("level_of", 1.0, level_of, {"level": 9})], timeout_s=5)
    assert fixed.submit(plain(), ["a", "b"], [[1], [2]]).result() == {"level_of": [9.0, 9.0]}
    assert math.isnan(score_two(lambda completions: [None, 1.0])[0])


def test_a_function_cannot_disturb_another_through_its_arguments() -> None:
    def greedy(completions: Any, answer: Any) -> list[float]:
        completions.clear()
        answer.clear()
        return [0.0, 0.0]

    def late(completions: Any, answer: Any) -> list[float]:
        time.sleep(0.05)
        return [float(len(completions)), float(len(answer))]

    assert together(greedy, late).submit(plain(), ["a", "b"], [[1], [2]]).result()["late"] == [2.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [(1, True), np.array([1, 1], dtype=np.float32), torch.ones(2), [np.float64(1), torch.tensor(1)], [np.bool_(1), 1]],
)
def test_numbers_of_many_kinds_become_floats(values: Any) -> None:
    scores = score_two(lambda completions: values)
    assert scores == [1.0, 1.0]
    assert all(type(value) is float for value in scores)


def test_sync_and_async_functions_run_side_by_side() -> None:
    barrier = threading.Barrier(2, timeout=5)  # passed only when both sync functions wait at once
    met = asyncio.Event()

    def first(completions: Any) -> list[float]:
        barrier.wait()
        return [1.0, 1.0]

    def second(completions: Any) -> list[float]:
        barrier.wait()
        return [2.0, 2.0]

    async def third(completions: Any) -> list[float]:
        await asyncio.wait_for(met.wait(), timeout=5)
        return [3.0, 3.0]

    class Fourth:
        async def __call__(self, completions: Any) -> list[float]:
            met.set()
            return [4.0, 4.0]

    functions = together(first, second, third, Fourth())
    for _ in range(2):  # the event loop outlives a call, so what async functions keep stays usable
        scores = functions.submit(plain(), ["a", "b"], [[1], [2]]).result()
        assert scores == {"first": [1, 1], "second": [2, 2], "third": [3, 3], "object": [4, 4]}


def test_async_functions_wait_for_several_groups_at_once_and_sync_ones_are_never_called_twice_at_once() -> None:
    arrived, running, most = 0, 0, 0
    all_there = asyncio.Event()

    async def judge(completions: Any) -> list[float]:
        nonlocal arrived
        arrived += 1
        if arrived == 6:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), timeout=5)
        return [float(c) for c in completions]

    def alone(completions: Any) -> list[float]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return [-float(c) for c in completions]

    functions = together(judge, alone)

    def score(first: int) -> list[dict[str, list[float]]]:  # as a call of the reward actor, with two groups
        groups = [functions.submit(plain(), [str(i), str(i + 1)], [[1], [2]]) for i in (first, first + 2)]
        return [group.result() for group in groups]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(score, [0, 4, 8]))
    assert answers == [
        [{"judge": [i, i + 1], "alone": [-i, -i - 1]} for i in (first, first + 2)] for first in (0, 4, 8)
    ]
    assert most == 1


def test_a_partial_is_named_after_its_function_and_async_ones_are_found() -> None:
    async def base(completions: Any, bonus: float) -> list[float]:
        return [bonus, bonus]

    assert score_two(functools.partial(base, bonus=2.0)) == [2.0, 2.0]


def test_the_deadline_ends_the_wait() -> None:
    release = threading.Event()

    def stuck(completions: Any) -> list[float]:
        release.wait(20)
        return [0.0, 0.0]

    async def stuck_async(completions: Any) -> list[float]:
        await asyncio.sleep(20)
        return [0.0, 0.0]

    for call in (stuck, stuck_async):
        start = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            score_two(call, timeout_s=0.2)
        assert time.monotonic() - start < 5
        assert f"reward function {call.__name__} (reward.functions[0]) did not finish 2 completions within" in str(
            caught.value
        )
        assert "reward.function_timeout_s=0.2; raise that" in str(caught.value)
    release.set()


def boom(completions: Any) -> list[float]:
    raise KeyError("two\nlines")


async def boom_async(completions: Any) -> list[float]:
    raise KeyError("two\nlines")


def leave(completions: Any) -> list[float]:
    sys.exit(3)


async def cancelled(completions: Any) -> list[float]:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("call", "message", "cause"),
    [
        (boom, "boom (reward.functions[0]) raised KeyError: 'two\\nlines'", KeyError),
        (boom_async, "boom_async (reward.functions[0]) raised KeyError: 'two\\nlines'", KeyError),
        (leave, "leave (reward.functions[0]) raised SystemExit: 3", SystemExit),
        (cancelled, "cancelled (reward.functions[0]) raised CancelledError", BaseException),
    ],
)
def test_what_a_function_raises_is_named_and_chained(call: Any, message: str, cause: type[BaseException]) -> None:
    with pytest.raises(RewardError) as caught:
        score_two(call)
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_failure_does_not_wait_for_the_others() -> None:
    def slow(completions: Any) -> list[float]:
        time.sleep(3)
        return [0.0, 0.0]

    start = time.monotonic()
    with pytest.raises(RewardError, match="boom"):
        together(slow, boom).submit(plain(), ["a", "b"], [[1], [2]]).result()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 values for 2 completions; return one per completion"),
        (1.0, "returned a float; return a list with one number per completion"),
        (np.float32(1), "returned a float"),
        ("ab", "returned a str; return a list"),
        ({0: 1.0, 1: 1.0}, "returned a dict"),
        ([1.0, "1"], "returned '1' for completion 1; return a finite number or None"),
        ([math.inf, 1.0], "returned inf for completion 0; return a finite number or None"),
        ([[1.0], 1.0], "returned [1.0] for completion 0"),
        (torch.ones(2, 2), "returned [1.0, 1.0] for completion 0"),
        ([torch.ones(2), 1.0], "for completion 0; return a finite number or None"),
    ],
)
def test_what_is_not_one_number_per_completion(values: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        score_two(lambda completions: values)
    assert "reward function <lambda> (reward.functions[0]) " in str(caught.value)
    assert message in str(caught.value)


# ---- the sum


def test_combine_is_the_weighted_sum_of_those_that_did_not_abstain() -> None:
    scores = {"a": [1.0, math.nan, 2.0], "b": [10.0, 20.0, math.nan]}
    combined = combine(scores, {"a": 2.0, "b": 0.5, "unused": 9.0})
    assert combined.dtype == torch.float32
    assert combined.tolist() == [7.0, 10.0, 4.0]


def test_a_row_without_any_reward_is_an_error() -> None:
    with pytest.raises(RewardError) as caught:
        combine({"a": [1.0, math.nan], "b": [1.0, math.nan]}, {"a": 1.0, "b": 1.0})
    assert "every reward function (a, b) abstained for 1 of 2 completions (first: 1)" in str(caught.value)


def test_text_is_asked_for_only_by_functions_that_take_it() -> None:
    assert not together(lambda completion_ids: [0.0]).needs_text
    assert together(lambda completion_ids: [0.0], lambda completions: [0.0]).needs_text
    assert together(lambda **kwargs: [0.0]).needs_text
    by_tokens = together(lambda completion_ids, prompts: [float(len(ids)) for ids in completion_ids])
    assert by_tokens.submit(plain(), None, [[1], [2, 3]]).result() == {"<lambda>": [1.0, 2.0]}
