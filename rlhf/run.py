"""What every training run shares, whatever it trains: steps, evaluations, and checkpoints to resume from."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rlhf.checkpoint import CheckpointStore, Written, read_state
from rlhf.checks.nonfinite import SkippedSteps
from rlhf.config import Config
from rlhf.errors import DeadlineError, GpuMemoryError, RlhfError
from rlhf.evaluation import BestModel
from rlhf.reward_config import RewardTrainingConfig
from rlhf.roles import Metrics, Trained
from rlhf.tracking import Tracker

SAVE_EVERY_S = 600.0  # if checkpoint.every_steps is null

C = TypeVar("C", bound=Config | RewardTrainingConfig)


class Stateful(Protocol):
    """A part of a run that a checkpoint stores as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Run(Generic[C]):
    """One training run. ``step`` counts finished training steps. Subclasses implement the loop."""

    config: C
    held_out: Mapping[str, Sequence[Any]]  # prompts or preference pairs by name; '' is the name of data.eval
    tracker: Tracker
    checkpoints: CheckpointStore
    memory: Callable[[], Metrics] = dict  # metrics of what the roles' processes hold
    best: BestModel | None = None  # None: no model is kept but the last
    step: int = 0
    stop_requested: int = 0  # the number of the signal that asked for it
    evaluations: dict[int, Metrics] = field(default_factory=dict)  # by the step they followed
    skipped: SkippedSteps = field(init=False)
    _saving: int | None = field(default=None, init=False)  # the step whose checkpoint is being written
    _saved_s: float = field(default_factory=lambda: time.monotonic(), init=False)  # when the last one began, or the run

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.config.checks)

    def trained(self) -> dict[str, Trained]:
        """The models that learn, by the name of their directory in a checkpoint."""
        raise NotImplementedError

    def stateful(self) -> dict[str, Stateful]:
        """What a resumed run needs in addition to the step and the evaluations."""
        return {"tracker": self.tracker, "skipped": self.skipped}

    def measure(self, held_out: Sequence[Any]) -> Metrics:
        """Metrics of held-out data under the current weights."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Evaluates on the held-out data, if any, and records the metrics."""
        if not self.held_out:
            return
        with self.tracker.phase("evaluate"):
            metrics = {
                f"{name}/{metric}" if name else metric: value
                for name, data in self.held_out.items()
                for metric, value in self.measure(data).items()
            }
        self.evaluations[self.step] = metrics
        self.tracker.log_eval(self.step, metrics)
        if self.best is not None:
            with self.tracker.phase("checkpoint"):
                self.best.judge(self.step, metrics)

    def save_if_due(self) -> None:
        """After each step: begins a checkpoint if it is time for one, and completes the one that has been written."""
        every = self.config.checkpoint.every_steps
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S if every is None else self.is_due(every):
            self.save()
        self.complete_save(wait=False)

    def save_at_end(self) -> None:
        """Leaves a complete checkpoint of the last step."""
        self.complete_save(wait=True)
        if not self.checkpoints.holds(self.step):
            self.save()
            self.complete_save(wait=True)

    def save(self) -> None:
        """Begins a checkpoint of everything as it is now, which is written while training goes on."""
        self.complete_save(wait=True)
        with self.tracker.phase("checkpoint"):
            self._saved_s = time.monotonic()
            directory = self.checkpoints.begin(self.step, self.state_dict())
            for name, model in self.trained().items():
                model.save(str(directory / name))
            self._saving = self.step

    def complete_save(self, *, wait: bool) -> None:
        """Puts the checkpoint that is being written in its place, if all models have written it; ``wait``: waits."""
        if self._saving is None:
            return
        with self.tracker.phase("checkpoint"):
            answers = [model.finish_save(wait=wait) for model in self.trained().values()]
            written = Written.together([answer.result() for answer in answers])
            if written is None:
                return
            self.checkpoints.complete(self._saving, written.files)
        self._saving = None
        self.tracker.log_with_next_step(
            {"checkpoint/write_s": written.seconds, "checkpoint/bytes": float(written.num_bytes)}
        )

    @contextmanager
    def completing_saves(self) -> Iterator[None]:
        """If its body fails, the checkpoint that is being written still counts; unless a role hangs, or on Ctrl-C.

        A rank without enough memory leaves the others waiting for it: they hang, too.
        """
        try:
            yield
        except (DeadlineError, GpuMemoryError):
            raise
        except Exception:
            with suppress(RlhfError):  # the models may be what was lost
                self.complete_save(wait=True)
            raise

    def resume(self) -> None:
        """Resumes from the checkpoint that ``checkpoint.resume`` names, if there is one."""
        self.checkpoints.sweep()
        if (directory := self.checkpoints.find(self.config.checkpoint.resume)) is None:
            return
        self.load_state_dict(read_state(directory))
        for name, model in self.trained().items():
            model.load(str(directory / name))
        if self.best is not None:
            self.best.resume()

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
