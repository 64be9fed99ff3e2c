"""Whether all roles of a run fit their GPUs, known before anything loads; and what follows for the learners.

Roles that share a GPU take turns: vLLM is awake while learner and critic idle, and the frozen models score what it has
finished; then learner and critic score, then they train side by side. The GPU must hold each of these phases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.config import Config, LearnerConfig, kind_key
from rlhf.errors import ConfigError
from rlhf.planning.memory import (
    ALLOCATOR_SLACK,
    ASLEEP_BYTES,
    ENGINE_BYTES,
    GIB,
    GRAPH_BYTES,
    RoleMemory,
    frozen_memory,
    kv_token_bytes,
    learner_memory,
    rollout_memory,
)
from rlhf.planning.shapes import read_shape
from rlhf.reward_config import RewardTrainingConfig

AUTO_SHARE = 0.9  # what is decided here fills at most so much of a GPU: predictions are good to some 10 %

AnyConfig = Config | RewardTrainingConfig


@dataclass(frozen=True)
class Choice:
    """What a learner's settings leave open, decided."""

    checkpointing: bool
    offloads: bool
    float32_gradients: bool

    def as_fast_as(self, other: "Choice") -> bool:
        """Whether it recomputes and moves nothing that ``other`` does not."""
        return self.checkpointing <= other.checkpointing and self.offloads <= other.offloads


@dataclass(frozen=True)
class Checkpointing:
    """Whether a learner recomputes its activations, and the two numbers that say why."""

    on: bool
    needed: float  # bytes of its passes without it
    left: float  # bytes that everything else leaves them


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of every role, and of every kind of GPU in each phase."""

    config: AnyConfig
    device_bytes: float
    roles: dict[str, RoleMemory]
    gpus: dict[str, dict[str, float]]  # who sits there ('shared', or a role) -> phase -> bytes
    checkpointing: dict[str, Checkpointing]  # of learner and critic

    def check(self, role: str | None = None) -> None:
        """Raises ConfigError with the key to change where ``role``'s GPU (None: any) cannot hold a phase."""
        for gpu, phases in self.gpus.items():
            if role is not None and gpu not in (role, "shared"):
                continue
            phase, needed = max(phases.items(), key=lambda item: item[1])
            if needed > self.device_bytes:
                who = " + ".join(self.roles) if gpu == "shared" else gpu
                raise ConfigError(
                    f"{who}: {needed / GIB:.1f} GiB predicted to {phase}, the GPU has {self.device_bytes / GIB:.1f}; "
                    f"{self._remedy(gpu, phase)}"
                )
        if isinstance(self.config, Config):
            for kind, (settings, resources) in self.config.rollout.kinds().items():
                key = kind_key(kind)
                engine = self.roles[key]
                if engine.kv_cache <= 0 and not resources:  # those ask for GPUs of their own choice
                    raise ConfigError(
                        f"{key}.gpu_memory_fraction={settings.gpu_memory_fraction} leaves no KV cache: weights and "
                        f"activations take {(engine.weights + ENGINE_BYTES) / GIB:.1f} GiB; raise it, or "
                        f"{key}.tensor_parallel_size"
                    )

    def _remedy(self, gpu: str, phase: str) -> str:
        """The keys that would help most."""
        separate = ", or use placement.mode=separate" if gpu == "shared" else ""
        if phase == "generate":
            return f"lower {'rollout' if gpu == 'shared' else gpu}.gpu_memory_fraction{separate}"
        if phase == "score":
            key = {"shared": "reference", "reward_model": "reward.model"}.get(gpu, gpu)
            return f"lower {key}.micro_batch_tokens{separate}"
        role = max(self.checkpointing, key=lambda name: self.roles[name].peak) if gpu == "shared" else gpu
        memory, settings = self.roles[role], getattr(self.config, role)
        if memory.training < memory.weights + memory.gradients + memory.optimizer:
            offload = "" if settings.offload_optimizer else f", or set {role}.offload_optimizer=true"
            return f"raise {role}.num_ranks (with zero_stage=3){offload}{separate}"
        checkpointing = "" if self.checkpointing[role].on else f"set {role}.gradient_checkpointing=null, or "
        return f"{checkpointing}lower {role}.micro_batch_tokens or {role}.logits_chunk_tokens{separate}"

    def largest_rollout_fraction(self) -> float:
        """The most that rollout.gpu_memory_fraction could be beside those who share the GPU."""
        assert isinstance(self.config, Config)
        engines = self.config.rollout_workers_per_gpu
        awake = engines * self.roles["rollout"].peak
        others = self.gpus["shared"]["generate"] - awake if "shared" in self.gpus else 0.0
        return max(0.0, AUTO_SHARE - (others + engines * GRAPH_BYTES) / self.device_bytes)

    def describe_rollout(self, kind: str) -> str:
        """One line on the KV cache of a kind of rollout worker, and on settings that would be better."""
        assert isinstance(self.config, Config)
        settings, _ = self.config.rollout.kinds()[kind]
        shape = read_shape(self.config.model.path)
        assert shape is not None, "there is a plan"
        cached = self.roles[kind_key(kind)].kv_cache / kv_token_bytes(shape, settings.tensor_parallel_size)
        share = self.config.rollout_share
        too_many = "shared" in self.gpus and settings.max_num_seqs > share
        return (
            f"{kind_key(kind)}: the KV cache holds {max(0.0, cached):,.0f} tokens; gpu_memory_fraction="
            f"{settings.gpu_memory_fraction:g}, and {self.largest_rollout_fraction():.2f} would be safe"
            + (f"; max_num_seqs={settings.max_num_seqs}, and {share} is a worker's share of a step" if too_many else "")
        )

    def settings(self, role: str) -> LearnerConfig:
        """A learner's settings with what they leave open decided."""
        return replace(
            getattr(self.config, role),
            gradient_checkpointing=self.checkpointing[role].on,
            offload_when_idle=self.roles[role].offloads,
            float32_gradients=self.roles[role].float32_gradients,
        )

    def describe(self, role: str) -> str:
        """One line on what was decided for a learner."""
        choice, memory = self.checkpointing[role], self.roles[role]
        return (
            f"{role}: {memory.peak / GIB:.1f} GiB of {self.device_bytes / GIB:.1f} predicted; gradient checkpointing "
            f"{'on' if choice.on else 'off'}: without it a pass needs {choice.needed / GIB:.1f} GiB, and "
            f"{max(0.0, choice.left) / GIB:.1f} are left; gradients add up in "
            + ("float32" if memory.float32_gradients else "bfloat16")
            + ("; its optimiser state waits in host memory while vLLM generates" if memory.offloads else "")
        )


def plan_memory(config: AnyConfig, device_bytes: float) -> MemoryPlan | None:
    """Predicts a run on GPUs of ``device_bytes``; None where the policy's ``config.json`` is not at hand.

    Other models whose ``config.json`` is not at hand count as large as the policy. What the configuration leaves open
    is decided here: no checkpointing where the training phase then still fits, optimiser state in host memory where
    vLLM would otherwise find no room to wake up, and float32 gradients where they cost neither of the two.
    """
    if read_shape(config.model.path) is None:
        return None
    learners, limit = _learners(config), AUTO_SHARE * device_bytes
    float32 = {role: bool(settings.float32_gradients) for role, settings in learners.items()}
    choices = _choose(config, device_bytes, float32)
    for role, settings in learners.items():
        wider = float32 | {role: settings.can_sum_in_float32}
        trial = _choose(config, device_bytes, wider)
        phases = _gpu(_phases(config, _roles(config, device_bytes, trial)), role)
        free = all(trial[name].as_fast_as(choices[name]) for name in learners)
        if settings.float32_gradients is None and free and max(phases.values()) <= limit:
            float32, choices = wider, trial
    roles = _roles(config, device_bytes, choices)
    gpus = _phases(config, roles)
    checkpointing = {}
    for role in learners:
        without = _roles(config, device_bytes, choices | {role: replace(choices[role], checkpointing=False)})[role]
        others = _training(gpus, role) - (1 + ALLOCATOR_SLACK) * roles[role].training
        needed = (1 + ALLOCATOR_SLACK) * without.training
        checkpointing[role] = Checkpointing(choices[role].checkpointing, needed, limit - others)
    return MemoryPlan(config, device_bytes, roles, gpus, checkpointing)


def _learners(config: AnyConfig) -> dict[str, LearnerConfig]:
    critic = {"critic": config.critic} if isinstance(config, Config) and config.uses_critic else {}
    return {"learner": config.learner, **critic}


def _choose(config: AnyConfig, device_bytes: float, float32: Mapping[str, bool]) -> dict[str, Choice]:
    """Checkpointing and offload of each learner, given whether its gradients are ``float32``."""
    learners, limit = _learners(config), AUTO_SHARE * device_bytes

    def phases(choices: Mapping[str, Choice]) -> dict[str, dict[str, float]]:
        return _phases(config, _roles(config, device_bytes, choices))

    choices = {
        role: Choice(settings.gradient_checkpointing is not False, bool(settings.offload_when_idle), float32[role])
        for role, settings in learners.items()
    }
    if phases(choices).get("shared", {}).get("generate", 0.0) > limit:
        for role, settings in learners.items():
            choices[role] = replace(choices[role], offloads=settings.offload_when_idle is not False)
    for role, settings in learners.items():
        trial = choices | {role: replace(choices[role], checkpointing=False)}
        if settings.gradient_checkpointing is None and _training(phases(trial), role) <= limit:
            choices = trial
    return choices


def _gpu(gpus: Mapping[str, Mapping[str, float]], role: str) -> Mapping[str, float]:
    """Bytes in each phase on the GPU that ``role`` sits on."""
    return gpus["shared" if "shared" in gpus else role]


def _training(gpus: Mapping[str, Mapping[str, float]], role: str) -> float:
    return _gpu(gpus, role)["train"]


def _roles(config: AnyConfig, device_bytes: float, choices: Mapping[str, Choice]) -> dict[str, RoleMemory]:
    """Every role that holds a model, learner first; of rollout workers every kind, under its key."""
    policy = read_shape(config.model.path)
    assert policy is not None
    element_bytes = 4 if config.model.dtype == "float32" else 2
    if isinstance(config, RewardTrainingConfig):
        tokens = min(config.learner.micro_batch_tokens, config.batch_pairs * config.max_pair_tokens)
        return {
            "learner": learner_memory(
                config.learner,
                policy,
                checkpointing=choices["learner"].checkpointing,
                float32_gradients=choices["learner"].float32_gradients,
                tokens=tokens,
                lm_head=False,
                element_bytes=element_bytes,
            )
        }
    batch_tokens = config.algorithm.num_sequences * config.max_sequence_tokens
    roles = {
        "learner": learner_memory(
            config.learner,
            policy,
            checkpointing=choices["learner"].checkpointing,
            float32_gradients=choices["learner"].float32_gradients,
            tokens=min(config.learner.micro_batch_tokens, batch_tokens),
            element_bytes=element_bytes,
            bucket_bytes=config.rollout.weight_bucket_mib << 20,
            offloads=choices["learner"].offloads,
        )
    }
    if config.uses_critic:
        roles["critic"] = learner_memory(
            config.critic,
            read_shape(config.critic.path or config.model.path) or policy,
            checkpointing=choices["critic"].checkpointing,
            float32_gradients=choices["critic"].float32_gradients,
            tokens=min(config.critic.micro_batch_tokens, batch_tokens),
            lm_head=False,
            element_bytes=element_bytes,
            offloads=choices["critic"].offloads,
        )
    if config.uses_reference:
        roles["reference"] = frozen_memory(
            read_shape(config.reference.path or config.model.path) or policy,
            tokens=min(config.reference.micro_batch_tokens, batch_tokens),
            chunk=config.learner.logits_chunk_tokens,
            lm_head=True,
            element_bytes=element_bytes,
        )
    if (model := config.reward.model) is not None:
        roles["reward_model"] = frozen_memory(
            read_shape(model.path) or policy,
            tokens=min(model.micro_batch_tokens, config.algorithm.num_sequences * model.max_tokens),
            lm_head=False,
            element_bytes=element_bytes,
        )
    for kind, (settings, _) in config.rollout.kinds().items():
        roles[kind_key(kind)] = rollout_memory(
            policy,
            budget_bytes=settings.gpu_memory_fraction * device_bytes / config.rollout_workers_per_gpu,
            tensor_parallel_size=settings.tensor_parallel_size,
            cache_tokens=config.rollout_cache_tokens,
            element_bytes=element_bytes,
        )
    return roles


def _phases(config: AnyConfig, roles: Mapping[str, RoleMemory]) -> dict[str, dict[str, float]]:
    """Bytes on each kind of GPU in each phase."""
    learners = [role for role in ("learner", "critic") if role in roles]
    if isinstance(config, RewardTrainingConfig):
        return {role: {"train": roles[role].peak} for role in learners}
    if not config.placement.colocated:
        phase = dict.fromkeys(learners, "train") | {kind_key(kind): "generate" for kind in config.rollout.kinds()}
        return {role: {phase.get(role, "score"): memory.peak} for role, memory in roles.items()}
    bundles = config.num_shared_bundles
    ranks = {
        "learner": config.learner.num_ranks,
        "critic": config.critic.num_ranks,
        "reference": config.reference.num_ranks,
        "reward_model": config.reward.model.num_ranks if config.reward.model else 0,
    }
    count = {role: -(-ranks[role] // bundles) for role in roles if role != "rollout"}  # on the fullest GPU
    idle = {role: number * roles[role].idle for role, number in count.items()}
    engines = config.rollout_workers_per_gpu
    return {
        "shared": {
            # reference and reward model score groups as they finish, while others are still being sampled
            "generate": sum(idle[r] if r in learners else count[r] * roles[r].scores for r in count)
            + engines * roles["rollout"].peak,
            "score": sum(number * roles[role].scores for role, number in count.items()) + engines * ASLEEP_BYTES,
            "train": sum(count[r] * roles[r].peak if r in learners else idle[r] for r in count)
            + engines * ASLEEP_BYTES,
        }
    }
