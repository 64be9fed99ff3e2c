"""The Ray actor of one rollout worker: requests in, completions out, weights and sleep in between."""

from collections.abc import Sequence
from typing import Any

from actors.group import RankActor, host_memory_gib
from actors.rollouts.engine import MakeEngine, Ready, Request, WorkerSpec
from actors.rollouts.engine_loop import EngineLoop, Report
from actors.weights.object_store import StoredBucket
from actors.weights.routes import ObjectStore


class RolloutActor(RankActor):
    """The Ray actor around an EngineLoop. Threaded: ``collect`` waits while other calls come and go."""

    concurrent_calls = 8

    def __init__(self, spec: WorkerSpec, make_engine: MakeEngine) -> None:
        # The CPU threads of this process are the engine's; ours only wait.
        self._loop = EngineLoop(spec, make_engine)
        self._loop.start()

    def start(self) -> str:
        """Waits until the engine is up; returns the IP address of the worker's node."""
        self._loop.call(lambda engine: None)
        return self.node()

    def submit(self, requests: list[Request]) -> None:
        """Queues requests. Weights must have been published."""
        self._loop.submit(requests)

    def abort(self, keys: list[str]) -> None:
        """Drops requests; unknown keys (already finished) are ignored."""
        self._loop.abort(keys)

    def collect(self, wait_s: float) -> Report:
        """Waits up to ``wait_s`` for a finished completion, then returns all there are."""
        return self._loop.collect(wait_s)

    # Weights: begin, join (when the receivers change), receive, finish, commit.

    def begin_update(self) -> Ready:
        """Stops serving the old version, or an update that broke off."""
        return self._loop.begin_update()

    def join_weights(self, info: dict[str, Any]) -> None:
        """Joins a session with the learner (BucketReceiver.join says what ``info`` holds). Raises
        TransferAbortedError."""
        self._loop.call(lambda engine: engine.join_weights(info))

    def receive_session(self, timeout_s: float, frozen: bool) -> list[list[int]]:
        """Loads what the session's sender sends; returns every engine process's checksums of the buckets, in order.

        ``frozen``: weights that never change are among it. Raises TransferAbortedError.
        """
        return self._loop.call(lambda engine: engine.receive_session(timeout_s, frozen=frozen))

    def receive_objects(self, buckets: Sequence[StoredBucket], timeout_s: float) -> list[list[int]]:
        """Loads buckets from the object store, one after another; returns checksums as ``receive_session`` does."""
        fetched = ObjectStore().receiver(buckets, timeout_s)
        return self._loop.call(lambda engine: engine.receive_objects(fetched))

    def finish_update(self) -> None:
        """Makes the new weights current. Raises UnwrittenWeightsError if the model has more than were sent."""
        self._loop.call(lambda engine: engine.finish_update())

    def commit(self, version: int) -> None:
        """From now on the worker samples, and stamps its tokens with ``version``."""
        self._loop.commit(version)

    # A worker that shares its GPU with a learner

    def sleep(self) -> None:
        """Frees the GPU's memory except for a small remainder; weights and KV cache are gone."""
        self._loop.call(lambda engine: engine.sleep())

    def wake_weights(self) -> None:
        """Allocates the weights, for a publish to fill. The learner may still hold the memory for the KV cache."""
        self._loop.call(lambda engine: engine.wake_weights())

    def wake_cache(self) -> None:
        """Allocates the KV cache: from now on the worker may sample."""
        self._loop.call(lambda engine: engine.wake_cache())

    def device_name(self) -> str:
        """Same as the base class, but asks the engine."""
        return self._loop.call(lambda engine: engine.device_name())

    def memory_gib(self) -> dict[str, float]:
        """Same as the base class, but the engine's processes hold the GPU memory, and it is the most since the
        start."""
        reserved = self._loop.call(lambda engine: engine.peak_gpu_bytes())
        self._most_reserved = max(self._most_reserved, reserved)
        return host_memory_gib() | ({"gpu": reserved / 2**30} if reserved else {})
