"""What every training run shares, whatever it trains: steps, evaluations, and checkpoints to resume from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.checks.nonfinite import SkippedSteps
from rlhf.config import Config
from rlhf.reward_config import RewardTrainingConfig
from rlhf.roles import Metrics, Trained
from rlhf.tracking import Tracker

C = TypeVar("C", bound=Config | RewardTrainingConfig)


class Stateful(Protocol):
    """A part of a run that a checkpoint stores as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Run(Generic[C]):
    """One training run. ``step`` counts finished training steps. Subclasses implement the loop."""

    config: C
    held_out: Sequence[Any]  # evaluation data: prompts or preference pairs
    tracker: Tracker
    checkpoints: CheckpointStore
    step: int = 0
    stop_requested: bool = False
    evaluations: dict[int, Metrics] = field(default_factory=dict)  # by the step they followed
    skipped: SkippedSteps = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.config.checks)

    def trained(self) -> dict[str, Trained]:
        """The models that learn, by the name of their directory in a checkpoint."""
        raise NotImplementedError

    def stateful(self) -> dict[str, Stateful]:
        """What a resumed run needs in addition to the step and the evaluations."""
        return {"tracker": self.tracker, "skipped": self.skipped}

    def measure(self) -> Metrics:
        """Metrics of ``held_out`` under the current weights."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Evaluates on the held-out data, if any, and records the metrics."""
        if not self.held_out:
            return
        with self.tracker.phase("evaluate"):
            metrics = self.measure()
        self.evaluations[self.step] = metrics
        self.tracker.log_eval(self.step, metrics)

    def save(self) -> None:
        """Writes one checkpoint of everything, complete or not at all."""
        with self.tracker.phase("checkpoint"), self.checkpoints.writing(self.step, self.state_dict()) as directory:
            for name, model in self.trained().items():
                model.save(str(directory / name))

    def resume(self) -> None:
        """Resumes from the checkpoint that ``checkpoint.resume`` names, if there is one."""
        if (directory := self.checkpoints.find(self.config.checkpoint.resume)) is None:
            return
        self.load_state_dict(read_state(directory))
        for name, model in self.trained().items():
            model.load(str(directory / name))

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state that a resumed run needs, as JSON."""
        return {
            "step": self.step,
            "evaluations": {str(step): metrics for step, metrics in self.evaluations.items()},
            **{name: part.state_dict() for name, part in self.stateful().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.evaluations = {int(step): metrics for step, metrics in state["evaluations"].items()}
        for name, part in self.stateful().items():
            part.load_state_dict(state[name])

    def is_due(self, every: int) -> bool:
        """Whether something that happens every ``every`` steps happens now; 0: never."""
        return every > 0 and self.step % every == 0
