"""What vLLM is told of a request, of pauses and of weights: with fakes in its place."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.rollouts.engine import Ready, Request, request_seed
from actors.rollouts.vllm_engine import VllmEngine, hint_at_merging
from actors.weights.channel import TransferAbortedError
from rlhf.config import LoraConfig
from rlhf.errors import UnwrittenWeightsError
from tests.fake_engine import fake_spec


class FakeLLM:
    """Keeps what it is asked; answers calls of its worker processes as ``answers`` says."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, ...]] = []
        self.adapters: list[Any] = []  # of what was added
        self.asked: list[tuple[str, tuple[Any, ...]]] = []  # of its worker processes
        self.answers: dict[str, list[Any]] = {}
        self.engine_core = SimpleNamespace()

    def add_request(self, *args: Any, lora_request: Any = None) -> None:
        self.added.append(args)
        self.adapters.append(lora_request)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.asked.append((method, args))
        return self.answers[method].pop(0) if method == "receive_objects" else self.answers[method]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """An engine around a FakeLLM; sampling parameters are what they were made from."""
    vllm = SimpleNamespace(SamplingParams=lambda **given: given)
    params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final", DELTA="parts"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)  # type: ignore[arg-type]
    made = object.__new__(VllmEngine)
    made._spec, made._adapter, made.llm = fake_spec(), None, FakeLLM()
    return made


def ask(**settings: Any) -> Request:
    return Request("3.1", 5, [1, 2], 1, **settings)


def sampling(engine: VllmEngine, request: Request) -> dict[str, Any]:
    engine.add(request, 1)
    return engine.llm.added[-1][2]


def test_a_request_uses_no_cache_of_other_weights(engine: VllmEngine) -> None:
    for version in (1, 1, 2):
        engine.add(ask(), version)
    assert [key for key, _, _ in engine.llm.added] == ["3.1"] * 3
    prompts = [prompt for _, prompt, _ in engine.llm.added]
    assert all(prompt["prompt_token_ids"] == [1, 2] for prompt in prompts)
    first, same, other = (prompt["cache_salt"] for prompt in prompts)
    assert first == same != other


def test_an_episode_keeps_the_cache_that_it_began_with_and_a_turn_its_own_limit(engine: VllmEngine) -> None:
    for request, version in ((ask(), 1), (ask(turn=1, cached_since=1, max_tokens=3), 2), (ask(cached_since=0), 1)):
        engine.add(request, version)
    began, goes_on, other = (prompt["cache_salt"] for _, prompt, _ in engine.llm.added)
    assert began == goes_on != other
    assert [sampled["max_tokens"] for _, _, sampled in engine.llm.added] == [4, 3, 4]


def test_a_request_is_sampled_as_the_configuration_says(engine: VllmEngine) -> None:
    config = replace(
        engine._spec.config, temperature=0.7, eval_temperature=0.2, top_p=0.9, top_k=40, stop=["</s>"], ignore_eos=True
    )
    engine._spec = replace(engine._spec, config=config, seed=3)
    expected = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 4,
        "stop": ["</s>"],
        "ignore_eos": True,
        "detokenize": True,
        "logprobs": None,
        "flat_logprobs": True,
        "seed": request_seed(3, ask()),
        "output_kind": "final",
    }
    assert sampling(engine, ask()) == expected
    greedy = ask(greedy=True, logprobs=True)
    assert sampling(engine, greedy) == {**expected, "temperature": 0.2, "seed": request_seed(3, greedy)}
    assert sampling(engine, ask(logprobs=True))["logprobs"] == 0, "of the sampled token only"
    engine._spec = replace(engine._spec, logprobs=True, config=replace(config, seed_requests=False, stop=[]))
    unseeded = sampling(engine, ask())
    assert (unseeded["logprobs"], unseeded["seed"], unseeded["stop"], unseeded["detokenize"]) == (0, None, None, False)


def test_a_stream_yields_the_new_tokens_of_every_step(engine: VllmEngine) -> None:
    steps = [[5], [6, 7]]

    def step() -> list[Any]:
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=steps.pop(0))])]

    engine.llm.step, engine.llm.has_unfinished_requests = step, lambda: bool(steps)
    assert list(engine.stream([1, 2])) == [[5], [6, 7]]
    ((_, prompt, params),) = engine.llm.added
    assert prompt == {"prompt_token_ids": [1, 2]} and params["output_kind"] == "parts"


def test_what_one_process_says_of_an_update_counts_for_the_engine(engine: VllmEngine) -> None:
    engine.llm.answers = {
        "begin_weight_update": [True, False],
        "join_session": ["", "the learner died"],
        "receive_session": [([4, 5], ""), ([4, 6], "")],
        "finish_weight_update": [None, None],
        "unwritten_modules": [[], []],
    }
    assert engine.begin_update() == Ready(2, has_frozen=False)
    with pytest.raises(TransferAbortedError, match="the learner died"):
        engine.join_weights({})
    assert engine.receive_session(1.0, frozen=True) == [[4, 5], [4, 6]]
    engine.finish_update()
    engine.llm.answers["receive_session"] = [([4, 5], ""), ([], "a worker died")]
    with pytest.raises(TransferAbortedError, match="a worker died"):
        engine.receive_session(1.0, frozen=False)
    engine.llm.answers["unwritten_modules"] = [["b"], ["a", "b"]]
    with pytest.raises(UnwrittenWeightsError, match=r"leaves 2 module\(s\) of vLLM's model unwritten \(a, b\)"):
        engine.finish_update()


def test_an_adapter_is_installed_after_every_update_and_all_of_it_has_a_place(engine: VllmEngine) -> None:
    engine._spec, engine._adapter = replace(engine._spec, adapter=LoraConfig(alpha=7)), "the adapter"
    engine.llm.answers = {"finish_weight_update": [None], "unwritten_modules": [[]], "install_adapter": [[]]}
    engine.finish_update()
    assert engine.llm.asked[-1] == ("install_adapter", (7,)), "vLLM forgets adapters when an update is finished"
    engine.add(ask(), 1)
    assert engine.llm.adapters == ["the adapter"]
    engine.llm.answers["install_adapter"] = [["layers.0.router", "layers.1.router"]]
    expected = r"no place for the adapter of 2 layer\(s\) .*layers.0.router.* learner.lora.publish=merged"
    with pytest.raises(UnwrittenWeightsError, match=expected):
        engine.finish_update()


def test_a_model_that_vllm_knows_no_adapters_for_needs_another_publish() -> None:
    spec, error = fake_spec(), RuntimeError("vLLM did not start: ValueError: Foo does not support LoRA yet.")
    hinted = hint_at_merging(error, replace(spec, adapter=LoraConfig()))
    assert str(hinted).startswith(str(error)) and "learner.lora.publish=merged" in str(hinted)
    assert hint_at_merging(error, spec) is error
    other = RuntimeError("out of memory")
    assert hint_at_merging(other, replace(spec, adapter=LoraConfig())) is other


def test_checksums_come_by_process_in_the_order_of_buckets(engine: VllmEngine) -> None:
    engine.llm.answers["receive_objects"] = [[[1], [10]], [[2], [20]], [[3], [30]]]  # by bucket, then by process
    buckets = [((), np.zeros(1, np.uint8))] * 3
    assert engine.receive_objects(buckets) == [[1, 2, 3], [10, 20, 30]]


def test_an_engine_in_a_process_of_its_own_hands_out_what_it_sampled_before_it_paused(engine: VllmEngine) -> None:
    core = engine.llm.engine_core
    assert engine.pause() == []
    engine.resume()

    waiting, told = ["a", "b"], []
    core.call_utility = lambda *call: told.append(call)
    core.outputs_queue = SimpleNamespace(empty=lambda: not waiting)
    sampled = SimpleNamespace(token_ids=[7], finish_reason="stop", logprobs=None, routed_experts=None)

    def step() -> list[Any]:
        return [
            SimpleNamespace(request_id=waiting.pop(0), finished=True, outputs=[sampled]),
            SimpleNamespace(request_id="unfinished", finished=False, outputs=[]),
        ]

    engine.llm.step = step
    assert [output.key for output in engine.pause()] == ["a", "b"]
    engine.resume()
    assert told == [("pause_scheduler", "keep", False), ("resume_scheduler",)]
