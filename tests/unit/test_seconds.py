"""A step's predicted seconds: against whole steps that were measured, and each part of the arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lengths import ragged_length
from jobs.prepare import QWEN_SHAPES
from rlhf.config import Config
from rlhf.planning.costs import Peaks, device_peaks, forward_flops
from rlhf.planning.fit import plan_memory
from rlhf.planning.memory import GIB
from rlhf.planning.seconds import (
    ENGINE_STEP_S,
    ENGINE_TOKEN_S,
    GENERATE_S,
    LOGPROBS_SPEED,
    PUBLISH_S,
    RANKS_FACTOR,
    SHARED_FACTOR,
    StepSeconds,
    matrix_share,
    predict_step,
)
from rlhf.planning.shapes import ModelShape
from rlhf.recipes import load_config

CONF = Path(__file__).resolve().parents[2] / "conf"
PROMPT = 100  # tokens of a prompt in the measured steps
RAGGED = [ragged_length(index, 1024) for index in range(512)]
H200 = device_peaks("NVIDIA H200")


def predict(
    tmp_path: Path,
    size: str,
    *overrides: str,
    lengths: Sequence[int] = (512,) * 512,
    prompt: int = PROMPT,
    recipe: str = "grpo_0.5b_1gpu.yaml",
    peaks: Peaks | None = H200,
    gib: float = 139.8,
) -> StepSeconds:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_SHAPES[size]))
    config = load_config(CONF / recipe, [f"model.path={tmp_path}", *overrides])
    assert isinstance(config, Config)
    plan = plan_memory(config, gib * GIB)
    assert plan is not None and peaks is not None
    return predict_step(config, plan, peaks, prompt_tokens=prompt, completion_lengths=lengths)


ONE_ENGINE = ("rollout.num_workers=1", "rollout.max_num_seqs=512")
WITH_REFERENCE = "algorithm.beta=0.01"
RLOO = (WITH_REFERENCE, "algorithm.name=rloo", "algorithm.loss_type=rloo")
LONG = "rollout.max_completion_tokens=1024"
APART = ("placement.mode=separate", "rollout.max_staleness=1", "rollout.max_num_seqs=512")

# Left out: asynchronous steps that were bound by engines whose log-probabilities took vLLM's own way, twice as slow.
MEASURED = [  # shape, settings, completions, seconds of a whole step on H200 (benchmarks/RESULTS.md)
    ("0.5b", ("rollout.num_workers=3", "rollout.max_num_seqs=176"), (512,) * 512, 7.20),
    ("0.5b", (), (512,) * 512, 5.70),  # the same work on other hosts
    ("0.5b", (LONG,), RAGGED, 6.55),
    ("1.5b", ("learner.micro_batch_tokens=8192",), (512,) * 512, 11.8),
    ("1.5b", (LONG, "learner.micro_batch_tokens=8192"), RAGGED, 11.0),
    ("1.5b", (LONG, "learner.micro_batch_tokens=8192"), RAGGED, 11.9),  # on another host
    ("1.5b", ("learner.micro_batch_tokens=8192",), (512,) * 512, 11.2),  # 2026-11-23
    ("1.5b", (LONG, "learner.micro_batch_tokens=8192"), RAGGED, 11.1),
    (
        "7b",
        (
            *("learner.num_ranks=2", "learner.zero_stage=3", "reference.num_ranks=2", "rollout.num_workers=2"),
            *("rollout.gpu_memory_fraction=0.3", WITH_REFERENCE),
        ),
        (512,) * 512,
        23.4,
    ),
    ("7b", ("learner.num_ranks=2", "rollout.num_workers=2"), (512,) * 512, 19.4),
    ("0.5b", ONE_ENGINE, (512,) * 512, 7.29),
    (
        "0.5b",
        ("learner.num_ranks=4", "rollout.num_workers=4", "rollout.max_num_seqs=512", "algorithm.prompts_per_step=256"),
        (512,) * 2048,
        9.15,
    ),
    ("0.5b", (WITH_REFERENCE,), (512,) * 512, 7.98),
    ("0.5b", RLOO, (512,) * 512, 9.5),
    ("0.5b", (*APART, "rollout.num_workers=3", "algorithm.prompts_per_step=192"), (512,) * 1536, 8.7),
]


@pytest.mark.parametrize(("size", "settings", "lengths", "measured_s"), MEASURED)
def test_a_whole_step_as_measured(
    tmp_path: Path, size: str, settings: tuple[str, ...], lengths: Sequence[int], measured_s: float
) -> None:
    assert predict(tmp_path, size, *settings, lengths=lengths).total == pytest.approx(measured_s, rel=0.2)


def test_a_step_of_four_models_as_measured(tmp_path: Path) -> None:
    step = predict(tmp_path, "0.5b", f"reward.model.path={tmp_path}", recipe="ppo_0.5b_1gpu.yaml")
    assert step.total == pytest.approx(13.5, rel=0.2)


# By hand.

SLOW = Peaks(flops=1e12, bytes_per_s=1e11, link_bytes_per_s=1e10)
WEIGHTS = 2 * (24 * (2 * 896 * (896 + 128) + 3 * 896 * 4864) + 151_936 * 896)  # bytes of 0.5B
TOKEN = 24 * 2 * 128 * 2  # bytes of a token's keys and values
FEW = ("algorithm.prompts_per_step=2", "algorithm.group_size=2", "rollout.max_num_seqs=4")
LENGTHS = (3, 3, 3, 3)


def forward_s(spans: list[tuple[int, int]], head_tokens: int, size: str = "0.5b") -> float:
    shape = ModelShape.of(QWEN_SHAPES[size])
    assert shape is not None
    share = {"0.5b": 0.9 * 896 / (896 + 896), "1.5b": 0.9 * 1536 / (1536 + 896)}[size]  # of the peak
    return forward_flops(shape, spans, head_tokens) / (share * 1e12)


def few(
    tmp_path: Path, *overrides: str, lengths: Sequence[int] = LENGTHS, prompt: int = 1, **more: float
) -> StepSeconds:
    return predict(tmp_path, "0.5b", *FEW, *overrides, lengths=lengths, prompt=prompt, peaks=SLOW, **more)  # type: ignore[arg-type]


def test_every_phase_by_hand(tmp_path: Path) -> None:
    step = few(tmp_path, "rollout.num_workers=1", WITH_REFERENCE)
    forward = forward_s([(4, 4)] * 4, 12)  # a repeated prompt token in 8 is not worth sharing
    assert step.reference == pytest.approx(forward)
    assert step.update == pytest.approx(3 * forward)
    assert step.publish == pytest.approx(PUBLISH_S + WEIGHTS / 5.8e9)
    assert (step.score, step.reward) == (0, 0)
    # two decoding steps of four sequences each read the weights, and 1 and 2 cached tokens; three steps of the CPU
    gpu = (2 * WEIGHTS + 4 * 3 * TOKEN) / 1e11 + forward_s([(1, 1)] * 2, 2)
    cpu = 3 * ENGINE_STEP_S + 12 * ENGINE_TOKEN_S
    engine = gpu + cpu
    assert step.generate == pytest.approx(GENERATE_S + engine)
    assert step.total == pytest.approx(step.generate + step.reference + step.update + step.publish)
    shown = few(tmp_path, "rollout.num_workers=1", WITH_REFERENCE, "rollout.logprobs=true")
    assert shown.generate == pytest.approx(GENERATE_S + engine / LOGPROBS_SPEED)
    halves = few(tmp_path, "rollout.num_workers=1", "rollout.tensor_parallel_size=2", "learner.num_ranks=2")
    assert halves.generate == pytest.approx(GENERATE_S + gpu / 2 + cpu)


def test_a_policy_with_adapters_scores_as_the_reference_after_sampling(tmp_path: Path) -> None:
    step = few(tmp_path, "rollout.num_workers=1", WITH_REFERENCE, "learner.lora={r: 8, alpha: 16}")
    assert (step.reference, step.score) == (0, pytest.approx(forward_s([(4, 4)] * 4, 12)))


def test_each_model_takes_the_time_of_its_own_shape(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "config.json").write_text(json.dumps(QWEN_SHAPES["1.5b"]))
    own = [f"{role}.path={other}" for role in ("critic", "reference", "reward.model")]
    ppo = ("algorithm.name=ppo", "critic.micro_batch_tokens=8192", "placement.mode=separate", WITH_REFERENCE)
    step = few(tmp_path, *ppo, *own)
    assert step.reference == pytest.approx(forward_s([(4, 4)] * 4, 12, "1.5b"))
    scored = forward_s([(4, 4)] * 4, 0, "1.5b")  # each a single row
    assert (step.reward, step.score, step.update) == pytest.approx((scored, scored, 3 * scored)), (
        "the policy ends first"
    )


def test_shared_prompts_save_less_time_than_work(tmp_path: Path) -> None:
    shared = forward_s([(100, 100), (3, 103), (3, 103)] * 2, 12)
    assert few(tmp_path, prompt=100).update == pytest.approx(3 * SHARED_FACTOR * shared)
    apart = forward_s([(10, 10)] * 4, 28)  # 3 tokens in 20: no more than the copies cost
    assert few(tmp_path, prompt=3, lengths=(7,) * 4).update == pytest.approx(3 * apart)


def test_checkpointed_layers_and_further_ranks_cost_time(tmp_path: Path) -> None:
    plain = few(tmp_path, "learner.checkpointed_layers=0").update
    assert few(tmp_path, "learner.checkpointed_layers=6").update == pytest.approx(plain * (1 + 6 / 24 / 3))
    assert few(tmp_path, "learner.num_ranks=2").update == pytest.approx(plain * RANKS_FACTOR / 2)
    assert few(tmp_path, "algorithm.num_epochs=2").update == pytest.approx(2 * plain)


def test_what_an_algorithm_scores_takes_time(tmp_path: Path) -> None:
    forward = forward_s([(4, 4)] * 4, 12)
    assert few(tmp_path, *RLOO).score == pytest.approx(forward)
    assert few(tmp_path, *RLOO[1:]).score == 0  # no KL in the reward
    head = forward_s([(4, 4)] * 4, 0)  # the critic's is a single row
    ppo = ("algorithm.name=ppo", "critic.micro_batch_tokens=8192")
    together = few(tmp_path, *ppo)
    assert (together.score, together.update) == pytest.approx((forward + head, 3 * (forward + head)))
    apart = few(tmp_path, *ppo, "placement.mode=separate")
    assert (apart.score, apart.update) == pytest.approx((forward, 3 * forward))


def test_engines_on_one_gpu_hide_each_others_cpu_work_up_to_two(tmp_path: Path) -> None:
    def engines_s(count: int) -> float:
        lengths = (512,) * 96
        return predict(tmp_path, "0.5b", f"rollout.num_workers={count}", lengths=lengths, peaks=endless).generate

    endless = replace(SLOW, flops=1e30, bytes_per_s=1e30)
    assert engines_s(1) - engines_s(2) == pytest.approx(48 * 512 * ENGINE_TOKEN_S)
    assert engines_s(3) == pytest.approx(engines_s(2))


def test_requests_beyond_an_engines_places_and_its_cache_take_more_steps(tmp_path: Path) -> None:
    def cpu_s(*overrides: str) -> float:
        endless = replace(SLOW, flops=1e30, bytes_per_s=1e30)
        settings = (*ONE_ENGINE, *overrides)
        return predict(tmp_path, "0.5b", *settings, lengths=(512,) * 96, peaks=endless, gib=80).generate

    free = cpu_s()
    assert cpu_s("rollout.max_num_seqs=32") == pytest.approx(free + 2 * 512 * ENGINE_STEP_S)
    assert cpu_s("rollout.max_num_seqs=1") == pytest.approx(free + 95 * 512 * ENGINE_STEP_S)
    # weights and activations take 2.92 GiB; the other 0.28 hold 24,457 tokens: 39 sequences of 612
    assert cpu_s("rollout.gpu_memory_fraction=0.04") == pytest.approx(free + (96 / 39 - 1) * 512 * ENGINE_STEP_S)


def test_an_asynchronous_step_takes_the_longer_of_generating_and_the_rest() -> None:
    step = StepSeconds(generate=4, reference=1, reward=0, score=0, update=2, publish=0.5, asynchronous=True)
    assert step.total == 4 and replace(step, asynchronous=False).total == 7.5
    assert replace(step, update=6).total == 7.5


def test_wider_models_come_closer_to_the_peak_up_to_what_was_measured() -> None:
    shapes = {size: ModelShape.of(config) for size, config in QWEN_SHAPES.items()}
    shares = {size: matrix_share(shape) for size, shape in shapes.items() if shape}
    assert shares == pytest.approx({"0.5b": 0.45, "1.5b": 0.568, "7b": 0.72}, abs=1e-3)
    assert shapes["7b"] and matrix_share(replace(shapes["7b"], hidden_size=8192)) == 0.72
