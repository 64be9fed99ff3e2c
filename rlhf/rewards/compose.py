"""Loading reward functions by name or path, calling them side by side, and checking what they return.

A reward function is ``fn(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or async. It is
called with keywords: one list of S per argument, and one per column of the data. For chat data a prompt is its messages
and a completion is ``[{"role": "assistant", "content": text}]``; else both are strings. None abstains for that row. A
function without ``**kwargs`` gets only the arguments it names.
"""

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf.batch import Prompt
from rlhf.config import RewardFunctionConfig
from rlhf.errors import ConfigError, DeadlineError, RewardError
from rlhf.rewards.functions import BUILT_IN

ARGUMENTS = ("prompts", "completions", "completion_ids")  # what every function may name, beside columns and kwargs


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function. ``name`` is unique among those loaded with it, and names its metric."""

    name: str
    weight: float
    call: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: str = "reward.functions"  # where the configuration names it, for errors

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    @property
    def needs_text(self) -> bool:
        return "completions" in _named_parameters(self.call) or _takes_any_keyword(self.call)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises RewardError unless ``columns`` and the configured kwargs give every argument it cannot do without."""
        available = {*ARGUMENTS, *columns, *self.kwargs}
        for name, parameter in _named_parameters(self.call).items():
            if parameter.default is parameter.empty and name not in available:
                raise RewardError(
                    f"{self.key}: {self.name} needs an argument {name!r}, which is no column of the data "
                    f"({', '.join(columns) or 'it has none'}); rename a column, or set it in kwargs"
                )

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``arguments`` that it accepts, and its configured kwargs, which win over columns of that name."""
        merged = {**arguments, **self.kwargs}
        if _takes_any_keyword(self.call):
            return merged
        named = _named_parameters(self.call)
        return {name: value for name, value in merged.items() if name in named}


def _named_parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be passed by keyword."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(call).parameters.items() if p.kind in by_keyword}


def _takes_any_keyword(call: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(call).parameters.values())


def load_reward_functions(configs: Sequence[RewardFunctionConfig]) -> list[RewardFunction]:
    """Loads them in order; a name that occurs again gets ``_2``, ``_3``, ... appended.

    A path is a built-in name, ``package.module.function`` or ``path/to/file.py:function``. Raises RewardError where one
    cannot be loaded or called as a reward function, ConfigError where its kwargs do not fit; both name the key.
    """
    functions: list[RewardFunction] = []
    for index, config in enumerate(configs):
        key = f"reward.functions[{index}].path={config.path}"
        call = _resolve(config.path, key)
        _check_signature(call, key)
        _check_kwargs(call, config.kwargs, f"reward.functions[{index}].kwargs")
        name = _unique(_name_of(call), {function.name for function in functions})
        functions.append(RewardFunction(name, float(config.weight), call, dict(config.kwargs), key))
    return functions


def _name_of(call: Callable[..., Any]) -> str:
    inner = call.func if isinstance(call, functools.partial) else call
    return getattr(inner, "__name__", type(inner).__name__)


def _unique(name: str, taken: Collection[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def _resolve(path: str, key: str) -> Callable[..., Any]:
    if path in BUILT_IN:
        return BUILT_IN[path]
    if ".py:" in path:
        file, _, attribute = path.rpartition(":")
        module = _import_file(Path(file).expanduser(), key)
    else:
        module_name, _, attribute = path.rpartition(".")
        if not module_name or not attribute:
            raise RewardError(
                f"{key} is no built-in function ({', '.join(sorted(BUILT_IN))}); use one of them, "
                "package.module.function, or path/to/file.py:function"
            )
        module = _import_module(module_name, key)
    if not hasattr(module, attribute):
        functions = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise RewardError(f"{key}: the module has no {attribute!r}; its callables are {', '.join(functions) or 'none'}")
    call = getattr(module, attribute)
    if not callable(call):
        raise RewardError(f"{key} is a {type(call).__name__}, not callable; name a function")
    return call


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a module may raise anything while it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else "?"
        if name == missing or name.startswith(f"{missing}."):
            remedy = "install it, add its directory to PYTHONPATH, or use path/to/file.py:function"
            raise RewardError(f"{key}: no module {missing!r}; {remedy}") from error
        raise RewardError(f"{key}: importing it failed: {_described(error)}; correct the module") from error


def _import_file(file: Path, key: str) -> ModuleType:
    """Imports a file once per process: two functions of one file share its module."""
    if not file.is_file():
        raise RewardError(f"{key}: no such file {file.absolute()}; give its full path")
    resolved = file.resolve()
    name = f"rlhf_reward_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a module may raise anything while it is imported
        del sys.modules[name]
        raise RewardError(f"{key}: importing it failed: {_described(error)}; correct the module") from error
    return module


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_signature(call: Callable[..., Any], key: str) -> None:
    remedy = "write it as fn(prompts, completions, completion_ids, **kwargs)"
    try:
        named = _named_parameters(call)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{key}: its signature cannot be read; {remedy}") from error
    if not _takes_any_keyword(call) and not set(ARGUMENTS) & set(named):
        raise RewardError(f"{key}: it takes none of {', '.join(ARGUMENTS)} by keyword; {remedy}")


def _check_kwargs(call: Callable[..., Any], kwargs: Mapping[str, Any], key: str) -> None:
    named = _named_parameters(call)
    for name in kwargs:
        if name in ARGUMENTS:
            raise ConfigError(f"{key}.{name} would hide what the loop passes as {name!r}; remove it")
        if name not in named and not _takes_any_keyword(call):
            known = ", ".join(n for n in named if n not in ARGUMENTS)
            raise ConfigError(f"{key}.{name} is no argument of {_name_of(call)}; it has {known or 'none to set'}")


class RewardFunctions:
    """Several reward functions, called side by side under one deadline; group by group.

    Sync functions run in daemon threads, those of one group at a time, for they need not bear more. Async ones run on
    one event loop that lives as long as the process (so a client that a module keeps stays bound to it), those of all
    groups at once, for what they do is wait. Past the deadline a sync function cannot be stopped: its thread is left
    behind, and nothing waits for it. What never lets go of the interpreter (a runaway ``re``) holds the deadline up.
    """

    def __init__(self, functions: Sequence[RewardFunction], *, timeout_s: float) -> None:
        self.functions = list(functions)
        self.timeout_s = timeout_s
        # whether any of them takes the completions' text: to decode it costs more than many a function
        self.needs_text = any(function.needs_text for function in functions)
        self._turn = threading.Lock()  # of the group whose sync functions run
        if any(function.is_async for function in functions):
            _event_loop()  # made once, before several threads can ask for it

    def weights(self) -> dict[str, float]:
        """The weight of each function in the sum, by name."""
        return {function.name: function.weight for function in self.functions}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises RewardError, naming the function, where the data lacks a column that one needs."""
        for function in self.functions:
            function.check_columns(columns)

    def required_columns(self) -> dict[str, set[str]]:
        """By function name, the columns of the data that it cannot do without."""
        return {
            function.name: {
                name
                for name, parameter in _named_parameters(function.call).items()
                if parameter.default is parameter.empty and name not in {*ARGUMENTS, *function.kwargs}
            }
            for function in self.functions
        }

    def submit(
        self, prompts: Sequence[Prompt], texts: Sequence[str] | None, token_ids: Sequence[Sequence[int]]
    ) -> "Scoring":
        """Starts the async functions on a group; its scores are asked for later.

        ``texts`` and ``token_ids`` [S] are the completions, ``texts`` None where no function reads them; ``prompts``
        [S] repeats a prompt for each of its samples. Raises RewardError where a column is missing.
        """
        assert prompts, "there is nothing to score"
        assert len(prompts) == len(token_ids)
        assert texts is not None or not self.needs_text, "a function would not get the text it asks for"
        self.check_columns(list(_columns(prompts)))
        # Every function has lists of its own: one that changes them does not disturb the others.
        calls = [(f, f.accepted(_arguments(prompts, texts, token_ids))) for f in self.functions]
        return Scoring(calls, len(prompts), self._turn, self.timeout_s)


class Scoring:
    """One group under way in all functions."""

    def __init__(
        self,
        calls: Sequence[tuple[RewardFunction, dict[str, Any]]],
        num_rows: int,
        turn: threading.Lock,
        timeout_s: float,
    ) -> None:
        self._functions = [function for function, _ in calls]
        self._sync = [(function, arguments) for function, arguments in calls if not function.is_async]
        self._async = [(f, _on_event_loop(f, arguments)) for f, arguments in calls if f.is_async]
        self._num_rows, self._turn, self._timeout_s = num_rows, turn, timeout_s
        self._ends = time.monotonic() + timeout_s  # of the async functions; the others begin when it is their turn

    def result(self) -> dict[str, list[float]]:
        """One list [S] per function, by name, unweighted; NaN where it abstained.

        Raises RewardError (a function raised, or did not return one finite number per completion) or DeadlineError.
        """
        try:
            scores = {}
            if self._sync:
                with self._turn:
                    running = [(function, _in_thread(function, arguments)) for function, arguments in self._sync]
                    scores |= self._wait(running, self._timeout_s)
            scores |= self._wait(self._async, max(0.0, self._ends - time.monotonic()))
        finally:
            for _, future in self._async:
                future.cancel()
        return {function.name: scores[function.name] for function in self._functions}

    def _wait(self, running: Sequence[tuple[RewardFunction, Future[Any]]], timeout_s: float) -> dict[str, list[float]]:
        done, late = wait([future for _, future in running], timeout=timeout_s, return_when=FIRST_EXCEPTION)
        scores = {
            function.name: _checked(_outcome(function, future), self._num_rows, function)
            for function, future in running
            if future in done
        }
        for function, future in running:
            if future in late:
                raise DeadlineError(
                    f"{_who(function)} did not finish {self._num_rows} completions within "
                    f"reward.function_timeout_s={self._timeout_s:g}; raise that, or make it faster"
                )
        return scores


def _who(function: RewardFunction) -> str:
    return f"reward function {function.name} ({function.key})"


def _columns(prompts: Sequence[Prompt]) -> dict[str, None]:
    """The names of all columns of these prompts, in order."""
    return {name: None for prompt in prompts for name in prompt.columns}


def _arguments(
    prompts: Sequence[Prompt], texts: Sequence[str] | None, token_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    def chat_or_text(prompt: Prompt, text: str) -> Any:
        return text if prompt.messages is None else [{"role": "assistant", "content": text}]

    arguments = {
        **{name: [prompt.columns.get(name) for prompt in prompts] for name in _columns(prompts)},
        "prompts": [prompt.text if prompt.messages is None else prompt.messages for prompt in prompts],
        "completion_ids": [list(ids) for ids in token_ids],
    }
    if texts is not None:
        arguments["completions"] = [chat_or_text(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return arguments


def _on_event_loop(function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
    async def awaited() -> Any:
        return await function.call(**arguments)

    return asyncio.run_coroutine_threadsafe(awaited(), _event_loop())


def _in_thread(function: RewardFunction, arguments: dict[str, Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so setting its outcome never fails

    def run() -> None:
        try:
            future.set_result(function.call(**arguments))
        except BaseException as error:  # SystemExit included: it would end this thread without a word
            future.set_exception(error)

    threading.Thread(target=run, name=f"reward-{function.name}", daemon=True).start()
    return future


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop


def _outcome(function: RewardFunction, future: Future[Any]) -> Any:
    try:
        return future.result()
    except (Exception, SystemExit) as error:
        raise RewardError(f"{_who(function)} raised {_described(error)}") from error


def _checked(values: Any, num_rows: int, function: RewardFunction) -> list[float]:
    """The values as floats, None as NaN. Raises RewardError unless they are one finite number or None per row."""
    who = _who(function)
    if hasattr(values, "tolist"):  # NumPy and torch
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"{who} returned a {type(values).__name__}; return a list with one number per completion")
    if len(values) != num_rows:
        raise RewardError(f"{who} returned {len(values)} values for {num_rows} completions; return one per completion")
    checked = []
    for row, value in enumerate(values):
        number = value.tolist() if hasattr(value, "tolist") else value
        if number is None:
            checked.append(math.nan)
        elif isinstance(number, Real) and not math.isinf(number):
            checked.append(float(number))
        else:
            shown = " ".join(repr(number).split())[:80]
            raise RewardError(f"{who} returned {shown} for completion {row}; return a finite number or None")
    return checked


def combine(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Tensor:
    """float32 [S]: the weighted sum of the scores of each row, without the functions that abstained (NaN) there.

    Raises RewardError where all of them abstained.
    """
    table = torch.tensor([list(values) for values in scores.values()], dtype=torch.float64)  # [functions, S]
    weight = torch.tensor([weights[name] for name in scores], dtype=torch.float64)
    without_reward = table.isnan().all(dim=0).nonzero().flatten().tolist()
    if without_reward:
        raise RewardError(
            f"every reward function ({', '.join(scores)}) abstained for {len(without_reward)} of {table.shape[1]} "
            f"completions (first: {without_reward[0]}); let one of them return a number, or drop those prompts"
        )
    return (weight[:, None] * table.nan_to_num(nan=0.0)).sum(dim=0).to(torch.float32)
