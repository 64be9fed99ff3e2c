"""Typed configuration: frozen dataclasses, validated as they are built. ``rlhf.recipes`` reads them from YAML.

Everything that can be known to be wrong without loading a model or starting Ray is wrong here, in one line that names
the key. Every key there is stands in this file, with its default.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from omegaconf import MISSING

from rlhf.errors import ConfigError

GROUPED_ALGORITHMS = ("grpo", "rloo", "reinforce_pp")
DEFAULT_KIND = "default"  # the kind of rollout worker that rollout.num_workers counts


def kind_key(kind: str) -> str:
    """Where the settings of a kind of rollout worker stand."""
    return "rollout" if kind == DEFAULT_KIND else f"rollout.extra_kinds.{kind}"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def at_least(section: str, minimum: float, **values: float) -> None:
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        require(value >= minimum, f"{name}={value} must be at least {minimum}")


@dataclass(frozen=True)
class ModelConfig:
    """The policy's weights: a Hugging Face directory or hub id."""

    path: str = MISSING
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DataConfig:
    """Prompts. A source is ``task:NAME``, a ``.jsonl`` or ``.parquet`` file, or a directory saved by ``datasets``."""

    train: str = MISSING
    eval: str | None = None  # None: no evaluation
    eval_size: int = 128  # at most so many held-out prompts
    task_args: dict[str, Any] = field(default_factory=dict)  # for task:NAME, both splits
    prompt_column: str = "prompt"
    system_prompt: str | None = None  # prepended to chat prompts that have no system message
    max_prompt_tokens: int = 512
    overlong_prompts: Literal["drop", "truncate"] = "drop"  # truncate keeps the last tokens
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    date: str | None = None  # YYYY-MM-DD, for templates that ask for today's; null: the day on which the run began
    shuffle: bool = True

    def __post_init__(self) -> None:
        at_least("data", 1, max_prompt_tokens=self.max_prompt_tokens, eval_size=self.eval_size)


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimised. Defaults are GRPO with DAPO's token-level normaliser, as in TRL."""

    name: Literal["grpo", "rloo", "reinforce_pp", "ppo"] = "grpo"
    prompts_per_step: int = 8
    group_size: int = 8  # completions per prompt
    num_epochs: int = 1
    num_minibatches: int = 1  # optimiser steps per epoch
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None  # two-sided clip: upper bound of the ratio where the advantage is negative
    dual_clip: float | None = None
    beta: float = 0.0  # weight of the KL to the reference; 0: no reference model is created
    kl_bias_correction: bool = True
    entropy_coef: float = 0.0
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0  # train on this fraction of tokens, those of highest entropy
    # auto: token_truncate with rollout.max_staleness > 0, else none
    rollout_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    rollout_correction_cap: float = 2.0  # ratios above are truncated, or their tokens masked
    rollout_correction_floor: float | None = None  # the same below; None: no bound
    dynamic_sampling_max_tries: int = 0  # DAPO: replace zero-variance groups, at most so many batches' worth; 0: off
    reward_clip: float | None = None  # clip rewards to [-c, c]
    # PPO only
    gamma: float = 1.0
    lam: float = 0.95
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # per-token KL in the reward
    kl_target: float | None = None  # adaptive KL controller; None: beta is fixed
    kl_horizon: int = 10_000
    whiten_advantages: bool = True
    value_clip: float = 0.2
    missing_eos_penalty: float | None = None

    def __post_init__(self) -> None:
        at_least(
            "algorithm",
            1,
            prompts_per_step=self.prompts_per_step,
            group_size=self.group_size,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
        )
        at_least("algorithm", 0, beta=self.beta, epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high)
        require(
            self.name not in GROUPED_ALGORITHMS or self.group_size >= 2,
            f"algorithm.group_size={self.group_size} leaves {self.name} nothing to compare within a group; "
            "use at least 2, or algorithm.name=ppo",
        )
        require(
            self.loss_type != "rloo" or self.name == "rloo",
            f"algorithm.loss_type=rloo needs algorithm.name=rloo (it is {self.name})",
        )
        require(
            self.num_sequences % self.num_minibatches == 0,
            f"algorithm.num_minibatches={self.num_minibatches} does not divide prompts_per_step x group_size = "
            f"{self.num_sequences}",
        )
        require(
            self.loss_type != "cispo" or self.epsilon_high > 1,
            f"algorithm.epsilon_high={self.epsilon_high} bounds the ratio itself with loss_type=cispo; use 5, say",
        )
        require(0 <= self.gamma <= 1, f"algorithm.gamma={self.gamma} must lie in [0, 1]")
        require(0 <= self.lam <= 1, f"algorithm.lam={self.lam} must lie in [0, 1]")
        for key in (
            "rollout_correction_cap",
            "rollout_correction_floor",
            "reward_clip",
            "delta",
            "dual_clip",
            "kl_target",
        ):
            value = getattr(self, key)
            require(value is None or value > 0, f"algorithm.{key}={value} must be positive")
        require(
            0 < self.top_entropy_quantile <= 1,
            f"algorithm.top_entropy_quantile={self.top_entropy_quantile} must lie in (0, 1]; 1 trains on every token",
        )
        require(
            self.dynamic_sampling_max_tries == 0 or self.name in GROUPED_ALGORITHMS,
            "algorithm.dynamic_sampling_max_tries needs groups; set it to 0 with algorithm.name=ppo",
        )
        require(
            self.kl_target is None or (self.name == "ppo" and self.beta > 0),
            "algorithm.kl_target adapts beta of the KL reward; it needs algorithm.name=ppo and algorithm.beta > 0",
        )

    @property
    def num_sequences(self) -> int:
        """Completions per training step."""
        return self.prompts_per_step * self.group_size

    @property
    def kl_in_loss(self) -> bool:
        """GRPO and REINFORCE++ penalise KL in the loss; RLOO and PPO subtract it from the reward."""
        return self.name in ("grpo", "reinforce_pp")

    @property
    def steps_per_update(self) -> int:
        """Optimiser steps of one training step."""
        return self.num_epochs * self.num_minibatches


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule, counted in optimiser steps."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"optimizer.learning_rate={self.learning_rate} must be positive")
        require(all(0 <= b < 1 for b in self.betas), f"optimizer.betas={self.betas} must lie in [0, 1)")
        at_least("optimizer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        require(
            self.max_grad_norm > 0,
            f"optimizer.max_grad_norm={self.max_grad_norm} must be positive; use a large number for no clipping",
        )


@dataclass(frozen=True)
class LearnerConfig:
    """A DeepSpeed engine: the policy's, and with the same fields the critic's."""

    num_ranks: int = 1
    zero_stage: int = 3
    offload_optimizer: bool = False
    # null: decided by the memory plan (`rlhf plan`) from what is left of the GPU; off on CPU
    gradient_checkpointing: bool | None = None
    # optimiser state waits in host memory while vLLM generates; null: where they share a GPU that cannot hold both
    offload_when_idle: bool | None = None
    # torch.compile the decoder layers, of reference and reward model too on a GPU; needs zero_stage < 3
    compile: bool = False
    # gradients of several micro-batches add up in float32, of a bfloat16 model too; null: where the memory plan has
    # room for them, and on CPU. DeepSpeed cannot at zero_stage 0, nor at 1 and 2 with offload_optimizer
    float32_gradients: bool | None = None
    micro_batch_tokens: int = 8192  # token budget of one packed forward
    logits_chunk_tokens: int = 1024  # the LM head runs on so many tokens at once
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cpus_per_rank: int = 1

    SECTION: ClassVar[str] = "learner"  # what errors call it

    def __post_init__(self) -> None:
        at_least(
            self.SECTION,
            1,
            num_ranks=self.num_ranks,
            micro_batch_tokens=self.micro_batch_tokens,
            logits_chunk_tokens=self.logits_chunk_tokens,
            cpus_per_rank=self.cpus_per_rank,
        )
        require(
            self.zero_stage in (0, 1, 2, 3),
            f"{self.SECTION}.zero_stage={self.zero_stage} does not exist; use 0, 1, 2 or 3",
        )
        require(
            not self.compile or self.zero_stage < 3,
            f"{self.SECTION}.compile=true does not go with {self.SECTION}.zero_stage=3, which gathers weights within "
            "each layer; use zero_stage 0, 1 or 2, or compile=false",
        )
        require(
            not self.offload_optimizer or self.zero_stage > 0,
            f"{self.SECTION}.offload_optimizer needs {self.SECTION}.zero_stage 1, 2 or 3",
        )

    @property
    def can_sum_in_float32(self) -> bool:
        """Whether DeepSpeed can add up a bfloat16 model's gradients in float32."""
        return self.zero_stage == 3 or (self.zero_stage > 0 and not self.offload_optimizer)


@dataclass(frozen=True)
class CriticConfig(LearnerConfig):
    """PPO's value model: a learner with a scalar head."""

    SECTION: ClassVar[str] = "critic"

    path: str | None = None  # backbone; None: model.path. A sequence-classification directory brings its head
    warmup_steps: int = 0  # training steps in which only the critic learns
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=5e-6))


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy for the KL; only created when algorithm.beta > 0."""

    num_ranks: int = 1
    path: str | None = None  # None: model.path
    micro_batch_tokens: int = 16384
    cpus_per_rank: int = 1

    def __post_init__(self) -> None:
        at_least("reference", 1, num_ranks=self.num_ranks, micro_batch_tokens=self.micro_batch_tokens)


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One reward function: a built-in name or a dotted path ``package.module.function``."""

    path: str = MISSING
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed on every call


@dataclass(frozen=True)
class RewardModelConfig:
    """A Hugging Face sequence-classification directory with its own tokenizer and chat template."""

    path: str = MISSING
    weight: float = 1.0
    random_head: bool = False  # a causal LM's directory gets a random score head: for measurements only
    num_ranks: int = 1
    max_tokens: int = 2048  # per text; the end is kept
    micro_batch_tokens: int = 16384
    cpus_per_rank: int = 1


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions run on ``num_workers`` actors; the model on its own actors. The reward is the weighted sum."""

    num_workers: int = 1
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    model: RewardModelConfig | None = None
    max_abstained: float = 0.5  # the run ends where a larger share of a step's completions gets no reward from anyone
    # For one call: on a group, or on a worker's share of the held-out completions. Calls of async functions wait side
    # by side, and what one waits for others counts.
    function_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        at_least("reward", 1, num_workers=self.num_workers)
        require(self.function_timeout_s > 0, f"reward.function_timeout_s={self.function_timeout_s} must be positive")

    @property
    def num_replicas(self) -> int:
        """So many parts of a batch can be scored at the same time."""
        return max(self.num_workers, self.model.num_ranks if self.model else 1)


@dataclass(frozen=True)
class AutoscaleConfig:
    """Bounds and thresholds of the pool's own scaling. A step's load is judged when its weights are published."""

    min: int = 1  # workers of the pool's own kind
    max: int = 1
    wait_fraction: float = 0.25  # grow when the learner waits for samples for more than this part of a step
    idle_fraction: float = 0.5  # shrink when workers are idle for more than this part of their time
    patience_steps: int = 3  # so many steps in a row must agree

    def __post_init__(self) -> None:
        at_least("rollout.autoscale", 1, min=self.min, patience_steps=self.patience_steps)
        require(
            self.max >= self.min,
            f"rollout.autoscale.max={self.max} must be at least rollout.autoscale.min={self.min}",
        )
        for key in ("wait_fraction", "idle_fraction"):
            value = getattr(self, key)
            require(0 < value < 1, f"rollout.autoscale.{key}={value} must lie between 0 and 1")


@dataclass(frozen=True)
class WorkerKindConfig:
    """Further rollout workers that differ from the pool's own: None takes the value from ``rollout``."""

    num_workers: int = 1
    tensor_parallel_size: int | None = None
    gpu_memory_fraction: float | None = None
    max_num_seqs: int | None = None
    cpus_per_worker: int | None = None
    resources: dict[str, float] = field(default_factory=dict)  # Ray resources, e.g. {"accelerator_type:A100": 0.001}


@dataclass(frozen=True)
class RolloutConfig:
    """The pool of vLLM workers and how they sample."""

    num_workers: int = 1
    extra_kinds: dict[str, WorkerKindConfig] = field(default_factory=dict)  # further workers, by the name of their kind
    autoscale: AutoscaleConfig | None = None  # None: num_workers stays what it is, until `rlhf scale`
    max_failures: int = 5  # workers in a row that cannot start, or that fail with the same group: the run gives up
    tensor_parallel_size: int = 1
    max_completion_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    eval_temperature: float = 0.0
    seed_requests: bool = True  # one generator per completion: the same samples for any number of workers
    max_staleness: int = 0  # weight versions that a sample may lag behind; 0 is strictly on-policy
    logprobs: bool = False  # ask vLLM for log-probabilities even when no correction uses them
    gpu_memory_fraction: float = 0.85  # of one GPU, for weights and KV cache of all workers on it
    cpu_kv_cache_mib: int = 128
    max_num_seqs: int = 256
    enforce_eager: bool = False  # no CUDA graphs; CPU is always eager
    weight_bucket_mib: int = 256  # extra memory bound of a weight publish
    engine_args: dict[str, Any] = field(default_factory=dict)  # passed to vLLM as they are
    cpus_per_worker: int = 1

    def __post_init__(self) -> None:
        at_least(
            "rollout",
            1,
            tensor_parallel_size=self.tensor_parallel_size,
            max_completion_tokens=self.max_completion_tokens,
            max_num_seqs=self.max_num_seqs,
            weight_bucket_mib=self.weight_bucket_mib,
            cpu_kv_cache_mib=self.cpu_kv_cache_mib,
        )
        require(self.cpus_per_worker >= 1, f"rollout.cpus_per_worker={self.cpus_per_worker} must be at least 1")
        require(
            self.top_k == -1 or self.top_k > 0, f"rollout.top_k={self.top_k} must be positive, or -1 for all tokens"
        )
        require(self.temperature > 0, f"rollout.temperature={self.temperature} must be positive: RL needs to explore")
        require(0 < self.top_p <= 1, f"rollout.top_p={self.top_p} must lie in (0, 1]")
        require(
            0 < self.gpu_memory_fraction < 1,
            f"rollout.gpu_memory_fraction={self.gpu_memory_fraction} must lie between 0 and 1",
        )
        at_least("rollout", 0, num_workers=self.num_workers, max_staleness=self.max_staleness)
        at_least("rollout", 2, max_failures=self.max_failures)
        scale = self.autoscale
        require(
            scale is None or scale.min <= self.num_workers <= scale.max,
            f"rollout.num_workers={self.num_workers} must lie between rollout.autoscale.min and .max, as the start",
        )
        require(
            DEFAULT_KIND not in self.extra_kinds,
            f"rollout.extra_kinds.{DEFAULT_KIND} is what rollout.num_workers counts; give it another name",
        )
        self.kinds()

    def kinds(self) -> "dict[str, tuple[RolloutConfig, dict[str, float]]]":
        """Every kind of worker: its settings in full, and the Ray resources it asks for beside CPUs and GPUs.

        Raises ConfigError where the settings of an extra kind are not valid.
        """
        kinds: dict[str, tuple[RolloutConfig, dict[str, float]]] = {DEFAULT_KIND: (self, {})}
        for name, kind in self.extra_kinds.items():
            own = {k: v for k, v in vars(kind).items() if k != "resources" and v is not None}
            try:
                kinds[name] = (replace(self, extra_kinds={}, autoscale=None, **own), kind.resources)
            except ConfigError as error:
                raise ConfigError(str(error).replace("rollout.", f"{kind_key(name)}.")) from None
        return kinds


@dataclass(frozen=True)
class PlacementConfig:
    """Where the roles sit. On CPU the same keys place CPU bundles."""

    mode: Literal["separate", "colocate"] = "separate"
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: gpu where the cluster has any
    timeout_s: float = 120.0  # for the cluster to grant the bundles

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, f"placement.timeout_s={self.timeout_s} must be positive")

    @property
    def colocated(self) -> bool:
        """Whether the other roles share the learner's GPUs."""
        return self.mode == "colocate"


@dataclass(frozen=True)
class TimeoutConfig:
    """Deadlines of every wait, in seconds."""

    start_s: float = 900.0
    generate_s: float = 1800.0
    score_s: float = 1800.0
    update_s: float = 3600.0
    publish_s: float = 600.0
    worker_silence_s: float = 300.0  # a rollout worker whose engine has not moved for so long is replaced
    checkpoint_s: float = 1800.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value > 0, f"timeouts.{key}={value} must be positive")


@dataclass(frozen=True)
class CheckpointConfig:
    """Every how many steps a resumable checkpoint is written, and how many are kept."""

    every_steps: int = 0  # 0: only at the end and at Ctrl-C
    keep: int = 2
    resume: str = "auto"  # auto: newest whole one of the run directory; none; or a checkpoint directory
    save_final_model: bool = True
    max_restarts: int = 2  # of a run whose learner or another role died, from its last checkpoint

    def __post_init__(self) -> None:
        at_least("checkpoint", 0, every_steps=self.every_steps, max_restarts=self.max_restarts)
        at_least("checkpoint", 1, keep=self.keep)


@dataclass(frozen=True)
class ChecksConfig:
    """What a run watches itself for, so that nothing goes wrong in silence."""

    probe: bool = True  # at start, the packed forward pass is compared with the model's own
    # What a NaN or an infinity does in a loss, a gradient, log-probabilities, values or advantages. stop: ends the run;
    # nothing of that training step is published or saved. skip: leaves out the optimiser steps it is in
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped_steps: int = 3  # training steps in a row of which anything was left out; one more ends the run

    def __post_init__(self) -> None:
        at_least("checks", 0, max_skipped_steps=self.max_skipped_steps)


@dataclass(frozen=True)
class SamplingChecksConfig(ChecksConfig):
    """Whether rollout workers sample from the weights that the learner has: their log-probabilities are compared.

    The bounds are on the mean absolute difference over the compared tokens, in nats. null: by model.dtype.
    """

    logprob_groups: int = 1  # groups of a compared step that are sampled with log-probabilities; 0: no comparison
    logprob_every_steps: int = 1  # which steps are compared, beside the first
    warn_logprob_difference: float | None = None  # null: 1e-3 in float32, 0.1 in bfloat16
    max_logprob_difference: float | None = None  # a larger one ends the run; null: 1e-2 in float32, 0.5 in bfloat16


@dataclass(frozen=True)
class TrackingConfig:
    """What is recorded of a run, beside metrics.jsonl and summary.json, which always are."""

    tensorboard: bool = True
    wandb_project: str | None = None
    completions_every_steps: int = 5  # 0: never
    completions_rows: int = 4
    progress: bool = True


@dataclass(frozen=True)
class RayConfig:
    """Which cluster. address None: $RAY_ADDRESS, else a local one started for this run."""

    address: str | None = None
    object_store_mib: int = 1024  # local cluster only


@dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str = "run"
    run_dir: str = "runs/${name}"
    seed: int = 0
    num_steps: int = 100
    eval_every_steps: int = 0  # 0: before the first and after the last step only
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checks: SamplingChecksConfig = field(default_factory=SamplingChecksConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        at_least("", 1, num_steps=self.num_steps)
        at_least("", 0, eval_every_steps=self.eval_every_steps)
        at_least("rollout", 1, num_workers=self.rollout.num_workers)
        if self.algorithm.rollout_correction == "auto":
            correction = "token_truncate" if self.rollout.max_staleness > 0 else "none"
            object.__setattr__(self, "algorithm", replace(self.algorithm, rollout_correction=correction))
        for key, wanted in {
            "rollout.max_staleness > 0": self.rollout.max_staleness > 0,
            "rollout.autoscale": self.rollout.autoscale is not None,
            "rollout.extra_kinds": bool(self.rollout.extra_kinds),
        }.items():
            require(
                not (self.placement.colocated and wanted),
                f"{key} needs rollout workers with GPUs of their own, and placement.mode=colocate shares the "
                "learner's; use placement.mode=separate",
            )
        require(
            bool(self.reward.functions) or self.reward.model is not None,
            "reward: nothing gives a reward; set reward.functions (e.g. [{path: exact_match}]) or reward.model.path",
        )
        for role in ("learner", "critic", "reference"):
            budget = getattr(self, role).micro_batch_tokens
            require(
                budget >= self.max_sequence_tokens,
                f"{role}.micro_batch_tokens={budget} cannot hold one sequence of data.max_prompt_tokens + "
                f"rollout.max_completion_tokens = {self.max_sequence_tokens}; use at least that",
            )
        require(
            not self.placement.colocated or self._fits_shared_bundles(),
            f"placement.mode=colocate puts rollout workers on the learner's {self.learner.num_ranks} ranks, but "
            f"rollout.num_workers={self.rollout.num_workers} x rollout.tensor_parallel_size="
            f"{self.rollout.tensor_parallel_size} does not fit them; use as many or fewer, a multiple of them with "
            "tensor_parallel_size=1, another learner.num_ranks, or placement.mode=separate",
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest completion."""
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

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
        """More than one only in colocate mode, where several small engines hide each other's work on the CPU."""
        return max(1, self.rollout.num_workers // self.num_shared_bundles) if self.placement.colocated else 1

    @property
    def rollout_share(self) -> int:
        """Completions of a training step for each worker, where they share its groups evenly."""
        return math.ceil(self.algorithm.prompts_per_step / self.rollout.num_workers) * self.algorithm.group_size

    @property
    def rollout_cache_tokens(self) -> int | None:
        """What one engine's KV cache need hold where it shares its GPU; None where it may have all that is left."""
        return self.rollout.max_num_seqs * self.max_sequence_tokens if self.placement.colocated else None

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is created at all."""
        return self.algorithm.beta > 0

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is created at all."""
        return self.algorithm.name == "ppo"

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether vLLM is asked for log-probabilities (they halve its speed)."""
        return self.rollout.logprobs or self.algorithm.rollout_correction not in ("auto", "none")


@dataclass(frozen=True)
class PreferenceDataConfig:
    """Preference pairs. A source is ``task:NAME`` or a ``.jsonl`` file with prompt, chosen, rejected and, optionally,
    margin: by how much the chosen answer's score should at least exceed the other's."""

    train: str = MISSING
    eval: str | None = None  # None: no evaluation
    eval_size: int = 256  # at most so many held-out pairs
    task_args: dict[str, Any] = field(default_factory=dict)  # for task:NAME, both splits
    max_tokens: int = 1024  # per text, prompt included; the end is kept, as reward.model.max_tokens does
    date: str | None = None  # YYYY-MM-DD, for templates that ask for today's; null: the day on which the run began
    shuffle: bool = True

    def __post_init__(self) -> None:
        at_least("data", 1, max_tokens=self.max_tokens, eval_size=self.eval_size)


@dataclass(frozen=True)
class RewardTrainingConfig:
    """A run of ``rlhf train-reward``: a scalar reward model from preference pairs."""

    name: str = "reward"
    run_dir: str = "runs/${name}"
    seed: int = 0
    num_epochs: int = 1
    batch_pairs: int = 64  # per optimiser step
    eval_every_steps: int = 0  # 0: before the first and after the last step only
    center_coef: float = 0.0  # weight of (chosen + rejected)^2, which keeps scores around zero; 0.01 is usual
    model: ModelConfig = field(default_factory=ModelConfig)  # a causal LM, or a classifier to go on from
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    learner: LearnerConfig = field(
        default_factory=lambda: LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-5, betas=(0.9, 0.999)))
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        at_least("config", 1, num_epochs=self.num_epochs, batch_pairs=self.batch_pairs)
        at_least("config", 0, eval_every_steps=self.eval_every_steps, center_coef=self.center_coef)
        require(
            self.learner.micro_batch_tokens >= self.max_pair_tokens,
            f"learner.micro_batch_tokens={self.learner.micro_batch_tokens} cannot hold one pair of 2 x "
            f"(data.max_tokens + 1) = {self.max_pair_tokens} tokens; raise it to that, or lower data.max_tokens",
        )

    @property
    def max_pair_tokens(self) -> int:
        """Longest pair: two texts, and the one token appended to each to read the score at its end."""
        return 2 * (self.data.max_tokens + 1)
