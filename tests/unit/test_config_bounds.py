"""Every number of the configuration has bounds: the schema is walked, and each number is set to what it must not be."""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from rlhf.bounds import Bounds, Section
from rlhf.config import (
    AutoscaleConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutConfig,
    SourceConfig,
    WorkerKindConfig,
)
from rlhf.errors import ConfigError
from rlhf.recipes import load_config
from rlhf.reward_config import PreferenceDataConfig, RewardTrainingConfig

RECIPE = Path(__file__).parents[2] / "conf" / "grpo_tiny.yaml"
Names = tuple[str | int, ...]

# Configurations in which every section, list and dictionary has something in it.
WHOLE = Config(
    model=ModelConfig(path="m"),
    learner=LearnerConfig(lora=LoraConfig()),
    data=DataConfig(mixture={"sums": SourceConfig("task:arithmetic")}),
    reward=RewardConfig(functions=[RewardFunctionConfig(path="f")], model=RewardModelConfig(path="r")),
    rollout=RolloutConfig(autoscale=AutoscaleConfig(), extra_kinds={"big": WorkerKindConfig(resources={"h100": 1})}),
)
EPISODES = Config(
    model=ModelConfig(path="m"),
    data=DataConfig(train="task:guess"),
    environment=EnvironmentConfig(max_context_tokens=2048, path="guess"),
)
REWARD_TRAINING = RewardTrainingConfig(model=ModelConfig(path="m"), data=PreferenceDataConfig(train="task:phrases"))


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in a configuration: the names that lead to it, the field that says what it is, its bounds, its type."""

    config: Config | RewardTrainingConfig
    names: Names
    field: str
    bounds: Bounds | None
    kind: type

    @property
    def key(self) -> str:
        parts = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in self.names)
        return "".join(parts).removeprefix(".")

    def __str__(self) -> str:
        return f"train-reward:{self.key}" if self.config is REWARD_TRAINING else self.key

    def next(self, bound: float, towards: float) -> float:
        """The number closest to a bound on that side."""
        return math.nextafter(bound, towards) if self.kind is float else bound + (1 if towards > 0 else -1)

    def set(self, value: float) -> None:
        """Builds the configuration with this value. Raises ConfigError."""
        replaced(self.config, self.names, value)


def replaced(part: Any, names: Names, value: float) -> Any:
    """A copy of a part of a configuration with one number in it changed."""
    if not names:
        return value
    name, rest = names[0], names[1:]
    if isinstance(part, list | tuple):
        return type(part)(replaced(m, rest, value) if i == name else m for i, m in enumerate(part))
    if isinstance(part, dict):
        return part | {name: replaced(part[name], rest, value)}
    assert isinstance(name, str)
    return dataclasses.replace(part, **{name: replaced(getattr(part, name), rest, value)})


def numbers(config: Config | RewardTrainingConfig, part: Any, names: Names = ()) -> Iterator[Number]:
    """All numbers in a dataclass of a configuration."""

    def walk(annotation: Any, value: Any, names: Names, field: str) -> Iterator[Number]:
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation in (int, float):
            yield Number(config, names, field, None, annotation)
        elif origin is Annotated:
            yield Number(config, names, field, annotation.__metadata__[0], args[0])
        elif NoneType in args:
            yield from walk(next(arg for arg in args if arg is not NoneType), value, names, field)
        elif dataclasses.is_dataclass(value):
            yield from numbers(config, value, names)
        elif origin is dict:
            for name, member in value.items():
                yield from walk(args[1], member, (*names, name), field)
        elif origin in (list, tuple):
            for index, member in enumerate(value):
                yield from walk(args[index if origin is tuple else 0], member, (*names, index), field)

    hints = get_type_hints(type(part), include_extras=True)
    for field in dataclasses.fields(part):
        where = f"{type(part).__name__}.{field.name}"
        yield from walk(hints[field.name], getattr(part, field.name), (*names, field.name), where)


NUMBERS = [
    *numbers(WHOLE, WHOLE),
    *numbers(EPISODES, EPISODES.environment, ("environment",)),
    *numbers(REWARD_TRAINING, REWARD_TRAINING),
]
EACH_NUMBER = pytest.mark.parametrize("number", NUMBERS, ids=str)


def annotations(schema: type, seen: set[type]) -> Iterator[tuple[str, Any]]:
    """The annotation of every field of every dataclass that a schema leads to, whatever its value."""
    if schema in seen:
        return
    seen.add(schema)
    hints = get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        yield f"{schema.__name__}.{field.name}", hints[field.name]
        for part in parts_of(hints[field.name]):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from annotations(part, seen)


def parts_of(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of; a number with its bounds is one part."""
    yield annotation
    if get_origin(annotation) is not Annotated:
        for arg in get_args(annotation):
            yield from parts_of(arg)


def unbounded(schema: type) -> list[str]:
    return [key for key, whole in annotations(schema, set()) if any(part in (int, float) for part in parts_of(whole))]


# The schema.


@pytest.mark.parametrize("schema", [Config, RewardTrainingConfig])
def test_every_number_has_bounds(schema: type) -> None:
    assert unbounded(schema) == []


@dataclasses.dataclass(frozen=True)
class Inner:
    plain: float = 0.0


@dataclasses.dataclass(frozen=True)
class Outer:
    bounded: Annotated[int, Bounds(min=1)] = 1
    pair: tuple[float, float] = (0.0, 0.0)
    maybe: int | None = None
    several: dict[str, Inner] = dataclasses.field(default_factory=dict)
    flag: bool = False
    name: str = ""


def test_a_number_without_bounds_is_found() -> None:
    """Guards the guard, in all the places where a number may stand."""
    assert unbounded(Outer) == ["Outer.pair", "Outer.maybe", "Inner.plain"]


def test_the_values_below_are_those_of_every_number_in_the_schema() -> None:
    fields = {
        key
        for schema in (Config, RewardTrainingConfig)
        for key, whole in annotations(schema, set())
        if any(get_origin(part) is Annotated for part in parts_of(whole))
    }
    assert {number.field for number in NUMBERS} == fields


@pytest.mark.parametrize("bounds", sorted({number.bounds for number in NUMBERS if number.bounds}, key=str), ids=str)
def test_an_end_has_one_bound_at_most(bounds: Bounds) -> None:
    assert bounds.min is None or bounds.above is None
    assert bounds.max is None or bounds.below is None
    assert not bounds.interval or (bounds.min, bounds.above) != (None, None) != (bounds.max, bounds.below)


# The interval of every number, as somebody else would write it down: what config.py says must not change unnoticed.
INTERVALS = {
    "[1, 2147483647]": """
        Config.num_steps DataConfig.eval_size DataConfig.eval_samples DataConfig.max_prompt_tokens
        AlgorithmConfig.prompts_per_step
        AlgorithmConfig.group_size AlgorithmConfig.num_epochs AlgorithmConfig.num_minibatches AlgorithmConfig.kl_horizon
        LearnerConfig.num_ranks LearnerConfig.micro_batch_tokens LearnerConfig.logits_chunk_tokens
        LearnerConfig.cpus_per_rank LoraConfig.r LoraConfig.alpha CriticConfig.num_ranks CriticConfig.micro_batch_tokens
        CriticConfig.logits_chunk_tokens CriticConfig.cpus_per_rank ReferenceConfig.num_ranks
        ReferenceConfig.micro_batch_tokens ReferenceConfig.cpus_per_rank RewardConfig.num_workers
        RewardModelConfig.num_ranks RewardModelConfig.max_tokens RewardModelConfig.micro_batch_tokens
        RewardModelConfig.cpus_per_rank AutoscaleConfig.min AutoscaleConfig.max AutoscaleConfig.patience_steps
        WorkerKindConfig.tensor_parallel_size WorkerKindConfig.max_num_seqs WorkerKindConfig.cpus_per_worker
        RolloutConfig.tensor_parallel_size RolloutConfig.max_completion_tokens RolloutConfig.cpu_kv_cache_mib
        RolloutConfig.max_num_seqs RolloutConfig.weight_bucket_mib RolloutConfig.cpus_per_worker CheckpointConfig.keep
        SamplingChecksConfig.logprob_every_steps TrackingConfig.completions_rows RewardTrainingConfig.num_epochs
        RewardTrainingConfig.batch_pairs PreferenceDataConfig.eval_size PreferenceDataConfig.max_tokens
        EnvironmentConfig.max_context_tokens EnvironmentConfig.max_turns EnvironmentConfig.num_workers
        EnvironmentConfig.episodes_per_worker
    """,
    "[0, 2147483647]": """
        Config.eval_every_steps AlgorithmConfig.dynamic_sampling_max_tries OptimizerConfig.warmup_steps
        CriticConfig.warmup_steps WorkerKindConfig.num_workers RolloutConfig.num_workers RolloutConfig.max_staleness
        CheckpointConfig.every_steps CheckpointConfig.max_restarts ChecksConfig.max_skipped_steps
        SamplingChecksConfig.max_skipped_steps SamplingChecksConfig.logprob_groups
        TrackingConfig.completions_every_steps RewardTrainingConfig.eval_every_steps
        LearnerConfig.checkpointed_layers CriticConfig.checkpointed_layers EnvironmentConfig.retries
    """,
    "[2, 2147483647]": "RolloutConfig.max_failures",
    "[-1, 2147483647]": "RolloutConfig.top_k",
    "[75, 2147483647]": "RayConfig.object_store_mib",
    "[0, 4294967295]": "Config.seed RewardTrainingConfig.seed",
    "[0, 3]": "LearnerConfig.zero_stage CriticConfig.zero_stage",
    "[0, 1]": "AlgorithmConfig.epsilon_low AlgorithmConfig.gamma AlgorithmConfig.lam RewardConfig.max_abstained",
    "(0, 1]": """
        AlgorithmConfig.top_entropy_quantile OptimizerConfig.learning_rate OptimizerConfig.eps RolloutConfig.top_p
    """,
    "[0, 1)": "OptimizerConfig.betas LoraConfig.dropout",
    "(0, 1)": """
        AlgorithmConfig.rollout_correction_floor AutoscaleConfig.wait_fraction AutoscaleConfig.idle_fraction
        WorkerKindConfig.gpu_memory_fraction RolloutConfig.gpu_memory_fraction
    """,
    "[0, inf)": """
        AlgorithmConfig.epsilon_high AlgorithmConfig.beta AlgorithmConfig.entropy_coef
        AlgorithmConfig.missing_eos_penalty OptimizerConfig.weight_decay RolloutConfig.eval_temperature
        SamplingChecksConfig.warn_logprob_difference SamplingChecksConfig.max_logprob_difference
        RewardTrainingConfig.center_coef
    """,
    "(0, inf)": """
        AlgorithmConfig.reward_clip AlgorithmConfig.kl_target AlgorithmConfig.value_clip OptimizerConfig.max_grad_norm
        WorkerKindConfig.resources PlacementConfig.gpu_memory_gib
    """,
    "[1, inf)": "AlgorithmConfig.rollout_correction_cap",
    "(1, inf)": "AlgorithmConfig.delta AlgorithmConfig.dual_clip",
    "[0.01, inf)": "RolloutConfig.temperature",
    "(0, 1000000000]": """
        RewardConfig.function_timeout_s PlacementConfig.timeout_s TimeoutConfig.start_s TimeoutConfig.generate_s
        TimeoutConfig.score_s TimeoutConfig.update_s TimeoutConfig.publish_s TimeoutConfig.worker_silence_s
        TimeoutConfig.checkpoint_s CheckpointConfig.grace_s EnvironmentConfig.step_timeout_s
    """,
    "(0, 1000000]": "SourceConfig.weight",
    "[-1000000, 1000000]": "RewardFunctionConfig.weight RewardModelConfig.weight",
    "[-1000000000, 1000000000]": "DataConfig.eval_pass_reward",
}


def interval(bounds: Bounds | None) -> str:
    assert bounds is not None
    low = f"({bounds.above}" if bounds.min is None else f"[{bounds.min}"
    high = f"{math.inf if bounds.below is None else bounds.below})" if bounds.max is None else f"{bounds.max}]"
    return f"{low}, {high}"


def test_every_number_has_the_bounds_written_down_here() -> None:
    expected = {(field, interval) for interval, fields in INTERVALS.items() for field in fields.split()}
    assert {(number.field, interval(number.bounds)) for number in NUMBERS} == expected


# The values.


@EACH_NUMBER
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(number: Number, value: float) -> None:
    assert_refused(number, value, "must be a finite number")


@EACH_NUMBER
def test_what_is_out_of_bounds_is_refused(number: Number) -> None:
    bounds = number.bounds
    assert bounds is not None
    smaller = None if bounds.min is None else number.next(bounds.min, -math.inf)
    larger = None if bounds.max is None else number.next(bounds.max, math.inf)
    for value in (smaller, bounds.above, larger, bounds.below):
        if value is not None:
            assert_refused(number, value, "must ")


def assert_refused(number: Number, value: float, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        number.set(value)
    message = str(caught.value)
    assert message.startswith(f"{number.key}={value} {reason}") and "\n" not in message


@pytest.mark.parametrize(
    ("bounds", "value", "complaint"),
    [
        (Bounds(above=3), 3, "must be greater than 3"),
        (Bounds(below=3, hint="use 2"), 3, "must be less than 3: use 2"),
        (Bounds(above=0, max=1, interval=True), 2, "must lie in (0, 1]"),
        (Bounds(min=0, below=1, interval=True), -1, "must lie in [0, 1)"),
        (Bounds(min=0, max=1), 1, None),
    ],
)
def test_the_violated_bound_is_named(bounds: Bounds, value: float, complaint: str | None) -> None:
    assert bounds.complaint(value) == complaint


def test_each_member_of_a_tuple_has_its_own_bounds_and_all_of_a_list_the_same() -> None:
    @dataclasses.dataclass(frozen=True)
    class Box(Section, key="box"):
        sides: tuple[Annotated[int, Bounds(min=1)], Annotated[int, Bounds(min=5)]]
        holes: list[Annotated[int, Bounds(min=1)]]

    Box((1, 5), [1, 1, 1])
    with pytest.raises(ConfigError, match=r"^box\.sides\[1\]=4 must be at least 5$"):
        Box((1, 4), [])
    with pytest.raises(ConfigError, match=r"^box\.holes\[2\]=0 must be at least 1$"):
        Box((1, 5), [1, 1, 0])


# Where a number at its bound contradicts another at its default: what the error says then.
CONTRADICTIONS = {
    "data.max_prompt_tokens=2147483647": "learner.micro_batch_tokens=8192 cannot hold one sequence",
    "train-reward:data.max_tokens=2147483647": "learner.micro_batch_tokens=8192 cannot hold one pair",
    "data.eval_samples=2147483647": "would be equal completions at rollout.eval_temperature=0",
    "algorithm.group_size=1": "nothing to compare within a group",
    "algorithm.num_minibatches=2147483647": "does not divide prompts_per_step x group_size",
    "algorithm.delta=1.0000000000000002": "must be greater than 1 + algorithm.epsilon_high = 1.2",
    "algorithm.kl_target=5e-324": "needs algorithm.name=ppo",
    "learner.micro_batch_tokens=1": "cannot hold one sequence",
    "learner.lora.r=2147483647": "vLLM samples with adapters of rank 512 at most",
    "learner.zero_stage=3": "which learner.lora leaves frozen",
    "train-reward:learner.micro_batch_tokens=1": "cannot hold one pair",
    "learner.optimizer.warmup_steps=2147483647": "exceeds the 100 optimiser steps",
    "critic.micro_batch_tokens=1": "cannot hold one sequence",
    "reference.micro_batch_tokens=1": "cannot hold one sequence",
    "reward.model.max_tokens=2147483647": "reward.model.micro_batch_tokens=16384 cannot hold one text",
    "reward.model.micro_batch_tokens=1": "cannot hold one text",
    "rollout.num_workers=0": "must lie between rollout.autoscale.min and .max",
    "rollout.num_workers=2147483647": "must lie between rollout.autoscale.min and .max",
    "rollout.autoscale.min=2147483647": "must be at least rollout.autoscale.min",
    "environment.max_context_tokens=1": "leaves no room after a prompt",
    "environment.max_context_tokens=2147483647": "learner.micro_batch_tokens=8192 cannot hold one sequence",
    "rollout.max_completion_tokens=2147483647": "learner.micro_batch_tokens=8192 cannot hold one sequence",
}


@EACH_NUMBER
def test_the_bounds_are_accepted_unless_another_key_contradicts(number: Number) -> None:
    bounds = number.bounds
    assert bounds is not None
    above = None if bounds.above is None else number.next(bounds.above, math.inf)
    below = None if bounds.below is None else number.next(bounds.below, -math.inf)
    for value in (bounds.min, above, below, bounds.max):
        if value is None:
            continue
        if expected := CONTRADICTIONS.get(f"{number}={value}"):
            with pytest.raises(ConfigError, match=re.escape(expected)):
                number.set(value)
        else:
            number.set(value)


# As they come from YAML.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.num_ranks=0", "learner.num_ranks=0 must be at least 1"),
        ("critic.num_ranks=-1", "critic.num_ranks=-1 must be at least 1"),
        ("critic.optimizer.eps=0", "critic.optimizer.eps=0.0 must be positive"),
        ("learner.optimizer.learning_rate=10", "learner.optimizer.learning_rate=10.0 must be at most 1"),
        ("learner.optimizer.betas=[0.9, nan]", "learner.optimizer.betas[1]=nan must be a finite number"),
        ("learner.optimizer.betas=[1, 0.9]", "learner.optimizer.betas[0]=1.0 must lie in [0, 1)"),
        ("learner.zero_stage=4", "learner.zero_stage=4 must lie in [0, 3]: use 0, 1, 2 or 3"),
        ("algorithm.entropy_coef=-0.1", "algorithm.entropy_coef=-0.1 must be at least 0"),
        ("algorithm.beta=.nan", "algorithm.beta=nan must be a finite number"),
        ("algorithm.lam=1e999", "algorithm.lam=inf must be a finite number"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip=1.0 must be greater than 1"),
        ("seed=4294967296", "seed=4294967296 must be at most 4294967295"),
        ("rollout.extra_kinds.big.resources.h100=-1", "rollout.extra_kinds.big.resources.h100=-1.0 must be positive"),
        ("reward.functions=[{path: f, weight: .inf}]", "reward.functions[0].weight=inf must be a finite number"),
        ("reward.model={path: r, num_ranks: 0}", "reward.model.num_ranks=0 must be at least 1"),
        (
            "rollout.autoscale.idle_fraction=1",
            "rollout.autoscale.idle_fraction=1.0 must lie between 0 and 1, exclusive",
        ),
        # what OmegaConf refuses before
        ("learner.num_ranks=2.5", "learner.num_ranks: Value '2.5' of type 'float' could not be converted to Integer"),
        ("learner.num_ranks=.inf", "learner.num_ranks: Value 'inf' of type 'float' could not be converted to Integer"),
        ("learner.num_ranks=true", "learner.num_ranks: Value 'True' of type 'bool' could not be converted to Integer"),
        ("algorithm.beta=true", "algorithm.beta: Value 'True' of type 'bool' could not be converted to Float"),
        ("algorithm.beta=null", "algorithm.beta: Incompatible value 'None' for field of type 'float'"),
    ],
)
def test_a_number_in_a_recipe_is_refused_by_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, [override])
    assert str(caught.value) == message


def test_bounds_change_nothing_about_what_omegaconf_takes() -> None:
    config = load_config(
        RECIPE,
        [
            *("algorithm.delta=null", "algorithm.gamma=1", "learner.optimizer.betas=[0, 0.5]", "learner.compile=0"),
            *("learner.zero_stage=1", "rollout.logprobs=1", "rollout.extra_kinds.big={resources: {h100: 2}}"),
        ],
    )
    assert config.algorithm.delta is None
    assert (config.algorithm.gamma, type(config.algorithm.gamma)) == (1.0, float)
    assert config.learner.optimizer.betas == (0.0, 0.5)
    assert (config.learner.compile, config.rollout.logprobs) == (False, True)
    assert config.rollout.extra_kinds["big"].resources == {"h100": 2.0}
