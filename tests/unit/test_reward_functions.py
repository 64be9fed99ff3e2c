"""Reward functions: the built-in ones, loading by name and path, calling under a deadline, checking, combining."""

import asyncio
import functools
import math
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from actors.cluster import reward_weights
from rlhf.batch import Prompt
from rlhf.config import RewardFunctionConfig
from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.recipes import load_config
from rlhf.rewards import RewardFunction, RewardFunctions, load_reward_functions
from rlhf.rewards.functions import (
    contains_answer,
    even_tokens,
    exact_match,
    format_regex,
    last_number,
    length_penalty,
    number_match,
)
from rlhf.rewards.total import Scores, combine
from tests.fake_ray import Clock

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

def model(completions, answer, level, bonus=0.0):
    return [0.0 for _ in prompts]

def backwards(completions):
    return [-float(c) for c in completions]
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


ROOT = Path(__file__).resolve().parents[2]


def load(*paths: str, **kwargs: Any) -> list[RewardFunction]:
    return load_reward_functions([RewardFunctionConfig(path=path, kwargs=kwargs) for path in paths])


def unloaded(call: Callable[..., Any], **kwargs: Any) -> RewardFunction:
    """A function of this process, as only async ones can be called."""
    return RewardFunction(getattr(call, "__name__", "object"), 1.0, call, "", kwargs, key="reward.functions[0]")


def together(*calls: Callable[..., Any], timeout_s: float = 5.0) -> RewardFunctions:
    return RewardFunctions([unloaded(call) for call in calls], timeout_s=timeout_s)


def plain(n: int = 2) -> list[Prompt]:
    return [Prompt(i, [i], f"prompt {i}", columns={"answer": str(i), "level": i}) for i in range(n)]


def chat(n: int = 2) -> list[Prompt]:
    return [Prompt(p.id, p.token_ids, p.text, [{"role": "user", "content": p.text}], p.columns) for p in plain(n)]


def score_two(call: Callable[..., Any], timeout_s: float = 5.0) -> list[float]:
    scores = together(call, timeout_s=timeout_s).submit(plain(), ["a", "b"], [[1], [2, 3]]).result()
    return next(iter(scores.values()))


# ---- built-in functions


def test_exact_match() -> None:
    assert exact_match([" 7\n", "8", "7 ", "x", "a"], ["7", "7", 7, None, " a\n"]) == [1.0, 0.0, 1.0, None, 1.0]
    assert exact_match([[{"role": "assistant", "content": "7"}]], ["7"]) == [1.0]


def test_contains_answer_wants_whole_words() -> None:
    texts = ["it is 7.", "it is 17", "it is 71", "a (b) c", "it is 125", "7"]
    assert contains_answer(texts, ["7", "7", "7", "(b)", "1.5", None]) == [1.0, 0.0, 0.0, 1.0, 0.0, None]


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
    assert number_match(["1.3", "0.7"], ["1", "1"], tolerance=0.3) == [1.0, 1.0], "0.3 as it is written, included"
    with pytest.raises(ValueError, match="answer 'seven' contains no number"):
        number_match(["7"], ["seven"])


@pytest.mark.parametrize("function", [exact_match, contains_answer, number_match])
def test_as_many_answers_as_completions(function: Any) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer) than argument 1"):
        function(["1", "2"], ["1"])
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer) than argument 1"):
        function(["1"], ["1", "2"])


def test_even_tokens() -> None:
    assert even_tokens([[2, 3, 4, 6], [1], [2], []]) == [0.75, 0.0, 1.0, 0.0]


def test_length_penalty_is_soft_then_full() -> None:
    ids = [[0] * n for n in (4, 6, 7, 10, 12)]  # max 10, buffer 4: free up to 6
    assert length_penalty(ids, max_tokens=10, buffer_tokens=4) == [0.0, 0.0, -0.25, -1.0, -1.0]
    assert length_penalty(ids[:2], max_tokens=4, buffer_tokens=4) == [-1.0, -1.0]
    assert length_penalty(ids, max_tokens=7, buffer_tokens=1) == [0.0, 0.0, -1.0, -1.0, -1.0]
    for buffer_tokens in (0, 11):
        with pytest.raises(ValueError, match=f"buffer_tokens={buffer_tokens} must be from 1 to max_tokens=10"):
            length_penalty(ids, max_tokens=10, buffer_tokens=buffer_tokens)


def test_format_regex_matches_the_whole_text() -> None:
    texts = ["<think>a\nb</think> 7 ", "x <think></think> 7", "<think></think> 7 x", "7"]
    assert format_regex(texts, regex="<think>.*</think> \\d+") == [1.0, 0.0, 0.0, 0.0]


# ---- loading


def test_loading_by_name_dotted_path_and_file(module_on_path: str, module_file: Path) -> None:
    functions = load("exact_match", f"{module_on_path}.later", f"{module_file}:score")
    assert [f.name for f in functions] == ["exact_match", "later", "score"]
    assert [f.is_async for f in functions] == [False, True, False]
    assert functions[2].call is load(f"{module_file}:score")[0].call  # one module per file


def test_names_are_unique_and_weights_and_kwargs_are_kept() -> None:
    configs = [RewardFunctionConfig("format_regex", weight=w, kwargs={"regex": "a" * w}) for w in (1, 2, 3)]
    with closing(RewardFunctions(load_reward_functions(configs), timeout_s=60)) as functions:
        assert functions.weights() == {"format_regex": 1.0, "format_regex_2": 2.0, "format_regex_3": 3.0}
        assert functions.submit(plain(1), ["aa"], [[1]]).result() == {
            "format_regex": [0.0],
            "format_regex_2": [1.0],
            "format_regex_3": [0.0],
        }


def test_a_function_does_not_take_the_reward_model_s_name(module_file: Path) -> None:
    path = f"{module_file}:model"
    assert [f.name for f in load(path, path)] == ["model_2", "model_3"]
    overrides = [f"reward.functions=[{{path: {path}, weight: 2}}]", "reward.model={path: somewhere, weight: 3}"]
    assert reward_weights(load_config(ROOT / "conf" / "grpo_tiny.yaml", overrides)) == {"model_2": 2.0, "model": 3.0}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "exactmatch",
            "reward.functions[0].path=exactmatch is not a built-in function (contains_answer, even_tokens, ",
        ),
        ("exactmatch", "use one of them, package.module.function, or path/to/file.py:function"),
        (".x", "is not a built-in function"),
        ("nowhere.to.be", "no module 'nowhere'; install it, add its directory to PYTHONPATH, or use path/to/file.py:"),
        ("my_rewards.sub.f", "no module 'my_rewards.sub'"),
        (
            "my_rewards.absent",
            "the module has no 'absent'; its callables are backwards, later, model, nothing, plus, positional",
        ),
        ("my_rewards.constant", "my_rewards.constant is a int, not callable; name a function"),
        ("my_rewards.nothing", "it takes none of prompts, completions, completion_ids by keyword; write it as fn("),
        ("my_rewards.positional", "it takes none of prompts, completions, completion_ids by keyword"),
        ("broken.f", "importing it failed: ZeroDivisionError: division by zero; fix the module"),
        ("needs.f", "importing it failed: ModuleNotFoundError: No module named 'not_installed'"),
        (
            "{dir}/broken.py:f",
            "importing it failed: ZeroDivisionError: division by zero (at broken.py:1); fix the module",
        ),
        ("{dir}/syntax.py:f", "importing it failed: SyntaxError"),
        ("{dir}/absent.py:f", "absent.py on "),
        ("builtins.dict", "its signature cannot be read"),
    ],
)
def test_what_cannot_be_loaded(path: str, message: str, module_on_path: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "needs.py").write_text("import not_installed")
    (tmp_path / "syntax.py").write_text("def f(:")
    with pytest.raises(ConfigError) as caught:
        load("exact_match", path.format(dir=tmp_path))
    assert message.replace("functions[0]", "functions[1]") in str(caught.value)
    assert str(caught.value).startswith("reward.functions[1].path=")
    assert "\n" not in str(caught.value)
    assert not any(name.startswith("rlhf_user_broken") for name in sys.modules)


def test_kwargs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        load("length_penalty", max_token=3)
    assert str(caught.value) == (
        "reward.functions[0].kwargs.max_token is not an argument of length_penalty; it has max_tokens, buffer_tokens"
    )
    with pytest.raises(ConfigError, match=r"kwargs\.prompts would hide what the loop passes as 'prompts'; remove it"):
        load("exact_match", prompts=[])


def test_a_missing_column_is_known_before_the_first_batch() -> None:
    functions = RewardFunctions(load("number_match"), timeout_s=5)
    functions.check_columns(["answer"])
    with pytest.raises(
        RewardError, match=r"path=number_match: number_match needs an argument 'answer', which is not a "
    ):
        functions.check_columns(["solution", "level"])
    with pytest.raises(RewardError, match=r"column of the data \(it has none\); rename a column, set it in kwargs"):
        functions.submit([Prompt(0, [1], "a")], ["b"], [[2]]).result()


def test_required_columns_are_those_that_neither_loop_nor_kwargs_nor_defaults_give(module_file: Path) -> None:
    configs = [
        RewardFunctionConfig(f"{module_file}:model", kwargs={"level": 1}),
        RewardFunctionConfig(f"{module_file}:score"),
        RewardFunctionConfig("even_tokens"),
    ]
    functions = RewardFunctions(load_reward_functions(configs), timeout_s=5)
    assert functions.required_columns() == {"model_2": {"answer"}, "score": set(), "even_tokens": set()}


# ---- calling


def test_plain_data_is_passed_as_strings_with_its_columns() -> None:
    seen: dict[str, Any] = {}

    async def spy(**kwargs: Any) -> list[float]:
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
    mixed = [Prompt(0, [1], "a", columns={"answer": "0"}), Prompt(1, [1], "b", columns={"level": 1})]
    together(spy).submit(mixed, ["a", "b"], [[1], [2]]).result()
    assert (seen["answer"], seen["level"]) == (["0", None], [None, 1])


def test_chats_are_passed_as_messages() -> None:
    seen: dict[str, Any] = {}

    async def spy(prompts: Any, completions: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    together(spy).submit(chat(1), ["a"], [[1]]).result()
    assert seen["prompts"] == [[{"role": "user", "content": "prompt 0"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}]]


EPISODE = [
    {"role": "assistant", "content": "6 * 7"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "42", "tool_calls": [{"function": {"name": "tell"}}]},
    {"role": "tool", "content": "told"},
]


def test_an_episode_is_passed_as_all_its_messages_and_each_function_gets_its_own() -> None:
    seen: list[Any] = []

    async def greedy(completions: Any, completion_ids: Any) -> list[float]:
        seen.append((str(completions), completion_ids))
        completions[0][2]["tool_calls"][0]["function"].clear()
        return [0.0]

    together(greedy, greedy).submit(chat(1), [EPISODE], [[1, 5]]).result()
    assert seen == [(str([EPISODE]), [[1, 5]])] * 2


def test_a_built_in_function_reads_what_the_model_said_last() -> None:
    assert exact_match([EPISODE, EPISODE[:2]], answer=["42", "42"]) == [1.0, 0.0], "not what it was told"


def test_configured_kwargs_win_over_columns_and_none_abstains(module_file: Path) -> None:
    with closing(RewardFunctions(load(f"{module_file}:plus", bonus=10.0), timeout_s=60)) as functions:
        functions.start()
        assert functions.submit(plain(), ["a", "b"], [[1], [2]]).result() == {"plus": [10.0, 11.0]}

    async def level_of(completions: Any, level: Any) -> list[float]:
        return [level] * len(completions)

    fixed = RewardFunctions([unloaded(level_of, level=9)], timeout_s=5)
    assert fixed.submit(plain(), ["a", "b"], [[1], [2]]).result() == {"level_of": [9.0, 9.0]}
    assert math.isnan(checked([None, 1.0])[0])


def test_a_function_cannot_disturb_another_through_its_arguments() -> None:
    async def greedy(completions: Any, answer: Any) -> list[float]:
        completions.clear()
        answer.clear()
        return [0.0, 0.0]

    async def late(completions: Any, answer: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(completions)), float(len(answer))]

    assert together(greedy, late).submit(plain(), ["a", "b"], [[1], [2]]).result()["late"] == [2.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [(1, True), np.array([1, 1], dtype=np.float32), torch.ones(2), [np.float64(1), torch.tensor(1)], [np.bool_(1), 1]],
)
def test_numbers_of_many_kinds_become_floats(values: Any) -> None:
    scores = checked(values)
    assert scores == [1.0, 1.0]
    assert all(type(value) is float for value in scores)


def test_async_functions_run_side_by_side() -> None:
    met = asyncio.Event()

    async def third(completions: Any) -> list[float]:
        await asyncio.wait_for(met.wait(), timeout=5)
        return [3.0, 3.0]

    class Fourth:
        async def __call__(self, completions: Any) -> list[float]:
            met.set()
            return [4.0, 4.0]

    functions = together(third, Fourth())
    for _ in range(2):  # the event loop outlives a call, so what async functions keep stays usable
        scores = functions.submit(plain(), ["a", "b"], [[1], [2]]).result()
        assert scores == {"third": [3, 3], "object": [4, 4]}


def test_async_functions_wait_for_several_groups_at_once_while_those_take_turns_in_sync_ones(module_file: Path) -> None:
    arrived = 0
    all_there = asyncio.Event()

    async def judge(completions: Any) -> list[float]:
        nonlocal arrived
        arrived += 1
        if arrived == 6:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), timeout=5)
        return [float(c) for c in completions]

    functions = RewardFunctions([unloaded(judge), *load(f"{module_file}:backwards")], timeout_s=60)

    def score(first: int) -> list[dict[str, list[float]]]:  # as a call of the reward actor, with two groups
        groups = [functions.submit(plain(), [str(i), str(i + 1)], [[1], [2]]) for i in (first, first + 2)]
        return [group.result() for group in groups]

    with closing(functions), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(score, [0, 4, 8]))
    assert answers == [
        [{"judge": [i, i + 1], "backwards": [-i, -i - 1]} for i in (first, first + 2)] for first in (0, 4, 8)
    ]


def test_only_sync_functions_have_a_process(module_file: Path) -> None:
    async def judge(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    before = {p.pid for p in psutil.Process().children()}
    functions = together(judge)
    functions.start()
    functions.submit(plain(), ["a", "b"], [[1], [2]]).result()
    RewardFunctions(load(f"{module_file}:score"), timeout_s=5).check_columns([])  # nor those that are only looked at
    assert {p.pid for p in psutil.Process().children()} <= before


def test_the_process_of_sync_functions_has_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def judge(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    class Process:
        def __init__(self, functions: Any, *, timeout_s: float, start_timeout_s: float) -> None:
            given.append(([function.name for function in functions], timeout_s, start_timeout_s))

    given: list[Any] = []
    monkeypatch.setattr("rlhf.rewards.scoring.FunctionProcess", Process)
    RewardFunctions([unloaded(judge), *load("even_tokens")], timeout_s=7.0, start_timeout_s=11.0)
    assert given == [(["even_tokens"], 7.0, 11.0)]


def test_a_partial_is_named_after_its_function_and_async_ones_are_found() -> None:
    async def base(completions: Any, bonus: float) -> list[float]:
        return [bonus, bonus]

    assert score_two(functools.partial(base, bonus=2.0)) == [2.0, 2.0]


def test_the_deadline_ends_the_wait() -> None:
    async def stuck(completions: Any) -> list[float]:
        await asyncio.sleep(600)
        return [0.0, 0.0]

    with pytest.raises(DeadlineError) as caught:
        score_two(stuck, timeout_s=0.1)
    assert str(caught.value) == (
        "reward function stuck (reward.functions[0]) did not finish 2 completions within "
        "reward.function_timeout_s=0.1; raise that, or make it faster"
    )


async def boom_async(completions: Any) -> list[float]:
    raise KeyError("two\nlines")


async def cancelled(completions: Any) -> list[float]:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("call", "message", "cause"),
    [
        (boom_async, "boom_async (reward.functions[0]) raised KeyError: 'two\\nlines'", KeyError),
        (cancelled, "cancelled (reward.functions[0]) raised CancelledError", BaseException),
    ],
)
def test_what_a_function_raises_is_named_and_chained(call: Any, message: str, cause: type[BaseException]) -> None:
    with pytest.raises(RewardError) as caught:
        score_two(call)
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_async_functions_time_begins_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def wait(futures: Any, timeout: float, return_when: str) -> Any:
        given.append(timeout)
        return set(), set(futures)

    async def judge(completions: Any) -> list[float]:
        return [0.0, 0.0]

    clock = Clock(monkeypatch)
    groups = [together(judge, timeout_s=60.0).submit(plain(), ["a", "b"], [[1], [2]]) for _ in range(2)]
    monkeypatch.setattr("rlhf.rewards.scoring.wait", wait)
    for group, later_s in zip(groups, (25.0, 36.0), strict=True):
        clock.now_s += later_s
        with pytest.raises(DeadlineError):
            group.result()
    assert given == [35.0, 0.0]


def test_what_is_late_is_cancelled() -> None:
    cancelled = threading.Event()

    async def stuck(completions: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return [0.0, 0.0]

    with pytest.raises(DeadlineError):
        score_two(stuck, timeout_s=0.1)
    assert cancelled.wait(10), "it would go on for nobody"


def test_a_failure_does_not_wait_for_the_others() -> None:
    async def slow(completions: Any) -> list[float]:
        await asyncio.sleep(600)
        return [0.0, 0.0]

    with pytest.raises(RewardError, match="boom_async"):
        together(slow, boom_async, timeout_s=600).submit(plain(), ["a", "b"], [[1], [2]]).result()


def checked(values: Any) -> list[float]:
    return unloaded(boom_async).checked(values, 2)


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
        ([1.0, math.nan], "returned nan for completion 1; return a finite number or None"),
        (np.array([1.0, np.nan]), "returned nan for completion 1; return a finite number or None"),
        ([1.0, 10**400], "returned 1000000"),
        ([[1.0], 1.0], "returned [1.0] for completion 0"),
        (torch.ones(2, 2), "returned [1.0, 1.0] for completion 0"),
        ([torch.ones(2), 1.0], "for completion 0; return a finite number or None"),
    ],
)
def test_what_is_not_one_number_per_completion(values: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        checked(values)
    assert "reward function boom_async (reward.functions[0]) " in str(caught.value)
    assert message in str(caught.value)


# ---- the sum


def test_combine_is_the_weighted_sum_of_those_that_did_not_abstain() -> None:
    scores = {"a": [1.0, math.nan, 2.0], "b": [10.0, 20.0, math.nan]}
    combined = combine(scores, {"unused": 9.0, "b": 0.5, "a": 2.0})
    assert combined.dtype == torch.float32
    assert combined.tolist() == [7.0, 10.0, 4.0]
    assert combine({"penalty": [4.0, math.nan]}, {"penalty": -0.5})[:1].tolist() == [-2.0], "a penalty is a number, too"
    assert combine({"a": [1e8], "b": [1.0], "c": [1e8]}, {"a": 1.0, "b": 1.0, "c": -1.0}).tolist() == [1.0]
    large = 2.0**24  # float32 has no number between it and large + 2
    assert combine({"a": [large + 1], "b": [large]}, {"a": 1.0, "b": -1.0}).tolist() == [1.0]
    assert combine({"a": [1.0], "b": [-1.0]}, {"a": large + 1, "b": large}).tolist() == [1.0]


def test_a_row_to_which_nobody_gave_a_number_has_no_reward() -> None:
    scores = {"a": [1.0, math.nan, math.nan], "b": [1.0, 2.0, math.nan]}
    combined = combine(scores, {"a": 1.0, "b": 3.0})
    assert combined.isnan().tolist() == [False, False, True]
    assert combined[:2].tolist() == [4.0, 6.0]


def test_a_function_of_weight_zero_decides_nothing() -> None:
    scores = {"shown": [5.0, math.nan, 5.0], "right": [1.0, 2.0, math.nan]}
    combined = combine(scores, {"shown": 0.0, "right": 1.0})
    assert combined[:2].tolist() == [1.0, 2.0]
    assert combined[2].isnan()
    assert combine(scores, {"shown": 0.0, "right": 0.0}).isnan().all()


def test_a_sum_that_float32_cannot_hold_is_an_error() -> None:
    with pytest.raises(RewardError, match="the reward of completion 1, the weighted sum of a, b, is too large"):
        combine({"a": [1.0, 1e30], "b": [0.0, 0.0]}, {"a": 1e10, "b": 1.0})


def test_the_scores_of_batches_join_by_name() -> None:
    parts = [
        Scores({"a": [1.0], "b": [2.0]}, {"a": 1.0, "b": 10.0}),
        Scores({"b": [3.0, 4.0], "a": [5.0, 6.0]}, {"a": 1.0, "b": 10.0}),
    ]
    whole = Scores.concat(parts)
    assert whole.given == {"a": [1.0, 5.0, 6.0], "b": [2.0, 3.0, 4.0]}
    assert whole.rewards.tolist() == [21.0, 35.0, 46.0]
    assert Scores.concat(parts[:1]) == parts[0]


def test_more_abstained_than_allowed_ends_the_run() -> None:
    given = [math.nan, math.nan, 1.0, math.nan]
    Scores({"a": given}, {"a": 1.0}).check_abstained(0.75)
    Scores({"a": given, "b": [1.0] * 4}, {"a": 1.0, "b": 1.0}).check_abstained(0.0)
    with pytest.raises(RewardError) as caught:
        Scores({"a": given, "b": [1.0] * 4, "c": given}, {"a": 1.0, "b": 0.0, "c": 2.0}).check_abstained(0.5)
    assert str(caught.value) == (
        "3 of 4 completions of this step (75%) have no reward: every reward function with nonzero weight (a, c) "
        "abstained; return numbers for more of them, drop those prompts, or raise reward.max_abstained=0.5"
    )
    with pytest.raises(RewardError, match="have no reward: all weights are 0; "):
        Scores({"a": given}, {"a": 0.0}).check_abstained(0.5)
    failed = (
        r"have no reward: their episodes failed, as noted above; mend the environment, drop those prompts, or raise"
    )
    with pytest.raises(RewardError, match=failed):
        Scores({"a": given, "environment": given}, {"a": 1.0, "environment": 1.0}).check_abstained(0.5)


def test_text_is_asked_for_only_by_functions_that_take_it() -> None:
    assert not together(lambda completion_ids: [0.0]).needs_text
    assert together(lambda completion_ids: [0.0], lambda completions: [0.0]).needs_text
    assert together(lambda **kwargs: [0.0]).needs_text

    async def by_tokens(completion_ids: Any, prompts: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    assert together(by_tokens).submit(plain(), None, [[1], [2, 3]]).result() == {"by_tokens": [1.0, 2.0]}


def test_the_allowed_share_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"reward\.max_abstained=50\.0 must lie in \[0, 1\]: it is a fraction"):
        load_config(ROOT / "conf" / "grpo_tiny.yaml", ["reward.max_abstained=50"])
