"""vLLM behind ``engine.Engine``: the in-process engine on CPU, one in separate processes on GPUs.

vLLM is imported when the engine starts: the driver names this class and must not load vLLM.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from actors.rollouts.engine import Output, Ready, Request, WorkerSpec, request_seed
from actors.rollouts.vllm_errors import ErrorOutput
from actors.rollouts.vllm_settings import engine_args
from actors.weights.channel import TransferAbortedError
from rlhf.config import LoraConfig
from rlhf.errors import RlhfError, UnwrittenWeightsError
from rlhf.paths import check_model_directory
from rlhf.training.weights import TensorSpec, to_plain


class VllmEngine:
    """Implements ``actors.rollouts.engine.Engine``."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Returns once the engine is up. Raises ConfigError or RuntimeError saying why it did not start."""
        check_model_directory(spec.model_path, "model.path")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        import actors.weights.vllm_receiver  # noqa: F401  (registers the weight-transfer engine)

        self._spec, self._adapter = spec, adapter_request() if spec.adapter else None
        output = ErrorOutput()
        try:
            self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**engine_args(spec)))
        except RlhfError:
            raise
        except Exception as error:
            raise hint_at_merging(output.explain(error), spec) from error

    # Sampling

    def add(self, request: Request, version: int) -> None:
        """The salt keeps the request from the prefix cache of older weights, which outlives a change of weights."""
        salt = version if request.cached_since is None else request.cached_since
        prompt = {"prompt_token_ids": request.token_ids, "cache_salt": f"v{salt}"}
        self.llm.add_request(request.key, prompt, self._sampling_params(request), lora_request=self._adapter)

    def abort(self, keys: Sequence[str]) -> None:
        self.llm.abort_request(list(keys))

    def has_unfinished(self) -> bool:
        return self.llm.has_unfinished_requests()

    def step(self) -> list[Output]:
        return [to_output(output) for output in self.llm.step() if output.finished]

    def running_tokens(self) -> dict[str, int]:
        states = self.llm.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def stream(self, token_ids: list[int]) -> Iterator[list[int]]:
        """Samples one completion, of the weights as loaded, while there is no other; yields its tokens as they come."""
        request = Request("chat", 0, token_ids, 0)
        self.llm.add_request(
            request.key, {"prompt_token_ids": token_ids}, self._sampling_params(request, in_parts=True)
        )
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                yield list(output.outputs[0].token_ids)

    def pause(self) -> list[Output]:
        outputs: list[Output] = []
        if self._steps_by_itself:
            self.llm.engine_core.call_utility("pause_scheduler", "keep", False)
            while not self.llm.engine_core.outputs_queue.empty():  # it now holds everything sampled before
                outputs += self.step()
        return outputs

    def resume(self) -> None:
        if self._steps_by_itself:
            self.llm.engine_core.call_utility("resume_scheduler")

    @property
    def _steps_by_itself(self) -> bool:
        """Whether the engine steps in a process of its own, so that pausing takes a call."""
        return hasattr(self.llm.engine_core, "call_utility")

    def _sampling_params(self, request: Request, *, in_parts: bool = False) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self._spec.config
        return SamplingParams(
            temperature=config.eval_temperature if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=request.max_tokens or config.max_completion_tokens,
            stop=list(config.stop) or None,
            ignore_eos=config.ignore_eos,
            detokenize=bool(config.stop),
            logprobs=0 if (self._spec.logprobs or request.logprobs) and not request.greedy else None,
            flat_logprobs=True,
            seed=request_seed(self._spec.seed, request) if config.seed_requests else None,
            output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
        )

    # Weights: the other end is actors/weights/vllm_receiver.py, in each of vLLM's worker processes.

    def begin_update(self) -> Ready:
        have_frozen = self._rpc("begin_weight_update")
        return Ready(len(have_frozen), all(have_frozen))

    def join_weights(self, info: dict[str, Any]) -> None:
        _raise_if_aborted(self._rpc("join_session", info))

    def receive_session(self, timeout_s: float, *, frozen: bool) -> list[list[int]]:
        received = self._rpc("receive_session", timeout_s, frozen)
        _raise_if_aborted([why for _, why in received])
        return [sums for sums, _ in received]

    def receive_objects(self, buckets: Iterable[tuple[tuple[TensorSpec, ...], np.ndarray]]) -> list[list[int]]:
        by_bucket = [self._rpc("receive_objects", to_plain([specs]), [data]) for specs, data in buckets]
        return [list(chain.from_iterable(of_process)) for of_process in zip(*by_bucket, strict=True)]

    def finish_update(self) -> None:
        self._rpc("finish_weight_update")
        if unwritten := sorted({name for names in self._rpc("unwritten_modules") for name in names}):
            raise UnwrittenWeightsError(
                f"model.path={self._spec.model_path}: a weight publish leaves {len(unwritten)} module(s) of "
                f"vLLM's model unwritten ({', '.join(unwritten[:3])}), which the learner does not have; use a model of "
                "another family (docs/models.md)"
            )
        if self._spec.adapter:
            self._install_adapter(self._spec.adapter)

    def _install_adapter(self, config: LoraConfig) -> None:
        if homeless := self._rpc("install_adapter", config.alpha)[0]:
            raise UnwrittenWeightsError(
                f"learner.lora.target_modules={config.target_modules}: vLLM has no place for the adapter of "
                f"{len(homeless)} layer(s) of {self._spec.model_path} ({', '.join(homeless[:3])}); leave them out, or "
                "set learner.lora.publish=merged"
            )

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Each worker process's answer."""
        return self.llm.collective_rpc(method, args=args)

    # Sharing a GPU. Level 2 drops the weights too (the model's buffers move to the host): a publish of all weights
    # follows every wake-up, so a copy of the old ones would be wasted.

    def sleep(self) -> None:
        self._rpc("lose_weights")
        self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        self.llm.wake_up(tags=["kv_cache"])

    # Facts

    def device_name(self) -> str:
        """Asks vLLM, because torch would open a second CUDA context."""
        from vllm.platforms import current_platform

        return "cpu" if self._spec.device == "cpu" else current_platform.get_device_name()

    def peak_gpu_bytes(self) -> int:
        return max(self._rpc("peak_gpu_memory_bytes")) if self._spec.device == "gpu" else 0


def hint_at_merging(error: RuntimeError, spec: WorkerSpec) -> RuntimeError:
    """What kept an engine from starting; with what would work, if it is that vLLM knows no adapters for this model."""
    if spec.adapter and "LoRA" in str(error):
        return RuntimeError(f"{error}; set learner.lora.publish=merged, which needs no adapters in vLLM")
    return error


def adapter_request() -> Any:
    """What has vLLM sample with the adapter that ``install_adapter`` keeps in memory; nothing opens its path."""
    from vllm.lora.request import LoRARequest

    from actors.weights.vllm_adapter import ADAPTER_ID

    return LoRARequest("policy", ADAPTER_ID, "in memory")


def _raise_if_aborted(reasons: Sequence[str]) -> None:
    """``reasons``: one per worker process, '' if it did not abort."""
    for why in filter(None, reasons):
        raise TransferAbortedError(why)


def to_output(output: Any) -> Output:
    """A finished RequestOutput as ours."""
    completion = output.outputs[0]
    logprobs, flat = completion.routed_experts, completion.logprobs  # of our scheduler, of vLLM's own
    if flat:
        logprobs = np.asarray([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32)
    return Output(output.request_id, list(completion.token_ids), completion.finish_reason, logprobs)
