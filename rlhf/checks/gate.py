"""The gate between sampling and training: do the rollout workers sample from the learner's weights?

Checksums prove that the bytes of a weight version arrived; only the engine's output shows that it computes with them,
and computes the same. So in some steps, some completions carry the sampler's log-probabilities, to be compared with the
learner's. (Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlhf.algorithms.losses import sum_sequences
from rlhf.batch import TrainBatch
from rlhf.config import RolloutConfig, SamplingChecksConfig
from rlhf.errors import SamplingError

DIFFERENCE = "sampling/logprob_difference_mean"
BOUNDS = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.1, 0.5)}  # nats: warn, stop


@dataclass(frozen=True)
class SamplingGate:
    """Bounds on the mean absolute difference, in nats; infinite if it is not judged."""

    warn: float
    stop: float

    @classmethod
    def of(cls, checks: SamplingChecksConfig, rollout: RolloutConfig, dtype: torch.dtype) -> "SamplingGate":
        """Samplers that truncate the distribution (top_p, top_k) differ by design, so they are not judged."""
        if rollout.top_p < 1 or rollout.top_k > 0:
            return cls(float("inf"), float("inf"))
        warn, stop = BOUNDS[dtype]
        stop = stop if checks.max_logprob_difference is None else checks.max_logprob_difference
        warn = min(warn, stop) if checks.warn_logprob_difference is None else checks.warn_logprob_difference
        return cls(warn, stop)

    def judge(self, metrics: Mapping[str, float], version: int) -> str | None:
        """A warning, if one is due. Raises SamplingError if the difference is beyond the bound, or NaN."""
        difference = metrics.get(DIFFERENCE)
        if difference is None or difference <= min(self.warn, self.stop):
            return None
        found = (
            f"weight version {version}: the learner's log-probabilities differ from the rollout workers' by "
            f"{difference:.2g} nats on average"
        )
        if difference <= self.stop:
            return f"{found} (checks.warn_logprob_difference={self.warn:g})"
        raise SamplingError(
            f"{found}, more than checks.max_logprob_difference={self.stop:g}: the policy in training is not the one "
            "that was sampled, and nothing of this step is published or saved; look for settings that affect only the "
            "sampler (rollout.engine_args) or a model that one side computes wrongly, or raise the bound"
        )


def compared_tokens(batch: TrainBatch, version: int) -> torch.Tensor | None:
    """bool [N]: tokens with the sampler's log-probability, of completions sampled wholly from ``version``; None: none.

    For older tokens, the difference would be what the learner has learnt since; and a token that follows older ones
    attends to keys and values of the older weights, which vLLM keeps.
    """
    if batch.rollout_logprobs is None:
        return None
    lengths = batch.completion_lengths
    of_version = sum_sequences((batch.versions == version).float(), lengths) == lengths
    compared = ~batch.rollout_logprobs.isnan() & of_version.repeat_interleave(lengths)
    return compared if compared.any() else None
