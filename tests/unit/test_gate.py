"""Which tokens the learner compares with the sampler, and what it makes of the difference."""

import math

import pytest
import torch

from rlhf.batch import TrainBatch
from rlhf.checks.gate import DIFFERENCE, SamplingGate, compared_tokens
from rlhf.config import RolloutConfig, SamplingChecksConfig
from rlhf.errors import SamplingError
from rlhf.training.engine import add_stat

NAN = math.nan


def batch(logprobs: list[float] | None, versions: list[int], lengths: list[int]) -> TrainBatch:
    return TrainBatch(
        tokens=torch.arange(len(versions) + len(lengths)),
        prompt_lengths=torch.ones(len(lengths), dtype=torch.long),
        completion_lengths=torch.tensor(lengths),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        versions=torch.tensor(versions, dtype=torch.int32),
        rollout_logprobs=None if logprobs is None else torch.tensor(logprobs),
    )


def test_completions_of_exactly_this_version_with_logprobs_are_compared() -> None:
    found = compared_tokens(batch([-1.0, -2.0, NAN, -1.0, -3.0], [4, 4, 4, 3, 4], [2, 1, 2]), version=4)
    assert found is not None
    assert found.tolist() == [True, True, False, False, False], "the last one attends to what older weights computed"
    assert compared_tokens(batch([-1.0, -1.0], [3, 3], [2]), version=4) is None
    assert compared_tokens(batch(None, [4], [1]), version=4) is None


def test_differences_warn_then_stop_and_nan_stops() -> None:
    gate = SamplingGate(warn=0.1, stop=0.5)
    assert gate.judge({}, 3) is None, "a step without a compared token"
    assert gate.judge({DIFFERENCE: 0.1}, 3) is None
    assert gate.judge({DIFFERENCE: 0.5}, 3) is not None, "at the bound itself, a warning"
    warning = gate.judge({DIFFERENCE: 0.2}, 3)
    assert warning is not None
    assert "weight version 3" in warning and "0.2 nats" in warning and "checks.warn_logprob_difference=0.1" in warning
    with pytest.raises(SamplingError):
        SamplingGate(warn=1.0, stop=0.5).judge({DIFFERENCE: 0.6}, 3)  # a warning set too high hides no end
    for beyond in (0.51, math.inf, NAN):
        with pytest.raises(SamplingError, match=r"checks\.max_logprob_difference=0\.5") as caught:
            gate.judge({DIFFERENCE: beyond}, 3)
        assert "\n" not in str(caught.value)


def test_bounds_follow_the_dtype_unless_they_are_set() -> None:
    def bounds(dtype: torch.dtype, *, top_p: float = 1.0, top_k: int = -1, **checks: float) -> tuple[float, float]:
        gate = SamplingGate.of(SamplingChecksConfig(**checks), RolloutConfig(top_p=top_p, top_k=top_k), dtype)
        return gate.warn, gate.stop

    assert bounds(torch.float32) == (1e-3, 1e-2)
    assert bounds(torch.bfloat16) == (0.1, 0.5)
    assert bounds(torch.bfloat16, max_logprob_difference=0.05) == (0.05, 0.05), "nothing is let pass without a word"
    assert bounds(torch.float32, warn_logprob_difference=0.5, max_logprob_difference=2.0) == (0.5, 2.0)
    for cut in ({"top_p": 0.9}, {"top_k": 1}):
        assert bounds(torch.float32, **cut) == (math.inf, math.inf), "a cut distribution differs by design"


def test_parts_of_a_stat_add_up_and_of_a_maximum_the_largest_stays() -> None:
    for make in (float, torch.tensor):
        stats: dict = {}
        for mean, largest in ((0.5, 2.0), (0.25, 3.0), (0.0, 1.0)):
            add_stat(stats, "gap_mean", make(mean))
            add_stat(stats, "gap_max", make(largest))
        assert (float(stats["gap_mean"]), float(stats["gap_max"])) == (0.75, 3.0)
    add_stat(stats, "gap_max", torch.tensor(NAN))
    assert math.isnan(float(stats["gap_max"]))
