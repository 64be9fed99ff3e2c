"""What a rollout worker asks of an inference engine. An engine other than vLLM's plugs in here, as one more class."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.planning.topology import Device

if TYPE_CHECKING:
    from rlhf.training.weights import TensorSpec


@dataclass(frozen=True)
class WorkerSpec:
    """What a rollout worker needs to know about the run."""

    config: RolloutConfig
    model_path: str
    trust_remote_code: bool
    max_model_tokens: int
    device: Device
    colocated: bool
    workers_on_gpu: int
    logprobs: bool
    seed: int
    dtype: str = "auto"
    gpu_memory_gib: float | None = None  # what the run may take of the GPU; None: all
    adapter: LoraConfig | None = None  # that requests are sampled with, beside the weights


@dataclass(frozen=True)
class Request:
    """One completion to sample. ``key`` names it and comes back with the completion."""

    key: str
    prompt_id: int
    token_ids: list[int]  # of the prompt; later in an episode, of all that has been said
    sample_index: int  # within the group
    greedy: bool = False
    logprobs: bool = False  # for this completion, even if the run asks for none
    turn: int = 0  # of its episode
    max_tokens: int | None = None  # None: rollout.max_completion_tokens
    cached_since: int | None = None  # a weight version whose cache it may use, though another is current


def request_key(group_id: int, sample: int) -> str:
    """A sample's name on its worker, which never gets the same sample twice."""
    return f"{group_id}.{sample}"


def group_of(key: str) -> str:
    """What the samples of a group, and no others, have in common in their names."""
    return key.partition(".")[0]


def request_seed(run_seed: int, request: Request) -> int:
    """The completion's own seed, 63 bits: the same whichever worker samples it, however often."""
    text = f"{run_seed}/{request.prompt_id}/{request.sample_index}/{request.greedy}"
    text += f"/{request.turn}" if request.turn else ""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Output:
    """What an engine sampled for a request. The fields are those of ``rlhf.batch.Rollout``."""

    key: str
    token_ids: list[int]
    finish_reason: str
    logprobs: np.ndarray | None


@dataclass(frozen=True)
class Completion(Output):
    """An output together with the weight version each token was sampled from, int32 ``[len(token_ids)]``."""

    versions: np.ndarray


@dataclass(frozen=True)
class Ready:
    """An engine that waits for weights."""

    processes: int  # each of which receives
    has_frozen: bool = False  # it holds those weights that never change, as they were sent before


class Engine(Protocol):
    """Samples requests step by step. All calls come from one thread.

    It keeps its unfinished requests through a pause and through a change of weights.
    """

    # Sampling

    def add(self, request: Request, version: int) -> None:
        """Accepts a request. Nothing cached under another weight ``version`` may be used for it, or under another than
        its ``cached_since``: an episode keeps the cache that it began with."""
        ...

    def abort(self, keys: Sequence[str]) -> None:
        """Drops requests; unknown keys are ignored."""
        ...

    def has_unfinished(self) -> bool:
        """Whether there is anything to sample."""
        ...

    def step(self) -> list[Output]:
        """Runs one step of sampling; returns what has finished."""
        ...

    def running_tokens(self) -> dict[str, int]:
        """How many tokens each unfinished request has so far, by key."""
        ...

    def pause(self) -> list[Output]:
        """Stops sampling, also in the engine's own processes; returns what finished before they stopped."""
        ...

    def resume(self) -> None:
        """Ends a pause."""
        ...

    # Weights, while paused. Checksums come back per engine process, one for each bucket in order.

    def begin_update(self) -> Ready:
        """Prepares for new weights, even if the last update broke off."""
        ...

    def join_weights(self, info: dict[str, Any]) -> None:
        """Joins a weight session with the learner. Raises TransferAbortedError."""
        ...

    def receive_session(self, timeout_s: float, *, frozen: bool) -> list[list[int]]:
        """Loads what the session's sender sends: with ``frozen`` all weights, else those that change. Raises
        TransferAbortedError."""
        ...

    def receive_objects(self, buckets: Iterable[tuple[tuple["TensorSpec", ...], np.ndarray]]) -> list[list[int]]:
        """Loads the given buckets: specs and their bytes."""
        ...

    def finish_update(self) -> None:
        """Makes the new weights current. Raises UnwrittenWeightsError if the update left some unwritten."""
        ...

    # Sharing a GPU

    def sleep(self) -> None:
        """Frees the GPU memory of weights and KV cache, contents included."""
        ...

    def wake_weights(self) -> None:
        """Allocates memory for the weights, which an update must then fill."""
        ...

    def wake_cache(self) -> None:
        """Allocates memory for the KV cache."""
        ...

    # Facts

    def device_name(self) -> str:
        """The GPU's name, or 'cpu'."""
        ...

    def peak_gpu_bytes(self) -> int:
        """The most GPU memory that one of the engine's processes has reserved; 0 on CPU."""
        ...


MakeEngine = Callable[[WorkerSpec], Engine]
"""Starts an engine in the process and thread that will use it."""
