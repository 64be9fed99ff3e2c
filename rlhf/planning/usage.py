"""A run's GPU memory: bytes per role, and per kind of GPU in each phase.

Roles that share a GPU take turns: vLLM is awake while learner and critic are idle, and the frozen models score what it
has finished; then learner and critic score, then they train concurrently.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config import OFFLOADS, Config, LearnerConfig, Offload, RewardModelConfig, RolloutConfig, kind_key
from rlhf.planning.memory import ASLEEP_BYTES, RoleMemory, frozen_memory, learner_memory, rollout_memory
from rlhf.planning.shapes import ModelShape, read_shape
from rlhf.planning.topology import model_roles
from rlhf.reward_config import RewardTrainingConfig

AnyConfig = Config | RewardTrainingConfig

LEARNERS = ("learner", "critic")


@dataclass(frozen=True)
class Choice:
    """Decisions that a learner's settings may leave open."""

    zero_stage: int
    checkpointed_layers: int
    offload: Offload
    float32_gradients: bool

    def memory(self, settings: LearnerConfig, shape: ModelShape, **arguments: Any) -> RoleMemory:
        """``learner_memory`` under this choice."""
        return learner_memory(
            replace(settings, zero_stage=self.zero_stage, offload=self.offload),
            shape,
            checkpointed_layers=self.checkpointed_layers,
            float32_gradients=self.float32_gradients,
            **arguments,
        )


@dataclass(frozen=True)
class Choices:
    """The choice of every role that learns."""

    by_role: Mapping[str, Choice]

    def __getitem__(self, role: str) -> Choice:
        return self.by_role[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_role)

    def vary(self, role: str, **changes: Any) -> "Choices":
        """The same choices with these fields of ``role`` changed."""
        return Choices({**self.by_role, role: replace(self[role], **changes)})

    def as_fast_as(self, other: "Choices", *, spare_layers: int) -> bool:
        """Whether no role recomputes more than ``spare_layers`` or moves anything that it would not under ``other``."""
        return all(
            self[role].checkpointed_layers <= other[role].checkpointed_layers + spare_layers
            and OFFLOADS.index(self[role].offload) <= OFFLOADS.index(other[role].offload)
            and self[role].zero_stage <= other[role].zero_stage
            for role in self
        )


@dataclass(frozen=True)
class Usage:
    """Predicted bytes of one rank per role, and per kind of GPU in each phase."""

    roles: dict[str, RoleMemory]  # learner first; rollout workers by their kind's key
    gpus: dict[str, dict[str, float]]  # who runs there ('shared', or a role) -> phase -> bytes

    def gpu_of(self, role: str) -> dict[str, float]:
        """Bytes in each phase on ``role``'s GPU."""
        at = next(
            name for name in ("shared", role, "learner") if name in self.gpus
        )  # a critic may stand on the learner
        return self.gpus[at]


def predict(config: AnyConfig, device_bytes: float, choices: Choices) -> Usage:
    """Predicted usage on GPUs of ``device_bytes``.

    The policy's ``config.json`` must be available; other models without one are assumed to be as large as the policy.
    """
    if isinstance(config, RewardTrainingConfig):
        learner = _reward_learner(config, choices["learner"])
        return Usage({"learner": learner}, {"learner": {"train": learner.peak}})
    roles = {"learner": _learner(config, choices["learner"])}
    if config.uses_critic:
        roles["critic"] = _critic(config, choices["critic"])
    if config.uses_reference:
        roles["reference"] = _reference(config)
    if config.reward.model is not None:
        roles["reward_model"] = _reward_model(config, config.reward.model)
    for kind, (settings, _) in config.rollout.kinds().items():
        roles[kind_key(kind)] = _engine(config, settings, device_bytes)
    phases = _shared_phases if config.placement.colocated else _separate_phases
    return Usage(roles, phases(config, roles))


def _reward_learner(config: RewardTrainingConfig, choice: Choice) -> RoleMemory:
    return choice.memory(
        config.learner,
        model_shape(config),
        tokens=min(config.learner.micro_batch_tokens, config.batch_pairs * config.max_pair_tokens),
        lm_head=False,
        element_bytes=_element_bytes(config),
    )


def _learner(config: Config, choice: Choice) -> RoleMemory:
    return choice.memory(
        config.learner,
        model_shape(config),
        tokens=_fullest(config, config.learner.micro_batch_tokens),
        element_bytes=_element_bytes(config),
        bucket_bytes=config.rollout.weight_bucket_mib << 20,
    )


def _critic(config: Config, choice: Choice) -> RoleMemory:
    return choice.memory(
        config.critic,
        model_shape(config, config.critic.path),
        tokens=_fullest(config, config.critic.micro_batch_tokens),
        lm_head=False,
        element_bytes=_element_bytes(config),
        on_base=config.critic_on_base,
    )


def _reference(config: Config) -> RoleMemory:
    return frozen_memory(
        model_shape(config, config.reference.path),
        tokens=_fullest(config, config.reference.micro_batch_tokens),
        chunk=config.learner.logits_chunk_tokens,
        lm_head=True,
        element_bytes=_element_bytes(config),
    )


def _reward_model(config: Config, settings: RewardModelConfig) -> RoleMemory:
    return frozen_memory(
        model_shape(config, settings.path),
        tokens=min(settings.micro_batch_tokens, config.algorithm.num_sequences * settings.max_tokens),
        lm_head=False,
        element_bytes=_element_bytes(config),
    )


def _engine(config: Config, settings: RolloutConfig, device_bytes: float) -> RoleMemory:
    return rollout_memory(
        model_shape(config),
        budget_bytes=settings.gpu_memory_fraction * device_bytes / config.rollout_workers_per_gpu,
        tensor_parallel_size=settings.tensor_parallel_size,
        cache_tokens=config.rollout_cache_tokens,
        element_bytes=_element_bytes(config),
        adapter=config.learner.adapter_apart,
    )


def model_shape(config: AnyConfig, path: str | None = None) -> ModelShape:
    """The shape of the model at ``path``; the policy's if that is None or unknown."""
    shape = read_shape(path or config.model.path) or read_shape(config.model.path)
    assert shape is not None, "the policy's shape is known"
    return shape


def _element_bytes(config: AnyConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _fullest(config: Config, token_budget: int) -> int:
    """Tokens in the fullest micro-batch: a small batch does not fill the budget."""
    return min(token_budget, config.algorithm.num_sequences * config.max_sequence_tokens)


def _separate_phases(config: Config, roles: Mapping[str, RoleMemory]) -> dict[str, dict[str, float]]:
    """Every process has its own GPUs, and one phase in which it takes the most."""
    phase = dict.fromkeys(LEARNERS, "train") | {kind_key(kind): "generate" for kind in config.rollout.kinds()}
    return {role: {phase.get(role, "score"): needed} for role, needed in process_peaks(config, roles).items()}


def process_peaks(config: AnyConfig, roles: Mapping[str, RoleMemory]) -> dict[str, float]:
    """The most bytes that one process of each role takes. A critic on the learner's weights is part of that one."""
    return {
        role: sum(memory.idle for memory in parts) + max(memory.working for memory in parts)
        for role, parts in _processes(config, roles).items()
    }


def _processes(config: AnyConfig, roles: Mapping[str, RoleMemory]) -> dict[str, list[RoleMemory]]:
    """The models in the process of each role; they take turns."""
    lodging = isinstance(config, Config) and config.critic_on_base
    processes = {role: [memory] for role, memory in roles.items() if not (lodging and role == "critic")}
    if lodging:
        processes["learner"].append(roles["critic"])
    return processes


def _shared_phases(config: Config, roles: Mapping[str, RoleMemory]) -> dict[str, dict[str, float]]:
    """All roles take turns on the same GPUs, with at most one rank of each on a GPU; the bytes are of one with all."""
    processes = _processes(config, roles)
    models = {role: processes[role] for role in model_roles(config)}
    learning = [parts for role, parts in models.items() if role in LEARNERS]
    scoring = [parts for role, parts in models.items() if role not in LEARNERS]
    engines = config.rollout_workers_per_gpu
    awake, asleep = engines * roles["rollout"].peak, engines * ASLEEP_BYTES
    idle = sum(memory.idle for parts in [*learning, *scoring] for memory in parts)
    return {
        "shared": {
            # reference and reward model score groups as they finish, while others are still being sampled
            "generate": idle + sum(_most(parts, "passing") for parts in scoring) + awake,
            "score": idle + sum(_most(parts, "passing") for parts in [*learning, *scoring]) + asleep,
            "train": idle + sum(_most(parts, "working") for parts in learning) + asleep,
        }
    }


def _most(parts: Iterable[RoleMemory], what: str) -> float:
    """Of models that take turns, the most bytes that one needs in addition."""
    return max(getattr(memory, what) for memory in parts)
