"""Typed configuration of `rlhf train-reward`: its own keys, and the sections it shares with ``rlhf.config``."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from rlhf.bounds import Section
from rlhf.config import (
    CheckpointConfig,
    ChecksConfig,
    LearnerConfig,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    OptimizerConfig,
    PlacementConfig,
    PositiveInt,
    RayConfig,
    Seed,
    TimeoutConfig,
    TrackingConfig,
    require,
    require_date,
)


@dataclass(frozen=True)
class PreferenceDataConfig(Section, key="data"):
    """Preference pairs. A source is ``task:NAME`` or a ``.jsonl`` file (also ``.gz`` or ``.zst``) with prompt, chosen,
    rejected and, optionally, margin: the least by which the chosen answer's score should exceed the other's."""

    train: str = MISSING
    eval: str | None = None  # None: no evaluation
    eval_size: PositiveInt = 256  # at most this many held-out pairs
    task_args: dict[str, Any] = field(default_factory=dict)  # for task:NAME, both splits
    max_tokens: PositiveInt = 1024  # per text, prompt included; the end is kept, as with reward.model.max_tokens
    date: str | None = None  # YYYY-MM-DD, for templates that ask for today's date; null: the day the run started
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_date("data.date", self.date)


@dataclass(frozen=True)
class RewardTrainingConfig(Section, key=""):
    """A run of ``rlhf train-reward``: a scalar reward model from preference pairs."""

    name: str = "reward"
    run_dir: str = "runs/${name}"
    seed: Seed = 0
    num_epochs: PositiveInt = 1
    batch_pairs: PositiveInt = 64  # per optimiser step
    eval_every_steps: NonNegativeInt = 0  # 0: only before the first and after the last step
    # weight of (chosen + rejected)^2, which keeps scores around zero; 0.01 is usual
    center_coef: NonNegativeFloat = 0.0
    model: ModelConfig = field(default_factory=ModelConfig)  # a causal LM, or a classifier to train further
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
        super().__post_init__()
        self.model.require_device(self.placement.device)
        require(
            self.learner.micro_batch_tokens >= self.max_pair_tokens,
            f"learner.micro_batch_tokens={self.learner.micro_batch_tokens} cannot hold one pair of 2 x "
            f"(data.max_tokens + 1) = {self.max_pair_tokens} tokens; raise it to that, or lower data.max_tokens",
        )

    @property
    def max_pair_tokens(self) -> int:
        """Longest pair: two texts, each with the one token appended to read the score at its end."""
        return 2 * (self.data.max_tokens + 1)
