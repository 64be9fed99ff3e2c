"""A run's memory plan: whether its roles fit their GPUs, and what was decided, in words."""

from dataclasses import dataclass, replace

from rlhf.config import Config, LearnerConfig, kind_key
from rlhf.errors import ConfigError
from rlhf.planning.memory import AUTO_SHARE, ENGINE_BYTES, GIB, GRAPH_BYTES, RoleMemory, kv_token_bytes
from rlhf.planning.shapes import read_shape
from rlhf.planning.usage import AnyConfig, process_peaks

WORDS = {
    "none": "",
    "idle": "; its optimiser state waits in host memory while vLLM generates ({gib:.1f} GiB)",
    "optimizer": "; its optimiser state is in host memory, where the CPU makes its steps ({gib:.1f} GiB)",
    "all": "; its weights and optimiser state are in host memory, where the CPU makes its steps ({gib:.1f} GiB)",
}


@dataclass(frozen=True)
class Checkpointing:
    """How many of a learner's decoder layers recompute their activations, and the two numbers that say why."""

    layers: int
    num_layers: int  # that it has
    needed: float  # bytes of its training passes without it
    left: float  # bytes left for them by everything else


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes per role, and per kind of GPU in each phase."""

    config: AnyConfig
    device_bytes: float
    roles: dict[str, RoleMemory]
    gpus: dict[str, dict[str, float]]  # who runs there ('shared', or a role) -> phase -> bytes
    checkpointing: dict[str, Checkpointing]  # for learner and critic

    def check(self, role: str | None = None) -> None:
        """Raises ConfigError with the key to change if a phase does not fit on ``role``'s GPU (None: any)."""
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
            self._check_caches(self.config)

    def _check_caches(self, config: Config) -> None:
        for kind, (settings, resources) in config.rollout.kinds().items():
            key = kind_key(kind)
            engine = self.roles[key]
            if engine.kv_cache <= 0 and not resources:  # custom resources mean other GPUs than these
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
            role = max(self.roles, key=lambda name: self.roles[name].scoring) if gpu == "shared" else gpu
            key = "reward.model" if role == "reward_model" else role
            return f"lower {key}.micro_batch_tokens{separate}"
        role = max(self.checkpointing, key=lambda name: self.roles[name].peak) if gpu == "shared" else gpu
        memory, settings = self.roles[role], getattr(self.config, role)
        if memory.training < memory.weights + memory.gradients + memory.optimizer:
            return f"raise {role}.num_ranks (with zero_stage=3){_offload_more(role, settings)}{separate}"
        choice = self.checkpointing[role]
        more = "" if choice.layers == choice.num_layers else f"set {role}.checkpointed_layers=null, or "
        return f"{more}lower {role}.micro_batch_tokens or {role}.logits_chunk_tokens{separate}"

    def process_peaks(self) -> dict[str, float]:
        """The most bytes that one process of each role takes. A critic on the learner's weights is part of that one."""
        return process_peaks(self.config, self.roles)

    def largest_rollout_fraction(self) -> float:
        """The largest rollout.gpu_memory_fraction that leaves room for the roles sharing the GPU."""
        assert isinstance(self.config, Config)
        engines = self.config.rollout_workers_per_gpu
        awake = engines * self.roles["rollout"].peak
        others = self.gpus["shared"]["generate"] - awake if "shared" in self.gpus else 0.0
        return max(0.0, AUTO_SHARE - (others + engines * GRAPH_BYTES) / self.device_bytes)

    def describe_rollout(self, kind: str) -> str:
        """One line on the KV cache of a rollout worker kind, and on better settings."""
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
        """A learner's settings, with everything they leave open decided."""
        return replace(
            getattr(self.config, role),
            zero_stage=self.roles[role].zero_stage,
            checkpointed_layers=self.checkpointing[role].layers,
            compile=getattr(self.config, role).compile is not False,
            offload=self.roles[role].offload,
            float32_gradients=self.roles[role].float32_gradients,
        )

    def describe(self, role: str) -> str:
        """One line on what was decided for a learner."""
        choice, memory = self.checkpointing[role], self.roles[role]
        return (
            f"{role}: {memory.peak / GIB:.1f} GiB of {self.device_bytes / GIB:.1f} predicted; "
            f"ZeRO-{memory.zero_stage}; gradient checkpointing in {choice.layers} of {choice.num_layers} layers: "
            f"without it a pass needs {choice.needed / GIB:.1f} GiB, and {max(0.0, choice.left) / GIB:.1f} are left; "
            "gradients add up in "
            + ("float32" if memory.float32_gradients else "bfloat16")
            + WORDS[memory.offload].format(gib=memory.host / GIB)
        )


def _offload_more(role: str, settings: LearnerConfig) -> str:
    """What would put more of a learner into host memory; '' if nothing more can be."""
    if settings.lora is not None or settings.offload == "all":
        return ""
    if settings.offload in ("none", "idle"):
        return f", or set {role}.offload=null"
    return f", or set {role}.offload=all" if settings.zero_stage in (3, None) else ""
