"""Typed Python functions that the model may call: their schemas, finding calls in a reply, and making them."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError, validate_call

from rlhf.data.chat import render_chat
from rlhf.environments.template import USER, Message, tool_call
from rlhf.errors import ConfigError, one_line
from rlhf.user_code import described

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STUCK = 16  # tools that did not return in time, in one process, before it must be replaced

TAG = r"</?[^<>\s]+>|\[/?[A-Z_]+\]"
NAME_KEYS, ARGUMENT_KEYS = ("name", "tool_name"), ("arguments", "parameters")
BARE_CALL = re.compile(r"""\s*(?:<\|python_tag\|>)?\s*(\{\s*".*)""", re.DOTALL)  # Llama's


@dataclass(frozen=True)
class CallFormat:
    """How a reply calls tools: in JSON, one call or a list of them, between two tags.

    ``opens``: '': the JSON is all of the reply; ``closes``: '': it ends with the reply.
    """

    opens: str
    closes: str


@dataclass(frozen=True)
class ToolCall:
    """A call in a reply. ``problem``: why it cannot be made, in words for the model; None: it can."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None = None

    def message(self) -> Message:
        """The call as chat templates take it."""
        return tool_call(self.name, self.arguments, self.id)


class Tools:
    """The tools of an environment. Sync ones run in threads."""

    def __init__(self, functions: Sequence[Callable[..., Any]], *, num_threads: int) -> None:
        self._functions = {function.__name__: validate_call(function) for function in functions}
        self._threads = ThreadPoolExecutor(num_threads, "tool")
        self._num_stuck = 0

    async def call(self, call: ToolCall) -> str:
        """What it returns, or what went wrong, as text for the model."""
        if call.problem is not None:
            return f"Error: {call.problem}"
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(self._functions)}"
        try:
            inspect.signature(function).bind(**call.arguments)
            result = await self._run(function, call.arguments)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"Error: {call.name}: {wrong}"
        except Exception as error:  # whatever a tool raises is the model's to deal with
            return f"Error: {described(error)}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    async def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        running = self._threads.submit(function, **arguments)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.done():  # nothing can end a thread
                self._num_stuck += 1
                running.add_done_callback(self._is_back)
            raise

    def _is_back(self, _: Any) -> None:
        self._num_stuck -= 1

    def check(self) -> None:
        """Raises RuntimeError if too many calls never returned: their threads cannot be had back."""
        if self._num_stuck > MAX_STUCK:
            raise RuntimeError(f"{self._num_stuck} tool calls outlasted environment.step_timeout_s and still run")


def schema(function: Callable[..., Any], key: str) -> dict[str, Any]:
    """A function as chat templates show it to the model: its name, docstring and typed parameters.

    Raises ConfigError, naming ``key``, if it has no docstring or an argument without a type.
    """
    description = inspect.getdoc(function)
    if not description:
        raise ConfigError(f"{key}: {function.__name__} has no docstring, which tells the model what it does; add one")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{key}: argument {parameter.name!r} of {function.__name__} has no type; annotate it")
    typed: Any = function
    try:
        parameters = TypeAdapter(typed).json_schema()
    except Exception as error:  # pydantic has many
        why = one_line(error)
        raise ConfigError(f"{key}: the arguments of {function.__name__} have no JSON schema: {why}") from error
    parameters.pop("additionalProperties", None)
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


def call_format(
    tokenizer: "PreTrainedTokenizerBase", schemas: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> CallFormat:
    """How the model calls tools: as its template shows a call that was made. Raises ConfigError if it shows none, or in
    a way that is not known here."""
    refused = "environment.tools: the chat template of model.path "
    if not re.search(r"\btools\b", str(tokenizer.chat_template)):
        raise ConfigError(f"{refused}knows no tools; use a model that was trained to call them")
    name = "probe_5b1f0c9d"
    said = {"role": "assistant", "content": "", "tool_calls": [tool_call(name, {"value": 1}, "callid123")]}
    shown = {"date": None, "kwargs": {**kwargs, "tools": list(schemas)}}
    try:
        asked = render_chat(tokenizer, [USER], add_generation_prompt=True, **shown)
        text = render_chat(tokenizer, [USER, said], **shown)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"{refused}rejects a tool call: {one_line(error)}") from error
    begin = next((i for i, (a, b) in enumerate(zip(asked, text, strict=False)) if a != b), min(len(asked), len(text)))
    for place in (match.start() for match in re.compile(r"\{").finditer(text, begin)):
        try:
            call, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            continue
        if any(call.get(key) == name for key in NAME_KEYS):
            before = re.search(rf"({TAG})\s*\[?\s*$", text[begin:place])
            after = re.match(rf"\s*\]?\s*({TAG})", text[end:])
            if before is None and text[begin:place].strip():
                break
            closes = after[1] if before and after and after[1] != tokenizer.eos_token else ""
            return CallFormat(before[1] if before else "", closes)
    raise ConfigError(f"{refused}writes tool calls in another form than JSON with a name and arguments")


def find_calls(text: str, form: CallFormat) -> tuple[str, list[ToolCall]]:
    """What a reply says besides its calls, and the calls in their order."""
    if form.opens:
        said, *pieces = text.split(form.opens)
    else:
        bare = BARE_CALL.fullmatch(text)
        is_call = bare is not None and re.search(r'"name"\s*:', text) is not None
        said, pieces = ("", [bare[1]]) if bare is not None and is_call else (text, [])
    calls: list[ToolCall] = []
    for piece in pieces:
        body, _, rest = piece.partition(form.closes) if form.closes else (piece, "", "")
        calls += _parsed(body, len(calls))
        said += rest
    return said.strip(), calls


def _parsed(body: str, count: int) -> list[ToolCall]:
    """The calls in one piece of JSON: an object, or a list of them."""
    try:
        found = json.loads(body)
    except ValueError as error:
        return [ToolCall(_call_id(count), "", {}, f"the call is not valid JSON: {one_line(error)}")]
    return [_as_call(item, count + i) for i, item in enumerate(found if isinstance(found, list) else [found])]


def _as_call(item: Any, count: int) -> ToolCall:
    name = next((item[key] for key in NAME_KEYS if key in item), None) if isinstance(item, dict) else None
    if not isinstance(name, str):
        return ToolCall(_call_id(count), "", {}, 'a call is an object with a "name" and "arguments"')
    arguments = next((item[key] for key in ARGUMENT_KEYS if key in item), {})
    if not isinstance(arguments, dict):
        return ToolCall(_call_id(count), name, {}, f"the arguments of {name} are no object")
    return ToolCall(_call_id(count), name, arguments)


def _call_id(count: int) -> str:
    return f"call{count:05d}"  # nine letters and digits, which is what Mistral's template demands
