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

# What no template changes, to find again: a thought and the reply after it, and the message that follows
THOUGHT_MARK, REPLY_MARK, MARK = "c4f81b6e", "6a0d3e72", "5b1f0c9d"
USER = {"role": "user", "content": "Begin."}
GO_ON = {"role": "user", "content": "Go on."}


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
        texts = {str(tokenizer.decode([i])): i for i in sorted(ids)}
        self._stops = {text: i for text, i in texts.items() if text and self._tokenized(text) == [i]}
        self.rewritten_by: list[str] = []  # roles whose messages make the template show what was before otherwise
        try:
            self._closing = self._stops_after(self._render([USER, reply_before([])], generate=False))
            for message in [GO_ON, *([tool_message("tool", "callid123", "0")] if tools else [])]:
                self.observed([USER], [message])
                if not self._appends(message):
                    self.rewritten_by.append(str(message["role"]))
        except EpisodeFailedError as error:
            raise ConfigError(f"environment: {error}; use a model with another template") from error

    def observed(
        self, prompt: Sequence[Message], messages: Sequence[Message], stopped_by: int | None = None
    ) -> list[int]:
        """The tokens that the model reads after a reply, up to where it replies next.

        ``prompt``: the messages that the conversation began with; ``messages``: new ones, at least one; ``stopped_by``:
        the reply's last token, None: the one the template ends it with. Raises EpisodeFailedError if the template
        rejects them.
        """
        first, *rest = messages
        reply = reply_before(messages)
        text = self._render([*prompt, reply, *messages])
        marked = self._render([*prompt, reply, {**first, "content": MARK + first["content"]}, *rest])
        # What stands between the two. With the mark, a template trims less, and no message equals another
        between = marked[marked.rfind(REPLY_MARK) : marked.find(MARK)] if REPLY_MARK in marked else ""
        replied = text.rfind(REPLY_MARK)
        stops = self._stops_after(between)
        if not stops or not text[replied:].startswith(between):
            raise EpisodeFailedError(
                f"the chat template of model.path has no place for a {first['role']} message after a reply that ends "
                f"with {' or '.join(map(repr, self._stops)) or 'a stop token'}"
            )
        stop, place = next(iter(stops.items()))
        # tokenised with the stop token, since some (Phi-3's) take the line break after them
        own, *tokens = self._tokenized(text[replied + place :])
        assert own == self._stops[stop], "a stop token is one token wherever it stands"
        # One that only begins the next message (GLM's <|user|>) is still to be said after a reply that ended otherwise
        said = stop in self._closing or stopped_by in (None, own)
        return tokens if said else [own, *tokens]

    def _stops_after(self, text: str) -> dict[str, int]:
        """The stop tokens between the reply and the end of ``text``, each with its first place, in order."""
        reply = text.rfind(REPLY_MARK)
        places = {stop: text.find(stop, reply) for stop in self._stops} if reply >= 0 else {}
        found = ((stop, place) for stop, place in places.items() if place >= 0)
        return dict(sorted(found, key=lambda item: item[1]))

    def _appends(self, message: Message) -> bool:
        """Whether the template leaves a prompt and a thoughtful reply as they are when ``message`` follows."""
        reply = reply_before([message])
        reply["content"] = f"<think>\n{THOUGHT_MARK}\n</think>\n\n{reply['content']}"
        alone = self._render([USER, reply], generate=False)
        whole = self._render([USER, reply, message])
        longer = self._render([USER, reply, message, reply_before([])], generate=False)
        kept = THOUGHT_MARK in whole or THOUGHT_MARK not in alone
        return kept and whole.startswith(self._render([USER])) and longer.startswith(whole)

    def _tokenized(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]

    def _render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        try:
            return render_chat(
                self._tokenizer, messages, date=self._date, add_generation_prompt=generate, kwargs=self._kwargs
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise EpisodeFailedError(f"the chat template of model.path rejects {roles}: {one_line(error)}") from error


def reply_before(messages: Sequence[Message]) -> Message:
    """A stand-in for the reply that ``messages`` follow."""
    called = [message for message in messages if message["role"] == "tool"]
    if not called:
        return {"role": "assistant", "content": REPLY_MARK}
    # Some templates want a result to follow its call, and show of such a reply nothing else
    arguments = {"value": REPLY_MARK}
    calls = [tool_call(str(m.get("name")), arguments, str(m.get("tool_call_id"))) for m in called]
    return {"role": "assistant", "content": REPLY_MARK, "tool_calls": calls}


def tool_call(name: str, arguments: Mapping[str, Any], call_id: str) -> Message:
    """A call as chat templates take it."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(arguments)}}


def tool_message(name: str, call_id: str, content: str) -> Message:
    """What a call returned."""
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
