"""The built-in reward functions that check answers by programs: mathematics, JSON, code, and a model as judge."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from referencing.exceptions import Unresolvable

from rlhf.config import RewardFunctionConfig
from rlhf.rewards import judge, load_reward_functions
from rlhf.rewards.code import python_tests
from rlhf.rewards.functions import json_schema, math_match, repetition_penalty
from rlhf.rewards.judge import llm_judge

# ---- mathematics


def test_math_match_compares_values_and_not_texts() -> None:
    texts = [r"so \boxed{\frac12}", "$0.5$", "50%", "$2$", "", r"\boxed{", "½ " * 1000, r"\boxed{1+x^2}"]
    answers = ["1/2", r"\frac{1}{2}", r"$\frac{1}{2}$", "0.5", "0.5", "0.5", "0.5", "x^2+1"]
    assert math_match(texts, answers) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert math_match(["4", "4"], [None, ""]) == [None, None], "nothing to compare with"
    assert math_match(["$9^{9^{9^{9}}}$"], ["1"], timeout_s=1) == [0.0], "it ends"


def test_an_answer_within_text_is_the_one_that_it_marks() -> None:
    answers = [r"\[\frac12\]", r"\(3\) of 5 \(7\)", "5 of $7$"]
    assert math_match(["$0.5$", "$7$", "$7$"], answers) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer than argument 1"):
        math_match(["$7$"], ["7", "7"])


# ---- JSON


def test_json_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    right = ['{"n": 1}', ' ```json\n{"n": 1}\n``` ', '{"n": 1, "ü": "\N{SNOWMAN}"}']
    wrong = ['{"n": "1"}', "{}", "[]", "", '{"n": NaN}', '{"n": 1} and more', '{"n": 1', "[" * 100_000, "9" * 10_000]
    assert json_schema(right, schema=schema) == [1.0] * len(right)
    assert json_schema(wrong, schema=schema) == [0.0] * len(wrong)
    column = [json.dumps({"type": "string"}), {"type": "array"}, None]
    assert json_schema(['"a"', '"a"', '"a"'], schema=column) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer than argument 1"):
        json_schema(['"a"'], schema=column)
    assert json_schema(["NaN", "[-Infinity]", "null"], schema={}) == [0.0, 0.0, 1.0], "JSON has no such numbers"


def test_a_json_schema_s_references_to_other_documents_are_not_fetched(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"type": "string"}')
    with pytest.raises(Unresolvable):
        json_schema(['"a"'], schema={"$ref": other.as_uri()})


@pytest.mark.parametrize("schema", ["{", {"type": "strange"}, 5])
def test_what_is_no_json_schema(schema: Any) -> None:
    with pytest.raises(ValueError, match="not a JSON schema"):
        json_schema(["1"], schema=schema)


# ---- repetition


def test_repetition_penalty_is_the_share_of_repeated_ngrams() -> None:
    # 1 2 | 2 1 | 1 2 | 2 1: 2 of 4 are new; 5 5 | 5 5 | 5 5: 1 of 3
    assert repetition_penalty([[1, 2, 1, 2, 1], [5] * 4, [1, 2, 3], [1], []], ngram_size=2) == [
        -0.5,
        pytest.approx(-2 / 3),
        0.0,
        0.0,
        0.0,
    ]
    assert repetition_penalty([[5] * 5, [5] * 3]) == [-0.5, 0.0], "windows of four tokens unless told"
    assert repetition_penalty([[5] * 4], ngram_size=1) == [-0.75]
    with pytest.raises(ValueError, match="ngram_size=0 must be at least 1"):
        repetition_penalty([[1]], ngram_size=0)


# ---- code

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TEST = "assert add(1, 2) == 3"


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def test_code_passes_only_if_all_its_tests_do() -> None:
    texts = [ADD, ADD, ADD, fenced("def add(a, b): return 3") + "\n" + ADD, "def add(a, b): return a + b", "", ADD]
    tests = [TEST, [TEST, "assert add(1, 1) == 3"], [TEST, "assert add('a', 'b') == 'ab'"], TEST, TEST, TEST, None]
    assert python_tests(texts, tests) == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, None]
    with pytest.raises(ValueError, match="tests is an empty list"):
        python_tests([ADD], [[]])


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "def add(:",
        "def add(a, b): return '\0'",
        "x = bytearray(2**31)\ndef add(a, b): return a + b",  # 2 GiB
        "open('large', 'wb').write(bytes(2**25))\ndef add(a, b): return a + b",  # 32 MiB
        "import os\nassert os.environ.get('SECRET')\ndef add(a, b): return a + b",
        "import os\nassert os.listdir('.')\ndef add(a, b): return a + b",
        "def add(a, b): return add(a, b)",
    ],
)
def test_code_that_passes_nothing(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "value")
    assert python_tests([fenced(code)], [TEST], timeout_s=60.0) == [0.0]


def test_code_that_never_ends_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    assert python_tests([fenced(code)], [TEST], timeout_s=10.0) == [0.0]
    child = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 60  # killed at once, but the kernel takes its time
    while is_running(child) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_many_run_at_once(tmp_path: Path) -> None:
    """Each waits for the other's file, so one after the other would never end."""
    codes = [
        f"import os, time\nopen({str(tmp_path / me)!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / other)!r}): time.sleep(0.01)\ndef add(a, b): return a + b"
        for me, other in (("a", "b"), ("b", "a"))
    ]
    assert python_tests([fenced(code) for code in codes], [TEST, TEST], timeout_s=60.0) == [1.0, 1.0]


# ---- judge

Reply = tuple[int, Any]


def judged(replies: Callable[[int, dict[str, Any]], Reply], completions: list[str], **kwargs: Any) -> Any:
    """What the judge gives, and the requests; ``replies``: (number of the request, its body) -> status and content."""
    requests: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append({**await request.json(), "key": request.headers.get("Authorization")})
        status, content = replies(len(requests), requests[-1])
        if isinstance(content, bytes):
            return web.Response(status=status, body=content)
        return web.json_response({"choices": [{"message": {"content": content}}]}, status=status)

    async def ask() -> list[float | None]:
        server = web.Application()
        server.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        prompts = [[{"role": "user", "content": "why?"}]] * len(completions)
        try:
            return await llm_judge(prompts, completions, url=f"http://{host}:{port}/v1/", model="m", **kwargs)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(ask(), 60)), requests


@pytest.fixture(autouse=True)
def fresh_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    judge._cache.clear()
    monkeypatch.setattr(judge, "FIRST_DELAY_S", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_a_judge_s_last_score_counts_as_a_fraction() -> None:
    said = {"a": "Score: 2. No: **Score:** 7.5", "b": "score = 11", "c": "no idea", "d": "Score: -1", "e": None}
    scores, requests = judged(lambda _, body: (200, said[body["messages"][0]["content"][-1]]), list(said))
    assert scores == [0.75, None, None, None, None]
    assert {r["key"] for r in requests} == {None}


def test_what_a_judge_reads_is_filled_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    scores, requests = judged(
        lambda *_: (200, "Score: 1"),
        ["{answer} {0} ü", "x"],
        answer=["42", None],
        template="{prompt}|{completion}|{answer}|{other}",
        max_score=1.0,
        api_key_env="JUDGE_KEY",
    )
    assert scores == [1.0, None], "no answer to compare with"
    assert [r["messages"][0]["content"] for r in requests] == ["user: why?|{answer} {0} ü|42|{other}"]
    assert requests[0]["key"] == "Bearer k"
    with pytest.raises(ValueError, match=r"template names \{answer\}, but the data has no such column"):
        judged(lambda *_: (200, ""), ["a"], template="{answer}")


def test_a_judge_is_asked_again_after_what_may_pass_and_not_after_an_answer() -> None:
    first = {1: (503, b"busy"), 2: (429, b"slow down")}
    scores, requests = judged(lambda number, _: first.get(number, (200, "Score: 5")), ["a"])
    assert (scores, len(requests)) == ([0.5], 3)


def test_what_was_answered_is_not_asked_again() -> None:
    asked: list[str] = []

    async def ask() -> None:
        server = web.Application()

        async def handle(request: web.Request) -> web.Response:
            asked.append((await request.json())["messages"][0]["content"])
            return web.json_response({"choices": [{"message": {"content": "Score: 5"}}]})

        server.router.add_post("/chat/completions", handle)
        runner = web.AppRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            for template in ("{completion}", "{completion}", "other {completion}"):
                url = f"http://{host}:{port}"
                assert await llm_judge(["p"], ["a"], url=url, model="m", template=template) == [0.5]
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert asked == ["a", "other a"]


def test_a_judge_that_is_down() -> None:
    with pytest.raises(ConnectionError, match=r"gave no answer in 2 attempts \(status 500\); start it, or set score_"):
        judged(lambda *_: (500, b""), ["a", "b"], retries=1)
    assert judged(lambda *_: (500, b""), ["a"], retries=0, score_when_down=0.25)[0] == [0.25]
    with pytest.raises(ConnectionError, match="ClientConnectorError"):
        asyncio.run(llm_judge(["p"], ["a"], url="http://127.0.0.1:9/v1", model="m", retries=0))


def test_a_judge_that_refuses_or_is_something_else() -> None:
    with pytest.raises(ValueError, match="refuses the request with status 404: no model m"):
        judged(lambda *_: (404, b"no model\n m"), ["a"])
    with pytest.raises(ValueError, match="did not answer with a chat completion, but b'<html>'"):
        judged(lambda *_: (200, b"<html>"), ["a"])


def test_no_more_than_the_allowed_requests_wait_at_once() -> None:
    most, now = 0, 0

    async def ask() -> list[float | None]:
        server = web.Application()
        proceed = asyncio.Event()

        async def handle(request: web.Request) -> web.Response:
            nonlocal most, now
            now += 1
            most = max(most, now)
            if now == 2:
                proceed.set()
            await proceed.wait()
            now -= 1
            return web.json_response({"choices": [{"message": {"content": "Score: 5"}}]})

        server.router.add_post("/chat/completions", handle)
        runner = web.AppRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        texts = [str(i) for i in range(6)]
        try:
            return await llm_judge(texts, texts, url=f"http://{host}:{port}", model="m", max_concurrent=2)
        finally:
            await runner.cleanup()

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [0.5] * 6
    assert most == 2


def test_all_are_usable_by_name() -> None:
    names = ["json_schema", "repetition_penalty", "python_tests", "llm_judge"]
    kwargs: dict[str, dict[str, Any]] = {"json_schema": {"schema": {}}, "llm_judge": {"url": "http://x", "model": "m"}}
    loaded = load_reward_functions([RewardFunctionConfig(name, kwargs=kwargs.get(name, {})) for name in names])
    assert [f.name for f in loaded] == names
    assert [f.required_columns for f in loaded] == [set(), set(), {"tests"}, set()]
    assert [f.is_async for f in loaded] == [False, False, False, True]
