"""A run's figures as metrics of Ray, which its nodes export to Prometheus and its dashboard can show."""

import math
from collections.abc import Mapping
from functools import cache

from ray.util.metrics import Gauge

from rlhf.tracking.tracker import OUTSIDE_STEPS

# Prometheus' names, to which Ray adds ray_, by ours; and what they mean.
FIGURES = {
    "reward": ("rlhf_reward", "Mean reward of the last step's completions"),
    "reward_std": ("rlhf_reward_std", "Standard deviation of the last step's rewards"),
    "accuracy": ("rlhf_accuracy", "Share of pairs in the right order, training a reward model"),
    "eval/reward": ("rlhf_eval_reward", "Mean reward of the last evaluation on data.eval"),
    "eval/accuracy": ("rlhf_eval_accuracy", "Accuracy of the last evaluation, training a reward model"),
    "kl": ("rlhf_kl", "KL to the reference, in the loss"),
    "objective/kl": ("rlhf_kl", "KL to the reference, in the reward"),
    "loss": ("rlhf_loss", "Loss of the last step"),
    "tokens_per_s": ("rlhf_tokens_per_second", "Prompt and completion tokens per second of the last step"),
    "num_tokens": ("rlhf_tokens", "Prompt and completion tokens of all steps"),
    "completions/mean_length": ("rlhf_completion_tokens", "Mean length of the last step's completions"),
    "completions/clipped_ratio": ("rlhf_truncated_ratio", "Share of the last step's completions cut at their limit"),
    "pool/live_workers": ("rlhf_live_workers", "Rollout workers that serve"),
    "pool/wanted_workers": ("rlhf_wanted_workers", "Rollout workers that there should be"),
    "pool/replaced_workers": ("rlhf_replaced_workers", "Rollout workers that failed and were replaced so far"),
    "pool/queued_groups": ("rlhf_queued_groups", "Groups that wait for a rollout worker, at the last publish"),
    "pool/idle_fraction": ("rlhf_idle_fraction", "Share of the last step's time in which a rollout worker had no work"),
    "weight_sync/version": ("rlhf_weight_version", "Version of the published weights"),
    "staleness/mean": ("rlhf_staleness", "Mean number of versions by which the last step's tokens were behind"),
    "staleness/max": ("rlhf_staleness_max", "Largest number of versions by which one of them was behind"),
}
PHASE = ("rlhf_phase_seconds", "Wall seconds of a phase since the step before")
STEP = ("rlhf_step", "Training steps finished")
STEP_SECONDS = ("rlhf_step_seconds", "Wall seconds of the last step, without evaluations and checkpoints")


class RayMetrics:
    """A ``ScalarWriter``: the main figures as gauges with the label ``run``, and those of phases also ``phase``."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._phases: dict[str, float] = {}  # that there have been; one that the last step had not took no time

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sets what a record holds, of a step or of an evaluation; figures that are not finite stay as they were."""
        phases = {
            name.removeprefix("time/").removesuffix("_s"): seconds
            for name, seconds in metrics.items()
            if name.startswith("time/")
        }
        for name, value in metrics.items():
            if name in FIGURES:
                self._set(*FIGURES[name], float(value))
        if phases:
            self._phases = dict.fromkeys(self._phases, 0.0) | phases
        for phase, seconds in self._phases.items():
            self._set(*PHASE, seconds, phase=phase)
        if in_step := [seconds for phase, seconds in phases.items() if phase not in OUTSIDE_STEPS]:
            self._set(*STEP_SECONDS, sum(in_step))
        self._set(*STEP, step)

    def close(self) -> None:
        """Nothing is open: the gauges are of this process, not of a run in it."""

    def _set(self, name: str, description: str, value: float, **labels: str) -> None:
        if math.isfinite(value):
            _gauge(name, description, ("run", *labels)).set(value, {"run": self._run, **labels})


@cache
def _gauge(name: str, description: str, labels: tuple[str, ...]) -> Gauge:
    """One for each name in this process: Ray registers them by name."""
    return Gauge(name, description, labels)
