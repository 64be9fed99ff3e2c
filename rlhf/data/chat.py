"""Chats and plain prompts: which are usable, and the one way a tokenizer turns them into text and tokens."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]

DATE_FUNCTION = "strftime_now"  # what a template calls for today's date
# Forbidden in data.chat_template_kwargs: the arguments of apply_chat_template and of the renderer behind it that we set
# or that change more than the template's text.
RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "max_length",
    "messages",
    "padding",
    "raise_exception",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}


def prompt_problem(prompt: Any, *, is_chat: bool) -> str | None:
    """What is wrong with a prompt, or None."""
    if prompt is not None and not isinstance(prompt, (str, list)):
        return f"the prompt is a {type(prompt).__name__}; it must be a string or a list of {{role, content}} messages"
    if prompt is None or not (prompt.strip() if isinstance(prompt, str) else prompt):
        return "the prompt is empty; remove the row"
    if isinstance(prompt, list) != is_chat:
        return "chats and plain strings are mixed; use one kind"
    return _chat_problem(prompt) if isinstance(prompt, list) else None


def _chat_problem(chat: list[Any]) -> str | None:
    for message in chat:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            return f"the message {str(message)[:80]!r} must have a role and a content, both strings"
    if not any(message["content"].strip() for message in chat):
        return "the prompt is empty; remove the row"
    if chat[-1]["role"] == "assistant":
        return "the chat ends with an assistant message, which leaves nothing to answer; remove it"
    return None


def plain_messages(chat: Chat) -> Chat:
    """Without values that are None: Arrow gives every message all keys that any message of the data has."""
    return [{key: value for key, value in message.items() if value is not None} for message in chat]


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ConfigError if one of ``data.chat_template_kwargs`` would collide, or the template never reads it."""
    for name in kwargs:
        if name == DATE_FUNCTION:
            raise ConfigError(f"data.chat_template_kwargs.{name} is what data.date sets; use that")
        if name in RESERVED:
            raise ConfigError(
                f"data.chat_template_kwargs.{name} collides with an argument that the template already gets; remove it"
            )
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template of model.path never reads {name!r}; fix the "
                "name, or remove it"
            )


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    chat: Sequence[Mapping[str, Any]],
    *,
    date: str | None,
    add_generation_prompt: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The chat rendered by the tokenizer's own template. A template may raise anything.

    ``date`` (YYYY-MM-DD, None: today) is what a template gets as today's date. ``kwargs`` must pass
    ``check_template_kwargs``.
    """
    passed = dict(kwargs or {})
    if DATE_FUNCTION in str(tokenizer.chat_template):  # a render argument shadows jinja's global of the same name
        passed[DATE_FUNCTION] = (datetime.fromisoformat(date) if date else datetime.now()).strftime
    text = tokenizer.apply_chat_template(
        [dict(message) for message in chat], tokenize=False, add_generation_prompt=add_generation_prompt, **passed
    )
    assert isinstance(text, str)
    return text


def drop_second_bos(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Sequence[int]:
    """The ids of a plain text, without the BOS that the tokenizer adds to a text that already begins with one."""
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and list(ids[:2]) == [bos, bos] else ids


def answer_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[dict[str, str]],
    answer: str | list[dict[str, Any]],
    *,
    date: str | None = None,
) -> list[int]:
    """The tokens a reward model reads for a prompt, plain or a chat, and its answer: the same in training and in use.

    An answer of several messages is what followed the prompt in an environment. A chat needs a tokenizer with a chat
    template; ``date``: see ``render_chat``.
    """
    if isinstance(prompt, str):
        assert isinstance(answer, str), "environments are for chats"
        return list(drop_second_bos(tokenizer(prompt + answer, verbose=False)["input_ids"], tokenizer))  # type: ignore[arg-type]
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    text = render_chat(tokenizer, [*prompt, *messages], date=date)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def truncate_tail(ids: Any, max_tokens: int) -> list[int]:
    """The last ``max_tokens`` ids: the end of a conversation is what is judged."""
    return list(ids)[-max_tokens:]
