"""What is said to the model between two of its replies, as tokens: only that, and exactly what its template adds.

A reply is never tokenised again, and what came before it never rendered again: tokenisers and templates do not give the
same tokens twice (Qwen3's drops the thinking of earlier replies, for one). New messages are rendered after a stand-in
for the reply, and what follows the stand-in's stop token is what the model reads.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.data.chat import render_chat
from rlhf.errors import ConfigError, EpisodeFailedError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

STAND_IN = "Understood."  # for the reply
MARK = "5b1f0c9d"  # what new messages begin with when their place is looked for; no template changes it
USER = {"role": "user", "content": "Go on."}


class ChatTemplate:
    """A tokenizer's chat template, as a conversation goes on."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_ids: Sequence[int] = (),
        date: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``stop_ids``: tokens that end a reply, besides the tokenizer's own; ``date`` and ``kwargs``: see
        ``render_chat``; ``tools``: schemas.

        Raises ConfigError if the template cannot go on after a reply.
        """
        self._tokenizer, self._date = tokenizer, date
        self._kwargs = {**(kwargs or {}), **({"tools": list(tools)} if tools else {})}
        own = tokenizer.eos_token_id
        ids = {*stop_ids, *([own] if isinstance(own, int) else [])}
        self._stops = [text for text in (str(tokenizer.decode(i)) for i in sorted(ids)) if text]
        for message in [USER, *([tool_message("tool", "1", "0")] if tools else [])]:
            try:
                self.observed([USER], [message])
            except EpisodeFailedError as error:
                raise ConfigError(f"environment: {error}; use a model with another template") from error

    def observed(self, prompt: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        """The tokens that the model reads after a reply, up to where it replies next.

        ``prompt``: the messages that the conversation began with; ``messages``: new ones, at least one. Raises
        EpisodeFailedError if the template rejects them.
        """
        first, *rest = messages
        text = self._render(prompt, messages)
        marked = self._render(prompt, [{**first, "content": MARK + str(first.get("content") or "")}, *rest])
        before = marked[: marked.find(MARK)] if MARK in marked else ""
        ends = [before.rfind(stop) + len(stop) for stop in self._stops if stop in before]
        if not ends or not text.startswith(before):
            raise EpisodeFailedError(
                f"the chat template of model.path has no place for a {first['role']} message after a reply that ends "
                f"with {' or '.join(map(repr, self._stops)) or 'a stop token'}"
            )
        return self._tokenizer(text[max(ends) :], add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]

    def _render(self, prompt: Sequence[Message], messages: Sequence[Message]) -> str:
        reply: Message = {"role": "assistant", "content": STAND_IN}
        called = [message for message in messages if message["role"] == "tool"]
        if called:  # some templates want a result to follow its call
            reply["tool_calls"] = [tool_call(str(m.get("name")), {}, str(m.get("tool_call_id"))) for m in called]
        try:
            return render_chat(
                self._tokenizer,
                [*prompt, reply, *messages],
                date=self._date,
                add_generation_prompt=True,
                kwargs=self._kwargs,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise EpisodeFailedError(f"the chat template of model.path rejects {roles}: {one_line(error)}") from error


def tool_call(name: str, arguments: Mapping[str, Any], call_id: str) -> Message:
    """A call as chat templates take it."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(arguments)}}


def tool_message(name: str, call_id: str, content: str) -> Message:
    """What a call returned."""
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
