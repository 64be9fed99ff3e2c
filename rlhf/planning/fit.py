"""Fits a run to its GPUs: decides what its learners' settings leave open, before anything loads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.config import Config, LearnerConfig, Offload
from rlhf.planning.memory import ALL_LAYERS, ALLOCATOR_SLACK, AUTO_SHARE, GIB
from rlhf.planning.memory_plan import Checkpointing, MemoryPlan
from rlhf.planning.shapes import read_shape
from rlhf.planning.usage import AnyConfig, Choice, Choices, Usage, model_shape, predict

SAFE_STAGE = 3  # where nothing can be predicted
LORA_STAGE = 1
FLOAT32_LAYERS = 0.1  # share of the layers that may be checkpointed for float32 gradients: 3 % of an update


def plan_memory(config: AnyConfig, device_bytes: float) -> MemoryPlan | None:
    """Predicts a run on what it may take of GPUs of ``device_bytes``; None without the policy's ``config.json``.

    Other models whose ``config.json`` is not available are assumed to be as large as the policy. What the configuration
    leaves open is decided here: as few checkpointed layers as the training phase has room for, the lowest ZeRO stage
    that allows so few, optimiser state in host memory while vLLM generates if that would otherwise have no room to wake
    up, and always if the learner would not fit otherwise; and float32 gradients if that takes hardly more of any.

    Layers count before stages, because recomputing a layer costs 0.8 % of an update at 7B (28 instead of 4 layers: 3.80
    instead of 3.16 s), and a higher stage nothing that could be told apart: one rank takes 1.48 s under ZeRO-3 and 1.47
    under ZeRO-1; four ranks under ZeRO-1 take 17 % longer than one, two under ZeRO-3 13 % (benchmarks/RESULTS.md).
    """
    if read_shape(config.model.path) is None:
        return None
    device_bytes = min(device_bytes, (config.placement.gpu_memory_gib or math.inf) * GIB)
    fit = _Fit(config, device_bytes)
    choices = fit.decide()
    usage = fit.usage(choices)
    reasons = {role: fit.checkpointing(role, choices) for role in choices}
    return MemoryPlan(config, device_bytes, usage.roles, usage.gpus, reasons)


def open_stages(settings: LearnerConfig, offload: Offload | None = None) -> tuple[int, ...]:
    """The ZeRO stages that ``settings`` leave to the plan, from the fastest to the one that takes the least memory.

    ``offload``: what is chosen, where they leave that open, too.
    """
    if settings.zero_stage is not None:
        return (settings.zero_stage,)
    if settings.lora:  # frozen weights are whole on every rank, and what is left to shard is small
        return (LORA_STAGE,)
    if (settings.offload or offload) in ("optimizer", "all"):  # at stages 1 and 2 DeepSpeed could not sum in float32
        return (SAFE_STAGE,)
    return (1,) if settings.num_ranks == 1 else (1, 2, 3)  # one rank has nothing to shard


def may_offload(settings: LearnerConfig) -> bool:
    """Whether the plan may have the CPU compute the optimizer's steps: not those of adapters, which take little, nor
    where activations take the memory by request."""
    can = settings.zero_stage in (3, None) or (settings.zero_stage > 0 and not settings.float32_gradients)
    return can and settings.offload is settings.lora is settings.checkpointed_layers is None


def safe_stage(settings: LearnerConfig) -> int:
    """The stage where nothing can be predicted: of those that ``settings`` leave open, what takes the least memory."""
    return SAFE_STAGE if settings.zero_stage is None and settings.lora is None else open_stages(settings)[-1]


@dataclass(frozen=True)
class _Fit:
    """One run on GPUs of ``device_bytes``: tries choices by predicting the memory use of each."""

    config: AnyConfig
    device_bytes: float

    @property
    def limit(self) -> float:
        """The most bytes of a GPU that decisions may fill."""
        return AUTO_SHARE * self.device_bytes

    @property
    def learners(self) -> dict[str, LearnerConfig]:
        critic = {"critic": self.config.critic} if isinstance(self.config, Config) and self.config.uses_critic else {}
        return {"learner": self.config.learner, **critic}

    @property
    def lodging(self) -> bool:
        """Whether the critic's layers are the learner's."""
        return isinstance(self.config, Config) and self.config.critic_on_base

    def usage(self, choices: Choices) -> Usage:
        return predict(self.config, self.device_bytes, choices)

    def decide(self) -> Choices:
        """The fastest choices, with the optimizer in host memory only for learners that fit no other way; then float32
        gradients, one learner at a time, where they cost next to no speed."""
        start = Choices({role: self.starting_choice(settings) for role, settings in self.learners.items()})
        choices = self.fastest(start)
        for role, settings in self.learners.items():
            if may_offload(settings) and self.usage(choices).gpu_of(role)["train"] > self.device_bytes:
                start = start.vary(role, offload="optimizer", zero_stage=open_stages(settings, "optimizer")[-1])
                choices = self.fastest(start)
        for role, settings in self.learners.items():
            chosen = replace(settings, offload=choices[role].offload)
            if settings.float32_gradients is not None or not chosen.can_sum_in_float32:
                continue
            wider = start.vary(role, float32_gradients=True)
            trial = self.fastest(wider)
            spare_layers = int(FLOAT32_LAYERS * self.num_layers(role))
            if (
                trial.as_fast_as(choices, spare_layers=spare_layers)
                and max(self.usage(trial).gpu_of(role).values()) <= self.limit
            ):
                start, choices = wider, trial
        return choices

    def starting_choice(self, settings: LearnerConfig) -> Choice:
        """Where the search starts: options left open start checkpointed, not offloaded, and not in float32."""
        return Choice(
            zero_stage=open_stages(settings)[-1],
            checkpointed_layers=ALL_LAYERS if settings.checkpointed_layers is None else settings.checkpointed_layers,
            offload=settings.offload or "none",
            float32_gradients=bool(settings.float32_gradients),
        )

    def fastest(self, choices: Choices) -> Choices:
        """``choices``, offloading only if vLLM has no room next to idle learners, with the fewest checkpointed layers
        that fit (if none do: all), and then with the lowest stage at which they do."""
        if self.usage(choices).gpus.get("shared", {}).get("generate", 0.0) > self.limit:
            for role, settings in self.learners.items():
                if settings.offload is None and choices[role].offload == "none":
                    choices = choices.vary(role, offload="idle")
        for role, settings in self.learners.items():
            count = settings.checkpointed_layers
            if role == "critic" and self.lodging:
                count = choices["learner"].checkpointed_layers
            counts = (*range(self.num_layers(role)), ALL_LAYERS) if count is None else (count,)
            trials = (
                self.with_layers(choices, role, count).vary(role, zero_stage=stage)
                for count in counts
                for stage in open_stages(settings, choices[role].offload)
            )
            frugal = self.usage(choices).gpu_of(role)
            choices = next((trial for trial in trials if self.fits(trial, role, frugal)), choices)
        return choices

    def with_layers(self, choices: Choices, role: str, count: int) -> Choices:
        """``choices`` with ``count`` checkpointed layers in ``role``, and in who stands on its layers."""
        choices = choices.vary(role, checkpointed_layers=count)
        return choices.vary("critic", checkpointed_layers=count) if role == "learner" and self.lodging else choices

    def fits(self, choices: Choices, role: str, frugal: Mapping[str, float]) -> bool:
        """Whether training fits on ``role``'s GPU, and each other phase unless it does not at its most ``frugal``."""
        phases = self.usage(choices).gpu_of(role)
        return all(
            needed <= (self.limit if phase == "train" else max(self.limit, frugal[phase]))
            for phase, needed in phases.items()
        )

    def checkpointing(self, role: str, choices: Choices) -> Checkpointing:
        """What was chosen for ``role``, and why."""
        usage, without = self.usage(choices), self.usage(choices.vary(role, checkpointed_layers=0))
        passes, passes_without = ((1 + ALLOCATOR_SLACK) * u.roles[role].training for u in (usage, without))
        others = usage.gpu_of(role)["train"] - passes
        num_layers = self.num_layers(role)
        layers = min(choices[role].checkpointed_layers, num_layers)
        return Checkpointing(layers, num_layers, passes_without, self.limit - others)

    def num_layers(self, role: str) -> int:
        """Decoder layers of ``role``'s model."""
        return model_shape(self.config, getattr(self.learners[role], "path", None)).num_layers
