"""Runs an environment's coroutine for one episode, under a deadline, and makes a rollout of it."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.batch import Prompt, Rollout, Status
from rlhf.config import Config
from rlhf.environments.chat import Chat, EpisodeEnds, Limits
from rlhf.environments.loading import load_environment, load_tools, tool_schemas
from rlhf.environments.template import ChatTemplate
from rlhf.environments.tools import CallFormat, Tools, call_format
from rlhf.environments.turns import Sampler
from rlhf.errors import EpisodeFailedError
from rlhf.user_code import described, place_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeRunner:
    """What all episodes of a run share."""

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase", *, stop_ids: list[int]) -> None:
        """``stop_ids``: tokens that end a reply. Raises ConfigError if the environment, a tool or the chat template
        cannot be used."""
        assert config.environment is not None
        settings = self._settings = config.environment
        schemas = tool_schemas(settings)
        self._environment = load_environment(settings)
        self._tools = Tools(load_tools(settings), num_threads=settings.episodes_per_worker)
        kwargs = config.data.chat_template_kwargs
        self._format: CallFormat | None = call_format(tokenizer, schemas, kwargs) if schemas else None
        self._tokenizer = tokenizer
        self.template = ChatTemplate(
            tokenizer,
            stop_ids=stop_ids,
            date=config.data.date,
            kwargs=kwargs,
            tools=schemas,
        )
        self._limits = Limits(
            max_turns=settings.max_turns,
            max_context_tokens=settings.max_context_tokens,
            max_completion_tokens=config.rollout.max_completion_tokens,
        )

    async def run(self, prompt: Prompt, sample_index: int, sampler: Sampler) -> Rollout:
        """One episode. If its environment is ended for want of turns, of room or of time, all it gets is its turns'
        rewards.

        Raises EpisodeFailedError if the environment raised, or was late before the model had said anything.
        """
        settings = self._settings
        clock = asyncio.timeout(settings.step_timeout_s)
        chat = Chat(
            prompt,
            sampler,
            self.template,
            self._tokenizer,
            self._limits,
            clock,
            step_timeout_s=settings.step_timeout_s,
            tools=self._tools,
            call_format=self._format,
        )
        said = asyncio.create_task(self._reward(chat, prompt))
        try:
            with contextlib.suppress(TimeoutError):
                async with clock:
                    await asyncio.wait({said})
        finally:
            if not said.done():
                chat.ended = "timeout"  # there is no further turn, whatever it makes of being cancelled
                said.cancel()
                await asyncio.wait({said}, timeout=settings.step_timeout_s)  # its own ``finally`` may hang, too
        if clock.expired():
            if not chat.num_turns:
                raise EpisodeFailedError(
                    f"{self._environment.path}: silent for {settings.step_timeout_s:g} s before the model's first turn "
                    "(environment.step_timeout_s)"
                )
            return chat.rollout(sample_index, "timeout", 0.0)
        reward = said.result()
        if not chat.num_turns:
            raise EpisodeFailedError(f"{self._environment.path}: it ended before the model had said anything")
        status: Status = chat.ended or "done"
        return chat.rollout(sample_index, status, reward)

    async def _reward(self, chat: Chat, prompt: Prompt) -> float:
        """What the environment returns; 0 if nothing."""
        environment = self._environment
        try:
            value = await environment.call(chat=chat, **environment.accepted(prompt.columns))
        except EpisodeEnds:
            return 0.0
        except EpisodeFailedError:
            raise
        except Exception as error:  # the user's code may raise anything
            self._tools.check()
            place = place_in(environment.file, error)
            raise EpisodeFailedError(f"{environment.path} raised {described(error)}{place}") from error
        return _checked(value, environment.path)


def _checked(value: Any, path: str) -> float:
    if value is None:
        return 0.0
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise EpisodeFailedError(f"{path} returned {value!r}; return a number, or None") from error
    if not np.isfinite(reward):
        raise EpisodeFailedError(f"{path} returned {reward}; return a finite number, or None")
    return reward
