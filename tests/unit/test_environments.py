"""Episodes with a scripted model: what an environment gets and gives, how it ends, and what becomes of its failures."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.batch import Episode, Prompt, Rollout
from rlhf.config import EnvironmentConfig
from rlhf.data.corpus import passages
from rlhf.environments import tool_schemas
from rlhf.environments.builtin import BUILT_IN, interpreter
from rlhf.environments.builtin.calculator import calculate
from rlhf.environments.builtin.search import MAX_WORDS, Index, search
from rlhf.environments.loading import load_environment, load_tools
from rlhf.environments.tools import MAX_STUCK, CallFormat, ToolCall, Tools, find_calls, schema
from rlhf.errors import ConfigError, EpisodeFailedError
from tests import environments
from tests.environments import Log, Scripted, run, runner

pytestmark = pytest.mark.timeout(60)

GUIDE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
CHATML = (Path(__file__).parents[1] / "templates" / "chatml.jinja").read_text()
QWEN = (Path(__file__).parents[1] / "templates" / "qwen2.5.jinja").read_text()
TAGS = CallFormat("<tool_call>", "</tool_call>")


class Talk:
    """A prompt, and a model that says given texts; those in ``cut`` without an end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        (self.stop,) = self.ids("<|im_end|>")
        self.log = Log()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]

    def __call__(
        self,
        name: str | None,
        *said: str,
        cut: str | None = None,
        columns: dict[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[Rollout, Scripted]:
        replies = [[*self.ids(text), self.stop] for text in said] + ([self.ids(cut)] if cut else [])
        sampler = Scripted(replies, self.stop)
        path = name if name is None or name in BUILT_IN or ":" in name else f"tests.environments.{name}"
        episodes = runner(self.tokenizer, path, stop_ids=[self.stop], **settings)
        prompt = Prompt(0, self.ids("Begin."), "", [{"role": "user", "content": "Begin."}], {"log": self.log})
        prompt.columns.update(columns or {})
        return run(episodes, prompt, sampler), sampler


@pytest.fixture
def talk(tiny_tokenizer: PreTrainedTokenizerBase, tiny_model_dir: Path) -> Talk:
    tokenizer = type(tiny_tokenizer).from_pretrained(tiny_model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    return Talk(tokenizer)


@pytest.fixture
def free() -> Iterator[None]:
    """Lets tools that hang end with the test."""
    environments.FREE.clear()
    yield
    environments.FREE.set()


def episode_of(rollout: Rollout) -> Episode:
    assert rollout.episode is not None
    return rollout.episode


def test_an_episode_has_its_turns_rewards_what_it_returned_its_messages_and_its_notes(talk: Talk) -> None:
    rollout, sampler = talk("scored", "one", "two", "three")
    episode = episode_of(rollout)
    assert episode.turn_rewards == [0.25, 1.25, 2.25] and episode.reward == 0.5
    assert (episode.status, rollout.finish_reason, episode.notes) == ("done", "stop", {"said": 6})
    assert talk.log.lines == ["one", "two", "three", "cleaned up"]
    assert [m["content"] for m in episode.messages] == ["one", "Go on.", "two", "Go on.", "three"]
    assert episode.turn_lengths == [len(ids) for ids in sampler.replies]
    own = [token for token, sampled in zip(rollout.token_ids, episode.sampled, strict=True) if sampled]
    assert own == [token for ids in sampler.replies for token in ids]
    assert rollout.logprobs is not None and rollout.logprobs.tolist() == (-1.0 - rollout.versions).tolist()


def test_a_reply_that_was_cut_is_the_last_and_its_environment_sees_it(talk: Talk) -> None:
    rollout, _ = talk("scored", "one", cut="tw")
    episode = episode_of(rollout)
    assert (episode.status, rollout.finish_reason, episode.reward) == ("length", "length", 0.0)
    assert talk.log.lines == ["one", "tw (cut)", "cleaned up"]
    assert episode.turn_rewards == [0.25, 1.25] and episode.sampled[-1]


def test_turns_are_bounded(talk: Talk) -> None:
    rollout, sampler = talk("scored", "one", "two", max_turns=2)
    episode = episode_of(rollout)
    assert (episode.status, rollout.finish_reason, len(sampler.requests)) == ("turns", "length", 2)
    assert talk.log.lines[-1] == "cleaned up" and episode.reward == 0.0


def test_a_context_is_never_exceeded_not_even_by_what_nobody_answers(talk: Talk) -> None:
    whole = len(talk.ids("Begin.")) + len(talk.ids("one")) + 1
    goes_on = len(talk.ids("\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"))
    full, sampler = talk("scored", "one", max_context_tokens=whole + goes_on)
    assert episode_of(full).status == "context" and len(sampler.requests) == 1
    assert len(full.token_ids) == len(episode_of(full).sampled) == len(talk.ids("one")) + 1
    assert episode_of(full).sampled.all()
    roomy, sampler = talk("scored", "one", cut="tw", max_context_tokens=whole + goes_on + 2)
    assert [request.max_tokens for request in sampler.requests] == [goes_on + whole + 2 - len(talk.ids("Begin.")), 2]
    assert episode_of(roomy).status == "context"


def test_a_turn_gets_no_more_than_a_completion_may_have(talk: Talk) -> None:
    _, sampler = talk("scored", "one", "two", "three", max_completion_tokens=8)
    assert [(request.max_tokens, request.turn) for request in sampler.requests] == [(8, 0), (8, 1), (8, 2)]


def test_an_environment_that_hangs_before_the_first_turn_has_failed(talk: Talk) -> None:
    with pytest.raises(EpisodeFailedError, match=r"hanging_reset: silent for 0.05 s before .*step_timeout_s"):
        talk("hanging_reset", "one", step_timeout_s=0.05)
    assert talk.log.lines == ["cleaned up"]


def test_an_environment_that_hangs_later_is_timed_out_with_its_turns_rewards(talk: Talk) -> None:
    rollout, _ = talk("hanging_step", "one", step_timeout_s=0.05)
    episode = episode_of(rollout)
    assert (episode.status, rollout.finish_reason, episode.reward, episode.turn_rewards) == (
        *("timeout", "length"),
        *(0.0, [0.5]),
    )
    assert talk.log.lines == ["cleaned up"]


def test_an_environment_that_does_not_heed_being_cancelled_is_left_behind(talk: Talk) -> None:
    rollout, _ = talk("deaf", "one", step_timeout_s=0.05)
    assert episode_of(rollout).status == "timeout"
    assert talk.log.lines[0] == "cancelled"


def test_what_an_environment_raises_names_its_file_and_line(talk: Talk) -> None:
    with pytest.raises(EpisodeFailedError, match=r"raising raised KeyError: 'board' \(at environments\.py:\d+\)"):
        talk("raising", "one")


@pytest.mark.parametrize(
    ("name", "columns", "why"),
    [
        ("cancelled", {}, "something that it awaited was cancelled"),
        ("wordless", {}, "ended before the model had said anything"),
        ("two_at_once", {}, "two calls of chat"),
        ("unsaid", {"said": None}, "after a reply needs a message"),
        ("unsaid", {"said": []}, "says nothing"),
        ("unsaid", {"said": {"role": "user"}}, "a role and a content, both strings"),
        ("unsaid", {"said": [{"role": "assistant", "content": "I win."}]}, "takes no assistant message"),
        ("returning", {"value": "much"}, "returned 'much'; return a number"),
        ("returning", {"value": float("nan")}, "returned nan; return a finite number"),
    ],
)
def test_a_mistake_in_an_environment_is_one_line(talk: Talk, name: str, columns: dict[str, Any], why: str) -> None:
    with pytest.raises(EpisodeFailedError, match=why):
        talk(name, "one", "two", columns=columns)


def test_nothing_returned_is_no_reward(talk: Talk) -> None:
    assert episode_of(talk("returning", "one", columns={"value": None})[0]).reward == 0.0
    assert episode_of(talk("returning", "one", columns={"value": np.float32(0.5)})[0]).reward == 0.5


# ---- tools


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def with_tools(talk: Talk) -> Talk:
    talk.tokenizer.chat_template = QWEN
    return talk


def results(rollout: Rollout) -> list[str]:
    return [m["content"] for m in episode_of(rollout).messages if m["role"] == "tool"]


def test_tools_are_called_until_a_reply_without_calls(with_tools: Talk) -> None:
    both = "Both." + called("add", '{"left": 1, "right": 2}') + called("shapes", '{"sides": [3, 4]}')
    rollout, sampler = with_tools(
        "answers",
        both,
        called("add", '{"left": "7"}'),
        "8",
        tools=["tests.environments.add", "tests.environments.shapes"],
    )
    assert results(rollout) == ["3", '{"sides": [3, 4], "colour": "red"}', "8"]
    assert with_tools.log.lines == ["8"] and len(sampler.requests) == 3
    assert episode_of(rollout).messages[0]["content"] == "Both."


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (called("add", '{"left": "many"}'), "Error: add: left: Input should be a valid integer"),
        (called("add", '{"left": 1, "up": 2}'), "Error: TypeError: got an unexpected keyword argument 'up'"),
        (called("add", "{}"), "Error: TypeError: missing a required argument: 'left'"),
        (called("add", "7"), "Error: the arguments of add are no object"),
        (called("subtract", "{}"), "Error: there is no tool 'subtract'; the tools are add, broken"),
        (called("broken", '{"why": "no paper"}'), "Error: RuntimeError: no paper"),
        ('<tool_call>\n{"name": "add", }\n</tool_call>', "Error: the call is not valid JSON"),
        ("<tool_call>\n[1]\n</tool_call>", 'Error: a call is an object with a "name"'),
        ('<tool_call>{"name": "add"', "Error: the call is not valid JSON"),
    ],
)
def test_a_call_that_goes_wrong_is_told_to_the_model(with_tools: Talk, call: str, answer: str) -> None:
    tools = ["tests.environments.add", "tests.environments.broken"]
    rollout, _ = with_tools(None, call, "Well.", tools=tools)
    (told,) = results(rollout)
    assert told.startswith(answer) and episode_of(rollout).status == "done"


@pytest.mark.parametrize("tool", ["endless", "slow"])
def test_a_tool_that_never_returns_ends_the_episode_with_a_timeout(with_tools: Talk, free: None, tool: str) -> None:
    path = f"tests.environments.{tool}"
    rollout, _ = with_tools("answers", called(tool, "{}"), tools=[path], step_timeout_s=0.05)
    assert episode_of(rollout).status == "timeout" and results(rollout) == []


def test_tool_calls_count_as_turns(with_tools: Talk) -> None:
    again = called("add", '{"left": 1}')
    rollout, sampler = with_tools("answers", again, again, again, tools=["tests.environments.add"], max_turns=3)
    assert episode_of(rollout).status == "turns" and len(sampler.requests) == 3
    assert not with_tools.log.lines


@pytest.mark.parametrize(
    ("text", "form", "said", "names"),
    [
        ('Hm. <tool_call>{"name": "a"}</tool_call> so', TAGS, "Hm.  so", ["a"]),
        ('{"name": "a", "parameters": {}}', CallFormat("", ""), "", ["a"]),
        ('<|python_tag|>{"name": "a", "parameters": {}}', CallFormat("", ""), "", ["a"]),
        ('{"answer": 4}', CallFormat("", ""), '{"answer": 4}', []),
        ('The call is {"name": "a"}', CallFormat("", ""), 'The call is {"name": "a"}', []),
        ('[TOOL_CALLS] [{"name": "a"}, {"name": "b"}]', CallFormat("[TOOL_CALLS]", ""), "", ["a", "b"]),
        ('{"name": "a"}', TAGS, '{"name": "a"}', []),
    ],
)
def test_only_what_is_written_as_a_call_is_one(text: str, form: CallFormat, said: str, names: list[str]) -> None:
    found, calls = find_calls(text, form)
    assert (found, [call.name for call in calls]) == (said, names)
    assert len({call.id for call in calls}) == len(calls)


def test_calls_have_ids_in_their_order_and_what_cannot_be_made_says_why() -> None:
    first = '[{"name": "a", "arguments": {"x": 1}}, {"tool_name": "b", "parameters": {"y": [2]}}]'
    second = '[{"name": 3}, 4, {"name": "c"}, {"name": "d", "arguments": "z"}]'
    said, calls = find_calls(f" Hm. <tool_call>{first}</tool_call> And <tool_call>{second}</tool_call> so. ", TAGS)
    assert said == "Hm.  And  so."
    assert calls == [
        ToolCall("call00000", "a", {"x": 1}),
        ToolCall("call00001", "b", {"y": [2]}),
        ToolCall("call00002", "", {}, 'a call is an object with a "name" and "arguments"'),
        ToolCall("call00003", "", {}, 'a call is an object with a "name" and "arguments"'),
        ToolCall("call00004", "c", {}),
        ToolCall("call00005", "d", {}, "the arguments of d are no object"),
    ]
    (broken,) = find_calls("<tool_call>{</tool_call>", TAGS)[1]
    assert (broken.id, broken.name, broken.arguments) == ("call00000", "", {})
    assert calls[0].message() == {
        "type": "function",
        "id": "call00000",
        "function": {"name": "a", "arguments": {"x": 1}},
    }


def test_tools_that_do_not_return_count_until_they_do() -> None:
    started, may_end = threading.Semaphore(0), threading.Event()

    def slow() -> None:
        started.release()
        may_end.wait(60)

    def take(count: int) -> bool:
        return all(started.acquire(timeout=60) for _ in range(count))

    async def leave(tools: Tools, count: int) -> None:
        calls = [asyncio.create_task(tools.call(ToolCall("call00000", "slow", {}))) for _ in range(count)]
        assert await asyncio.to_thread(take, count)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=60)
        assert all(call.cancelled() for call in calls)

    tools = Tools([slow], num_threads=MAX_STUCK + 1)
    try:
        asyncio.run(leave(tools, MAX_STUCK))
        tools.check()
        asyncio.run(leave(tools, 1))
        with pytest.raises(RuntimeError, match=r"^17 tool calls outlasted environment\.step_timeout_s and still run$"):
            tools.check()
    finally:
        may_end.set()
        tools._threads.shutdown()
    tools.check()
    assert tools._num_stuck == 0


def test_a_schema_comes_from_types_and_docstring() -> None:
    function = schema(environments.shapes, "key")["function"]
    assert (function["name"], function["description"]) == ("shapes", "Draws a shape.")
    parameters = function["parameters"]
    assert parameters["required"] == ["sides"]
    assert parameters["properties"]["sides"]["items"] == {"type": "integer"}
    assert parameters["properties"]["colour"]["enum"] == ["red", "blue"]


# ---- the user's mistakes in the configuration


def settings(**keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig(max_context_tokens=64, **keys)


@pytest.mark.parametrize(
    ("source", "path", "why"),
    [
        ("def play(chat): ...", "play", "no coroutine function; write it as async def play"),
        ("async def play(game): ...", "play", "takes no argument 'chat'"),
        ("async def play(chat): ...", "plya", "the module has no 'plya'"),
        ("1 / 0", "play", "ZeroDivisionError"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(tmp_path: Path, source: str, path: str, why: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"environment\.path=.*mine\.py:{path}: .*{why}"):
        load_environment(settings(path=f"{file}:{path}"))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def tool(x: int): return x", "tool has no docstring"),
        ('def tool(x):\n    "Says."', "argument 'x' of tool has no type"),
        ('def tool(x: object()):\n    "Says."', "the arguments of tool have no JSON schema"),
    ],
)
def test_a_tool_that_cannot_be_shown_is_one_line(tmp_path: Path, source: str, why: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"environment\.tools\[0\]=.*mine\.py:tool: .*{why}"):
        tool_schemas(settings(tools=[f"{file}:tool"]))


def test_two_tools_of_one_name_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def add(left: int):\n    "Adds."')
    with pytest.raises(ConfigError, match=r"environment\.tools\[1\]=.*: another tool is called add too"):
        load_tools(settings(tools=["tests.environments.add", f"{tmp_path}/mine.py:add"]))


def test_the_guide_s_game_is_played(talk: Talk, tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n# guess\.py\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "guess.py").write_text(source)
    rollout, _ = talk(f"{tmp_path}/guess.py:guess", "It is 3.", "Hm.", "7", columns={"secret": 7})
    episode = episode_of(rollout)
    assert (episode.reward, episode.turn_rewards) == (1.0, [-0.05, -0.05, 0.0])
    assert [m["content"] for m in episode.messages if m["role"] == "user"] == ["higher", "higher"]


class Sandbox(BaseHTTPRequestHandler):
    """A service that runs programs: it answers with what it was asked to run, or fails at 'broken'."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ran = json.dumps({"output": f"{self.path} {asked['language']} {asked['code']}"}).encode()
        self.send_response(503 if asked["code"] == "broken" else 200)
        self.end_headers()
        self.wfile.write(ran)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_guide_s_sandbox_service_takes_the_place_of_the_tool(
    with_tools: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```python\n# sandbox\.py\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "sandbox.py").write_text(source)
    said = (called("python", '{"code": "1 + 1"}'), called("python", '{"code": "broken"}'), "2")
    with ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SANDBOX_URL", f"http://127.0.0.1:{server.server_port}")
        tools = [f"{tmp_path}/sandbox.py:python"]
        rollout, _ = with_tools("python", *said, columns={"answer": "2"}, tools=tools)
        server.shutdown()
    ran, failed = results(rollout)
    assert ran == "/run python 1 + 1" and failed.startswith("Error: HTTPStatusError: Server error '503")
    assert episode_of(rollout).reward == 1.0


# ---- those that come along


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 * (4 + 5)", "27"), ("-7 // 2", "-4"), ("2.5 * 4", "10.0"), (" 417 * (38 - 512)", "-197658")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["2 ** 9", "__import__('os')", "True + 1", "9" * 101, "1 +", "(" * 500 + "1"])
def test_the_calculator_only_calculates(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


@pytest.mark.parametrize(("answer", "reward"), [("144", 1.0), ("145", 0.0)])
def test_the_calculator_is_used_and_its_answer_counts(with_tools: Talk, answer: str, reward: float) -> None:
    said = (called("calculate", '{"expression": "12 * 12"}'), "It is 144.")
    rollout, _ = with_tools("calculator", *said, columns={"answer": answer})
    assert episode_of(rollout).reward == reward and results(rollout) == ["144"]


@pytest.mark.parametrize(("answer", "reward"), [("1959", 1.0), ("1960", 0.0)])
def test_what_is_searched_is_told_and_the_answer_counts(with_tools: Talk, answer: str, reward: float) -> None:
    said = (
        called("search", '{"query": "mayor of Halton"}'),
        called("search", '{"query": "Boris Corwin"}'),
        "In 1959.",
    )
    rollout, _ = with_tools("search", *said, columns={"answer": answer})
    town, person = results(rollout)
    assert town.startswith("Halton: Halton is a town") and "is Boris Corwin." in town and town.count("\n") == 2
    assert person.startswith("Boris Corwin: ")
    assert episode_of(rollout).reward == reward


def test_a_search_ranks_titles_first_then_rare_words_and_takes_any_text() -> None:
    index = Index({"Cat": "It purrs.", "Dog": "A cat is not a dog.", "Purr": "What a cat does, a lynx too."})
    assert [found.partition(":")[0] for found in index.find("cat", 3)] == ["Cat", "Dog", "Purr"]
    assert [found.partition(":")[0] for found in index.find("cat lynx?", 1)] == ["Purr"]
    assert index.find("Cat", 1) == ["Cat: It purrs."]
    for query in ("", "_", '"', "*", "NEAR(", "fish", "-:^"):
        assert index.find(query, 3) == [], query
    assert index.find("fish AND title:cat", 1) == ["Cat: It purrs."], "what SQLite would take for an operator is a word"
    assert index.find("x " * MAX_WORDS + "cat", 3) == [] != index.find("x " * (MAX_WORDS - 1) + "cat", 3)


def test_everything_is_found_by_its_name() -> None:
    for title in passages():
        assert search(title).startswith(f"{title}: "), title
    assert search("fish") == "Nothing was found."


@pytest.mark.parametrize(("answer", "reward"), [("25", 1.0), ("24", 0.0)])
def test_what_a_program_prints_is_told_and_the_answer_counts(with_tools: Talk, answer: str, reward: float) -> None:
    code = "print(sum(n > 1 and all(n % d for d in range(2, n)) for n in range(100)))"
    said = (called("python", json.dumps({"code": code})), "There are 25.")
    rollout, _ = with_tools("python", *said, columns={"answer": answer})
    assert episode_of(rollout).reward == reward and results(rollout) == ["25\n"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1", "The program printed nothing."),
        ("print('a')\n1 / 0", 'a\nTraceback (most recent call last):\n  File "solution.py", line 2, in <module>\n'
         "ZeroDivisionError: division by zero\n"),
        ("import sys\nprint('é')\nsys.exit(3)", "é\n"),
        ("import os, sys\nprint(os.listdir(), os.environ.get('SECRET'), sys.stdin.read() == '')", "[] None True\n"),
        ("print('ab' * 5000)", "ab" * 1000 + "\n... and more"),
        ("x = bytearray(2**31)",
         'Traceback (most recent call last):\n  File "solution.py", line 1, in <module>\nMemoryError\n'),
    ],
)  # fmt: skip
def test_a_program_tells_what_it_prints_and_raises(code: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "value")
    assert interpreter.python(code) == told


def test_every_program_starts_afresh() -> None:
    assert interpreter.python("x = 1; open('file', 'w'); print(x)") == "1\n"
    assert "NameError" in interpreter.python("print(x)")
    assert interpreter.python("import os; print(os.listdir())") == "[]\n"


def test_a_program_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "TIMEOUT_S", 3.0)
    assert interpreter.python("import time\nprint('so far')\nwhile True: time.sleep(1)") == (
        "so far\n\nThe program was ended after 3 s."
    )
