"""Log-probabilities that stay with vLLM's scheduler until a completion ends: with a stand-in for vLLM's own."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.rollouts.vllm_engine import to_output
from actors.rollouts.vllm_scheduler import SCHEDULER, scheduler
from actors.rollouts.vllm_settings import engine_args
from tests.fake_engine import fake_spec


class Request:
    def __init__(self, num_logprobs: int | None) -> None:
        self.sampling_params = SimpleNamespace(num_logprobs=num_logprobs)


class VllmScheduler:
    """Hands out the tokens that it is told of, and forgets the requests that end."""

    def __init__(self, vllm_config: Any) -> None:
        self.requests: dict[str, Request] = {}

    def update_from_output(self, scheduled: dict[str, str | None], sampled: Any) -> dict[int, Any]:
        """``scheduled``: why each request ends, None if it goes on."""
        assert sampled.logprobs is None, "vLLM has nothing to send"
        outputs = []
        for key, reason in scheduled.items():
            tokens = sampled.sampled_token_ids[sampled.req_id_to_index[key]]
            outputs.append(SimpleNamespace(request_id=key, new_token_ids=tokens, finish_reason=reason))
            if reason is not None:
                del self.requests[key]
        return {0: SimpleNamespace(outputs=outputs)}


@pytest.fixture(params=["scheduler", "async_scheduler"])
def keeping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler of ours above either of vLLM's."""
    for name, of_module in [("scheduler", "Scheduler"), ("async_scheduler", "AsyncScheduler")]:
        module: Any = SimpleNamespace(**{of_module: VllmScheduler if name == request.param else object})
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.sched.{name}", module)
    config = SimpleNamespace(async_scheduling=request.param == "async_scheduler")
    return scheduler(SimpleNamespace(scheduler_config=config))


def step(
    keeping: Any, scheduled: dict[str, str | None], rows: list[tuple[str, list[float]]]
) -> dict[str, list[float] | None]:
    """What is handed out for each request when these were sampled: (request, log-probability of each of its tokens)."""
    of_tokens = [value for _, values in rows for value in values]
    ragged = any(len(values) != 1 for _, values in rows)
    sampled = SimpleNamespace(
        req_id_to_index={key: index for index, (key, _) in enumerate(rows)},
        sampled_token_ids=[[7] * len(values) for _, values in rows],
        logprobs=SimpleNamespace(
            logprobs=np.array([[value, 99.0] for value in of_tokens], np.float32).reshape(-1, 2),
            cu_num_generated_tokens=[0, *np.cumsum([len(values) for _, values in rows])] if ragged else None,
        ),
    )
    given = {}
    for output in keeping.update_from_output(scheduled, sampled)[0].outputs:
        array = getattr(output, "routed_experts", None)
        assert array is None or array.dtype == np.float32
        given[output.request_id] = None if array is None else array.tolist()
    return given


def test_a_completions_logprobs_come_together_when_it_ends(keeping: Any) -> None:
    keeping.requests = {"a": Request(0), "b": Request(0), "none": Request(None)}
    first = step(keeping, dict.fromkeys(["a", "b", "none"]), [("b", [-1.0]), ("none", [-9.0]), ("a", [-2.0])])
    assert first == {"a": None, "b": None, "none": None}
    several = {"b": "length", "none": "stop", "a": None}  # one had only a part of its prompt computed
    second = step(keeping, several, [("a", []), ("b", [-3.0, -4.0]), ("none", [-9.0])])
    assert second == {"a": None, "b": [-1.0, -3.0, -4.0], "none": None}
    assert step(keeping, {"a": "stop"}, [("gone", [-9.0]), ("a", [-5.0])]) == {"a": [-2.0, -5.0]}


def test_nothing_is_kept_of_a_request_that_was_aborted(keeping: Any) -> None:
    keeping.requests = {"a": Request(0)}
    step(keeping, {"a": None}, [("a", [-1.0])])
    keeping.requests = {"a": Request(0)}  # another of the same name
    assert step(keeping, {"a": "stop"}, [("a", [-2.0])]) == {"a": [-2.0]}
    keeping.requests = {}
    assert not keeping._kept


def test_steps_without_logprobs_are_left_alone(keeping: Any) -> None:
    keeping.requests = {"a": Request(None)}
    sampled = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[7]], logprobs=None)
    (output,) = keeping.update_from_output({"a": "stop"}, sampled)[0].outputs
    assert not hasattr(output, "routed_experts")


@pytest.mark.parametrize(("stop", "expected"), [([], SCHEDULER), (["</s>"], None)])
def test_requests_that_end_where_they_are_detokenized_are_left_to_vllms_scheduler(
    stop: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: Any = SimpleNamespace(OneProcess=None, TensorParallel=None)
    monkeypatch.setitem(sys.modules, "actors.rollouts.vllm_executors", executors)
    spec = fake_spec()
    assert engine_args(replace(spec, config=replace(spec.config, stop=stop))).get("scheduler_cls") == expected


def test_an_engine_hands_out_the_logprobs_of_either_scheduler() -> None:
    def logprobs(**fields: Any) -> Any:
        completion = SimpleNamespace(token_ids=[7, 8], finish_reason="stop", **fields)
        return to_output(SimpleNamespace(request_id="a", outputs=[completion])).logprobs

    ours = np.array([-1.0, -2.0], np.float32)
    assert logprobs(routed_experts=ours, logprobs=[]) is ours
    flat = SimpleNamespace(logprobs=[-3.0, -9.0, -4.0, -9.0], start_indices=[0, 2])
    assert logprobs(routed_experts=None, logprobs=flat).tolist() == [-3.0, -4.0]
    assert logprobs(routed_experts=None, logprobs=None) is None
