"""Stand-ins at the borders of the loop: answers that are there already, and batches made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from rlhf.batch import Rollout
from rlhf.checkpoint import CheckpointStore, FileSum
from rlhf.rewards.total import Scores
from rlhf.stream import Admitted, Batch, Item, ScoredGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """An answer that is there; ``when`` is called as it is asked for."""

    value: T
    when: Callable[[], None] = lambda: None

    def result(self) -> T:
        self.when()
        return self.value


def batch_of(
    rollouts: Sequence[Rollout],
    given: dict[str, list[float]],
    weights: dict[str, float],
    ref_logprobs: Tensor | None = None,
) -> Batch:
    """A training step's batch that is one group, scored already."""
    reference = None if ref_logprobs is None else Item(Done([ref_logprobs]), 0)
    scores = Item(Done([Scores(given, weights)]), 0)
    return Batch([ScoredGroup(Admitted(rollouts[0].prompt, last_step=0), list(rollouts), scores, reference)])


def sums(*paths: Path) -> dict[str, FileSum]:
    """What a role reports of files that it has written."""
    return {str(path): FileSum.of(path) for path in paths}


def save(store: CheckpointStore, step: int, **state: Any) -> None:
    """A complete checkpoint whose learner has written one file: the step's number."""
    learner = store.begin(step, {"step": step, **state}) / "learner"
    learner.write_text(str(step))
    store.complete(step, sums(learner))
