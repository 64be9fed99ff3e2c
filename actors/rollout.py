"""One rollout worker: a vLLM engine under a step loop of our own, in a thread of its own.

Requests come in at any time; finished completions go out as they finish; everything else that touches the engine
(weights, sleep, cache) runs between two steps. The same loop drives the in-process engine on CPU and the engine-core
process on GPU.
"""

import concurrent.futures
import dataclasses
import hashlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from actors.group import RankActor
from rlhf.batch import Prompt, Rollout
from rlhf.config import RolloutConfig
from rlhf.topology import Device
from rlhf.weights import TensorSpec

IDLE_WAIT_S = 0.1  # how long an idle loop waits for a call before it looks around


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    sample_index: int
    greedy: bool = False

    @property
    def key(self) -> str:
        return f"{self.prompt.id}/{self.sample_index}"


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What a rollout worker needs to know of the run."""

    config: RolloutConfig
    model_path: str
    trust_remote_code: bool
    max_model_tokens: int
    device: Device
    colocated: bool
    logprobs: bool
    seed: int
    dtype: str = "auto"


def worker_env(device: Device) -> dict[str, str]:
    """Environment of a rollout worker's process, set before vLLM is imported."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def engine_args(spec: WorkerSpec) -> dict[str, Any]:
    """vLLM's engine arguments, derived from the configuration; ``rollout.engine_args`` has the last word."""
    config = spec.config
    args: dict[str, Any] = {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "seed": spec.seed,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "weight_transfer_config": {"backend": "rlhf"},
        "worker_extension_cls": "actors.vllm_weights.WorkerExtension",
    }
    if spec.device == "cpu":
        args |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.cpu_kv_cache_mib << 20,
            "block_size": 32,  # the default of 128 would keep a group from sharing its prompt
        }
    else:
        args |= {
            "dtype": "bfloat16" if spec.dtype == "auto" else spec.dtype,
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "enable_sleep_mode": spec.colocated,
        }
    return args | config.engine_args


def request_seed(run_seed: int, request: Request) -> int:
    """A seed of the completion's own, the same whichever worker samples it: 63 bits."""
    text = f"{run_seed}/{request.key}/{request.greedy}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class EngineLoop(threading.Thread):
    """Owns the engine. ``call`` runs a function between steps; ``finished`` holds completions as they finish."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(name="vllm-loop", daemon=True)
        self.spec = spec
        self.version = -1  # nothing published yet: nothing may be sampled
        self.finished: queue.Queue[Rollout] = queue.Queue()
        self.failure: BaseException | None = None
        self._calls: queue.Queue[tuple[Callable[[Any], Any], Future[Any]]] = queue.Queue()
        self._requests: dict[str, Request] = {}

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Runs ``function(engine)`` in the loop's thread, between two steps, and returns its result."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        while not future.done():
            if self.failure is not None:
                raise self.failure
            concurrent.futures.wait([future], timeout=1.0)
        return future.result()

    def run(self) -> None:
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            import actors.vllm_weights  # noqa: F401  (registers the weight-transfer engine)

            engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(self.spec)))
            while True:
                self._serve_calls(engine)
                if engine.has_unfinished_requests():
                    for output in engine.step():
                        if output.finished:
                            self.finished.put(self._to_rollout(output))
        except BaseException as error:
            self.failure = error
            raise

    def _serve_calls(self, engine: Any) -> None:
        """Runs what was asked for between two steps; waits a moment for it only while there is nothing to generate."""
        wait = not engine.has_unfinished_requests()
        while True:
            try:
                function, future = self._calls.get(block=wait, timeout=IDLE_WAIT_S)
            except queue.Empty:
                return
            try:
                future.set_result(function(engine))
            except BaseException as error:
                future.set_exception(error)
            wait = False

    def add(self, engine: Any, request: Request) -> None:
        """Hands one request to the engine (in the loop's thread)."""
        self._requests[request.key] = request
        prompt = {"prompt_token_ids": request.prompt.token_ids}
        engine.add_request(request.key, prompt, self._sampling_params(request))

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self.spec.config
        return SamplingParams(
            temperature=config.eval_temperature if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_completion_tokens,
            stop=list(config.stop) or None,
            ignore_eos=config.ignore_eos,
            detokenize=bool(config.stop),
            logprobs=0 if self.spec.logprobs and not request.greedy else None,
            flat_logprobs=True,
            seed=request_seed(self.spec.seed, request) if config.seed_requests else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _to_rollout(self, output: Any) -> Rollout:
        request = self._requests.pop(output.request_id)
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        flat = completion.logprobs
        return Rollout(
            prompt=request.prompt,
            sample_index=request.sample_index,
            token_ids=token_ids,
            versions=np.full(len(token_ids), self.version, dtype=np.int32),
            finish_reason=completion.finish_reason,
            logprobs=np.asarray([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32) if flat else None,
        )


class RolloutActor(RankActor):
    """The Ray actor around an EngineLoop. Threaded: ``collect`` waits while other calls come and go."""

    def __init__(self, spec: WorkerSpec) -> None:
        # The CPU threads of this process are vLLM's; ours only wait.
        self._loop = EngineLoop(spec)
        self._loop.start()

    def start(self) -> dict[str, Any]:
        """Returns once the engine is up: what it runs on and how much it can hold."""
        return self._loop.call(
            lambda engine: {
                "kv_cache_tokens": _kv_cache_tokens(engine),
                "threads": torch.get_num_threads(),
            }
        )

    def submit(self, requests: list[Request]) -> None:
        """Queues requests. Weights must have been published."""
        assert self._loop.version >= 0, "a worker without a committed weight version must not be asked to sample"

        def add_all(engine: Any) -> None:
            for request in requests:
                self._loop.add(engine, request)

        self._loop.call(add_all)

    def collect(self, wait_s: float) -> list[Rollout]:
        """Finished completions: waits up to ``wait_s`` for the first, then takes all there are."""
        ends = time.monotonic() + wait_s
        while True:
            if self._loop.failure is not None:
                raise self._loop.failure
            try:
                batch = [self._loop.finished.get(timeout=min(0.5, max(0.0, ends - time.monotonic())))]
            except queue.Empty:
                if time.monotonic() >= ends:
                    return []
                continue
            while not self._loop.finished.empty():
                batch.append(self._loop.finished.get_nowait())
            return batch

    # Weights: begin, receive (once or per bucket), finish, commit.

    def join_broadcast(self, init_info: dict[str, Any]) -> None:
        """Joins the NCCL group of the learner."""
        self._rpc("init_weight_transfer_engine", init_info)

    def begin_update(self) -> None:
        """Stops serving the old version."""

        def begin(engine: Any) -> None:
            assert not engine.has_unfinished_requests(), "weights must not change under a running request"
            self._loop.version = -1
            engine.collective_rpc("start_weight_update")

        self._loop.call(begin)

    def receive(
        self, layout: list[tuple[TensorSpec, ...]], data: Any = None, handles: dict[str, bytes] | None = None
    ) -> None:
        """Loads buckets: from ``data`` (bytes), through CUDA IPC ``handles``, or from the broadcast."""
        info = {
            "layout": [[dataclasses.asdict(spec) for spec in specs] for specs in layout],
            "data": data,
            "handles": handles or {},
        }
        self._rpc("update_weights", info)

    def finish_update(self) -> list[list[int]]:
        """Makes the new weights current; returns every engine process's bucket checksums."""

        def finish(engine: Any) -> list[list[int]]:
            engine.collective_rpc("finish_weight_update")
            engine.reset_prefix_cache()
            return engine.collective_rpc("received_checksums")

        return self._loop.call(finish)

    def commit(self, version: int) -> None:
        """From here on the worker samples, and stamps its tokens with ``version``."""
        self._loop.version = version

    def sleep(self) -> None:
        """Gives the GPU back but for a small rest."""
        self._loop.call(lambda engine: engine.sleep(level=1))

    def wake(self) -> None:
        self._loop.call(lambda engine: engine.wake_up())

    def peak_memory_gib(self) -> dict[str, float]:
        """As of any actor; on a GPU the engine's processes hold the memory."""
        host = super().peak_memory_gib()["host"]
        peaks = self._rpc("peak_gpu_memory_bytes") if self._loop.spec.device == "gpu" else []
        return {"host": host} | ({"gpu": max(peaks) / 2**30} if peaks else {})

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._loop.call(lambda engine: engine.collective_rpc(method, args=args))


def _kv_cache_tokens(engine: Any) -> int:
    cache = engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size
