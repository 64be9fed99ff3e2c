"""Evaluating a policy on held-out prompts: sampling, scoring, and the figures that follow. In training and by itself.

Several completions of one prompt are not independent, so the unit of every mean and of its interval is the prompt.
"""

import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.batch import Prompt, Rollout
from rlhf.checkpoint import put_in_place
from rlhf.errors import ConfigError
from rlhf.rewards.total import Scores
from rlhf.roles import Metrics, Reward, Rollouts
from rlhf.tracking import rollout_metrics

Z_95 = 1.959964  # of the normal distribution: 95 % of it lie within so many deviations


@dataclass(frozen=True)
class Evaluation:
    """Completions of held-out prompts and their scores; those of one prompt are neighbours, ``num_samples`` of each."""

    rollouts: list[Rollout]
    scores: Scores
    num_samples: int

    def metrics(self, pass_reward: float | None) -> Metrics:
        """As of a training step, but ``reward`` is the mean over prompts of each one's mean; with ``reward/ci95`` and
        ``pass@k`` where there are enough prompts and samples.

        ``pass_reward``: a completion with at least this reward passes; None: no pass@k.
        """
        by_prompt = self.scores.rewards.double().view(-1, self.num_samples)
        metrics = rollout_metrics(self.rollouts, self.scores, group_size=1)
        return metrics | mean_reward(by_prompt) | ({} if pass_reward is None else pass_rates(by_prompt, pass_reward))

    def by(self, column: str) -> "dict[str, Evaluation]":
        """Its parts by what the prompts have in a column of the data, in order of appearance."""
        rows: dict[str, list[int]] = {}
        for row, rollout in enumerate(self.rollouts):
            rows.setdefault(str(rollout.prompt.columns.get(column)), []).append(row)
        return {value: self._select(of_value) for value, of_value in rows.items()}

    def _select(self, rows: Sequence[int]) -> "Evaluation":
        given = {name: [values[row] for row in rows] for name, values in self.scores.given.items()}
        return Evaluation(
            [self.rollouts[row] for row in rows], Scores(given, self.scores.weights), num_samples=self.num_samples
        )


def evaluate(prompts: Sequence[Prompt], rollouts: Rollouts, reward: Reward, *, num_samples: int) -> Evaluation:
    """Samples ``num_samples`` completions of each prompt at ``rollout.eval_temperature``, and scores them."""
    sampled = sample(prompts, rollouts, num_samples=num_samples)
    return Evaluation(sampled, reward.score(sampled).result(), num_samples)


def sample(prompts: Sequence[Prompt], rollouts: Rollouts, *, num_samples: int) -> list[Rollout]:
    """Completions of each prompt, in order of the prompts and of their samples."""
    ids = rollouts.submit(prompts, group_size=num_samples, greedy=True)
    finished: dict[int, list[Rollout]] = {}
    while waiting := set(ids) - finished.keys():
        finished |= rollouts.next_groups(waiting)
    return [rollout for group_id in ids for rollout in finished[group_id]]


def mean_reward(rewards: Tensor) -> Metrics:
    """``reward``: the mean over prompts of each one's mean reward; ``reward/ci95``: half of the width of its 95 %
    confidence interval by the normal distribution, z s / sqrt(P), for two prompts and more.

    rewards float64 [P, samples], NaN where none was given; prompts without any are left out.
    """
    means = rewards.nanmean(1)
    means = means[~means.isnan()].tolist()
    if len(means) < 2:
        return {"reward": means[0] if means else math.nan}
    return {
        "reward": statistics.fmean(means),
        "reward/ci95": Z_95 * statistics.stdev(means) / math.sqrt(len(means)),
    }


def pass_rates(rewards: Tensor, pass_reward: float) -> Metrics:
    """``pass@k`` for k = 1, 2, 4, ... and for all samples: the mean over the prompts with at least k rewards.

    rewards float64 [P, samples], NaN where none was given.
    """
    num_samples = rewards.shape[1]
    ks = sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})
    counts = list(zip((~rewards.isnan()).sum(1).tolist(), (rewards >= pass_reward).sum(1).tolist(), strict=True))
    rates = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in ks}
    return {f"pass@{k}": statistics.fmean(of_k) for k, of_k in rates.items() if of_k}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples passes, if c of n did: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


@dataclass
class BestModel:
    """Keeps the model with the highest value of an evaluation's metric, as a directory that ``save`` writes.

    The directory says what it holds, so that what a resumed run finds there is never taken for something else.
    """

    metric: str  # as in eval.jsonl
    directory: Path
    save: Callable[[Path], None]
    best: dict[str, Any] = field(default_factory=dict)  # step, value and metric; empty: nothing is kept

    NOTE = "best.json"

    def resume(self) -> None:
        """What an earlier part of the run has kept counts, if it was judged by the same metric."""
        note = self.directory / self.NOTE
        found = json.loads(note.read_text()) if note.exists() else {}
        self.best = found if found.get("metric") == self.metric else {}

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Saves the model if it is better than the one that is kept. Raises ConfigError if there is no such metric."""
        values = {f"eval/{name}": value for name, value in metrics.items()}
        if self.metric not in values:
            raise ConfigError(
                f"checkpoint.keep_best={self.metric}: the evaluation has no such metric; use one of {', '.join(values)}"
            )
        value = values[self.metric]
        if not math.isfinite(value) or (self.best and value <= self.best["value"]):
            return
        partial, removed = (self.directory.with_name(f".{self.directory.name}-{which}") for which in ("new", "old"))
        shutil.rmtree(partial, ignore_errors=True)  # what a crash left there
        self.save(partial)
        self.best = {"step": step, "metric": self.metric, "value": value}
        (partial / self.NOTE).write_text(json.dumps(self.best) + "\n")
        put_in_place(partial, self.directory, removed)
        shutil.rmtree(removed)
