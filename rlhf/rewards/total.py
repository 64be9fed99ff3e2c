"""The reward of a completion: the weighted sum of its scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from rlhf.errors import RewardError
from rlhf.rewards.loading import ENVIRONMENT_NAME


@dataclass(frozen=True)
class Scores:
    """The scores of S completions by source, and the weight of each source."""

    given: dict[str, list[float]]  # [S] by the name of a reward function or model, unweighted; NaN where it abstained
    weights: dict[str, float]  # in the sum, by name

    @cached_property
    def rewards(self) -> Tensor:
        """float32 [S]: the weighted sum; NaN where no score was given. Raises RewardError as ``combine`` does."""
        return combine(self.given, self.weights)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The scores of several batches of completions, concatenated. All come from the same functions."""
        first = parts[0]
        return cls({name: [x for part in parts for x in part.given[name]] for name in first.given}, first.weights)

    def check_abstained(self, max_abstained: float) -> None:
        """Raises RewardError if more than the share ``max_abstained`` of the completions has no reward."""
        num_abstained = int(self.rewards.isnan().sum())
        if num_abstained <= max_abstained * len(self.rewards):
            return
        deciding = [name for name, weight in self.weights.items() if weight != 0]
        who = (
            f"every reward function with nonzero weight ({', '.join(deciding)}) abstained"
            if deciding
            else "all weights are 0"
        )
        remedy = "return numbers for more of them"
        if ENVIRONMENT_NAME in self.given:  # which gives every episode a reward that it does not fail
            who, remedy = "their episodes failed, as noted above", "mend the environment"
        raise RewardError(
            f"{num_abstained} of {len(self.rewards)} completions of this step "
            f"({num_abstained / len(self.rewards):.0%}) have no reward: {who}; {remedy}, drop those prompts, or raise "
            f"reward.max_abstained={max_abstained:g}"
        )


def combine(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Tensor:
    """float32 [S]: the weighted sum of each row's scores, ignoring those that abstained (NaN).

    NaN where all with nonzero weight abstained. Raises RewardError if a sum is too large for float32.
    """
    table = torch.tensor([list(values) for values in scores.values()], dtype=torch.float64)  # [functions, S]
    weight = torch.tensor([weights[name] for name in scores], dtype=torch.float64)[:, None]
    given = ~table.isnan() & (weight != 0)
    total = (weight * table.nan_to_num(nan=0.0)).sum(dim=0).to(torch.float32)
    if total.isinf().any():
        row = int(total.isinf().nonzero()[0])
        raise RewardError(
            f"the reward of completion {row}, the weighted sum of {', '.join(scores)}, is too large for float32; "
            "return smaller numbers, or lower their weights"
        )
    return total.where(given.any(dim=0), torch.nan)
