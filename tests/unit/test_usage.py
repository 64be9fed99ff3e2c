"""Who takes memory on a GPU in each phase: sums of what each role holds, by hand, and the sizes that each role gets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.planning.memory import (
    ASLEEP_BYTES,
    GIB,
    frozen_memory,
    kept_by_layer,
    kv_token_bytes,
    rollout_memory,
    training_bytes,
)
from rlhf.planning.shapes import ModelShape
from rlhf.planning.usage import AnyConfig, Choice, Choices, predict
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig

CONF = Path(__file__).resolve().parents[2] / "conf"
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
PLAIN = Choice(zero_stage=1, checkpointed_layers=99, offload="none", float32_gradients=False)


def model(directory: Path, name: str, **changes: int) -> ModelShape:
    """Its shape; ``directory / name`` has its config.json."""
    (directory / name).mkdir()
    (directory / name / "config.json").write_text(json.dumps(SHAPE | changes))
    shape = ModelShape.of(SHAPE | changes)
    assert shape is not None
    return shape


def ppo(directory: Path, *overrides: str) -> Config:
    """PPO on GPUs of 8 GiB: 5 prompts x 2, of at most 300 tokens each."""
    settings = ["rollout.num_workers=4", "rollout.gpu_memory_fraction=0.5", "rollout.max_num_seqs=3"]
    settings += ["algorithm.prompts_per_step=5", "algorithm.group_size=2", "algorithm.num_minibatches=1"]
    settings += ["data.max_prompt_tokens=100", "rollout.max_completion_tokens=200", "learner.logits_chunk_tokens=7"]
    settings += [f"model.path={directory / 'policy'}", f"reward.model.path={directory / 'judge'}"]
    return load_config(CONF / "ppo_0.5b_1gpu.yaml", [*settings, *overrides])


def test_roles_on_a_shared_gpu_take_turns(tmp_path: Path) -> None:
    for name in ("policy", "judge"):
        model(tmp_path, name)
    ranks = ["learner.num_ranks=2", "critic.num_ranks=2", "reference.num_ranks=2", "reward.model.num_ranks=1"]
    config = ppo(tmp_path, *ranks)
    offloading = Choice(zero_stage=1, checkpointed_layers=99, offload="idle", float32_gradients=False)
    usage = predict(config, 8 * GIB, Choices({"learner": PLAIN, "critic": offloading}))
    learner, critic = usage.roles["learner"], usage.roles["critic"]
    reference, judge, engine = (usage.roles[role] for role in ("reference", "reward_model", "rollout"))
    assert critic.idle < critic.peak - critic.optimizer, "it waits elsewhere"
    # Two GPUs: on the fuller one are one of the reference's two replicas, the only judge, and two of four engines.
    assert usage.gpus.keys() == {"shared"} and usage.gpu_of("critic") == usage.gpus["shared"]
    assert usage.gpus["shared"] == pytest.approx(
        {
            "generate": learner.idle + critic.idle + reference.scores + judge.scores + 2 * engine.peak,
            "score": learner.scores + critic.scores + reference.scores + judge.scores + 2 * ASLEEP_BYTES,
            "train": learner.peak + critic.peak + reference.idle + judge.idle + 2 * ASLEEP_BYTES,
        }
    )


def test_a_role_alone_on_its_gpus_has_one_phase(tmp_path: Path) -> None:
    for name in ("policy", "judge"):
        model(tmp_path, name)
    config = ppo(tmp_path, "placement.mode=separate", "rollout.extra_kinds.big={tensor_parallel_size: 2}")
    usage = predict(config, 8 * GIB, Choices({"learner": PLAIN, "critic": PLAIN}))
    phases = {role: list(phases) for role, phases in usage.gpus.items()}
    assert phases == {
        "learner": ["train"],
        "critic": ["train"],
        "reference": ["score"],
        "reward_model": ["score"],
        "rollout": ["generate"],
        "rollout.extra_kinds.big": ["generate"],
    }
    assert [usage.gpu_of(role) for role in usage.roles] == [{phases[r][0]: usage.roles[r].peak} for r in phases]
    one, two = usage.roles["rollout"], usage.roles["rollout.extra_kinds.big"]
    assert two.weights == one.weights / 2
    assert two.weights + two.kv_cache == one.weights + one.kv_cache == 2 * GIB  # half a GPU, less the engine's own


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_each_role_is_predicted_with_its_own_sizes(tmp_path: Path, dtype: str, element_bytes: int) -> None:
    policy = model(tmp_path, "policy")
    value, old, judge = (
        model(tmp_path, name, num_hidden_layers=layers) for name, layers in (("value", 3), ("old", 4), ("judge", 5))
    )
    paths = [f"critic.path={tmp_path / 'value'}", f"reference.path={tmp_path / 'old'}"]
    # the critic has a budget that a step does not fill; the others' micro-batches are full
    budgets = ["learner.micro_batch_tokens=400", "reference.micro_batch_tokens=500", "reward.model.max_tokens=600"]
    settings = [f"model.dtype={dtype}", "placement.device=auto", "learner.compile=false", "critic.compile=false"]
    config = ppo(tmp_path, *paths, *budgets, *settings, "reward.model.micro_batch_tokens=700")
    roles = predict(config, 8 * GIB, Choices({"learner": PLAIN, "critic": PLAIN})).roles

    def passing(shape: ModelShape, tokens: int, chunk: int, lm_head: bool) -> float:
        return training_bytes(
            shape,
            tokens=tokens,
            chunk=chunk,
            lm_head=lm_head,
            checkpointed_layers=99,
            compiled=False,
            element_bytes=element_bytes,
        )

    assert roles["learner"].weights == policy.parameters(lm_head=True) * element_bytes
    assert roles["learner"].training == max(
        passing(policy, 400, 7, True), (4 + element_bytes) * policy.parameters(lm_head=True)
    )
    assert roles["critic"].weights == value.parameters(lm_head=False) * element_bytes
    assert roles["critic"].training == passing(value, 10 * 300, 1024, False), "ten sequences of 300 tokens at most"
    width = {"element_bytes": element_bytes}
    assert roles["reference"] == frozen_memory(old, tokens=500, chunk=7, lm_head=True, **width)
    assert roles["reward_model"] == frozen_memory(judge, tokens=700, lm_head=False, **width)
    cache = {"cache_tokens": 3 * 300, **width}
    assert roles["rollout"] == rollout_memory(policy, budget_bytes=GIB, tensor_parallel_size=1, **cache)
    assert roles["rollout"].kv_cache < 0, "a quarter of half a GPU is less than the engine's own"


def test_a_small_step_does_not_fill_a_micro_batch(tmp_path: Path) -> None:
    for name in ("policy", "judge"):
        model(tmp_path, name)
    budgets = ["learner.micro_batch_tokens=999999", "reward.model.micro_batch_tokens=999999"]
    large = ppo(tmp_path, "reward.model.max_tokens=600", *budgets)
    roles = predict(large, 8 * GIB, Choices({"learner": PLAIN, "critic": PLAIN})).roles
    judge = ModelShape.of(SHAPE)
    assert judge is not None
    kept = kept_by_layer(judge, compiled=False, element_bytes=2)  # by a token
    assert roles["reward_model"].scoring == 10 * 600 * kept
    assert roles["learner"].scoring == 10 * 300 * kept + 7 * 1000 * 2, "and seven tokens' logits at a time"
    assert roles["rollout"].kv_cache < 0 < kv_token_bytes(judge, 1)


def test_a_choice_may_recompute_a_few_layers_more_and_count_as_fast() -> None:
    few = Choices({"learner": PLAIN, "critic": PLAIN}).vary("critic", checkpointed_layers=5)
    assert few.vary("critic", checkpointed_layers=7).as_fast_as(few, spare_layers=2)
    assert not few.vary("critic", checkpointed_layers=8).as_fast_as(few, spare_layers=2)
    assert not few.vary("critic", zero_stage=2).as_fast_as(few, spare_layers=2)
    assert not few.vary("critic", offload="idle").as_fast_as(few, spare_layers=2)


def test_a_model_that_is_not_at_hand_counts_as_large_as_the_policy(tmp_path: Path) -> None:
    policy = model(tmp_path, "policy")
    paths = [f"{role}.path={tmp_path / 'elsewhere'}" for role in ("critic", "reference", "reward.model")]
    roles = predict(ppo(tmp_path, *paths), 8 * GIB, Choices({"learner": PLAIN, "critic": PLAIN})).roles
    assert roles["critic"].weights == roles["reward_model"].weights == 2 * policy.parameters(lm_head=False)
    assert roles["reference"].weights == 2 * policy.parameters(lm_head=True)


@pytest.mark.parametrize(("budget", "tokens"), [(1000, 1000), (5000, 4 * 2 * 201)])
def test_a_reward_model_in_training_holds_pairs(tmp_path: Path, budget: int, tokens: int) -> None:
    shape = model(tmp_path, "policy")
    settings = [f"model.path={tmp_path / 'policy'}", "batch_pairs=4", "data.max_tokens=200", "learner.zero_stage=0"]
    config: AnyConfig = load_config(
        CONF / "reward_tiny.yaml",
        [*settings, f"learner.micro_batch_tokens={budget}", "learner.num_ranks=1"],
        RewardTrainingConfig,
    )
    usage = predict(config, 8 * GIB, Choices({"learner": PLAIN}))
    learner = usage.roles["learner"]
    assert learner.weights == 2 * shape.parameters(lm_head=False)
    assert learner.scoring == tokens * kept_by_layer(shape, compiled=False, element_bytes=2)
    assert usage.gpus == {"learner": {"train": learner.peak}}
    wide = replace(config, model=replace(config.model, dtype="float32"))
    assert predict(wide, 8 * GIB, Choices({"learner": PLAIN})).roles["learner"].weights == 2 * learner.weights
