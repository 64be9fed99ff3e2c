"""What the loop requires of an algorithm."""

from typing import Any, Protocol

from rlhf.batch import TrainBatch


class Algorithm(Protocol):
    """Turns scores into advantages. The loss itself is computed by the learner, from the configuration."""

    needs_old_logprobs: bool
    """Whether advantages need the learner's log-probabilities before the update (PPO's KL reward does)."""

    def assign_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Fills in ``advantages [N]`` (and ``returns [N]`` if there is a critic), and returns metrics."""
        ...

    def adapt(self, batch: TrainBatch) -> None:
        """Updates what changes over a run (PPO's KL controller) after the policy has learnt from ``batch``."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
