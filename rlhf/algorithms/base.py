"""What the loop asks of an algorithm."""

from typing import Any, Protocol

from rlhf.batch import TrainBatch


class Algorithm(Protocol):
    """Turns scores into advantages. The loss itself is computed by the learner, from the configuration."""

    needs_old_logprobs: bool
    """Whether advantages need the learner's log-probabilities before the update (PPO's KL reward does)."""

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Fills in ``advantages [N]`` (and ``returns [N]`` where there is a critic), and says what it measured."""
        ...

    def adapt(self, batch: TrainBatch) -> None:
        """Moves what changes over a run (PPO's KL controller), once the policy has learnt from ``batch``."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
