"""The Ray actor of one rollout worker: requests in, completions out, weights and sleep in between."""

import contextlib
import dataclasses
import queue
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from actors.group import RankActor
from actors.rollouts.engine_loop import EngineLoop, Request, WorkerSpec
from actors.weights.channel import TransferAbortedError
from actors.weights.object_store import StoredBucket
from actors.weights.routes import ObjectStore
from rlhf.batch import Rollout
from rlhf.errors import UnwrittenWeightsError
from rlhf.training.weights import to_plain


@dataclasses.dataclass(frozen=True)
class Report:
    """What a worker has to say since the last one."""

    finished: list[tuple[str, Rollout]]  # with the keys of their requests
    generated_tokens: int  # since its start, those of unfinished completions included
    silent_s: float  # since its engine loop last went round; large means that the engine hangs


class RolloutActor(RankActor):
    """The Ray actor around an EngineLoop. Threaded: ``collect`` waits while other calls come and go."""

    concurrent_calls = 8

    def __init__(self, spec: WorkerSpec) -> None:
        # The CPU threads of this process are vLLM's; ours only wait.
        self._loop = EngineLoop(spec)
        self._loop.start()

    def start(self) -> str:
        """Returns once the engine is up: the IP address of the worker's node."""
        self._loop.call(lambda engine: None)
        return self.node()

    def submit(self, requests: list[Request]) -> None:
        """Queues requests. Weights must have been published."""

        def add_all(engine: Any) -> None:
            for request in requests:
                self._loop.add(engine, request)

        self._loop.call(add_all)

    def abort(self, keys: list[str]) -> None:
        """Drops requests; unknown keys (finished by now) are fine."""
        self._loop.call(lambda engine: self._loop.abort(engine, keys))

    def collect(self, wait_s: float) -> Report:
        """Finished completions: waits up to ``wait_s`` for the first, then takes all there are."""
        finished: list[tuple[str, Rollout]] = []
        with contextlib.suppress(queue.Empty):
            finished.append(self._loop.finished.get(timeout=wait_s))
        while not self._loop.finished.empty():
            finished.append(self._loop.finished.get_nowait())
        if self._loop.failure is not None:
            raise self._loop.failure
        return Report(finished, self._loop.generated_tokens, time.monotonic() - self._loop.last_round_s)

    # Weights: begin, join (when the receivers change), receive, finish, commit.

    def begin_update(self) -> int:
        """Stops serving the old version; returns the number of engine processes. Also ends what broke off before."""

        def begin(engine: Any) -> int:
            self._loop.pause(engine)
            return len(engine.collective_rpc("begin_weight_update"))

        return self._loop.call(begin)

    def join_weights(self, info: dict[str, Any]) -> None:
        """Joins a session with the learner (BucketReceiver.join says what ``info`` holds). Raises
        TransferAbortedError."""
        _raise_if_aborted(self._rpc("join_session", info))

    def receive_session(self, timeout_s: float) -> list[list[int]]:
        """Loads what the session's sender sends; returns every engine process's checksums of the buckets, in order.

        Raises TransferAbortedError.
        """
        received = self._rpc("receive_session", timeout_s)
        _raise_if_aborted([why for _, why in received])
        return [sums for sums, _ in received]

    def receive_objects(self, buckets: Sequence[StoredBucket], timeout_s: float) -> list[list[int]]:
        """Loads buckets from the object store, one after the other; returns the checksums as ``receive_session``."""
        fetched = ObjectStore().receiver(buckets, timeout_s)
        by_bucket = [self._rpc("receive_objects", to_plain([specs]), [data]) for specs, data in fetched]
        return [list(chain.from_iterable(of_process)) for of_process in zip(*by_bucket, strict=True)]

    def finish_update(self) -> None:
        """Makes the new weights current. The prefix cache of the old ones is never asked again (EngineLoop.add).

        Raises UnwrittenWeightsError where the model has weights that were not among them.
        """
        self._rpc("finish_weight_update")
        if unwritten := sorted({name for names in self._rpc("unwritten_modules") for name in names}):
            raise UnwrittenWeightsError(
                f"model.path={self._loop.spec.model_path}: a weight publish leaves {len(unwritten)} module(s) of "
                f"vLLM's model unwritten ({', '.join(unwritten[:3])}), which the learner does not have; use a model of "
                "another family (docs/models.md)"
            )

    def commit(self, version: int) -> None:
        """From here on the worker samples, and stamps its tokens with ``version``."""
        self._loop.call(lambda engine: self._loop.resume(engine, version))

    # A worker that shares its GPU. Level 2 drops the weights too (the model's buffers wait on the host): a publish of
    # all weights follows every wake-up, so a copy of the old ones would be for nothing.

    def sleep(self) -> None:
        """Gives the GPU back but for a small rest; weights and KV cache are gone."""
        self._loop.call(lambda engine: engine.sleep(level=2))

    def wake_weights(self) -> None:
        """Takes memory for the weights; a publish must fill it. The learner may still hold what the KV cache needs."""
        self._loop.call(lambda engine: engine.wake_up(tags=["weights"]))

    def wake_cache(self) -> None:
        """Takes memory for the KV cache: from here on the worker may sample."""
        self._loop.call(lambda engine: engine.wake_up(tags=["kv_cache"]))

    def device_name(self) -> str:
        """As of any actor, without opening a CUDA context beside the engine's."""
        from vllm.platforms import current_platform

        return "cpu" if self._loop.spec.device == "cpu" else current_platform.get_device_name()

    def peak_memory_gib(self) -> dict[str, float]:
        """As of any actor; on a GPU the engine's processes hold the memory."""
        host = super().peak_memory_gib()["host"]
        peaks = self._rpc("peak_gpu_memory_bytes") if self._loop.spec.device == "gpu" else []
        return {"host": host} | ({"gpu": max(peaks) / 2**30} if peaks else {})

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._loop.call(lambda engine: engine.collective_rpc(method, args=args))


def _raise_if_aborted(reasons: Sequence[str]) -> None:
    """Each engine process says why, or ''."""
    for why in filter(None, reasons):
        raise TransferAbortedError(why)
