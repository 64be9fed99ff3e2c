"""What a chat template is asked, and which stop token is still to be said: templates written as functions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.environments.template import GO_ON, REPLY_MARK, ChatTemplate, reply_before, tool_call, tool_message
from rlhf.errors import ConfigError, EpisodeFailedError

Render = Callable[[list[dict[str, Any]], bool], str]
USER = {"role": "user", "content": "Question"}
STOPS = {"<a>": 1, "<b>": 2}


class Spelling:
    """A tokenizer whose tokens are characters, and the texts of STOPS; its template is a function."""

    eos_token_id = 1
    chat_template = "a function"

    def __init__(self, template: Render) -> None:
        self._template = template
        self.asked: list[SimpleNamespace] = []

    def decode(self, ids: list[int]) -> str:
        return next((text for text, i in STOPS.items() if [i] == ids), "")

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool) -> dict[str, list[int]]:
        ids: list[int] = [0] if add_special_tokens else []
        while text:
            stop = next((stop for stop in STOPS if text.startswith(stop)), None)
            ids.append(STOPS[stop] if stop else 100 + ord(text[0]))
            text = text[len(stop or text[0]) :]
        return {"input_ids": ids}

    def apply_chat_template(
        self, chat: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **passed: Any
    ) -> str:
        self.asked.append(SimpleNamespace(chat=chat, generate=add_generation_prompt, passed=passed))
        return self._template(chat, add_generation_prompt)


def letters(text: str) -> list[int]:
    return [100 + ord(letter) for letter in text]


def closed_by(stop: str, *, then: str = "") -> Render:
    """Every reply ends with ``stop``; other messages begin with their role, and replies with ``R``."""

    def render(chat: list[dict[str, Any]], generate: bool) -> str:
        spoken = [
            f"R{m['content']}{stop}{then}" if m["role"] == "assistant" else f"{m['role'][0].upper()}{m['content']}"
            for m in chat
        ]
        return "".join(spoken) + ("R" if generate else "")

    return render


def template(render: Render, **given: Any) -> tuple[ChatTemplate, Spelling]:
    tokenizer = Spelling(render)
    return ChatTemplate(tokenizer, stop_ids=[2], **given), tokenizer  # type: ignore[arg-type]


def test_messages_as_templates_take_them() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    assert tool_call("add", {"a": 1}, "c1") == call
    result = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"}
    assert tool_message("add", "c1", "3") == result
    assert reply_before([GO_ON]) == {"role": "assistant", "content": REPLY_MARK}
    stands_in = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"value": REPLY_MARK}}}
    expected = {"role": "assistant", "content": REPLY_MARK, "tool_calls": [stands_in]}
    assert reply_before([result, GO_ON]) == expected, "a result follows its call"


def test_the_model_reads_what_follows_the_stop_token_that_ended_its_reply() -> None:
    talk, tokenizer = template(closed_by("<a>", then="|"), date="2026-01-02", kwargs={"style": "plain"})
    assert talk.observed([USER], [GO_ON]) == letters("|UGo on.R")
    assert talk.observed([USER], [GO_ON], stopped_by=1) == letters("|UGo on.R")
    assert talk.observed([USER], [GO_ON], stopped_by=2) == letters("|UGo on.R"), "the template closes it anyway"
    assert talk.observed([USER], [GO_ON, USER]) == letters("|UGo on.UQuestionR")
    assert talk.rewritten_by == []
    assert all(asked.passed == {"style": "plain"} for asked in tokenizer.asked), "and no tools, as there are none"


def test_a_stop_token_that_begins_the_next_message_is_said_after_a_reply_that_ended_otherwise() -> None:
    def opened(chat: list[dict[str, Any]], generate: bool) -> str:
        spoken = [f"R{m['content']}" if m["role"] == "assistant" else f"<b>{m['content']}" for m in chat]
        return "".join(spoken) + ("R" if generate else "")

    talk, _ = template(opened)
    assert talk.observed([USER], [GO_ON], stopped_by=2) == letters("Go on.R")
    assert talk.observed([USER], [GO_ON]) == letters("Go on.R")
    assert talk.observed([USER], [GO_ON], stopped_by=1) == [2, *letters("Go on.R")]


def test_a_stop_token_of_the_next_generation_closes_no_reply() -> None:
    def opened(chat: list[dict[str, Any]], generate: bool) -> str:
        spoken = [f"<b>{m['content']}" for m in chat]
        return "".join(spoken) + ("<b>" if generate else "")

    talk, _ = template(opened)
    assert talk.observed([USER], [GO_ON], stopped_by=1) == [2, *letters("Go on."), 2]


def test_the_first_stop_token_after_a_reply_ends_it() -> None:
    talk, _ = template(closed_by("<b>", then="<a>"))
    assert talk.observed([USER], [GO_ON]) == [1, *letters("UGo on.R")], "in the order of the text, not of the alphabet"
    twice, _ = template(closed_by("<a>", then=".<a>"))
    assert twice.observed([USER], [GO_ON]) == [*letters("."), 1, *letters("UGo on.R")]


def test_a_prompt_that_spells_stop_tokens_and_the_mark_ends_no_reply() -> None:
    talk, _ = template(closed_by("<a>"))
    prompt = {"role": "user", "content": f"<b>{REPLY_MARK}<b>"}
    assert talk.observed([prompt], [GO_ON]) == letters("UGo on.R")


def test_with_tools_their_schemas_are_given_and_their_results_tried() -> None:
    schema = {"name": "add"}
    talk, tokenizer = template(closed_by("<a>"), tools=[schema])
    assert all(asked.passed == {"tools": [schema]} for asked in tokenizer.asked)
    tried = {message["role"] for asked in tokenizer.asked for message in asked.chat}
    assert tried == {"user", "assistant", "tool"}
    assert talk.observed([USER], [tool_message("add", "c1", "3")]) == letters("T3R")


def test_a_template_that_shows_earlier_replies_otherwise_is_noticed() -> None:
    def forgets(chat: list[dict[str, Any]], generate: bool) -> str:
        last = max((i for i, m in enumerate(chat) if m["role"] == "user"), default=0)
        spoken = []
        for i, m in enumerate(chat):
            content = m["content"]
            if m["role"] == "assistant":
                content = (content.rpartition("</think>")[2] if i < last else content) + "<a>"
            spoken.append(f"{m['role'][0].upper()}{content}")
        return "".join(spoken) + ("A" if generate else "")

    assert template(forgets)[0].rewritten_by == ["user"]
    assert template(forgets, tools=[{"name": "add"}])[0].rewritten_by == ["user"], "a tool's result forgets nothing"


@pytest.mark.parametrize(
    ("render", "says"),
    [
        (lambda chat, generate: "".join(m["content"] for m in chat), "no place for a user message .* '<a>' or '<b>'"),
        (lambda chat, generate: "<a>", "no place for a user message"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused(render: Render, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        template(render)


def test_what_a_template_raises_names_the_roles() -> None:
    def strict(chat: list[dict[str, Any]], generate: bool) -> str:
        if any(m["role"] == "system" for m in chat):
            raise ValueError("no system messages")
        return closed_by("<a>")(chat, generate)

    talk, _ = template(strict)
    with pytest.raises(EpisodeFailedError, match=r"rejects user, assistant, system: .*no system messages"):
        talk.observed([USER], [{"role": "system", "content": "Be brief."}])
