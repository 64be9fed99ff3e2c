"""Calling several reward functions on a group, under deadlines: async ones on an event loop, sync ones in a process."""

import asyncio
import copy
import functools
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any

from rlhf.config import TimeoutConfig
from rlhf.rewards.functions import Completion
from rlhf.rewards.loading import RewardFunction
from rlhf.rewards.process import FunctionProcess

if TYPE_CHECKING:
    from rlhf.batch import Prompt  # imports torch, which the process of the sync functions does without


class RewardFunctions:
    """Several reward functions, called group by group.

    Sync functions run in one process of their own, one group and one function at a time, each call under the deadline.
    Async ones run concurrently for all groups, since they mostly wait, on one event loop that lives as long as this
    process (so a client that a module keeps stays bound to it). An async function that never releases the interpreter
    (a runaway ``re``) holds up its own deadline; make it sync.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float,
        start_timeout_s: float = TimeoutConfig.start_s,
    ) -> None:
        """``timeout_s``: for one call; ``start_timeout_s``: for starting the sync functions' process."""
        self.functions = list(functions)
        self.timeout_s = timeout_s
        # whether any of them takes the completions' text: decoding it costs more than many functions do
        self.needs_text = any(function.needs_text for function in functions)
        sync = [function for function in functions if not function.is_async]
        self._process = FunctionProcess(sync, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
        if len(sync) < len(self.functions):
            _event_loop()  # created now, before several threads can ask for it

    def start(self) -> None:
        """Starts the process of the sync functions, if there are any, so that the first group need not wait for it.

        Raises ConfigError if one cannot be loaded there, RewardError if that ends the process, DeadlineError if it
        takes too long.
        """
        self._process.start()

    def close(self) -> None:
        """Ends the process of the sync functions."""
        self._process.close()

    def weights(self) -> dict[str, float]:
        """The weight of each function in the sum, by name."""
        return {function.name: function.weight for function in self.functions}

    def required_columns(self) -> dict[str, set[str]]:
        """The columns of the data that each function requires, by its name."""
        return {function.name: function.required_columns for function in self.functions}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises RewardError, naming the function, if the data lacks a column that one requires."""
        for function in self.functions:
            function.check_columns(columns)

    def submit(
        self, prompts: "Sequence[Prompt]", completions: Sequence[Completion] | None, token_ids: Sequence[Sequence[int]]
    ) -> "Scoring":
        """Starts the async functions on a group; ``Scoring.result`` gives the scores.

        ``completions`` [S] are texts, or an episode's messages, None if no function reads them; ``token_ids`` [S] what
        was sampled; ``prompts`` [S] repeats a prompt for each of its samples. Raises RewardError if a column is
        missing.
        """
        assert prompts, "there is nothing to score"
        assert len(prompts) == len(token_ids)
        assert completions is not None or not self.needs_text, "a function would not get the text it asks for"
        self.check_columns(list(_columns(prompts)))
        # Every function gets its own lists, so that changes made by one do not affect the others.
        calls = [(f, f.accepted(_arguments(prompts, completions, token_ids))) for f in self.functions]
        return Scoring(calls, len(prompts), self._process, self.timeout_s)


class Scoring:
    """One group in progress in all functions."""

    def __init__(
        self,
        calls: Sequence[tuple[RewardFunction, dict[str, Any]]],
        num_rows: int,
        process: FunctionProcess,
        timeout_s: float,
    ) -> None:
        self._functions = [function for function, _ in calls]
        self._sync = [(function, arguments) for function, arguments in calls if not function.is_async]
        self._async = [(f, _on_event_loop(f, arguments)) for f, arguments in calls if f.is_async]
        self._num_rows, self._process, self._timeout_s = num_rows, process, timeout_s
        self._ends = time.monotonic() + timeout_s  # for the async functions; a sync one's time begins with its turn

    def result(self) -> dict[str, list[float]]:
        """One list [S] per function, by name, unweighted; NaN where it abstained.

        Raises RewardError (a function raised, ended its process, or did not return one finite number or None per
        completion) or DeadlineError.
        """
        try:
            scores = self._process.score(self._sync, self._num_rows)
            scores |= self._await_async()
        finally:
            for _, future in self._async:
                future.cancel()
        return {function.name: scores[function.name] for function in self._functions}

    def _await_async(self) -> dict[str, list[float]]:
        timeout_s = max(0.0, self._ends - time.monotonic())
        done, late = wait([future for _, future in self._async], timeout=timeout_s, return_when=FIRST_EXCEPTION)
        scores = {
            function.name: function.checked(_outcome(function, future), self._num_rows)
            for function, future in self._async
            if future in done
        }
        for function, future in self._async:
            if future in late:
                raise function.late(self._num_rows, self._timeout_s)
        return scores


def _columns(prompts: "Sequence[Prompt]") -> dict[str, None]:
    """The names of all columns of these prompts, in order."""
    return {name: None for prompt in prompts for name in prompt.columns}


def _arguments(
    prompts: "Sequence[Prompt]", completions: Sequence[Completion] | None, token_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    def as_asked(prompt: "Prompt", completion: Completion) -> Completion:
        """A chat is answered by messages, a text by a text."""
        if not isinstance(completion, str):
            return copy.deepcopy(completion)
        return completion if prompt.messages is None else [{"role": "assistant", "content": completion}]

    arguments = {
        **{name: [prompt.columns.get(name) for prompt in prompts] for name in _columns(prompts)},
        "prompts": [prompt.text if prompt.messages is None else prompt.messages for prompt in prompts],
        "completion_ids": [list(ids) for ids in token_ids],
    }
    if completions is not None:
        arguments["completions"] = list(map(as_asked, prompts, completions))
    return arguments


def _on_event_loop(function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
    async def awaited() -> Any:
        return await function.call(**arguments)

    return asyncio.run_coroutine_threadsafe(awaited(), _event_loop())


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop


def _outcome(function: RewardFunction, future: Future[Any]) -> Any:
    try:
        return future.result()
    except (Exception, SystemExit) as error:
        raise function.raised(error) from error
