"""Memory by hand, against what was measured, and what the plan decides from it."""

import dataclasses
import json
from pathlib import Path

import pytest

from actors.weights.channel import NUM_SLOTS
from rlhf.config import Config, LearnerConfig, LoraConfig
from rlhf.errors import ConfigError
from rlhf.planning.fit import plan_memory
from rlhf.planning.memory import (
    CONTEXT_BYTES,
    GIB,
    RING_BUCKETS,
    RoleMemory,
    forward_bytes,
    frozen_memory,
    kept_by_layer,
    kv_token_bytes,
    learner_memory,
    publish_bytes,
    rollout_memory,
    training_bytes,
)
from rlhf.planning.memory_plan import Checkpointing, MemoryPlan
from rlhf.planning.shapes import ModelShape
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig

CONF = Path(__file__).resolve().parents[2] / "conf"
QWEN_05B = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
QWEN_15B: dict[str, object] = QWEN_05B | {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
}
QWEN_7B: dict[str, object] = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}
TOY = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_size=2,
    vocab_size=10,
    tied=False,
)


def shape_of(config: dict[str, object]) -> ModelShape:
    shape = ModelShape.of(config)
    assert shape is not None
    return shape


# By hand.


def test_what_a_layer_keeps_by_hand() -> None:
    # eager, bf16: two norms of (4 + 2 + 2) x 4; q and out 2 x 4 each, k and v 2 x 2; four of 2 x 8; a log-sum-exp of 2
    assert kept_by_layer(TOY, compiled=False, element_bytes=2) == 2 * 32 + 2 * (8 + 4) + 4 * 16 + 8
    # compiled: two residuals 2 x 4; q, out, k, v; gate, up and one more 2 x 8; log-sum-exp
    assert kept_by_layer(TOY, compiled=True, element_bytes=2) == 2 * 8 + 2 * (8 + 4) + 3 * 16 + 8


def test_a_training_pass_by_hand() -> None:
    layer, ends = 100 * 160, 100 * 4 * (4 + 8)
    head = 2 * 3 * 10 * 2 + 40 * 8
    mlp_gradients = 3 * 100 * 8 * 2
    arguments = {"tokens": 100, "chunk": 3, "compiled": False, "element_bytes": 2}
    plain = training_bytes(TOY, **arguments, lm_head=True, checkpointed_layers=0)
    assert plain == 2 * layer + ends + max(head, mlp_gradients)
    checkpointed = training_bytes(TOY, **arguments, lm_head=True, checkpointed_layers=2)
    assert checkpointed == 2 * 100 * 4 * 2 + ends + layer + mlp_gradients
    half = training_bytes(TOY, **arguments, lm_head=True, checkpointed_layers=1)
    assert half == layer + 100 * 4 * 2 + ends + max(head, mlp_gradients), "the other layer's are freed by then"
    wide = dataclasses.replace(TOY, vocab_size=100_000)
    big_head = 2 * 3 * 100_000 * 2 + 400_000 * 8
    assert training_bytes(wide, **arguments, lm_head=True, checkpointed_layers=0) == 2 * layer + ends + big_head
    assert training_bytes(wide, **arguments, lm_head=False, checkpointed_layers=0) == 2 * layer + ends + mlp_gradients


def test_states_by_hand() -> None:
    count = TOY.parameters(lm_head=True)

    def of(stage: int, ranks: int, **settings: object) -> tuple[float, float, float]:
        config = LearnerConfig(num_ranks=ranks, zero_stage=stage, **settings)  # type: ignore[arg-type]
        memory = learner_memory(config, TOY, checkpointed_layers=2)
        return memory.weights, memory.gradients, memory.optimizer

    bucket = 1e9
    assert of(0, 4) == (2 * count, 2 * count, 12 * count)
    assert of(1, 4) == (2 * count, 2 * count + bucket, 3 * count)
    assert of(2, 4) == (2 * count, count / 2 + bucket, 3 * count)
    assert of(3, 4) == (count / 2 + 2 * count, count / 2 + bucket, 3 * count)  # a shard, and the weights in use
    for stage, gradients in ((1, 2 * count), (2, count / 2), (3, 0)):
        assert of(stage, 4, offload="optimizer")[1:] == (gradients + bucket, 0)
    assert of(3, 4, offload="all") == (2 * count, bucket, 0), "what is in use, and what is on its way"
    assert of(3, 4, offload="idle") == of(3, 4)


def test_float32_gradients_by_hand() -> None:
    """Rows: whole at stage 1, where they are one tensor and need no bucket; else a shard and a bfloat16 bucket."""
    big = dataclasses.replace(TOY, vocab_size=10**8)  # so that the step's copies are what counts
    count = big.parameters(lm_head=True)
    assert count / 2 < 1e9

    def of(stage: int, *, tokens: int = 1, float32: bool = True, element_bytes: int = 2) -> tuple[float, float, bool]:
        config = LearnerConfig(num_ranks=2, zero_stage=stage, micro_batch_tokens=tokens, logits_chunk_tokens=1)
        memory = learner_memory(
            config, big, checkpointed_layers=2, float32_gradients=float32, element_bytes=element_bytes, lm_head=True
        )
        return memory.gradients, memory.training, memory.float32_gradients

    head = training_bytes(
        big, tokens=1, chunk=1, lm_head=True, checkpointed_layers=2, compiled=True, element_bytes=2
    )  # of the pass itself, and more than the step's copies below
    assert of(1) == (4 * count, head, True)
    assert of(2) == (2 * count + 1e9, head, True)
    assert of(3) == (2 * count + 1e9, head, True)
    assert of(2, float32=False) == (count + 1e9, head, False)
    for stage in (1, 2):
        assert of(stage, element_bytes=4) == of(stage, float32=False, element_bytes=4) != of(stage)
    assert of(2, float32=False, element_bytes=4)[2], "a float32 model's gradients are float32"


def test_what_a_step_copies_by_hand() -> None:
    """A deep model without a vocabulary: its passes are small, and the step makes float32 gradients from bfloat16."""
    deep = dataclasses.replace(TOY, num_layers=10**6)
    count = deep.parameters(lm_head=False)

    def of(stage: int, float32: bool) -> float:
        config = LearnerConfig(num_ranks=2, zero_stage=stage, micro_batch_tokens=1)
        return learner_memory(
            config, deep, checkpointed_layers=10**6, lm_head=False, float32_gradients=float32
        ).training

    passing = training_bytes(
        deep, tokens=1, chunk=1024, lm_head=False, checkpointed_layers=10**6, compiled=True, element_bytes=2
    )
    assert passing < 4 * count / 2
    assert of(1, False) == of(2, False) == of(3, False) == 6 * count / 2  # a flat bfloat16 copy, and one in float32
    assert of(3, True) == 4 * count / 2  # a flat copy
    assert of(1, True) == of(2, True) == passing  # in place


def test_kv_cache_by_hand() -> None:
    # 24 layers x 2 x (2 heads x 64) x 2 bytes
    assert kv_token_bytes(shape_of(QWEN_05B), 1) == 24 * 2 * 128 * 2
    assert kv_token_bytes(shape_of(QWEN_05B), 2) == 24 * 2 * 64 * 2
    assert kv_token_bytes(shape_of(QWEN_05B), 14) == 24 * 2 * 64 * 2  # no fewer than one head
    memory = rollout_memory(TOY, budget_bytes=10 * GIB, tensor_parallel_size=1)
    assert memory.weights + memory.kv_cache == 8 * GIB
    assert memory.peak == 11.5 * GIB


def test_a_publish_by_hand() -> None:
    """Buckets of 50 bytes; the largest tensor has 10 x 4 parameters."""

    def of(stage: int, ranks: int, bucket_bytes: int = 50, shape: ModelShape = TOY) -> float:
        return publish_bytes(LearnerConfig(num_ranks=ranks, zero_stage=stage), shape, bucket_bytes=bucket_bytes)

    assert RING_BUCKETS == NUM_SLOTS
    assert of(3, 1) == of(2, 4) == 2 * 50  # every rank has the weights whole
    assert of(3, 4) == of(3, 2) == 2 * 50 + 80
    assert of(3, 4, bucket_bytes=100) == 3 * 100
    assert of(3, 4, shape=dataclasses.replace(TOY, intermediate_size=20)) == 2 * 50 + 160
    assert of(3, 4, bucket_bytes=0) == 0  # a critic publishes nothing
    learner = LearnerConfig(num_ranks=4, zero_stage=3)
    other, silent = (
        learner_memory(learner, TOY, checkpointed_layers=0, element_bytes=4, bucket_bytes=size).other
        for size in (50, 0)
    )
    assert other - silent == 2 * 50 + 160, "float32"


def test_forward_by_hand() -> None:
    assert forward_bytes(TOY, tokens=100, chunk=3, lm_head=True, element_bytes=2) == 100 * 160 + 3 * 10 * 2
    assert forward_bytes(TOY, tokens=100, chunk=3, lm_head=False, element_bytes=2) == 100 * 160
    frozen = frozen_memory(TOY, tokens=100, lm_head=True)
    assert frozen.scoring == 100 * 160, "no chunk, no logits"
    assert frozen.weights == 2 * TOY.parameters(lm_head=True)


def test_what_a_rank_holds_by_hand() -> None:
    """A rank's training and its scoring are never at the same time; offloaded state counts in training alone."""
    memory = RoleMemory(1.0, gradients=2.0, optimizer=4.0, training=100.0, scoring=50.0, kv_cache=8.0, other=16.0)
    assert memory.allocated == 107
    assert memory.idle == 31
    assert memory.scores == pytest.approx(31 + 54)
    assert memory.peak == pytest.approx(31 + 108)
    scores_more = dataclasses.replace(memory, training=50.0, scoring=100.0, offload="idle")
    assert scores_more.allocated == 107
    assert scores_more.idle == 27
    assert scores_more.scores == pytest.approx(27 + 108)
    assert scores_more.peak == pytest.approx(31 + 108)


def test_an_engines_rank_by_hand() -> None:
    """Weights are divided among the ranks, and the cache takes what is left of each rank's share."""
    weights = 2 * TOY.parameters(lm_head=True) / 2
    memory = rollout_memory(TOY, budget_bytes=10 * GIB, tensor_parallel_size=2)
    assert (memory.weights, memory.kv_cache) == (weights, 8 * GIB - weights)
    bounded = rollout_memory(TOY, budget_bytes=10 * GIB, tensor_parallel_size=1, cache_tokens=100)
    assert bounded.kv_cache == pytest.approx(1.1 * 100 * 2 * 2 * 2 * 2)  # key and value, 2 layers, one head of 2
    wide = rollout_memory(TOY, budget_bytes=10 * GIB, tensor_parallel_size=1, cache_tokens=100, element_bytes=4)
    assert wide.kv_cache == 2 * bounded.kv_cache
    assert rollout_memory(TOY, budget_bytes=GIB, tensor_parallel_size=1, cache_tokens=100).kv_cache < 0


# Against benchmarks/RESULTS.md: one H200, allocated GiB.

MEASURED = [  # shape, ranks, ZeRO stage, checkpointed layers, tokens of the fullest micro-batch, GiB
    (QWEN_15B, 1, 1, 0, 14378, 53.4),
    (QWEN_15B, 1, 3, 0, 14378, 53.4),
    (QWEN_15B, 1, 1, 0, 32712, 88.8),
    (QWEN_15B, 2, 3, 0, 14378, 43.9),
    (QWEN_7B, 2, 3, 28, 12166, 65.6),
    (QWEN_7B, 2, 3, 4, 12166, 107.0),
]


@pytest.mark.parametrize(("shape", "ranks", "stage", "layers", "tokens", "measured"), MEASURED)
def test_learner_as_measured(
    shape: dict[str, object], ranks: int, stage: int, layers: int, tokens: int, measured: float
) -> None:
    config = LearnerConfig(num_ranks=ranks, zero_stage=stage)
    memory = learner_memory(config, shape_of(shape), checkpointed_layers=layers, tokens=tokens)
    assert memory.allocated / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("chunk", "lm_head", "measured"), [(4096, True, 2.8), (0, False, 1.7)])
def test_frozen_models_as_measured(chunk: int, lm_head: bool, measured: float) -> None:
    predicted = frozen_memory(shape_of(QWEN_05B), tokens=16384, chunk=chunk, lm_head=lm_head).allocated / GIB
    assert predicted == pytest.approx(measured, rel=0.2)


# The plan.

ENGINES = [  # shape, workers, settings of each, GiB that torch reserved at most in one (benchmarks/RESULTS.md)
    (QWEN_05B, 1, ("max_num_seqs=512", "max_completion_tokens=512"), 7.7),
    (QWEN_05B, 2, ("max_num_seqs=256", "max_completion_tokens=512"), 4.4),
    (QWEN_15B, 2, ("max_num_seqs=512", "max_completion_tokens=512"), 16.2),
    (QWEN_15B, 2, ("max_num_seqs=512", "max_completion_tokens=1024"), 23.5),
    (QWEN_15B, 2, ("max_num_seqs=512", "max_completion_tokens=1024", "gpu_memory_fraction=0.15"), 10.2),
]


@pytest.mark.parametrize(("shape", "workers", "settings", "measured"), ENGINES)
def test_engine_as_measured(
    tmp_path: Path, shape: dict[str, object], workers: int, settings: tuple[str, ...], measured: float
) -> None:
    overrides = [f"rollout.{setting}" for setting in (f"num_workers={workers}", *settings)]
    plan = plan_memory(with_shape(tmp_path, shape, "grpo_0.5b_1gpu.yaml", *overrides), 139.8 * GIB)
    assert plan is not None
    beyond = (plan.roles["rollout"].peak - CONTEXT_BYTES) / GIB - measured
    assert 0 < beyond < 2, f"{beyond:.1f} GiB more predicted than measured"


def with_shape(tmp_path: Path, shape: dict[str, object], recipe: str, *overrides: str) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return load_config(CONF / recipe, [f"model.path={tmp_path}", *overrides])


def test_small_model_needs_no_checkpointing_and_no_offload(tmp_path: Path) -> None:
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml"), 80 * GIB)
    assert plan is not None
    plan.check()
    assert plan.checkpointing["learner"].layers == 0
    settings = plan.settings("learner")
    assert (settings.checkpointed_layers, settings.offload, settings.compile) == (0, "none", True)
    assert "checkpointing in 0 of 24 layers" in plan.describe("learner")


@pytest.mark.parametrize(
    ("shape", "overrides", "device_gib", "stage", "layers"),
    [
        (QWEN_7B, (), 80, 3, 10),  # eight ranks: fewer layers than stage 2 would need
        (QWEN_7B, (), 139.8, 1, 0),
        (QWEN_15B, ("learner.num_ranks=2",), 80, 1, 0),
        (QWEN_15B, ("learner.num_ranks=1",), 80, 1, 0),  # nothing to shard
        (QWEN_15B, ("learner.num_ranks=1", "learner.offload=none"), 20, 1, 28),
        (QWEN_7B, ("learner.zero_stage=2",), 139.8, 2, 0),  # as the recipe says
        (QWEN_15B, ("learner.offload=optimizer",), 139.8, 3, 0),
    ],
)
def test_the_lowest_stage_that_needs_the_fewest_checkpointed_layers(
    tmp_path: Path, shape: dict[str, object], overrides: tuple[str, ...], device_gib: float, stage: int, layers: int
) -> None:
    plan = plan_memory(with_shape(tmp_path, shape, "grpo_7b_2x8a100.yaml", *overrides), device_gib * GIB)
    assert plan is not None
    settings = plan.settings("learner")
    assert (settings.zero_stage, settings.checkpointed_layers) == (stage, layers)


@pytest.mark.parametrize(("fraction", "stage"), [(0.5, 1), (0.55, 2), (0.6, 3), (0.7, 3)])
def test_a_stage_leaves_room_for_the_engines_on_its_gpu(tmp_path: Path, fraction: float, stage: int) -> None:
    """125.8 GiB may be filled; with 0.7 the engines fill more at any stage, which makes no layer checkpointed."""
    shared = ("placement.mode=colocate", "learner.num_ranks=4", "learner.offload=none", "algorithm.beta=0")
    engines = ("rollout.num_workers=4", "rollout.tensor_parallel_size=1", "rollout.max_num_seqs=9999")
    settings = (*shared, *engines, "learner.micro_batch_tokens=4096", f"rollout.gpu_memory_fraction={fraction}")
    plan = plan_memory(with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml", *settings), 139.8 * GIB)
    assert plan is not None
    assert (plan.gpus["shared"]["generate"] <= 0.9 * 139.8 * GIB) == (fraction < 0.7)
    decided = plan.settings("learner")
    assert (decided.zero_stage, decided.checkpointed_layers) == (stage, 0)


@pytest.mark.parametrize(
    ("shape", "device_gib", "overrides", "offload"),
    [
        (QWEN_7B, 80, (), "optimizer"),  # 126 GiB where everything is on the GPU
        (QWEN_7B, 139.8, (), "none"),
        (QWEN_7B, 80, ("learner.zero_stage=2",), "optimizer"),
        (QWEN_7B, 80, ("learner.offload=none",), "none"),
        (QWEN_7B, 80, ("learner.zero_stage=0",), "none"),  # DeepSpeed offloads at no stage below 1
        (QWEN_7B, 80, ("learner.zero_stage=2", "learner.float32_gradients=true"), "none"),  # nor there
        (QWEN_7B, 80, ("learner.checkpointed_layers=0",), "none"),  # then that is what takes the memory
        (QWEN_7B, 10, ("learner.lora={}",), "none"),  # an adapter's optimizer is small
    ],
)
def test_the_optimizer_is_in_host_memory_where_a_learner_fits_no_other_way(
    tmp_path: Path, shape: dict[str, object], device_gib: float, overrides: tuple[str, ...], offload: str
) -> None:
    one_rank = ("learner.num_ranks=1", *overrides)
    plan = plan_memory(with_shape(tmp_path, shape, "grpo_7b_2x8a100.yaml", *one_rank), device_gib * GIB)
    assert plan is not None
    settings = plan.settings("learner")
    assert settings.offload == offload
    assert settings.zero_stage == 3 or "zero_stage" in str(overrides) or offload == "none"
    assert settings.can_sum_in_float32 or not settings.float32_gradients or "float32_gradients=true" in overrides[-1]
    assert ("is in host memory" in plan.describe("learner")) == (offload == "optimizer")


def test_what_is_in_host_memory_by_hand() -> None:
    """Bytes of four ranks' shares: 12 a parameter for the optimizer, gradients and weights of two."""
    count = TOY.parameters(lm_head=True)
    for offload, of_one in (("none", 0), ("idle", 12), ("optimizer", 14), ("all", 16)):
        config = LearnerConfig(num_ranks=4, zero_stage=3, offload=offload)  # type: ignore[arg-type]
        assert learner_memory(config, TOY, checkpointed_layers=2).host == of_one * count / 4


def test_largest_rollout_fraction_leaves_a_tenth(tmp_path: Path) -> None:
    hungry = ("grpo_0.5b_1gpu.yaml", "rollout.max_num_seqs=99999")
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, *hungry), 80 * GIB)
    assert plan is not None
    fraction = plan.largest_rollout_fraction()
    again = plan_memory(with_shape(tmp_path, QWEN_05B, *hungry, f"rollout.gpu_memory_fraction={fraction}"), 80 * GIB)
    assert again is not None
    assert again.gpus["shared"]["generate"] == pytest.approx(0.9 * 80 * GIB)
    alone = plan_memory(with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", "placement.mode=separate"), 80 * GIB)
    assert alone is not None
    assert alone.largest_rollout_fraction() == pytest.approx(0.9 - 1.5 / 80)


def test_an_engine_on_a_shared_gpu_takes_no_more_cache_than_it_can_fill(tmp_path: Path) -> None:
    """256 sequences of 256 + 512 tokens; 24 layers x (key + value) x 2 heads of 64 x 2 bytes a token."""
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml"), 80 * GIB)
    assert plan is not None
    assert plan.roles["rollout"].kv_cache == pytest.approx(1.1 * 256 * 768 * 24 * 2 * 2 * 64 * 2)


def test_more_sequences_than_an_engine_gets_are_pointed_out(tmp_path: Path) -> None:
    """64 prompts x 8 over two engines."""
    for count, hint in ((256, ""), (512, "max_num_seqs=512, and 256 is a worker's share of a step")):
        settings = with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", f"rollout.max_num_seqs={count}")
        plan = plan_memory(settings, 80 * GIB)
        assert plan is not None
        assert plan.describe_rollout("default").endswith(hint or "would be safe")


def test_recipe_of_two_nodes_fits_and_checkpoints(tmp_path: Path) -> None:
    plan = plan_memory(with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml"), 80 * GIB)
    assert plan is not None
    plan.check()
    choice = plan.checkpointing["learner"]
    assert 0 < choice.layers < 28
    assert choice.needed > choice.left


def test_float32_gradients_where_they_cost_at_most_a_tenth_of_the_layers(tmp_path: Path) -> None:
    taken = []
    for device_gib in range(100, 30, -6):

        def decided(*overrides: str, device_gib: int = device_gib) -> LearnerConfig:
            settings = ("learner.num_ranks=1", "learner.zero_stage=2", *overrides)
            plan = plan_memory(with_shape(tmp_path, QWEN_15B, "grpo_7b_2x8a100.yaml", *settings), device_gib * GIB)
            assert plan is not None
            return plan.settings("learner")

        narrow, wide = (decided(f"learner.float32_gradients={word}") for word in ("false", "true"))
        assert narrow.checkpointed_layers is not None and wide.checkpointed_layers is not None
        cheap = wide.checkpointed_layers <= narrow.checkpointed_layers + 2 and wide.checkpointed_layers < 28
        assert decided().float32_gradients == cheap
        taken.append(cheap)
    assert taken[0]
    assert False in taken


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ((), "float32"),
        (("learner.float32_gradients=false",), "bfloat16"),
        (("learner.zero_stage=0",), "bfloat16"),
        (("learner.zero_stage=2", "learner.offload=optimizer"), "bfloat16"),
        (("learner.zero_stage=3", "learner.offload=optimizer"), "float32"),
    ],
)
def test_where_gradients_add_up_in_float32(tmp_path: Path, overrides: tuple[str, ...], word: str) -> None:
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", *overrides), 139 * GIB)
    assert plan is not None
    assert plan.settings("learner").float32_gradients is (word == "float32")
    assert f"gradients add up in {word}" in plan.describe("learner")


@pytest.mark.parametrize("compiles", [True, False])
def test_checkpointing_and_compiling_are_as_asked(tmp_path: Path, compiles: bool) -> None:
    asked = "learner.checkpointed_layers=5", f"learner.compile={compiles}"
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", *asked), 80 * GIB)
    assert plan is not None
    settings = plan.settings("learner")
    assert (settings.checkpointed_layers, settings.compile) == (5, compiles)


@pytest.mark.parametrize("recipe", ["grpo_0.5b_1gpu.yaml", "grpo_7b_2x8a100.yaml"])
def test_what_passes_need_without_checkpointing_and_what_everything_else_leaves_them(
    tmp_path: Path, recipe: str
) -> None:
    some, none = (
        plan_memory(with_shape(tmp_path, QWEN_05B, recipe, f"learner.checkpointed_layers={layers}"), 80 * GIB)
        for layers in (5, 0)
    )
    assert some is not None and none is not None
    needed, now = (1.08 * plan.roles["learner"].training for plan in (none, some))
    gpu = some.gpus.get("shared") or some.gpus["learner"]
    choice = some.checkpointing["learner"]
    assert (choice.layers, choice.needed) == (5, pytest.approx(needed)) and needed > now
    assert choice.left == pytest.approx(0.9 * 80 * GIB - (gpu["train"] - now))


def test_as_few_layers_are_checkpointed_as_memory_asks_for(tmp_path: Path) -> None:
    """One fewer would not fit into 90 % of the GPU."""
    fixed = "learner.float32_gradients=false"
    for device_gib in (50, 60, 70, 80):
        plan = plan_memory(with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml", fixed), device_gib * GIB)
        assert plan is not None
        layers = plan.settings("learner").checkpointed_layers
        assert layers is not None
        assert 0 < layers < 28
        assert plan.gpus["learner"]["train"] <= 0.9 * device_gib * GIB
        one_fewer = fixed, f"learner.checkpointed_layers={layers - 1}"
        fewer = plan_memory(with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml", *one_fewer), device_gib * GIB)
        assert fewer is not None
        assert fewer.gpus["learner"]["train"] > 0.9 * device_gib * GIB


def test_the_critic_has_its_own_choice(tmp_path: Path) -> None:
    """On a small GPU one of the two can do without checkpointing, and the learner is asked first."""
    config = with_shape(tmp_path, QWEN_05B, "ppo_0.5b_1gpu.yaml", f"reward.model.path={tmp_path}")
    choices = []
    for device_gib in (40, 60, 80):
        plan = plan_memory(config, device_gib * GIB)
        assert plan is not None
        choices.append((plan.checkpointing["learner"].layers, plan.checkpointing["critic"].layers))
    small, middle, large = choices
    assert 0 < small[0] < small[1] < 24
    assert middle[0] == 0 < middle[1]
    assert large == (0, 0)
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text(json.dumps(QWEN_05B | {"num_hidden_layers": 12}))
    other = f"reward.model.path={tmp_path}", f"critic.path={half}", "learner.float32_gradients=false"
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "ppo_0.5b_1gpu.yaml", *other), 139 * GIB)
    assert plan is not None
    assert [plan.settings(role).float32_gradients for role in ("learner", "critic")] == [False, True]
    assert [plan.checkpointing[role].num_layers for role in ("learner", "critic")] == [24, 12]


def test_optimiser_leaves_where_vllm_cannot_wake_beside_it(tmp_path: Path) -> None:
    plan = plan_memory(with_shape(tmp_path, QWEN_15B, "grpo_0.5b_1gpu.yaml"), 40 * GIB)
    assert plan is not None
    assert plan.settings("learner").offload == "idle"
    assert "waits in host memory" in plan.describe("learner")
    asked = with_shape(tmp_path, QWEN_15B, "grpo_0.5b_1gpu.yaml", "learner.offload=none")
    without = plan_memory(asked, 40 * GIB)
    assert without is not None
    saved = without.gpus["shared"]["generate"] - plan.gpus["shared"]["generate"]
    assert saved == pytest.approx(plan.roles["learner"].optimizer)
    wanted = with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", "learner.offload=idle")
    roomy = plan_memory(wanted, 80 * GIB)
    assert roomy is not None and roomy.settings("learner").offload == "idle"


@pytest.mark.parametrize(
    ("shape", "recipe", "overrides", "parts"),
    [
        (
            QWEN_7B,
            "grpo_7b_2x8a100.yaml",
            ["learner.num_ranks=1", "learner.offload=none"],
            ["learner:", "raise learner.num_ranks", "or set learner.offload=null"],
        ),
        (
            QWEN_7B,
            "grpo_7b_2x8a100.yaml",
            ["learner.checkpointed_layers=0"],
            ["learner:", "set learner.checkpointed_layers=null", "lower learner.micro_batch_tokens"],
        ),
        (
            QWEN_7B,
            "grpo_7b_2x8a100.yaml",
            ["rollout.gpu_memory_fraction=0.1"],
            ["rollout.gpu_memory_fraction=0.1", "KV cache", "rollout.tensor_parallel_size"],
        ),
        (
            QWEN_7B,
            "grpo_7b_2x8a100.yaml",
            ["rollout.extra_kinds.small.gpu_memory_fraction=0.1"],
            ["rollout.extra_kinds.small.gpu_memory_fraction=0.1", "rollout.extra_kinds.small.tensor_parallel_size"],
        ),
        (
            QWEN_15B,
            "grpo_0.5b_1gpu.yaml",
            ["rollout.gpu_memory_fraction=0.9", "rollout.max_num_seqs=9999", "learner.offload=none"],
            ["learner + rollout:", "to generate", "lower rollout.gpu_memory_fraction", "placement.mode=separate"],
        ),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_key(
    tmp_path: Path, shape: dict[str, object], recipe: str, overrides: list[str], parts: list[str]
) -> None:
    plan = plan_memory(with_shape(tmp_path, shape, recipe, *overrides), 80 * GIB)
    assert plan is not None
    with pytest.raises(ConfigError) as caught:
        plan.check()
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("gpu", ["learner", "shared"])
def test_a_phase_may_fill_the_gpu_and_not_a_byte_more(gpu: str) -> None:
    config = load_config(CONF / "grpo_tiny.yaml", ["model.path=x"])
    roles = {"learner": RoleMemory(1.0, training=2.0), "rollout": RoleMemory(1.0, kv_cache=1.0)}
    on = {"learner": Checkpointing(layers=1, num_layers=2, needed=0.0, left=0.0)}

    def plan(needed: float) -> MemoryPlan:
        return MemoryPlan(config, 8 * GIB, roles, {gpu: {"generate": 1.0, "score": needed, "train": 2.0}}, on)

    for role in (None, "learner"):
        plan(8 * GIB).check(role)
        with pytest.raises(ConfigError, match=r"^learner.*: 8\.0 GiB predicted to score, the GPU has 8\.0; lower "):
            plan(8 * GIB + 1).check(role)
    full = dataclasses.replace(plan(GIB), roles=roles | {"rollout": RoleMemory(1.0, kv_cache=0.0)})
    with pytest.raises(ConfigError, match=r"^rollout\.gpu_memory_fraction=.* leaves no KV cache: "):
        full.check()


@pytest.mark.parametrize(
    ("scoring", "key"),
    [
        ({"learner": 1.0, "reference": 3.0, "reward_model": 2.0}, "reference"),
        ({"learner": 1.0, "reference": 2.0, "reward_model": 3.0}, "reward.model"),
        ({"learner": 1.0, "reward_model": 2.0}, "reward.model"),
        ({"learner": 2.0, "reward_model": 1.0}, "learner"),
    ],
)
def test_the_remedy_for_scoring_names_the_model_that_takes_the_most(scoring: dict[str, float], key: str) -> None:
    config = load_config(CONF / "grpo_tiny.yaml", ["model.path=x"])
    roles = {role: RoleMemory(9.0 - size, scoring=size) for role, size in scoring.items()}
    plan = MemoryPlan(config, GIB, roles, {"shared": {"score": 2 * GIB}}, {})
    with pytest.raises(ConfigError, match=rf"lower {key}\.micro_batch_tokens, or use placement\.mode=separate"):
        plan.check()


@pytest.mark.parametrize(
    ("gpu", "phase", "learner", "layers", "overrides", "remedy"),
    [
        ("rollout", "generate", {}, 28, [], "lower rollout.gpu_memory_fraction"),
        ("shared", "generate", {}, 28, [], "lower rollout.gpu_memory_fraction, or use placement.mode=separate"),
        ("rollout.extra_kinds.a", "generate", {}, 28, [], "lower rollout.extra_kinds.a.gpu_memory_fraction"),
        ("reference", "score", {}, 28, [], "lower reference.micro_batch_tokens"),
        ("reward_model", "score", {}, 28, [], "lower reward.model.micro_batch_tokens"),
        # weights, gradients and optimiser state take 6 in all
        ("learner", "train", {"training": 6.0}, 28, [], "lower learner.micro_batch_tokens or LOGITS"),
        (
            "learner",
            "train",
            {"training": 6.0},
            27,
            [],
            "set learner.checkpointed_layers=null, or lower learner.micro_batch_tokens or LOGITS",
        ),
        (
            "learner",
            "train",
            {"training": 5.0},
            28,
            [],
            "raise learner.num_ranks (with zero_stage=3), or set learner.offload=all",
        ),
        (
            "learner",
            "train",
            {"training": 5.0},
            28,
            ["learner.offload=idle"],
            "raise learner.num_ranks (with zero_stage=3), or set learner.offload=null",
        ),
        (  # the learner takes more, elsewhere
            "critic",
            "train",
            {"training": 6.0},
            28,
            [],
            "raise critic.num_ranks (with zero_stage=3), or set critic.offload=all",
        ),
        (
            "shared",
            "train",
            {"training": 6.0},
            28,
            [],
            "lower learner.micro_batch_tokens or LOGITS, or use placement.mode=separate",
        ),
        (
            "shared",
            "train",
            {"training": 0.5},
            28,
            ["critic.offload=none"],
            "raise critic.num_ranks (with zero_stage=3), or set critic.offload=null, or use placement.mode=separate",
        ),
    ],
)
def test_the_remedy_names_the_key_of_what_takes_the_most(
    gpu: str, phase: str, learner: dict[str, float], layers: int, overrides: list[str], remedy: str
) -> None:
    config = load_config(CONF / "grpo_tiny.yaml", ["model.path=x", *overrides])
    states = {"gradients": 2.0, "optimizer": 1.0}
    roles = {"learner": RoleMemory(3.0, **states, **learner), "critic": RoleMemory(3.0, **states, training=1.0)}
    choices = {role: Checkpointing(layers, num_layers=28, needed=0.0, left=0.0) for role in roles}
    plan = MemoryPlan(config, GIB, roles, {gpu: {phase: 2 * GIB, "other": GIB}}, choices)
    with pytest.raises(ConfigError) as caught:
        plan.check()
    who = "learner + critic" if gpu == "shared" else gpu
    remedy = remedy.replace("LOGITS", "learner.logits_chunk_tokens")
    assert str(caught.value) == f"{who}: 2.0 GiB predicted to {phase}, the GPU has 1.0; {remedy}"


def test_what_was_decided_for_a_learner_is_one_line() -> None:
    config = load_config(CONF / "grpo_tiny.yaml", ["model.path=x"])
    roles = {
        "learner": RoleMemory(1.0 * GIB, training=2.0 * GIB, other=0.0, offload="idle", host=5.0 * GIB, zero_stage=3),
        "critic": RoleMemory(3.0 * GIB, other=0.0, float32_gradients=True, zero_stage=1),
    }
    choices = {
        "learner": Checkpointing(layers=26, num_layers=28, needed=4.0 * GIB, left=-1.0 * GIB),
        "critic": Checkpointing(layers=0, num_layers=24, needed=4.0 * GIB, left=5.0 * GIB),
    }
    plan = MemoryPlan(config, 8 * GIB, roles, {}, choices)
    assert plan.describe("learner") == (
        "learner: 3.2 GiB of 8.0 predicted; ZeRO-3; gradient checkpointing in 26 of 28 layers: without it a pass "
        "needs 4.0 GiB, and 0.0 are left; gradients add up in bfloat16; its optimiser state waits in host memory while "
        "vLLM generates (5.0 GiB)"
    )
    assert plan.describe("critic") == (
        "critic: 3.0 GiB of 8.0 predicted; ZeRO-1; gradient checkpointing in 0 of 24 layers: without it a pass needs "
        "4.0 GiB, and 5.0 are left; gradients add up in float32"
    )


def test_what_an_engine_may_hold_is_one_line(tmp_path: Path) -> None:
    """A token of the 0.5B model takes 24 layers x 2 x 2 heads of 64 x 2 bytes, half of it on each of two GPUs."""
    kind = "rollout.extra_kinds.big={tensor_parallel_size: 2, gpu_memory_fraction: 0.25}"
    config = with_shape(tmp_path, QWEN_05B, "grpo_0.5b_1gpu.yaml", "placement.mode=separate", kind)
    token = 24 * 2 * 2 * 64 * 2
    roles = {
        "rollout": RoleMemory(0.0, kv_cache=-1.0),
        "rollout.extra_kinds.big": RoleMemory(0.0, kv_cache=12_345 * token / 2),
    }
    plan = MemoryPlan(config, 15 * GIB, roles, {}, {})
    assert plan.describe_rollout("big") == (
        "rollout.extra_kinds.big: the KV cache holds 12,345 tokens; gpu_memory_fraction=0.25, and 0.80 would be safe"
    )
    assert plan.describe_rollout("default").startswith("rollout: the KV cache holds 0 tokens; ")
    assert dataclasses.replace(plan, device_bytes=GIB).largest_rollout_fraction() == 0, "the engine's graphs fill it"


def test_a_kind_that_asks_for_other_gpus_is_not_judged_by_these(tmp_path: Path) -> None:
    kind = "rollout.extra_kinds.other={gpu_memory_fraction: 0.1, resources: {h200: 1}}"
    plan = plan_memory(with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml", kind), 80 * GIB)
    assert plan is not None and plan.roles["rollout.extra_kinds.other"].kv_cache < 0
    plan.check()


def test_a_role_checks_its_own_gpu(tmp_path: Path) -> None:
    config = with_shape(tmp_path, QWEN_7B, "grpo_7b_2x8a100.yaml", "learner.num_ranks=1", "learner.offload=none")
    plan = plan_memory(config, 80 * GIB)
    assert plan is not None
    plan.check("reference")
    for gpus in (plan.gpus, dict(reversed(plan.gpus.items()))):
        with pytest.raises(ConfigError, match=r"^learner: "):
            dataclasses.replace(plan, gpus=gpus).check("learner")


def test_reward_training_has_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    config = load_config(CONF / "reward_tiny.yaml", [f"model.path={tmp_path}"], RewardTrainingConfig)
    plan = plan_memory(config, 80 * GIB)
    assert plan is not None
    plan.check()
    assert plan.gpus.keys() == {"learner"}


def test_only_the_sender_of_a_publish_holds_its_buckets(tmp_path: Path) -> None:
    plan = plan_memory(with_shape(tmp_path, QWEN_05B, "ppo_0.5b_1gpu.yaml", f"reward.model.path={tmp_path}"), 80 * GIB)
    assert plan is not None
    assert plan.roles["learner"].other - plan.roles["critic"].other == 2 * (256 << 20)


def test_unknown_models_are_not_predicted() -> None:
    assert plan_memory(load_config(CONF / "grpo_0.5b_1gpu.yaml", ["model.path=/nowhere"]), 80 * GIB) is None


def test_memory_of_a_learner_with_adapters_by_hand() -> None:
    shape = ModelShape(
        num_layers=2, hidden_size=8, intermediate_size=32, num_heads=4, num_kv_heads=2, head_size=2, vocab_size=10**6,
        tied=False,
    )  # fmt: skip
    q_and_down = 2 * 3 * ((8 + 8) + (32 + 8))  # layers x r x (inputs + outputs of each)
    everything = q_and_down + 2 * 3 * (2 * (8 + 4) + (8 + 8) + 2 * (8 + 32))
    count = shape.parameters(lm_head=True)

    def memory(**lora: object):
        adapters = LoraConfig(r=3, **lora) if lora else None  # type: ignore[arg-type]
        settings = LearnerConfig(num_ranks=2, zero_stage=2, micro_batch_tokens=1, logits_chunk_tokens=1, lora=adapters)
        return learner_memory(settings, shape, checkpointed_layers=0, bucket_bytes=100)

    whole = memory()
    for targets, trained in [(["q_proj", "down_proj"], q_and_down), (["all-linear"], everything)]:
        adapters = memory(target_modules=targets)
        assert adapters.weights - whole.weights == 2 * trained
        assert adapters.optimizer == 12 * trained / 2
        assert whole.gradients - adapters.gradients == 2 * (count - trained) / 2
        assert adapters.other == whole.other, "a publish makes nothing"
        merged = memory(target_modules=targets, publish="merged")
        assert merged.other - whole.other == 32 * 8 * 10, "the largest layer: float32 twice, and rounded"
        assert whole.training - adapters.training == 8 * 8 * 10**6, "no gradient of the head's weight: 4 + 2 + 2 bytes"
    assert memory(target_modules=["unheard_of"]).optimizer == 12 * 2 * 3 * (8 + 32) / 2
    assert memory(load_in_4bit=True).other - whole.other == 32 * 8 * 2, "the largest layer, dense"


def test_an_adapter_beside_an_engines_weights_is_there_twice() -> None:
    sizes = {"budget_bytes": 10 * GIB, "tensor_parallel_size": 1}
    plain, adapter = rollout_memory(TOY, **sizes), LoraConfig(r=3)
    beside = rollout_memory(TOY, **sizes, adapter=adapter)
    expected = 2 * 2 * TOY.adapter_parameters(adapter)
    assert beside.weights - plain.weights == expected == plain.kv_cache - beside.kv_cache
