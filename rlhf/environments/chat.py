"""What an environment's coroutine gets: the model to talk to."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.batch import Episode, Prompt, Rollout, Status
from rlhf.environments.template import ChatTemplate, Message, tool_message
from rlhf.environments.tools import CallFormat, ToolCall, Tools, find_calls
from rlhf.environments.turns import Sampler, TurnReply, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeEnds(BaseException):
    """Raised in an environment's coroutine when there can be no further turn. Let it pass; ``finally`` is yours."""


@dataclass(frozen=True)
class Reply:
    """What the model said in a turn. ``text`` is without its tool calls, and without special tokens.

    ``truncated``: it was cut at ``rollout.max_completion_tokens`` or the end of the context, and is the last.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False


@dataclass(frozen=True)
class Limits:
    """Of an episode: its turns, the tokens of its context, and those of a reply."""

    max_turns: int
    max_context_tokens: int
    max_completion_tokens: int


class Chat:
    """A conversation with the model. Call it to get the model's next reply::

        reply = await chat()                # to the prompt
        reply = await chat("And then?")     # after a user's message
        chat.reward(0.1)                    # for the last turn
        chat.notes["guesses"] = 3           # a column for reward functions

    What makes no sense in a conversation raises ValueError.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampler: Sampler,
        template: ChatTemplate,
        tokenizer: "PreTrainedTokenizerBase",
        limits: Limits,
        clock: asyncio.Timeout,
        *,
        step_timeout_s: float,
        tools: Tools,
        call_format: CallFormat | None,
    ) -> None:
        """``clock`` is stopped while the model samples; otherwise it allows ``step_timeout_s`` from each reply on."""
        assert prompt.messages is not None, "an environment is for chats"
        self.notes: dict[str, Any] = {}
        self._prompt, self._sampler, self._template, self._tokenizer = prompt, sampler, template, tokenizer
        self._limits, self._clock, self._step_timeout_s = limits, clock, step_timeout_s
        self._tools = tools
        self._call_format: CallFormat | None = call_format
        self._messages: list[Message] = []
        self._context = list(prompt.token_ids)
        self._sampled: list[np.ndarray] = []  # bool, of pieces of what follows the prompt
        self._turns: list[TurnReply] = []
        self._rewards: list[float] = []
        self._sampling = False
        self.ended: Status | None = None  # why there can be no further turn

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the prompt."""
        return [*(self._prompt.messages or []), *self._messages]

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    async def __call__(self, message: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """The model's next reply, after ``message``: a user's text, a message, or several.

        With ``environment.tools``, calls in a reply are made, and it goes on with what they returned, until a reply
        without any. Raises EpisodeEnds if the episode's turns or its context are used up, or the last reply was cut.
        """
        if message is not None:
            self._observe(as_messages(message))
        elif self._messages and self._messages[-1]["role"] == "assistant":
            raise ValueError("chat() after a reply needs a message for the model to answer")
        reply = await self._turn()
        while reply.tool_calls:
            self._tools.check()
            results = await asyncio.gather(*(self._tools.call(call) for call in reply.tool_calls))
            called = zip(reply.tool_calls, results, strict=True)
            self._observe([tool_message(call.name, call.id, result) for call, result in called])
            reply = await self._turn()
        return reply

    def reward(self, value: float) -> None:
        """Adds to the reward of the last turn."""
        if not self._turns:
            raise ValueError("chat.reward() is for the last turn, and there has been none")
        if not np.isfinite(value):
            raise ValueError(f"chat.reward({value}) is not a finite number")
        self._rewards[-1] += float(value)

    def _observe(self, messages: Sequence[Message]) -> None:
        """Others say something."""
        if not self._turns:
            raise ValueError("the prompt comes first: the first chat() takes no message")
        stopped_by = self._turns[-1].token_ids[-1]
        tokens = self._template.observed(self._prompt.messages or [], messages, stopped_by)
        self._messages += messages
        self._context += tokens
        self._sampled.append(np.zeros(len(tokens), dtype=bool))

    async def _turn(self) -> Reply:
        """The model says something."""
        room = self._limits.max_context_tokens - len(self._context)
        if self.ended is None and len(self._turns) == self._limits.max_turns:
            self.ended = "turns"
        if self.ended is None and room < 1:
            self.ended = "context"
        if self.ended is not None:
            raise EpisodeEnds
        if self._sampling:
            raise ValueError("two calls of chat() at once; await one before the next")
        max_tokens = min(self._limits.max_completion_tokens, room)
        self._clock.reschedule(None)
        self._sampling = True
        turn = await self._sampler.sample(TurnRequest(list(self._context), max_tokens, len(self._turns)))
        self._clock.reschedule(asyncio.get_running_loop().time() + self._step_timeout_s)
        self._sampling = False
        self._turns.append(turn)
        self._rewards.append(0.0)
        self._context += turn.token_ids
        self._sampled.append(np.ones(len(turn.token_ids), dtype=bool))
        reply = self._read(turn)
        calls = [call.message() for call in reply.tool_calls]
        self._messages.append({"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {}))
        if reply.truncated:
            self.ended = "length" if max_tokens < room else "context"
        return reply

    def _read(self, turn: TurnReply) -> Reply:
        text = str(self._tokenizer.decode(turn.token_ids, skip_special_tokens=True))
        if turn.finish_reason == "length":
            return Reply(text, truncated=True)
        if self._call_format is None:
            return Reply(text)
        # with special tokens, which mark calls in some families, but for the one that ended the reply
        said, calls = find_calls(str(self._tokenizer.decode(turn.token_ids[:-1])), self._call_format)
        return Reply(said, tuple(calls)) if calls else Reply(text)

    def rollout(self, sample_index: int, status: Status, reward: float) -> Rollout:
        """The episode as it is now, up to the last reply: nothing is learnt from what was said after it."""
        sampled = np.concatenate(self._sampled)
        sampled = sampled[: int(sampled.nonzero()[0][-1]) + 1]
        logprobs = [turn.logprobs for turn in self._turns if turn.logprobs is not None]
        assert len(logprobs) in (0, len(self._turns)), "a request's log-probabilities are for all of its turns"
        episode = Episode(
            sampled=sampled,
            turn_lengths=[len(turn.token_ids) for turn in self._turns],
            turn_rewards=list(self._rewards),
            reward=reward,
            status=status,
            messages=list(self._messages),
            notes=dict(self.notes),
        )
        return Rollout(
            self._prompt,
            sample_index,
            self._context[len(self._prompt.token_ids) :][: len(sampled)],
            np.concatenate([turn.versions for turn in self._turns]),
            "stop" if status == "done" else "length",
            np.concatenate(logprobs) if logprobs else None,
            episode,
        )


def as_messages(message: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Message]:
    """What an environment says to the model, as messages. Raises ValueError for what is none."""
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    messages = [dict(one) for one in ([message] if isinstance(message, Mapping) else message)]
    for one in messages:
        if not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise ValueError(f"chat({str(one)[:80]}): a message has a role and a content, both strings")
        if one["role"] == "assistant":
            raise ValueError("chat() takes no assistant message: what the assistant says is sampled")
    if not messages:
        raise ValueError("chat([]) says nothing; leave the message out")
    return messages
