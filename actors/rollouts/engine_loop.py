"""A vLLM engine under a step loop of our own, in a thread of its own.

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

from actors.rollouts.vllm_errors import ErrorOutput
from rlhf.batch import Prompt, Rollout
from rlhf.config import RolloutConfig
from rlhf.errors import ConfigError, RlhfError
from rlhf.planning.memory import rollout_memory
from rlhf.planning.shapes import read_shape
from rlhf.planning.topology import Device

CPU_BATCHED_TOKENS = 2048  # in one step of an engine
IDLE_WAIT_S = 0.1  # how long an idle loop waits for a call before it looks around
COUNT_EVERY_S = 1.0  # how often the loop counts the tokens of unfinished completions


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to sample. ``key`` names it in the pool and comes back with the result."""

    key: str
    prompt: Prompt
    sample_index: int
    greedy: bool = False
    logprobs: bool = False  # of this one, even where the run asks for none


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What a rollout worker needs to know of the run."""

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


def worker_env(device: Device) -> dict[str, str]:
    """Environment of a rollout worker's process, set before vLLM is imported."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def engine_args(spec: WorkerSpec) -> dict[str, Any]:
    """vLLM's engine arguments, derived from the configuration; ``rollout.engine_args`` has the last word."""
    from actors.rollouts.vllm_executors import OneProcess, TensorParallel

    config = spec.config
    args: dict[str, Any] = {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": TensorParallel if config.tensor_parallel_size > 1 else OneProcess,
        "seed": spec.seed,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "weight_transfer_config": {"backend": "rlhf"},
        "worker_extension_cls": "actors.weights.vllm_receiver.WorkerExtension",
    }
    if spec.device == "cpu":
        args |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.cpu_kv_cache_mib << 20,
            "block_size": 32,  # the default of 128 would keep a group from sharing its prompt
            # whole prompts only: after a part of one, vLLM turns back its seeded generator, which a CPU cannot
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, spec.max_model_tokens + config.max_num_seqs),
        }
    else:
        args |= {
            "dtype": "bfloat16" if spec.dtype == "auto" else spec.dtype,
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": config.gpu_memory_fraction / spec.workers_on_gpu,
            "enable_sleep_mode": spec.colocated,
        }
        if spec.colocated and (cache_bytes := kv_cache_bytes(spec)) is not None:
            args["kv_cache_memory_bytes"] = cache_bytes
    return args | config.engine_args


def kv_cache_bytes(spec: WorkerSpec) -> int | None:
    """How large the KV cache of an engine on a shared GPU is; None leaves it to vLLM, which takes all that it may.

    No more than its sequences can fill. Several engines on one GPU start at once and could not tell their own use of
    memory from the others', so for them it has to be known: raises ConfigError where it is not.
    """
    from vllm.platforms import current_platform

    config, cache_bytes = spec.config, 0.0
    if (shape := read_shape(spec.model_path)) is not None:
        cache_bytes = rollout_memory(
            shape,
            budget_bytes=config.gpu_memory_fraction * current_platform.get_device_total_memory() / spec.workers_on_gpu,
            tensor_parallel_size=config.tensor_parallel_size,
            element_bytes=4 if spec.dtype == "float32" else 2,
            cache_tokens=config.max_num_seqs * spec.max_model_tokens,
        ).kv_cache
    if cache_bytes > 0:
        return int(cache_bytes)
    if spec.workers_on_gpu == 1:
        return None
    raise ConfigError(
        f"rollout.num_workers: {spec.workers_on_gpu} workers on one GPU need a model.path of a known shape and a "
        "larger rollout.gpu_memory_fraction; use one worker per GPU"
    )


def request_seed(run_seed: int, request: Request) -> int:
    """A seed of the completion's own, the same whichever worker samples it and however often: 63 bits."""
    text = f"{run_seed}/{request.prompt.id}/{request.sample_index}/{request.greedy}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class EngineLoop(threading.Thread):
    """Owns the engine. ``call`` runs a function between steps; ``finished`` holds completions as they finish.

    Between ``pause`` and ``resume`` nothing is sampled, and unfinished requests stay where they are: weights may change
    under them. Each token is stamped with the version it was sampled from.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(name="vllm-loop", daemon=True)
        self.spec = spec
        self.version = -1  # of the weights that sample; -1: nothing published yet, nothing may be sampled
        self.finished: queue.Queue[tuple[str, Rollout]] = queue.Queue()
        self.failure: BaseException | None = None
        self.last_round_s = time.monotonic()
        self._paused = False
        self._calls: queue.Queue[tuple[Callable[[Any], Any], Future[Any]]] = queue.Queue()
        self._requests: dict[str, Request] = {}
        self._held: list[Request] = []  # came in during a pause
        self._older_tokens: dict[str, list[tuple[int, int]]] = {}  # (tokens so far, version) at every change of weights
        self._finished_tokens = 0
        self.generated_tokens = 0  # since the start, unfinished completions included; counted once a second

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

            import actors.weights.vllm_receiver  # noqa: F401  (registers the weight-transfer engine)

            output = ErrorOutput()
            try:
                engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(self.spec)))
            except RlhfError:
                raise
            except Exception as error:
                raise output.explain(error) from error
            counted_s = time.monotonic()
            while True:
                now = time.monotonic()
                if now - counted_s > COUNT_EVERY_S:
                    self.generated_tokens = self._finished_tokens + sum(self._running_tokens(engine).values())
                    counted_s = now
                self.last_round_s = now
                self._serve_calls(engine)
                if self._can_step(engine):
                    self._step(engine)
        except BaseException as error:
            self.failure = error
            raise

    def _can_step(self, engine: Any) -> bool:
        return not self._paused and engine.has_unfinished_requests()

    def _serve_calls(self, engine: Any) -> None:
        """Runs what was asked for between two steps; waits a moment for it only while there is nothing to generate."""
        wait = not self._can_step(engine)
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

    def _step(self, engine: Any) -> None:
        for output in engine.step():
            if output.finished:
                rollout = self._to_rollout(output)
                self._finished_tokens += len(rollout.token_ids)
                self.finished.put((output.request_id, rollout))

    # In the loop's thread, through ``call``:

    def add(self, engine: Any, request: Request) -> None:
        """Hands one request to the engine.

        The salt keeps it from the prefix cache of older weights, which are still there after a change of weights.
        """
        assert self.version >= 0, "a worker without a committed weight version must not be asked to sample"
        if self._paused:
            self._held.append(request)
            return
        self._requests[request.key] = request
        prompt = {"prompt_token_ids": request.prompt.token_ids, "cache_salt": f"v{self.version}"}
        engine.add_request(request.key, prompt, self._sampling_params(request))

    def abort(self, engine: Any, keys: list[str]) -> None:
        """Drops requests that nobody waits for any more."""
        self._held = [request for request in self._held if request.key not in keys]
        known = [key for key in keys if self._requests.pop(key, None)]
        for key in known:
            self._older_tokens.pop(key, None)
        engine.abort_request(known)

    def pause(self, engine: Any) -> None:
        """Stops sampling after the step in progress. Idempotent."""
        if self._paused:
            return
        client = engine.engine_core
        if hasattr(client, "call_utility"):  # the engine steps in a process of its own: it has to be told
            client.call_utility("pause_scheduler", "keep", False)
            while not client.outputs_queue.empty():  # all that it sampled before is here by now
                self._step(engine)
        self._paused = True

    def resume(self, engine: Any, version: int) -> None:
        """Goes on sampling, from here on with ``version``."""
        for key, num_tokens in self._running_tokens(engine).items():
            self._older_tokens.setdefault(key, []).append((num_tokens, self.version))
        self.version = version
        if self._paused and hasattr(engine.engine_core, "call_utility"):
            engine.engine_core.call_utility("resume_scheduler")
        self._paused = False
        held, self._held = self._held, []
        for request in held:
            self.add(engine, request)

    def _running_tokens(self, engine: Any) -> dict[str, int]:
        """Tokens that each unfinished request has so far."""
        states = engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

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
            logprobs=0 if (self.spec.logprobs or request.logprobs) and not request.greedy else None,
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
            versions=stamp(len(token_ids), self._older_tokens.pop(request.key, []), self.version),
            finish_reason=completion.finish_reason,
            logprobs=np.asarray([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32) if flat else None,
        )


def stamp(num_tokens: int, changes: list[tuple[int, int]], version: int) -> np.ndarray:
    """int32 [num_tokens]: each token's weight version. ``changes``: (tokens so far, version until then), in order."""
    versions = np.full(num_tokens, version, dtype=np.int32)
    for so_far, older in reversed(changes):
        versions[:so_far] = older
    return versions
