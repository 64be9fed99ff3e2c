"""Configuration: the shipped recipes load, layers win in order, and every mistake is one line that names its key."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from rlhf.aliases import ALIASES
from rlhf.config import Config
from rlhf.errors import ConfigError
from rlhf.recipes import load_config, to_yaml, validate_model
from rlhf.reward_config import RewardTrainingConfig

RECIPES = sorted((Path(__file__).parents[2] / "conf").glob("*.yaml"))
GOOD = """
model: {path: some/model}
data: {train: "task:arithmetic"}
reward: {functions: [{path: exact_match}]}
"""
PPO = ("algorithm.name=ppo",)


def write(directory: Path, text: str, name: str = "run.yaml") -> Path:
    file = directory / name
    file.write_text(text)
    return file


def error_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # Ray carries it between processes
    return message


# The recipes.


@pytest.mark.parametrize("recipe", [file for file in RECIPES if file.name != "base.yaml"], ids=lambda file: file.stem)
def test_shipped_recipe_loads(recipe: Path) -> None:
    schema = RewardTrainingConfig if recipe.name.startswith("reward") else Config
    config = load_config(recipe, schema=schema)
    assert config.name != schema.name, "a recipe names its run, or two recipes share a run directory"
    assert config.run_dir == f"runs/{config.name}"


def test_base_recipe_changes_no_default_silently(tmp_path: Path) -> None:
    """base.yaml states what the recipes share; a default it differs from would surprise who reads config.py."""
    base = next(file for file in RECIPES if file.name == "base.yaml")
    assert load_config(write(tmp_path, f"extends: {base}\n{GOOD}")) == load_config(write(tmp_path, GOOD))


# What wins.


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.algorithm.group_size == 8
    assert config.run_dir == "runs/run"
    assert not config.uses_reference
    assert not config.uses_critic


def test_recipe_beats_what_it_extends_and_overrides_beat_both(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "seed: 1\nnum_steps: 1\nrollout: {num_workers: 1, top_p: 0.9}", "grandparent.yaml")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "extends: ../grandparent.yaml\nseed: 2\nnum_steps: 2", "parent.yaml")
    recipe = write(tmp_path, "extends: sub/parent.yaml\nseed: 3\nrollout: {num_workers: 3}")
    config = load_config(recipe)
    assert (config.num_steps, config.seed) == (2, 3)
    assert (config.rollout.num_workers, config.rollout.top_p) == (3, 0.9)  # sections merge key by key
    config = load_config(recipe, ["seed=4", "rollout.num_workers=4", "seed=5", "name=other"])
    assert (config.seed, config.rollout.num_workers, config.run_dir) == (5, 4, "runs/other")


def test_lists_are_replaced_not_joined(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), ["reward.functions=[{path: my.module.f, weight: 2}]"])
    assert [(f.path, f.weight) for f in config.reward.functions] == [("my.module.f", 2.0)]


def test_overrides_parse_as_yaml(tmp_path: Path) -> None:
    overrides = ["rollout.stop=['\\n\\n', END]", "algorithm.delta=null", "tracking.progress=false", "seed=7"]
    config = load_config(write(tmp_path, GOOD), overrides)
    assert (config.algorithm.delta, config.tracking.progress, config.seed) == (None, False, 7)
    assert config.rollout.stop[1] == "END"


def test_critic_has_defaults_of_its_own(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), ["algorithm.name=ppo", "critic.num_ranks=2"])
    assert config.uses_critic
    assert (config.learner.optimizer.learning_rate, config.critic.optimizer.learning_rate) == (1e-6, 5e-6)
    assert (config.learner.num_ranks, config.critic.num_ranks) == (1, 2)


def test_yaml_round_trip(tmp_path: Path) -> None:
    overrides = [
        "seed=3",
        "algorithm.name=ppo",
        "algorithm.delta=4.0",
        "learner.optimizer.betas=[0.8, 0.99]",
        "reward.model={path: judge, weight: 0.5}",
        "rollout.engine_args={max_model_len: 900}",
    ]
    config = load_config(write(tmp_path, GOOD), overrides)
    assert load_config(write(tmp_path, to_yaml(config), "again.yaml")) == config


def test_stale_samples_are_corrected_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_config(path).algorithm.rollout_correction == "none"
    assert not load_config(path).needs_rollout_logprobs
    ahead = load_config(path, ["rollout.max_staleness=1"])
    assert ahead.algorithm.rollout_correction == "token_truncate"
    assert ahead.needs_rollout_logprobs
    merged = load_config(path, ["learner.lora={publish: merged}"])
    assert merged.algorithm.rollout_correction == "token_truncate" and merged.learner.adapter_apart is None, "rounded"
    beside = load_config(path, ["learner.lora={r: 512}"])
    assert beside.algorithm.rollout_correction == "none" and beside.learner.adapter_apart == beside.learner.lora
    with pytest.raises(ConfigError, match=r"learner.lora.r=513: .* rank 512 at most; .*learner.lora.publish=merged"):
        load_config(path, ["learner.lora={r: 513}"])
    load_config(path, ["learner.lora={r: 513, publish: merged}"])
    without = load_config(path, ["rollout.max_staleness=1", "algorithm.rollout_correction=none"])
    assert not without.needs_rollout_logprobs


def test_a_kind_of_worker_takes_what_it_does_not_say_from_the_pool(tmp_path: Path) -> None:
    overrides = [
        "rollout.max_num_seqs=77",
        "rollout.extra_kinds.big={num_workers: 2, tensor_parallel_size: 4, resources: {h100: 1}}",
    ]
    kinds = load_config(write(tmp_path, GOOD), overrides).rollout.kinds()
    assert list(kinds) == ["default", "big"]
    settings, resources = kinds["big"]
    assert (settings.num_workers, settings.tensor_parallel_size, settings.max_num_seqs) == (2, 4, 77)
    assert resources == {"h100": 1}


def test_a_kind_may_begin_with_no_worker_beside_a_pool_that_scales(tmp_path: Path) -> None:
    overrides = ["rollout.autoscale={min: 1, max: 2}", "rollout.extra_kinds.big.num_workers=0"]
    assert load_config(write(tmp_path, GOOD), overrides).rollout.kinds()["big"][0].num_workers == 0


def test_what_follows_from_a_configuration(tmp_path: Path) -> None:
    recipe = write(tmp_path, GOOD)
    settings = ["algorithm.prompts_per_step=7", "algorithm.group_size=4", "rollout.num_workers=3"]
    settings += ["algorithm.num_epochs=3", "algorithm.num_minibatches=2", "rollout.max_num_seqs=5"]
    config = load_config(recipe, [*settings, "algorithm.beta=0.1"])
    assert (config.algorithm.num_sequences, config.algorithm.steps_per_update) == (28, 6)
    assert config.rollout_share == 12, "the busiest worker gets three of the seven groups"
    assert (config.rollout_workers_per_gpu, config.rollout_cache_tokens) == (1, None)
    assert config.uses_reference
    shared = load_config(recipe, [*settings, "placement.mode=colocate"])
    assert (shared.rollout_workers_per_gpu, shared.rollout_cache_tokens) == (3, 5 * 1024)
    assert load_config(recipe, ["placement.mode=colocate", "learner.num_ranks=2"]).rollout_workers_per_gpu == 1


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


# What cannot be. Each case: overrides, then what the message must hold (the key first).


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.num_worker=2"], ["rollout.num_worker", "Did you mean", "'num_workers'"]),
        (["rolout.num_workers=2"], ["rolout", "Did you mean", "'rollout'"]),
        (["rollout.num_workers=two"], ["rollout.num_workers", "'two'", "Integer"]),
        (["rollout.num_workers=1.5"], ["rollout.num_workers", "1.5", "Integer"]),
        (["rollout.num_workers=null"], ["rollout.num_workers", "None", "int"]),
        (["rollout.num_workers=0"], ["rollout.num_workers=0", "at least 1"]),
        (["rollout.temperature=warm"], ["rollout.temperature", "'warm'", "Float"]),
        (["rollout.temperature=0"], ["rollout.temperature=0", "positive"]),
        (["rollout.top_p=1.2"], ["rollout.top_p=1.2", "(0, 1]"]),
        (["rollout.gpu_memory_fraction=1"], ["rollout.gpu_memory_fraction=1", "between 0 and 1"]),
        (["rollout.stop=END"], ["rollout.stop", "list"]),
        (["tracking.progress=maybe"], ["tracking.progress", "'maybe'", "bool"]),
        (["algorithm.name=dpo"], ["algorithm.name", "'dpo'", "grpo", "rloo", "ppo"]),
        (["placement.mode=both"], ["placement.mode", "'both'", "separate", "colocate"]),
        (["algorithm.group_size=1"], ["algorithm.group_size=1", "at least 2", "algorithm.name=ppo"]),
        (["algorithm.loss_type=rloo"], ["algorithm.loss_type=rloo", "algorithm.name=rloo"]),
        (["algorithm.num_minibatches=3"], ["algorithm.num_minibatches=3", "prompts_per_step", "64"]),
        (["algorithm.top_entropy_quantile=0"], ["algorithm.top_entropy_quantile=0", "(0, 1]"]),
        (["algorithm.kl_target=0.1"], ["algorithm.kl_target", "algorithm.name=ppo", "algorithm.beta > 0"]),
        (["algorithm.kl_target=0.1", "algorithm.beta=0.1"], ["algorithm.kl_target", "algorithm.name=ppo"]),
        ([*PPO, "algorithm.kl_target=0.1"], ["algorithm.kl_target", "algorithm.beta > 0"]),
        (
            [*PPO, "algorithm.advantage=f.py:g"],
            ["algorithm.advantage=f.py:g", "algorithm.name=ppo", "use algorithm.name"],
        ),
        (
            ["algorithm.name=ppo", "algorithm.dynamic_sampling_max_tries=2"],
            ["algorithm.dynamic_sampling_max_tries", "set it to 0", "ppo"],
        ),
        (["learner.zero_stage=4"], ["learner.zero_stage=4", "0, 1, 2 or 3"]),
        (
            ["learner.offload=optimizer", "learner.zero_stage=0"],
            ["learner.offload=optimizer", "learner.zero_stage 1, 2 or 3"],
        ),
        (["learner.offload=all", "learner.zero_stage=2"], ["learner.offload=all", "learner.zero_stage=3"]),
        (["learner.offload=all", "learner.lora={}"], ["learner.offload=all", "without learner.lora"]),
        (["learner.optimizer.learning_rate=0"], ["learning_rate=0", "positive"]),
        (["learner.optimizer.betas=0.9"], ["learner.optimizer.betas", "list"]),
        (["learner.micro_batch_tokens=1023"], ["learner.micro_batch_tokens=1023", "1024", "data.max_prompt_tokens"]),
        (["critic.micro_batch_tokens=1023"], ["critic.micro_batch_tokens=1023", "1024"]),
        (["reference.micro_batch_tokens=1023"], ["reference.micro_batch_tokens=1023", "1024"]),
        (
            ["environment={path: guess, max_context_tokens: 8193}"],
            ["learner.micro_batch_tokens=8192", "environment.max_context_tokens = 8193"],
        ),
        (
            ["environment={path: guess, max_context_tokens: 512}"],
            ["environment.max_context_tokens=512", "512; raise it"],
        ),
        (["environment={max_context_tokens: 600}"], ["environment: neither path nor tools"]),
        (["environment.path=guess"], ["environment", "max_context_tokens"]),
        (["environment={path: guess, max_context_tokens: 600, max_turns: 0}"], ["environment.max_turns=0"]),
        (["environment={path: guess, max_context_tokens: 600}", "rollout.stop=[x]"], ["rollout.stop", "end of turn"]),
        (["algorithm.name=rloo", "algorithm.credit=turn"], ["algorithm.credit=turn", "set environment"]),
        (["reward.functions=[]"], ["reward.functions", "reward.model.path", "exact_match"]),
        (["reward.functions=exact_match"], ["reward.functions", "list"]),
        (["reward.functions=[{weight: 2}]"], ["reward.functions[0].path", "no value given"]),
        (["reward.functions=[{paht: f}]"], ["paht", "Did you mean", "'path'"]),
        (["timeouts.publish_s=0"], ["timeouts.publish_s=0", "positive"]),
        (["checkpoint.keep=0"], ["checkpoint.keep=0", "at least 1"]),
        (["num_steps=0"], ["num_steps=0", "at least 1"]),
        (["run_dir=runs/${nmae}"], ["run_dir", "'nmae' not found"]),
        (
            ["placement.mode=colocate", "learner.num_ranks=2", "rollout.tensor_parallel_size=4"],
            ["placement.mode=colocate", "rollout.tensor_parallel_size=4", "2 ranks", "placement.mode=separate"],
        ),
        (
            ["placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=3"],
            ["placement.mode=colocate", "rollout.num_workers=3", "another learner.num_ranks"],
        ),
        (
            ["placement.mode=colocate", "rollout.max_staleness=1"],
            ["rollout.max_staleness > 0", "placement.mode=separate"],
        ),
        (
            ["placement.mode=colocate", "rollout.autoscale.max=3"],
            ["rollout.autoscale needs", "placement.mode=separate"],
        ),
        (
            ["placement.mode=colocate", "rollout.extra_kinds.big.num_workers=1"],
            ["rollout.extra_kinds needs", "placement.mode=separate"],
        ),
        (
            ["placement.mode=colocate", "learner.num_ranks=3", "rollout.tensor_parallel_size=2"],
            ["placement.mode=colocate", "rollout.tensor_parallel_size=2", "3 ranks"],
        ),
        (
            [
                "placement.mode=colocate",
                "learner.num_ranks=2",
                "rollout.tensor_parallel_size=2",
                "rollout.num_workers=2",
            ],
            ["placement.mode=colocate", "rollout.num_workers=2 x rollout.tensor_parallel_size=2", "2 ranks"],
        ),
        (["rollout.autoscale={min: 3, max: 2}"], ["rollout.autoscale.max=2", "rollout.autoscale.min=3"]),
        (["rollout.autoscale={min: 2, max: 4}"], ["rollout.num_workers=1", "rollout.autoscale.min"]),
        (
            ["rollout.autoscale={min: 1, max: 4}", "rollout.num_workers=5"],
            ["rollout.num_workers=5", "rollout.autoscale"],
        ),
        (["rollout.extra_kinds.default.num_workers=2"], ["rollout.extra_kinds.default", "another name"]),
        (["rollout.extra_kinds.big.max_num_seqs=0"], ["rollout.extra_kinds.big.max_num_seqs=0", "at least 1"]),
        (["rollout.extra_kinds.big.num_workers=-1"], ["rollout.extra_kinds.big.num_workers=-1", "at least 0"]),
        (["rollout.max_staleness=-1"], ["rollout.max_staleness=-1", "at least 0"]),
        (["rollout.num_workers"], ["'rollout.num_workers' is not key=value", "write it like"]),
        (["rollout.logprobs=5"], ["rollout.logprobs=5", "true or false"]),
        (["rollout.stop=['']"], ["rollout.stop", "remove it"]),
        (["rollout.top_k=0"], ["rollout.top_k=0", "positive, or -1"]),
        (["rollout.temperature=0.005"], ["rollout.temperature=0.005", "at least 0.01", "vLLM"]),
        (["rollout.eval_temperature=0.005"], ["rollout.eval_temperature=0.005", "0 (greedy)", "0.01"]),
        (["rollout.extra_kinds.big.resources.GPU=2"], ["rollout.extra_kinds.big.resources", "GPU", "remove it"]),
        (["rollout.extra_kinds.big.resources.CPU=2"], ["rollout.extra_kinds.big.resources", "CPU", "remove it"]),
        (["data.date=2026-1-31"], ["data.date=2026-1-31", "YYYY-MM-DD"]),
        (["data.date=20260131"], ["data.date=20260131", "YYYY-MM-DD"]),
        (["data.date=2026-W05-6"], ["data.date=2026-W05-6", "YYYY-MM-DD"]),
        (["data.date=2026-02-30"], ["data.date=2026-02-30", "YYYY-MM-DD"]),
        (
            ["model.dtype=float32", "placement.device=gpu"],
            ["model.dtype=float32", "16 bits", "model.dtype=auto", "placement.device=cpu"],
        ),
        (
            ["rollout.ignore_eos=true", "algorithm.mask_truncated_completions=true"],
            ["rollout.ignore_eos=true", "algorithm.mask_truncated_completions=true", "set one of the two to false"],
        ),
        (["algorithm.delta=1.2"], ["algorithm.delta=1.2", "algorithm.epsilon_high = 1.2", "use 4"]),
        (["algorithm.dual_clip=0.9"], ["algorithm.dual_clip=0.9", "greater than 1"]),
        (["algorithm.rollout_correction_cap=0.9"], ["algorithm.rollout_correction_cap=0.9", "at least 1"]),
        (["algorithm.rollout_correction_floor=1"], ["algorithm.rollout_correction_floor=1", "between 0 and 1"]),
        (
            ["algorithm.name=rloo", "algorithm.loss_type=rloo", "algorithm.importance_sampling_level=sequence"],
            ["algorithm.loss_type=rloo", "algorithm.importance_sampling_level at token", "another loss_type"],
        ),
        (["algorithm.loss_type=cispo"], ["algorithm.epsilon_high=0.2", "use 5"]),
        (
            [*PPO, "algorithm.beta=0.1", "algorithm.kl_target=6", "algorithm.kl_horizon=12"],
            ["algorithm.kl_horizon=12", "negative", "64 completions"],
        ),
        ([*PPO, "num_steps=5", "critic.warmup_steps=5"], ["critic.warmup_steps=5", "num_steps=5", "use at most 4"]),
        (
            ["num_steps=5", "algorithm.num_minibatches=2", "learner.optimizer.warmup_steps=11"],
            ["learner.optimizer.warmup_steps=11", "10 optimiser steps", "use at most 10"],
        ),
        (
            [*PPO, "num_steps=5", "critic.warmup_steps=2", "learner.optimizer.warmup_steps=4"],
            ["learner.optimizer.warmup_steps=4", "3 optimiser steps", "use at most 3"],
        ),
        (
            [*PPO, "num_steps=5", "critic.warmup_steps=2", "critic.optimizer.warmup_steps=6"],
            ["critic.optimizer.warmup_steps=6", "5 optimiser steps", "use at most 5"],
        ),
        (["reward.functions=[{path: f, weight: 0}, {path: g, weight: 0}]"], ["reward", "every weight is 0"]),
        (["reward.functions=[]", "reward.model={path: r, weight: 0}"], ["reward", "every weight is 0"]),
        (["reward.model={path: r, micro_batch_tokens: 2048}"], ["reward.model.micro_batch_tokens=2048", "2049"]),
        (
            ["checks.warn_logprob_difference=0.2", "checks.max_logprob_difference=0.1"],
            ["checks.warn_logprob_difference=0.2", "at most checks.max_logprob_difference=0.1"],
        ),
        # of the wrong kind altogether, where OmegaConf does not name the key
        (["learner=3"], ["learner: ", "LearnerConfig"]),
        (["rollout.extra_kinds=[1]"], ["rollout.extra_kinds: ", "container"]),
        (["learner.optimizer.betas=[0.9]"], ["learner.optimizer.betas: ", "length 1"]),
        (["learner.optimizer.betas=[a, b]"], ["learner.optimizer.betas: Value could not be converted to Float"]),
        (["seed=1", "reward.functions=[{path: f, weight: x}]"], ["reward.functions: ", "'x'", "Float"]),
    ],
    ids=lambda value: ",".join(value) if "=" in value[0] else "",
)
def test_bad_value_is_one_line_naming_key_and_remedy(tmp_path: Path, overrides: list[str], parts: list[str]) -> None:
    message = error_of(write(tmp_path, GOOD), *overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=1e-5", "no such key; use learner.optimizer.learning_rate"),
        ("critic.optim.lr=1e-5", "no such key; use critic.optimizer.learning_rate"),
        ("rollout.max_new_tokens=4", "no such key; use rollout.max_completion_tokens"),
        ("actor_rollout_ref.rollout.n=4", "no such key; use algorithm.group_size"),
        ("save_total_limit=3", "no such key; use checkpoint.keep"),
        (
            "train_batch_size=4",
            "no such key; use algorithm.prompts_per_step (counts prompts, of all ranks together; each gets "
            "algorithm.group_size completions)",
        ),
        ("actor_rollout_ref.rollout.top_p=1", "no such key; use rollout.top_p"),
        ("group_size=4", "no such key; use algorithm.group_size"),
        ("learning_rate=1", "no such key; use learner.optimizer.learning_rate"),
        ("betas=[1, 1]", "no such key; use learner.optimizer.betas or critic.optimizer.betas"),
        ("path=m", "no such key; use model.path or critic.path or reference.path"),
        ("micro_batch=2", "Key 'micro_batch' not in 'Config'"),
        ("num_ranks=2", "no such key; use learner.num_ranks or critic.num_ranks or reference.num_ranks"),
        (
            "cpus_per_rank=2",
            "no such key; use learner.cpus_per_rank or critic.cpus_per_rank or reference.cpus_per_rank",
        ),
    ],
)
def test_another_library_s_name_or_one_without_its_section_is_answered_with_the_key(
    tmp_path: Path, override: str, said: str
) -> None:
    assert error_of(write(tmp_path, GOOD), override) == f"{override.split('=')[0]}: {said}"


def test_a_name_that_means_nothing_to_a_reward_model_s_training_is_unknown_there(tmp_path: Path) -> None:
    for override, said in {
        "num_generations=4": "Key 'num_generations' not in",
        "lr=1": "use learner.optimizer",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_config(write(tmp_path, ""), [override], RewardTrainingConfig)


def test_every_alias_names_a_key_that_exists_and_is_none_itself(tmp_path: Path) -> None:
    recipe = write(tmp_path, GOOD)
    for name, alias in ALIASES.items():
        meaning = f" ({alias.meaning})" if alias.meaning else ""
        assert error_of(recipe, f"{name}=1") == f"{name}: no such key; use {alias.key}{meaning}"


@pytest.mark.parametrize(
    "overrides",
    [
        # a text that stops it ends a completion before its limit
        ["rollout.ignore_eos=true", "rollout.stop=[END]", "algorithm.mask_truncated_completions=true"],
        ["algorithm.delta=1.5", "algorithm.epsilon_high=0.4"],
        ["algorithm.loss_type=cispo", "algorithm.epsilon_high=5", "algorithm.delta=2"],  # not read, so not refused
        ["algorithm.name=rloo", "algorithm.importance_sampling_level=sequence"],  # with a loss that has such a ratio
        ["algorithm.name=rloo", "algorithm.loss_type=rloo", "algorithm.rollout_correction=sequence_truncate"],
        ["num_steps=5", "critic.warmup_steps=5"],  # there is no critic
        [*PPO, "num_steps=5", "critic.warmup_steps=4", "learner.optimizer.warmup_steps=1"],
        ["num_steps=5", "algorithm.num_epochs=2", "learner.optimizer.warmup_steps=10"],
        ["reward.functions=[{path: f, weight: 0}, {path: g, weight: -1}]"],
        ["reward.functions=[{path: f, weight: 0}]", "reward.model.path=r"],
        ["model.dtype=float32"],
        ["model.dtype=bfloat16", "placement.device=gpu"],
        ["data.date=2026-01-31"],
        ["checks.warn_logprob_difference=0.1", "checks.max_logprob_difference=0.1"],
        # exactly as much as is needed, or allowed
        [f"{role}.micro_batch_tokens=1024" for role in ("learner", "critic", "reference")],
        ["reward.model={path: r, max_tokens: 2048, micro_batch_tokens: 2049}"],
        ["rollout.autoscale={min: 2, max: 2}", "rollout.num_workers=2"],
        ["rollout.eval_temperature=0.01"],
        ["algorithm.group_size=2"],
        [*PPO, "algorithm.group_size=1", "algorithm.prompts_per_step=1"],
        [*PPO, "algorithm.beta=0.1", "algorithm.kl_target=6", "algorithm.kl_horizon=13"],  # 5 x 13 > 64 completions
        ["learner.compile=true", "learner.zero_stage=3"],
        ["learner.offload=optimizer", "learner.zero_stage=1"],
        ["learner.offload=all"],
        ["algorithm.loss=f.py:g", "algorithm.delta=1.1"],  # a loss of your own has its own bounds
        ["placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=1"],
        ["placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=4"],
        ["placement.mode=colocate", "learner.num_ranks=4", "rollout.num_workers=2", "rollout.tensor_parallel_size=2"],
    ],
    ids=",".join,
)
def test_what_only_looks_like_a_contradiction_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load_config(write(tmp_path, GOOD), overrides)


REWARD_TINY = next(file for file in RECIPES if file.name == "reward_tiny.yaml")


def test_a_micro_batch_of_a_reward_model_holds_a_pair_and_the_tokens_that_end_its_texts() -> None:
    enough = ["data.max_tokens=100", "learner.micro_batch_tokens=202"]
    assert load_config(REWARD_TINY, enough, RewardTrainingConfig).max_pair_tokens == 202
    with pytest.raises(ConfigError, match=r"learner\.micro_batch_tokens=201 cannot hold one pair .* = 202 tokens"):
        load_config(REWARD_TINY, ["data.max_tokens=100", "learner.micro_batch_tokens=201"], RewardTrainingConfig)


def test_a_reward_model_is_not_trained_in_float32_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype=float32 .*; use model\.dtype=auto"):
        load_config(REWARD_TINY, ["model.dtype=float32", "placement.device=gpu"], RewardTrainingConfig)


@pytest.mark.parametrize("key", ["model.path", "data.train"])
def test_missing_mandatory_key_is_named(tmp_path: Path, key: str) -> None:
    sections = {"model.path": "model", "data.train": "data"}
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(sections[key]))
    assert error_of(write(tmp_path, text)).startswith(f"{key}: no value given, and there is no default")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {path: x\n", ["not valid YAML", "line 1"]),
        ("model:\n\tpath: x\n", ["not valid YAML", "line 2"]),
        ("seed: 1\nseed: 2\n", ["not valid YAML", "duplicate key seed"]),
        ("- model\n- data\n", ["keys and values"]),
    ],
    ids=["unclosed", "tab", "duplicate", "list"],
)
def test_bad_file_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path, text)
    message = error_of(file)
    for part in [str(file), *parts]:
        assert part in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such config file"
    extending = write(tmp_path, "extends: none.yaml\n" + GOOD)
    assert error_of(extending) == f"{tmp_path / 'none.yaml'}: no such config file"


def test_extends_cycle_is_named(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    message = error_of(write(tmp_path, "extends: a.yaml\n" + GOOD))
    for part in ("extends itself", "run.yaml", "a.yaml", "b.yaml"):
        assert part in message


# What needs the model's shape.


def with_model(directory: Path, shape: dict[str, int], *overrides: str) -> Config:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))
    return load_config(write(directory, GOOD), [f"model.path={model}", *overrides])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiny_model_takes_tensor_parallelism(tmp_path: Path, tiny_model_dir: Path, size: int) -> None:
    overrides = [f"model.path={tiny_model_dir}", f"rollout.tensor_parallel_size={size}"]
    validate_model(load_config(write(tmp_path, GOOD), overrides))


def test_tensor_parallelism_must_divide_the_heads(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = with_model(tmp_path, shape, "rollout.tensor_parallel_size=3")
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size=3 .*num_attention_heads=14.*; use 1, 2, 14$"):
        validate_model(config)


def test_tensor_parallelism_of_every_kind_must_divide_the_heads(tmp_path: Path) -> None:
    config = with_model(tmp_path, {"num_attention_heads": 4}, "rollout.extra_kinds.big.tensor_parallel_size=3")
    with pytest.raises(ConfigError, match=r"rollout\.extra_kinds\.big\.tensor_parallel_size=3 .*; use 1, 2, 4"):
        validate_model(config)


def test_sequences_must_fit_the_context(tmp_path: Path) -> None:
    validate_model(with_model(tmp_path, {"num_attention_heads": 4, "max_position_embeddings": 1024}))
    config = with_model(tmp_path, {"num_attention_heads": 4, "max_position_embeddings": 1023})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens.* = 1024 exceeds .*max_position_embeddings=1023"):
        validate_model(config)


def test_a_hub_model_is_checked_once_its_config_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = load_config(write(tmp_path, GOOD), ["rollout.tensor_parallel_size=3"])
    validate_model(config)  # nothing is known of it yet, and nothing is asked of the hub
    revision = tmp_path / "models--some--model" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    (revision / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size=3 .*num_attention_heads=4.*; use 1, 2, 4"):
        validate_model(config)


def test_loading_a_tokenizer_fetches_the_models_config(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``rlhf train`` relies on to check a hub model before Ray starts."""
    from transformers import AutoConfig, AutoTokenizer

    asked = []
    load = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **kw: asked.append(args[0]) or load(*args, **kw))
    AutoTokenizer.from_pretrained(tiny_model_dir)
    assert asked == [tiny_model_dir]
