"""FLOPs, bytes and a step's figures by hand, and what nobody has measured stays unknown."""

import dataclasses

import pytest
import torch

from rlhf.batch import TrainBatch
from rlhf.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    WorkerKindConfig,
)
from rlhf.planning.costs import (
    Peaks,
    decode_bytes,
    device_peaks,
    forward_flops,
    update_flops,
    weight_bytes,
)
from rlhf.planning.shapes import ModelShape
from rlhf.tracking.performance import Bottleneck, Roofline, find_bottleneck

SHAPE = ModelShape(
    num_layers=3,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    vocab_size=100,
    tied=True,
)
SMALLER = dataclasses.replace(SHAPE, num_layers=1)
BODY = 3 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32)
PEAKS = Peaks(flops=1e9, bytes_per_s=1e6, link_bytes_per_s=2e5)


def test_forward_flops_by_hand() -> None:
    # two sequences of 5 and 3 tokens, 4 of them completion; causal scores and values: 2 * 3 layers * 32 * (25 + 9)
    expected = 2 * BODY * 8 + 2 * 1600 * 4 + 2 * 3 * 32 * 34
    assert forward_flops(SHAPE, [(5, 5), (3, 3)], 4) == expected
    assert update_flops(SHAPE, [(5, 5), (3, 3)], 4) == 3 * expected
    # the same with one token of prompt that both share: a token less, and its attention to itself
    shared = forward_flops(SHAPE, [(1, 1), (4, 5), (2, 3)], 4)
    assert shared == expected - 2 * BODY - 2 * 3 * 32


def test_decode_bytes_by_hand() -> None:
    weights = 2 * (BODY + 1600)
    per_token = 2 * 2 * 3 * 16  # keys and values of three layers, two bytes each
    # Completions of 4 and 2: three steps and one; the first token of each is the prefill's. Contexts 1 + 2 + 3, and 1.
    assert decode_bytes(SHAPE, [4, 2], num_workers=1, max_num_seqs=8) == 3 * weights + 7 * per_token
    # One at a time: 3 + 1 steps.
    assert decode_bytes(SHAPE, [4, 2], num_workers=1, max_num_seqs=1) == 4 * weights + 7 * per_token
    # A worker each: ceil(4 / 2 / 1) = 2 steps at least, and 3 where the longest is.
    assert decode_bytes(SHAPE, [4, 2], num_workers=2, max_num_seqs=8) == 5 * weights + 7 * per_token
    assert decode_bytes(SHAPE, [1, 1], num_workers=1, max_num_seqs=8) == 0


def test_decode_bytes_is_a_lower_bound_of_a_simulated_schedule() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 40, (24,), generator=generator).tolist()
        for workers, at_once in ((1, 24), (1, 5), (3, 8), (3, 2)):
            steps = 0
            for worker in range(workers):
                waiting, running = [n - 1 for n in lengths[worker::workers] if n > 1], []
                while waiting or running:
                    running += [waiting.pop() for _ in range(min(len(waiting), at_once - len(running)))]
                    running = [n - 1 for n in running if n > 1]
                    steps += 1
            most = steps * 2 * (BODY + 1600) + 192 * sum(n * (n - 1) // 2 for n in lengths)
            assert decode_bytes(SHAPE, lengths, num_workers=workers, max_num_seqs=at_once) <= most


def test_peaks_are_known_or_none() -> None:
    known = device_peaks("NVIDIA H200")
    assert known is not None and known.flops == 790e12 and known.copy_bytes_per_s == 2.15e12
    assert device_peaks("NVIDIA A100-SXM4-80GB") is not None
    assert device_peaks("Some Other GPU") is None
    assert device_peaks("cpu") is None


def batch(prompts: list[int], completions: list[int]) -> TrainBatch:
    count = sum(completions)
    return TrainBatch(
        tokens=torch.zeros(sum(prompts) + count, dtype=torch.long),
        prompt_lengths=torch.tensor(prompts),
        completion_lengths=torch.tensor(completions),
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        versions=torch.zeros(count, dtype=torch.int32),
    )


def roofline(**changes: object) -> Roofline:
    fields: dict[str, object] = {
        "policy": SHAPE,
        "critic": None,
        "learner_peaks": PEAKS,
        "rollout_peaks": PEAKS,
        "num_update_gpus": 2,
        "num_epochs": 3,
        "critic_warmup_steps": 0,
        "tensor_parallel_size": 1,
        "workers_per_gpu": 1,
        "max_num_seqs": 8,
        "colocated": False,
    }
    return Roofline(**(fields | changes))  # type: ignore[arg-type]


STEP = batch([1, 1], [4, 2])  # the sequences of the tests above
PHASES = {"generate": 9.0, "score": 0.1, "update": 0.5, "publish": 0.25}


def figures(limits: Roofline, phases: dict[str, float] = PHASES, step: int = 1) -> dict[str, float]:
    return limits.figures(STEP, phases, step=step, generate_s=0.75, num_workers=1)


def test_a_steps_figures_by_hand() -> None:
    found = figures(roofline())
    assert found.keys() == {"perf/mfu_update", "perf/hbm_decode", "perf/link_sync"}
    # three epochs over both GPUs in half a second
    assert found["perf/mfu_update"] == pytest.approx(3 * update_flops(SHAPE, [(5, 5), (3, 3)], 6) / (0.5 * 1e9 * 2))
    # the caller's 0.75 seconds, not the phase's nine
    expected = decode_bytes(SHAPE, [4, 2], num_workers=1, max_num_seqs=8)
    assert found["perf/hbm_decode"] == pytest.approx(expected / (0.75 * 1e6))
    assert found["perf/link_sync"] == pytest.approx(2 * (BODY + 1600) / (0.25 * 2e5))
    assert weight_bytes(SHAPE) == 2 * (BODY + 1600)
    assert weight_bytes(dataclasses.replace(SHAPE, tied=False)) == 2 * (BODY + 2 * 1600)


def test_engines_have_the_bandwidth_of_the_gpus_they_span_or_share() -> None:
    limits = roofline(tensor_parallel_size=2)
    found = limits.figures(STEP, PHASES, step=1, generate_s=2.0, num_workers=2)
    expected = decode_bytes(SHAPE, [4, 2], num_workers=2, max_num_seqs=8)
    assert found["perf/hbm_decode"] == pytest.approx(expected / (2.0 * 4e6))
    shared = roofline(workers_per_gpu=2).figures(STEP, PHASES, step=1, generate_s=2.0, num_workers=2)
    assert shared["perf/hbm_decode"] == pytest.approx(expected / (2.0 * 1e6)), "two engines of one GPU have its own"


def test_a_shared_gpu_publishes_by_a_copy_that_reads_and_writes() -> None:
    assert figures(roofline(colocated=True))["perf/link_sync"] == pytest.approx(2 * (BODY + 1600) / (0.25 * 5e5))


def test_a_critic_counts_and_learns_alone_in_its_warmup() -> None:
    limits = roofline(critic=SMALLER, critic_warmup_steps=1)
    policy, critic = update_flops(SHAPE, [(5, 5), (3, 3)], 6), update_flops(SMALLER, [(5, 5), (3, 3)], 0)
    assert figures(limits, step=1)["perf/mfu_update"] == pytest.approx(3 * critic / 1e9)
    assert figures(limits, step=2)["perf/mfu_update"] == pytest.approx(3 * (policy + critic) / 1e9)


def test_what_is_unknown_is_absent() -> None:
    assert figures(roofline(policy=None)) == {}
    assert figures(roofline(learner_peaks=None)).keys() == {"perf/hbm_decode"}
    assert figures(roofline(rollout_peaks=None)).keys() == {"perf/mfu_update", "perf/link_sync"}
    assert figures(roofline(), {"update": 0.0}).keys() == figures(roofline(), {}).keys() == {"perf/hbm_decode"}
    for generate_s, num_workers in ((0.0, 1), (2.0, 0)):
        found = roofline().figures(STEP, PHASES, step=1, generate_s=generate_s, num_workers=num_workers)
        assert found.keys() == {"perf/mfu_update", "perf/link_sync"}


def test_the_limits_follow_the_configuration() -> None:
    devices = {"learner": "NVIDIA H200", "rollout": "NVIDIA A100"}
    reward = RewardConfig(functions=[RewardFunctionConfig(path="even_tokens")])
    plain = Config(model=ModelConfig(path="m"), data=DataConfig(train="task:phrases"), reward=reward)
    ppo = dataclasses.replace(
        plain,
        algorithm=AlgorithmConfig(name="ppo", num_epochs=3),
        learner=LearnerConfig(num_ranks=4),
        critic=CriticConfig(num_ranks=2, warmup_steps=5),
        rollout=RolloutConfig(tensor_parallel_size=2, max_num_seqs=77),
    )
    limits = Roofline.of(ppo, SHAPE, SMALLER, devices)
    assert limits == Roofline(
        policy=SHAPE,
        critic=SMALLER,
        learner_peaks=device_peaks("NVIDIA H200"),
        rollout_peaks=device_peaks("NVIDIA A100"),
        num_update_gpus=4 + 2,
        num_epochs=3,
        critic_warmup_steps=5,
        tensor_parallel_size=2,
        workers_per_gpu=1,
        max_num_seqs=77,
        colocated=False,
    )
    grpo = dataclasses.replace(ppo, algorithm=AlgorithmConfig(name="grpo", num_epochs=3))
    expected = dataclasses.replace(limits, critic=None, num_update_gpus=4, critic_warmup_steps=0)
    assert Roofline.of(grpo, SHAPE, None, devices) == expected, "a critic that is not used does not count"
    sharing = dataclasses.replace(
        ppo,
        placement=PlacementConfig(mode="colocate"),
        critic=CriticConfig(num_ranks=4),
        rollout=RolloutConfig(num_workers=8),
    )
    shared = Roofline.of(sharing, SHAPE, SMALLER, devices)
    assert (shared.colocated, shared.num_update_gpus, shared.workers_per_gpu) == (True, 4, 2)


def test_only_what_the_peaks_were_measured_for_is_compared_with_them() -> None:
    h200 = {"learner": "NVIDIA H200", "rollout": "NVIDIA H200"}
    reward = RewardConfig(functions=[RewardFunctionConfig(path="even_tokens")])
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="task:phrases"), reward=reward)
    limits = Roofline.of(config, SHAPE, None, h200)
    assert limits.policy == SHAPE and limits.critic is None
    assert limits.learner_peaks == limits.rollout_peaks == device_peaks("NVIDIA H200")
    assert (limits.num_update_gpus, limits.colocated) == (1, False)
    ppo = dataclasses.replace(config, algorithm=AlgorithmConfig(name="ppo"), critic=CriticConfig(warmup_steps=5))
    assert Roofline.of(ppo, SHAPE, SHAPE, h200).num_update_gpus == 2
    assert Roofline.of(ppo, SHAPE, None, h200).critic_warmup_steps == 5
    shared = dataclasses.replace(ppo, placement=PlacementConfig(mode="colocate"))
    assert Roofline.of(shared, SHAPE, SHAPE, h200).num_update_gpus == 1, "critic and policy take turns"
    assert Roofline.of(config, SHAPE, None, {"learner": "cpu", "rollout": "cpu"}).learner_peaks is None
    exact = Roofline.of(dataclasses.replace(config, model=ModelConfig(path="m", dtype="float32")), SHAPE, None, h200)
    assert exact.learner_peaks is None and exact.rollout_peaks is None
    kinds = {"big": WorkerKindConfig(resources={"big": 1})}
    mixed = Roofline.of(dataclasses.replace(config, rollout=RolloutConfig(extra_kinds=kinds)), SHAPE, None, h200)
    assert mixed.learner_peaks == device_peaks("NVIDIA H200") and mixed.rollout_peaks is None


@pytest.mark.parametrize(
    ("phases", "shares", "expected"),
    [
        ({"generate": 3.0, "update": 2.0}, {"perf/hbm_decode": 0.214}, "generate: engine overhead (HBM 21 %)"),
        ({"generate": 3.0, "update": 2.0}, {"perf/hbm_decode": 0.35}, "generate: memory bandwidth (HBM 35 %)"),
        ({"generate": 1.0, "update": 2.0}, {"perf/mfu_update": 0.49}, "update: compute (MFU 49 %)"),
        ({"generate": 1.0, "update": 2.0}, {"perf/mfu_update": 0.15}, "update: overhead (MFU 15 %)"),
        ({"publish": 2.0, "update": 1.0}, {"perf/link_sync": 0.6}, "publish: link (link 60 %)"),
        ({"score": 2.0, "update": 1.0}, {"perf/mfu_update": 0.6}, "score"),
        ({"generate": 3.0, "update": 2.0}, {}, "generate"),
    ],
)
def test_the_bottleneck_is_the_longest_phase_and_its_limit(
    phases: dict[str, float], shares: dict[str, float], expected: str
) -> None:
    assert str(find_bottleneck(phases, shares)) == expected


def test_a_bottleneck_has_a_name_without_its_evidence() -> None:
    assert find_bottleneck({}, {}) is None and find_bottleneck({"update": 0.0}, {}) is None
    assert Bottleneck("generate", "engine overhead", "HBM 21 %").name == "generate: engine overhead"
    assert Bottleneck("generate").name == str(Bottleneck("generate")) == "generate"
