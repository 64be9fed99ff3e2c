"""Typed configuration: frozen dataclasses, validated on construction. ``rlhf.recipes`` reads them from YAML.

Every mistake that can be found without loading a model or starting Ray is reported here, in one line that names the
key. Every key of `rlhf train` is in this file, with its default; `rlhf train-reward` has some of its own in
``rlhf.reward_config``. A number's bounds are part of its type: one of the names below, or ``Bounds`` on the field.
"""

import math
from dataclasses import dataclass, field, fields, replace
from datetime import date
from typing import Annotated, Any, Literal, get_args

from omegaconf import MISSING

from rlhf.bounds import Bounds, Section
from rlhf.errors import ConfigError

INT32_MAX = 2**31 - 1  # token positions and weight versions are int32
MIN_TEMPERATURE = 0.01  # vLLM raises smaller positive temperatures to this

PositiveInt = Annotated[int, Bounds(min=1, max=INT32_MAX)]
NonNegativeInt = Annotated[int, Bounds(min=0, max=INT32_MAX)]
Seed = Annotated[int, Bounds(min=0, max=2**32 - 1)]  # vLLM seeds NumPy with it, which accepts 32 bits
PositiveFloat = Annotated[float, Bounds(above=0)]
NonNegativeFloat = Annotated[float, Bounds(min=0)]
Seconds = Annotated[float, Bounds(above=0, max=10**9)]  # 30 years; timers overflow beyond that
Fraction = Annotated[float, Bounds(min=0, max=1, interval=True)]
PositiveFraction = Annotated[float, Bounds(above=0, max=1, interval=True)]
OpenFraction = Annotated[float, Bounds(above=0, below=1, interval=True)]
DecayRate = Annotated[float, Bounds(min=0, below=1, interval=True)]
ClipRatio = Annotated[float, Bounds(above=1)]
Temperature = Annotated[
    float, Bounds(min=MIN_TEMPERATURE, hint="RL needs to explore, and vLLM raises smaller positive values to this")
]
Weight = Annotated[float, Bounds(min=-1_000_000, max=1_000_000, interval=True)]

AlgorithmName = Literal["grpo", "rloo", "reinforce_pp", "ppo"]


@dataclass(frozen=True)
class AlgorithmFacts:
    """What the rest of the code needs to know about an algorithm."""

    kl: Literal["loss", "reward"]  # where the KL to the reference is subtracted
    grouped: bool = True  # advantages compare the completions of one prompt
    critic: bool = False  # advantages and returns come from GAE over a value model
    scales_rewards: bool = False  # reads algorithm.scale_rewards


ALGORITHMS: dict[AlgorithmName, AlgorithmFacts] = {
    "grpo": AlgorithmFacts(kl="loss", scales_rewards=True),
    "rloo": AlgorithmFacts(kl="reward"),
    "reinforce_pp": AlgorithmFacts(kl="loss"),
    "ppo": AlgorithmFacts(kl="reward", grouped=False, critic=True),
}

DEFAULT_KIND = "default"  # the kind of rollout worker that rollout.num_workers counts


def kind_key(kind: str) -> str:
    """The key that holds the settings of a rollout worker kind."""
    return "rollout" if kind == DEFAULT_KIND else f"rollout.extra_kinds.{kind}"


def eval_key(name: str) -> str:
    """The key that holds the held-out source of this name."""
    return f"data.extra_eval.{name}" if name else "data.eval"


def train_key(name: str) -> str:
    """The key that holds the source of prompts of this name."""
    return f"data.mixture.{name}" if name else "data.train"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_date(key: str, value: str | None) -> None:
    """Rejects anything but None or a date as YYYY-MM-DD."""
    try:
        valid = value is None or date.fromisoformat(value).isoformat() == value
    except ValueError:
        valid = False
    require(valid, f"{key}={value} is not a date; write it as YYYY-MM-DD, such as 2026-01-31")


@dataclass(frozen=True)
class ModelConfig:
    """The policy's weights: a Hugging Face directory or hub id."""

    path: str = MISSING
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    trust_remote_code: bool = False  # of every model and tokenizer of the run

    def require_device(self, device: str) -> None:
        """Raises ConfigError if a device ('gpu', 'cpu', or 'auto': not known yet) does not support this dtype."""
        require(
            self.dtype != "float32" or device != "gpu",
            "model.dtype=float32 does not run on GPUs, where the attention kernel for packed sequences supports only "
            "16 bits; use model.dtype=auto, or placement.device=cpu",
        )


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of prompts."""

    path: str = MISSING
    # its share of the prompts is this, divided by the sum of all weights
    weight: Annotated[float, Bounds(above=0, max=1_000_000, interval=True)] = 1.0


@dataclass(frozen=True)
class DataConfig(Section, key="data"):
    """Prompts. A source is ``task:NAME``, a ``.jsonl`` or ``.csv`` file (both also ``.gz`` or ``.zst``), a ``.parquet``
    file, or a directory saved by ``datasets``."""

    train: str | None = None
    # in place of train: several sources by name, each with a weight; rows carry the name as column data_source
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    # a column of numbers: the first epoch over a source takes its rows in ascending order; later ones as shuffle says
    curriculum: str | None = None
    eval: str | None = None  # None: no evaluation
    extra_eval: dict[str, str] = field(default_factory=dict)  # more sources, by name: their metrics are eval/NAME/...
    eval_size: PositiveInt = 128  # at most this many held-out prompts of each source
    eval_samples: PositiveInt = 1  # completions per held-out prompt, at rollout.eval_temperature
    # pass@k: a completion passes with at least this reward; None: no pass@k
    eval_pass_reward: Annotated[float, Bounds(min=-(10**9), max=10**9, interval=True)] | None = None
    task_args: dict[str, Any] = field(default_factory=dict)  # for task:NAME, both splits
    prompt_column: str = "prompt"
    system_prompt: str | None = None  # prepended to chat prompts that have no system message
    max_prompt_tokens: PositiveInt = 512
    overlong_prompts: Literal["drop", "truncate"] = "drop"  # truncate keeps the last tokens
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    date: str | None = None  # YYYY-MM-DD, for templates that ask for today's date; null: the day the run started
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_date("data.date", self.date)
        require(
            self.train is None or not self.mixture,
            f"data.train={self.train} and data.mixture are both set; make that source one of data.mixture, and "
            "data.train null",
        )
        for key, metrics in {"extra_eval": "eval/NAME/...", "mixture": "reward/by_source/NAME"}.items():
            wrong = next((name for name in getattr(self, key) if not name or "/" in name), None)
            require(
                wrong is None,
                f"data.{key}: {wrong!r} names metrics {metrics}; use a name that is not empty, without a slash",
            )

    def train_sources(self) -> dict[str, SourceConfig]:
        """All sources of prompts to train on by name; '' is the name of ``train``."""
        return self.mixture if self.train is None else {"": SourceConfig(self.train)}

    def eval_sources(self) -> dict[str, str]:
        """All held-out sources by name; '' is the name of ``eval``."""
        return ({} if self.eval is None else {"": self.eval}) | self.extra_eval


@dataclass(frozen=True)
class AlgorithmConfig(Section, key="algorithm"):
    """What is optimised. Defaults are GRPO with DAPO's token-level normaliser, as in TRL."""

    name: AlgorithmName = "grpo"
    # rloo in an environment: a token's reward is the whole episode's, or only what follows its turn
    credit: Literal["episode", "turn"] = "episode"
    prompts_per_step: PositiveInt = 8
    group_size: PositiveInt = 8  # completions per prompt
    num_epochs: PositiveInt = 1
    num_minibatches: PositiveInt = 1  # optimiser steps per epoch
    # your own advantage estimator, package.module.function or path/to/file.py:function (docs/extending.md)
    advantage: str | None = None
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)  # passed on every call
    # your own per-token loss, in place of the clipped surrogate; loss_type still sets how tokens are weighted
    loss: str | None = None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)  # passed on every call
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon_low: Fraction = 0.2
    epsilon_high: NonNegativeFloat = 0.2  # with loss_type=cispo: the largest weight itself, above 1
    delta: ClipRatio | None = None  # two-sided clip: largest ratio where the advantage is negative
    dual_clip: ClipRatio | None = None  # the same bound, applied to the objective
    beta: NonNegativeFloat = 0.0  # weight of the KL to the reference; 0: no reference model is created
    kl_bias_correction: bool = True
    entropy_coef: NonNegativeFloat = 0.0
    mask_truncated_completions: bool = False
    # train on this fraction of tokens, those with the highest entropy
    top_entropy_quantile: Annotated[float, Bounds(above=0, max=1, interval=True, hint="1 trains on every token")] = 1.0
    # auto: token_truncate with rollout.max_staleness > 0 or learner.lora.publish=merged, else none
    rollout_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    rollout_correction_cap: Annotated[float, Bounds(min=1)] = 2.0  # larger ratios are truncated, or their tokens masked
    rollout_correction_floor: OpenFraction | None = None  # the same for smaller ratios; None: no bound
    # DAPO: replace zero-variance groups, at most this many batches' worth; 0: off
    dynamic_sampling_max_tries: NonNegativeInt = 0
    reward_clip: PositiveFloat | None = None  # clip rewards to [-c, c]
    # PPO only
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # per-token KL in the reward
    kl_target: PositiveFloat | None = None  # adaptive KL controller; None: beta is fixed
    kl_horizon: PositiveInt = 10_000  # in completions; smaller adapts faster
    whiten_advantages: bool = True
    value_clip: PositiveFloat = 0.2
    missing_eos_penalty: NonNegativeFloat | None = None  # subtracted from the reward of a truncated completion

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_loss()
        require(
            self.advantage is None or self.facts.grouped,
            f"algorithm.advantage={self.advantage} cannot replace the advantages of algorithm.name={self.name}, which "
            "come from GAE together with the critic's returns; unset it, or use algorithm.name=grpo",
        )
        require(
            not self.facts.grouped or self.group_size >= 2,
            f"algorithm.group_size={self.group_size} leaves {self.name} nothing to compare within a group; "
            "use at least 2, or algorithm.name=ppo",
        )
        require(
            self.credit == "episode" or (self.name == "rloo" and self.advantage is None),
            f"algorithm.credit={self.credit} compares what followed a turn with the same of others, unscaled; use it "
            "with algorithm.name=rloo, and without algorithm.advantage",
        )
        require(
            self.num_sequences % self.num_minibatches == 0,
            f"algorithm.num_minibatches={self.num_minibatches} does not divide prompts_per_step x group_size = "
            f"{self.num_sequences}",
        )
        require(
            self.dynamic_sampling_max_tries == 0 or self.facts.grouped,
            "algorithm.dynamic_sampling_max_tries needs groups; set it to 0 with algorithm.name=ppo",
        )
        require(
            self.kl_target is None or (self.facts.critic and self.beta > 0),
            "algorithm.kl_target adapts beta of the KL reward; it needs algorithm.name=ppo and algorithm.beta > 0",
        )
        # one step multiplies beta by at least 1 - 0.2 x num_sequences / kl_horizon (Ziegler et al. 2019)
        require(
            self.kl_target is None or 5 * self.kl_horizon > self.num_sequences,
            f"algorithm.kl_horizon={self.kl_horizon} lets algorithm.kl_target turn beta negative within a step of "
            f"{self.num_sequences} completions; use at least that many",
        )

    def _check_loss(self) -> None:
        require(
            self.loss_type != "rloo" or self.name == "rloo",
            f"algorithm.loss_type=rloo needs algorithm.name=rloo (it is {self.name})",
        )
        require(
            self.loss_type != "rloo" or self.importance_sampling_level == "token",
            "algorithm.loss_type=rloo always uses the ratio of whole sequences; leave "
            "algorithm.importance_sampling_level at token, or use another loss_type",
        )
        if self.loss is None:
            self._check_clip()

    def _check_clip(self) -> None:
        if self.loss_type == "cispo":
            require(
                self.epsilon_high > 1,
                f"algorithm.epsilon_high={self.epsilon_high} must be above 1 with loss_type=cispo, where it bounds the "
                "ratio itself; use 5, say",
            )
        else:
            require(
                self.delta is None or self.delta > 1 + self.epsilon_high,
                f"algorithm.delta={self.delta} must be greater than 1 + algorithm.epsilon_high = "
                f"{1 + self.epsilon_high:g}, PPO's own upper bound on the ratio; use 4, say",
            )

    @property
    def num_sequences(self) -> int:
        """Completions per training step."""
        return self.prompts_per_step * self.group_size

    @property
    def facts(self) -> AlgorithmFacts:
        """The facts about the algorithm ``name``."""
        return ALGORITHMS[self.name]

    @property
    def steps_per_update(self) -> int:
        """Optimiser steps per training step."""
        return self.num_epochs * self.num_minibatches


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule, counted in optimiser steps."""

    learning_rate: Annotated[float, Bounds(above=0, max=1)] = 1e-6
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    eps: Annotated[float, Bounds(above=0, max=1)] = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: Annotated[float, Bounds(above=0, hint="use a large number to disable clipping")] = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # optimiser steps


ALL_LINEAR = "all-linear"  # in place of the names of all linear layers but the head
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al. 2021, arXiv 2106.09685), with PEFT's meanings."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32  # the product of the two matrices counts alpha / r times
    dropout: DecayRate = 0.0
    # names of linear layers, such as q_proj; all-linear: every one but the head
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    # what rollout workers are sent, and sample with. adapter: adapters, beside frozen weights that are sent once;
    # merged: their sum, rounded to the weights' dtype, which loses small updates but decodes as fast as without any
    publish: Literal["adapter", "merged"] = "adapter"
    # QLoRA: the frozen weights of all linear layers but the head are rounded to 4 bits (NF4), and it is these that
    # everybody samples from, trains on and compares with
    load_in_4bit: bool = False


Offload = Literal["none", "idle", "optimizer", "all"]
OFFLOADS = get_args(Offload)  # each takes less of the GPU than the one before, and more time


@dataclass(frozen=True)
class LearnerConfig(Section, key="learner"):
    """A DeepSpeed engine: the policy's; the critic's has the same fields."""

    num_ranks: PositiveInt = 1
    # train adapters instead of the weights, which then need neither gradients nor optimiser state; null: the weights
    lora: LoraConfig | None = None
    # null: the memory plan decides (`rlhf plan`): the lowest of 1, 2 and 3 that lets the fewest layers be checkpointed
    zero_stage: Annotated[int, Bounds(min=0, max=3, interval=True, hint="use 0, 1, 2 or 3")] | None = None
    # what is in host memory. none: nothing; idle: optimizer state, while vLLM generates; optimizer: always, and the CPU
    # computes optimizer steps; all: also the weights, of which the GPU holds a few layers at a time (zero_stage 3);
    # null: the memory plan takes the first of none, idle and optimizer that fits
    offload: Offload | None = None
    # gradient checkpointing: how many decoder layers compute their activations again instead of keeping them; null: as
    # few as the memory plan (`rlhf plan`) has room for, 0 on CPU
    checkpointed_layers: NonNegativeInt | None = None
    # torch.compile the decoder layers, on a GPU also those of reference and reward model; null: on a GPU
    compile: bool | None = None
    # accumulate gradients of micro-batches in float32, even of a bfloat16 model; null: if the memory plan has room,
    # and on CPU. DeepSpeed cannot at zero_stage 0, or at 1 and 2 with offload=optimizer
    float32_gradients: bool | None = None
    micro_batch_tokens: PositiveInt = 8192  # token budget of one packed forward
    logits_chunk_tokens: PositiveInt = 1024  # the LM head runs on this many tokens at once
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cpus_per_rank: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.cpu_optimizer or self.zero_stage != 0,
            f"{self.KEY}.offload={self.offload} needs {self.KEY}.zero_stage 1, 2 or 3",
        )
        require(
            self.offload != "all" or (self.zero_stage in (3, None) and self.lora is None),
            f"{self.KEY}.offload=all is possible only with {self.KEY}.zero_stage=3 and without {self.KEY}.lora; use "
            "offload=optimizer",
        )
        require(
            self.lora is None or self.zero_stage != 3,
            f"{self.KEY}.zero_stage=3 shards weights, which {self.KEY}.lora leaves frozen and whole on every rank; use "
            "zero_stage=null, or 1 or 2",
        )
        require(
            self.lora is None or bool(self.lora.target_modules),
            f"{self.KEY}.lora.target_modules is empty, so nothing would be trained; use [all-linear]",
        )

    @property
    def adapter_apart(self) -> LoraConfig | None:
        """The adapter that rollout workers sample with beside the weights, if it is not merged into them."""
        return self.lora if self.lora is not None and self.lora.publish == "adapter" else None

    @property
    def cpu_optimizer(self) -> bool:
        """Whether the CPU computes optimiser steps, next to their state."""
        return self.offload in ("optimizer", "all")

    @property
    def can_sum_in_float32(self) -> bool:
        """Whether DeepSpeed can accumulate a bfloat16 model's gradients in float32."""
        return self.zero_stage in (3, None) or (self.zero_stage > 0 and not self.cpu_optimizer)


HOUSE_KEYS = ("num_ranks", "cpus_per_rank", "checkpointed_layers", "compile")  # the learner's, for who stands on it


@dataclass(frozen=True)
class CriticConfig(LearnerConfig, key="critic"):
    """PPO's value model: a learner with a scalar head."""

    path: str | None = None  # backbone; None: model.path. A sequence-classification model keeps its head
    # with learner.lora, critic.lora and no path, the critic is adapters and a value head on the learner's frozen
    # weights, in its processes; true: on actors of its own, with weights of its own
    own_base: bool = False
    warmup_steps: NonNegativeInt = 0  # training steps in which only the critic learns
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=5e-6))


@dataclass(frozen=True)
class ReferenceConfig(Section, key="reference"):
    """The frozen policy for the KL; created only if algorithm.beta > 0. With learner.lora and without a path, it is the
    learner without its adapters, and the other keys are not read."""

    num_ranks: PositiveInt = 1
    path: str | None = None  # None: model.path
    micro_batch_tokens: PositiveInt = 16384
    cpus_per_rank: PositiveInt = 1


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One reward function: a built-in name, ``package.module.function`` or ``path/to/file.py:function``."""

    path: str = MISSING
    weight: Weight = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed on every call


@dataclass(frozen=True)
class RewardModelConfig(Section, key="reward.model"):
    """A Hugging Face sequence-classification directory with its own tokenizer and chat template."""

    path: str = MISSING
    weight: Weight = 1.0
    random_head: bool = False  # give a causal LM a random score head: for benchmarks only
    num_ranks: PositiveInt = 1
    max_tokens: PositiveInt = 2048  # per text; the end is kept
    micro_batch_tokens: PositiveInt = 16384
    cpus_per_rank: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.micro_batch_tokens > self.max_tokens,
            f"reward.model.micro_batch_tokens={self.micro_batch_tokens} cannot hold one text of "
            f"reward.model.max_tokens + 1 = {self.max_tokens + 1} tokens; use at least that, or lower max_tokens",
        )


@dataclass(frozen=True)
class RewardConfig(Section, key="reward"):
    """Reward functions run on ``num_workers`` actors, the model on its own. The reward is their weighted sum."""

    num_workers: PositiveInt = 1
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    model: RewardModelConfig | None = None
    # the run ends if a larger share of a step's completions gets no reward
    max_abstained: Annotated[float, Bounds(min=0, max=1, interval=True, hint="it is a fraction")] = 0.5
    # per call, on a group or on a worker's share of the held-out completions; async calls run concurrently, and the
    # time that one waits for others counts
    function_timeout_s: Seconds = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = [source.weight for source in (*self.functions, *([self.model] if self.model else []))]
        require(
            not weights or any(weights),
            "reward: every weight is 0, so every reward would be 0; give one of reward.functions or reward.model "
            "a nonzero weight",
        )


@dataclass(frozen=True)
class EnvironmentConfig(Section, key="environment"):
    """Episodes of several turns with what you write, or with tools alone, on ``num_workers`` actors (CPU only)."""

    max_context_tokens: PositiveInt  # of an episode: prompt, replies and all that is said between them
    # a coroutine that talks to the model: guess, calculator, package.module.function or path/to/file.py:function
    path: str | None = None
    tools: list[str] = field(default_factory=list)  # typed functions the model may call, each like path
    max_turns: PositiveInt = 8
    num_workers: PositiveInt = 1
    episodes_per_worker: PositiveInt = 256  # at once
    step_timeout_s: Seconds = 60.0  # for what happens between two replies, tool calls included
    retries: NonNegativeInt = 2  # of an episode that failed, each from its beginning
    # after that: leave it out of the batch's baselines and loss (reward.max_abstained bounds how many), or end the run
    on_failure: Literal["skip", "fail"] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.path is not None or bool(self.tools),
            "environment: neither path nor tools is set; name what the model talks to, or what it may call",
        )


@dataclass(frozen=True)
class AutoscaleConfig(Section, key="rollout.autoscale"):
    """Bounds and thresholds for autoscaling the pool. A step's load is judged when its weights are published."""

    min: PositiveInt = 1  # workers of the default kind
    max: PositiveInt = 1
    wait_fraction: OpenFraction = 0.25  # grow if the learner waits for samples for more than this fraction of a step
    idle_fraction: OpenFraction = 0.5  # shrink if workers are idle for more than this fraction of their time
    patience_steps: PositiveInt = 3  # this many steps in a row must agree

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max >= self.min,
            f"rollout.autoscale.max={self.max} must be at least rollout.autoscale.min={self.min}",
        )


@dataclass(frozen=True)
class WorkerKindConfig:
    """Additional rollout workers that differ from the default kind. None: the value from ``rollout``."""

    num_workers: NonNegativeInt = 1
    tensor_parallel_size: PositiveInt | None = None
    gpu_memory_fraction: OpenFraction | None = None
    max_num_seqs: PositiveInt | None = None
    cpus_per_worker: PositiveInt | None = None
    # Ray resources, e.g. {"accelerator_type:A100": 0.001}
    resources: dict[str, PositiveFloat] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig(Section, key="rollout"):
    """The pool of vLLM workers and how they sample."""

    num_workers: NonNegativeInt = 1
    extra_kinds: dict[str, WorkerKindConfig] = field(default_factory=dict)  # additional workers, by kind
    autoscale: AutoscaleConfig | None = None  # None: only `rlhf scale` changes num_workers
    # after this many in a row fail before they sample anything, the pool goes on with the workers it has; the run ends
    # if it has none, or if as many fail on the same group
    max_failures: Annotated[int, Bounds(min=2, max=INT32_MAX)] = 5
    tensor_parallel_size: PositiveInt = 1
    max_completion_tokens: PositiveInt = 512
    temperature: Temperature = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Annotated[int, Bounds(min=-1, max=INT32_MAX)] = -1  # -1: all
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    eval_temperature: NonNegativeFloat = 0.0  # 0: greedy
    seed_requests: bool = True  # one RNG per completion: the same samples with any number of workers
    max_staleness: NonNegativeInt = 0  # weight versions that a sample may lag behind; 0 is strictly on-policy
    logprobs: bool = False  # ask vLLM for log-probabilities even when no correction uses them
    gpu_memory_fraction: OpenFraction = 0.85  # share of one GPU's memory for weights and KV cache of all its workers
    cpu_kv_cache_mib: PositiveInt = 128
    max_num_seqs: PositiveInt = 256
    enforce_eager: bool = False  # no CUDA graphs; CPU is always eager
    weight_bucket_mib: PositiveInt = 256  # bound on the extra memory of a weight publish
    engine_args: dict[str, Any] = field(default_factory=dict)  # passed to vLLM unchanged
    cpus_per_worker: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k != 0, "rollout.top_k=0 must be positive, or -1 for all tokens")
        require(
            self.eval_temperature == 0 or self.eval_temperature >= MIN_TEMPERATURE,
            f"rollout.eval_temperature={self.eval_temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        require("" not in self.stop, "rollout.stop contains an empty string, which would stop at once; remove it")
        scale = self.autoscale
        require(
            scale is None or scale.min <= self.num_workers <= scale.max,
            f"rollout.num_workers={self.num_workers}, the initial size, must lie between rollout.autoscale.min and "
            ".max",
        )
        require(
            DEFAULT_KIND not in self.extra_kinds,
            f"rollout.extra_kinds.{DEFAULT_KIND} is the kind that rollout.num_workers counts; choose another name",
        )
        for name, kind in self.extra_kinds.items():
            own = sorted({"CPU", "GPU"} & kind.resources.keys())
            require(
                not own,
                f"{kind_key(name)}.resources contains {' and '.join(own)}, which cpus_per_worker and "
                "tensor_parallel_size set; remove it",
            )

    def kinds(self) -> "dict[str, tuple[RolloutConfig, dict[str, float]]]":
        """Every worker kind: its full settings, and the Ray resources it needs in addition to CPUs and GPUs."""
        kinds: dict[str, tuple[RolloutConfig, dict[str, float]]] = {DEFAULT_KIND: (self, {})}
        for name, kind in self.extra_kinds.items():
            own = {k: v for k, v in vars(kind).items() if k != "resources" and v is not None}
            kinds[name] = (replace(self, extra_kinds={}, autoscale=None, **own), kind.resources)
        return kinds


@dataclass(frozen=True)
class PlacementConfig(Section, key="placement"):
    """Where the roles run. On CPU the same keys place CPU bundles."""

    mode: Literal["separate", "colocate"] = "separate"
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: gpu if the cluster has any
    timeout_s: Seconds = 120.0  # for the cluster to grant the bundles
    # GiB of each GPU that this run may take, where others use it too or a smaller one is to be imitated; null: all
    gpu_memory_gib: PositiveFloat | None = None

    @property
    def colocated(self) -> bool:
        """Whether the other roles share the learner's GPUs."""
        return self.mode == "colocate"


@dataclass(frozen=True)
class TimeoutConfig(Section, key="timeouts"):
    """Deadlines for every wait, in seconds."""

    start_s: Seconds = 900.0
    generate_s: Seconds = 1800.0
    score_s: Seconds = 1800.0
    update_s: Seconds = 3600.0
    publish_s: Seconds = 600.0
    worker_silence_s: Seconds = 300.0  # a rollout worker whose engine makes no progress for this long is replaced
    checkpoint_s: Seconds = 1800.0


@dataclass(frozen=True)
class CheckpointConfig(Section, key="checkpoint"):
    """How often a resumable checkpoint is written, and how many are kept."""

    # null: after the first step to end ten minutes after the one before; 0: only at the end, and when stopped
    every_steps: NonNegativeInt | None = None
    keep: PositiveInt = 2
    resume: str = "auto"  # auto: the newest complete one in the run directory; none; or a checkpoint directory
    save_final_model: bool = True
    # a metric of eval.jsonl, such as eval/reward: the model with its highest value is kept in the run directory's best/
    keep_best: str | None = None
    max_restarts: NonNegativeInt = 2  # in a row without a new checkpoint, after a role was lost
    grace_s: Seconds = 300.0  # after SIGTERM: to finish the step and to save; less than the scheduler gives


@dataclass(frozen=True)
class ChecksConfig(Section, key="checks"):
    """Checks that a run makes on itself, so that nothing goes wrong silently."""

    probe: bool = True  # at startup, compare the packed forward pass with the model's own
    # on a NaN or infinity in a loss, gradient, log-probability, value or advantage. stop: end the run; nothing of that
    # training step is published or saved. skip: skip the affected optimiser steps
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped_steps: NonNegativeInt = 3  # training steps in a row with anything skipped; one more ends the run


@dataclass(frozen=True)
class SamplingChecksConfig(ChecksConfig, key="checks"):
    """Checks that rollout workers sample from the learner's weights, by comparing log-probabilities.

    The bounds are on the mean absolute difference over the compared tokens, in nats. null: set by model.dtype.
    """

    # groups sampled with log-probabilities in a compared step; 0: no comparison
    logprob_groups: NonNegativeInt = 1
    logprob_every_steps: PositiveInt = 8  # the first step is compared, then one in this many, a little slower
    warn_logprob_difference: NonNegativeFloat | None = None  # null: 1e-3 in float32, 0.1 in bfloat16
    # a larger difference ends the run; null: 1e-2 in float32, 0.5 in bfloat16
    max_logprob_difference: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        warn, stop = self.warn_logprob_difference, self.max_logprob_difference
        require(
            warn is None or stop is None or warn <= stop,
            f"checks.warn_logprob_difference={warn} must be at most checks.max_logprob_difference={stop}, or the run "
            "ends before it warns",
        )


@dataclass(frozen=True)
class TrackingConfig(Section, key="tracking"):
    """What a run records in addition to metrics.jsonl and summary.json, which are always written."""

    tensorboard: bool = True
    wandb_project: str | None = None
    completions_every_steps: NonNegativeInt = 5  # 0: never
    completions_rows: PositiveInt = 4
    progress: bool = True


@dataclass(frozen=True)
class RayConfig(Section, key="ray"):
    """Which cluster to use. address None: $RAY_ADDRESS, else a local one started for this run."""

    address: str | None = None
    object_store_mib: Annotated[int, Bounds(min=75, max=INT32_MAX)] = 1024  # local cluster only; Ray needs 75


@dataclass(frozen=True)
class Config(Section, key=""):
    """A whole run."""

    name: str = "run"
    run_dir: str = "runs/${name}"
    seed: Seed = 0
    num_steps: PositiveInt = 100
    eval_every_steps: NonNegativeInt = 0  # 0: only before the first and after the last step
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checks: SamplingChecksConfig = field(default_factory=SamplingChecksConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.require_device(self.placement.device)
        require(
            bool(self.data.train_sources()),
            "data.train: no value given, and there is no default; set it, or data.mixture for several sources",
        )
        require(
            self.rollout.num_workers > 0,
            f"rollout.num_workers={self.rollout.num_workers} must be at least 1: a run starts with default workers",
        )
        if self.algorithm.rollout_correction == "auto":
            merges = self.learner.lora is not None and self.learner.adapter_apart is None  # and rounds the sum
            correction = "token_truncate" if self.rollout.max_staleness > 0 or merges else "none"
            object.__setattr__(self, "algorithm", replace(self.algorithm, rollout_correction=correction))
        from_environment = self.environment is not None and self.environment.path is not None
        require(
            bool(self.reward.functions) or self.reward.model is not None or from_environment,
            "reward: nothing gives a reward; set reward.functions (e.g. [{path: exact_match}]) or reward.model.path",
        )
        adapter = self.learner.adapter_apart
        require(
            adapter is None or adapter.r <= ADAPTER_RANKS[-1],
            f"learner.lora.r={adapter.r if adapter else 0}: vLLM samples with adapters of rank {ADAPTER_RANKS[-1]} at "
            "most; lower it, or set learner.lora.publish=merged",
        )
        if self.critic_on_base:
            self._check_base()
            shared = {key: getattr(self.learner, key) for key in HOUSE_KEYS}
            object.__setattr__(self, "critic", replace(self.critic, **shared))
        self._check_environment()
        for role in ("learner", "critic", "reference"):
            budget = getattr(self, role).micro_batch_tokens
            require(
                budget >= self.max_sequence_tokens,
                f"{role}.micro_batch_tokens={budget} cannot hold one sequence of {self.longest_sequence}; "
                "use at least that",
            )
        self._check_completions()
        self._check_warmup()
        self._check_evaluation()
        self._check_colocation()

    def _check_base(self) -> None:
        """Raises ConfigError if the critic asks for what a base shared with the learner cannot give."""
        defaults = {setting.name: setting.default for setting in fields(CriticConfig)}
        for key in HOUSE_KEYS:
            own = getattr(self.critic, key)
            require(
                own in (defaults[key], getattr(self.learner, key)),
                f"critic.{key}={own}: the critic stands on the learner's frozen weights, in its processes, where "
                f"learner.{key}={getattr(self.learner, key)}; leave it out, or set critic.own_base=true",
            )
        assert self.learner.lora and self.critic.lora, "both are adapters"
        require(
            self.learner.lora.load_in_4bit == self.critic.lora.load_in_4bit,
            f"critic.lora.load_in_4bit={str(self.critic.lora.load_in_4bit).lower()}: the critic stands on the "
            "learner's frozen weights, of which learner.lora.load_in_4bit says otherwise; make them equal, or set "
            "critic.own_base=true",
        )

    def _check_completions(self) -> None:
        require(
            not (self.rollout.ignore_eos and self.algorithm.mask_truncated_completions) or bool(self.rollout.stop),
            "rollout.ignore_eos=true lets every completion run to its limit, and algorithm.mask_truncated_completions="
            "true excludes those from training; set one of the two to false",
        )

    def _check_warmup(self) -> None:
        alone = self.critic.warmup_steps if self.uses_critic else 0
        require(
            alone < self.num_steps,
            f"critic.warmup_steps={alone} leaves none of num_steps={self.num_steps} to the policy; use at most "
            f"{self.num_steps - 1}",
        )
        steps = {"learner": self.num_steps - alone} | ({"critic": self.num_steps} if self.uses_critic else {})
        for role, count in steps.items():
            warmup, total = getattr(self, role).optimizer.warmup_steps, count * self.algorithm.steps_per_update
            require(
                warmup <= total,
                f"{role}.optimizer.warmup_steps={warmup} exceeds the {total} optimiser steps that the {role} takes in "
                f"this run; use at most {total}, or raise num_steps",
            )

    def _check_evaluation(self) -> None:
        require(
            self.data.eval_samples == 1 or self.rollout.eval_temperature > 0,
            f"data.eval_samples={self.data.eval_samples} would be equal completions at rollout.eval_temperature=0 "
            "(greedy); raise that, to 1.0 say, or use data.eval_samples=1",
        )
        require(
            self.checkpoint.keep_best is None or bool(self.data.eval_sources()),
            f"checkpoint.keep_best={self.checkpoint.keep_best} needs evaluations; set data.eval, or unset it",
        )

    def _check_colocation(self) -> None:
        for key, wanted in {
            "rollout.max_staleness > 0": self.rollout.max_staleness > 0,
            "rollout.autoscale": self.rollout.autoscale is not None,
            "rollout.extra_kinds": bool(self.rollout.extra_kinds),
        }.items():
            require(
                not (self.placement.colocated and wanted),
                f"{key} needs rollout workers with GPUs of their own, but placement.mode=colocate shares the "
                "learner's; use placement.mode=separate",
            )
        require(
            not self.placement.colocated or self._fits_shared_bundles(),
            f"placement.mode=colocate puts rollout workers on the learner's {self.learner.num_ranks} ranks, but "
            f"rollout.num_workers={self.rollout.num_workers} x rollout.tensor_parallel_size="
            f"{self.rollout.tensor_parallel_size} does not fit them; use at most as many, a multiple of them with "
            "tensor_parallel_size=1, another learner.num_ranks, or placement.mode=separate",
        )

        sections = {
            "critic": self.critic if self.uses_critic else None,
            "reference": self.reference if self.uses_reference else None,
            "reward.model": self.reward.model,
        }
        for role, section in sections.items():
            ranks = section.num_ranks if section else 0
            require(
                not self.placement.colocated or ranks <= self.num_shared_bundles,
                f"{role}.num_ranks={ranks}: with placement.mode=colocate a GPU has room for one of them, and there are "
                f"learner.num_ranks={self.num_shared_bundles}; use at most that, or placement.mode=separate",
            )

    def _check_environment(self) -> None:
        environment = self.environment
        if environment is None:
            require(self.algorithm.credit == "episode", "algorithm.credit=turn: there are no turns; set environment")
            return
        require(
            environment.max_context_tokens > self.data.max_prompt_tokens,
            f"environment.max_context_tokens={environment.max_context_tokens} leaves no room after a prompt of "
            f"data.max_prompt_tokens={self.data.max_prompt_tokens}; raise it",
        )
        for key in ("stop", "ignore_eos"):
            require(
                not getattr(self.rollout, key),
                f"rollout.{key}: in an environment a reply ends with the model's own end of turn; unset it",
            )

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest completion, or an environment's longest context."""
        if self.environment is not None:
            return self.environment.max_context_tokens
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def longest_sequence(self) -> str:
        """``max_sequence_tokens`` with the keys that set it, for messages."""
        keys = "data.max_prompt_tokens + rollout.max_completion_tokens"
        if self.environment is not None:
            keys = "environment.max_context_tokens"
        return f"{keys} = {self.max_sequence_tokens}"

    @property
    def num_shared_bundles(self) -> int:
        """Bundles of the shared placement group in colocate mode: one per learner rank."""
        return self.learner.num_ranks

    def _fits_shared_bundles(self) -> bool:
        bundles, tp = self.num_shared_bundles, self.rollout.tensor_parallel_size
        wanted = self.rollout.num_workers * tp
        return bundles % tp == 0 and (wanted <= bundles or (tp == 1 and wanted % bundles == 0))

    @property
    def rollout_workers_per_gpu(self) -> int:
        """More than one only in colocate mode, where several small engines hide each other's CPU work."""
        return max(1, self.rollout.num_workers // self.num_shared_bundles) if self.placement.colocated else 1

    @property
    def rollout_share(self) -> int:
        """Completions per worker in a training step, if they share its groups evenly."""
        return math.ceil(self.algorithm.prompts_per_step / self.rollout.num_workers) * self.algorithm.group_size

    @property
    def rollout_cache_tokens(self) -> int | None:
        """Tokens that an engine's KV cache must hold if it shares its GPU; None if it may use all memory left."""
        return self.rollout.max_num_seqs * self.max_sequence_tokens if self.placement.colocated else None

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is created at all."""
        return self.algorithm.beta > 0 and not self.base_is_reference

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the policy without its adapters, which the learner holds already."""
        return self.algorithm.beta > 0 and self.learner.lora is not None and self.reference.path is None

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is created at all."""
        return self.algorithm.facts.critic

    @property
    def critic_on_base(self) -> bool:
        """Whether the critic stands on the learner's frozen weights, in its processes."""
        critic, adapters = self.critic, (self.learner.lora, self.critic.lora)
        return self.uses_critic and all(adapters) and critic.path is None and not critic.own_base

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether vLLM is asked for log-probabilities."""
        return self.rollout.logprobs or self.algorithm.rollout_correction not in ("auto", "none")
