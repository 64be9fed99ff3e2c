"""The reward of a completion: the weighted sum of what was given for it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf.errors import RewardError


def combine(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Tensor:
    """float32 [S]: the weighted sum of the scores of each row, without those that abstained (NaN) there.

    NaN where all that have a weight other than 0 abstained. Raises RewardError where a sum is too large for float32.
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


def check_abstained(rewards: Tensor, weights: Mapping[str, float], max_abstained: float) -> None:
    """Raises RewardError where a larger share than ``max_abstained`` of a step's rewards float [S] is missing (NaN)."""
    num_abstained = int(rewards.isnan().sum())
    if num_abstained <= max_abstained * len(rewards):
        return
    deciding = [name for name, weight in weights.items() if weight != 0]
    who = (
        f"every reward function of nonzero weight ({', '.join(deciding)}) abstained"
        if deciding
        else "all weights are 0"
    )
    raise RewardError(
        f"{num_abstained} of {len(rewards)} completions of this step ({num_abstained / len(rewards):.0%}) have no "
        f"reward: {who}; return numbers for more of them, drop those prompts, or raise "
        f"reward.max_abstained={max_abstained:g}"
    )
