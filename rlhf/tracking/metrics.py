"""Rewards and completion lengths of one batch as named numbers. The names are TRL's, so its dashboards work."""

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from rlhf.algorithms.grpo import zero_variance_groups
from rlhf.batch import STATUSES, Episode, Rollout
from rlhf.rewards.total import Scores
from rlhf.roles import Metrics


def rollout_metrics(rollouts: Sequence[Rollout], scores: Scores, *, group_size: int) -> Metrics:
    """Metrics of S rollouts: ``reward*`` and ``frac_reward_zero_std``, ``rewards/<function>/*``, ``completions/*``; in
    an environment ``episodes/*``.

    Groups of ``group_size`` are contiguous. Deviations are Bessel-corrected; lengths in tokens.
    """
    assert rollouts and len(rollouts) == len(scores.rewards) and len(rollouts) % group_size == 0
    metrics = reward_metrics(scores.rewards, group_size=group_size)
    for name, values in scores.given.items():
        metrics |= function_metrics(name, values)
    return metrics | length_metrics(rollouts) | episode_metrics([r.episode for r in rollouts if r.episode])


def reward_metrics(rewards: Tensor, *, group_size: int) -> Metrics:
    """``reward``, ``reward_std``: mean and deviation over the completions with a reward (NaN, 0 if there are none);
    ``reward/abstained``: share of completions without one; ``frac_reward_zero_std``: share of groups whose rewards are
    all equal, from which a grouped algorithm learns nothing (omitted for groups of one).

    rewards float [S], NaN where missing.
    """
    rewards = rewards.detach().double().cpu()
    given = rewards[~rewards.isnan()]
    metrics = {
        "reward": given.mean().item(),
        "reward_std": given.std().item() if len(given) > 1 else 0.0,
        "reward/abstained": rewards.isnan().double().mean().item(),
    }
    if group_size == 1:
        return metrics
    return metrics | {"frac_reward_zero_std": zero_variance_groups(rewards, group_size).double().mean().item()}


def function_metrics(name: str, scores: Sequence[float]) -> Metrics:
    """Mean and deviation of one reward function over the rows where it did not abstain (NaN); NaN if too few."""
    given = [score for score in scores if not math.isnan(score)]
    return {
        f"rewards/{name}/mean": statistics.fmean(given) if given else math.nan,
        f"rewards/{name}/std": statistics.stdev(given) if len(given) > 1 else math.nan,
    }


def source_metrics(rollouts: Sequence[Rollout], rewards: Tensor) -> Metrics:
    """``reward/by_source/<name>``: mean reward of the completions of each source of a mixture; none without one.

    rewards float [S], NaN where missing; a source without any is left out.
    """
    by_source: dict[str, list[float]] = {}
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        if rollout.prompt.source and not math.isnan(reward):
            by_source.setdefault(rollout.prompt.source, []).append(reward)
    return {f"reward/by_source/{name}": statistics.fmean(by_source[name]) for name in sorted(by_source)}


def length_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Completion lengths in sampled tokens: of all, and of those that were not truncated (0 if none, as in TRL)."""
    lengths = [r.num_sampled for r in rollouts]
    terminated = [r.num_sampled for r in rollouts if not r.truncated]
    return {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(terminated) / len(lengths),
        "completions/mean_terminated_length": statistics.fmean(terminated or [0]),
        "completions/min_terminated_length": float(min(terminated, default=0)),
        "completions/max_terminated_length": float(max(terminated, default=0)),
    }


def episode_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Turns and observed tokens of an episode, and the share of them that ended in each way; none without any."""
    if not episodes:
        return {}
    turns = [len(episode.turn_lengths) for episode in episodes]
    statuses = [episode.status for episode in episodes]
    return {
        "episodes/turns/mean": statistics.fmean(turns),
        "episodes/turns/max": float(max(turns)),
        "episodes/observed_tokens/mean": statistics.fmean(float((~episode.sampled).sum()) for episode in episodes),
        **{f"episodes/status/{status}": statuses.count(status) / len(statuses) for status in STATUSES},
    }
