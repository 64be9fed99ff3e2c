"""When the rollout pool should grow or shrink: measurements of a step's load, and a pure rule with hysteresis."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlhf.config import AutoscaleConfig


@dataclass(frozen=True)
class StepLoad:
    """The pool's load in one training step."""

    step_s: float  # from one publish to the next
    wait_s: float  # the part of it that the driver waited for samples
    busy_worker_s: float  # summed over workers: time with something to sample
    worker_s: float  # summed over workers: time in which they could have had it

    @property
    def wait_fraction(self) -> float:
        """Share of the step that the driver waited for samples."""
        return self.wait_s / self.step_s if self.step_s else 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of the workers' time in which they had nothing to sample."""
        return 1.0 - self.busy_worker_s / self.worker_s if self.worker_s else 0.0


class LoadMeter:
    """Adds up a step's load, from one publish to the next."""

    def __init__(self, *, on_policy: bool) -> None:
        """``on_policy``: workers can have work only while the driver waits for samples."""
        self._on_policy = on_policy
        self._closed_s = self._looked_s = time.monotonic()
        self._wait_s = self._busy_worker_s = self._worker_s = 0.0

    def waited(self, seconds: float) -> None:
        """Adds time that the driver waited for samples."""
        self._wait_s += seconds

    def looked(self, count_time: Callable[[float], tuple[float, float]], *, driver_waits: bool) -> None:
        """Adds the time since the last look; ``count_time(elapsed_s)`` returns (busy, total) worker-seconds."""
        now = time.monotonic()
        busy_s, worker_s = count_time(now - self._looked_s)
        self._looked_s = now
        if driver_waits or not self._on_policy:
            self._busy_worker_s += busy_s
            self._worker_s += worker_s

    def close(self) -> StepLoad:
        """Ends the step and returns its load; a new one begins."""
        now = time.monotonic()
        load = StepLoad(now - self._closed_s, self._wait_s, self._busy_worker_s, self._worker_s)
        self._closed_s, self._wait_s, self._busy_worker_s, self._worker_s = now, 0.0, 0.0, 0.0
        return load


@dataclass(frozen=True)
class Decision:
    """A new number of workers, and why."""

    num_workers: int
    reason: str


class Autoscaler:
    """Grows by one when the learner waits and workers are busy; shrinks by one when they idle and it does not wait.

    The number of workers does not oscillate: the two conditions exclude each other, several steps in a row must agree,
    and every decision restarts the count. Each time that the pool could not grow, twice as many steps must agree before
    it is to try again.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._votes = 0  # steps in a row for growing (positive) or shrinking (negative)
        self._growing_to: int | None = None  # decided, but not reached
        self._failures = 0  # to grow, in a row

    def judge(self, load: StepLoad, *, num_workers: int, settled: bool) -> Decision | None:
        """What to change after a step, if anything. ``settled``: the last change has taken effect."""
        config = self._config
        if self._growing_to is not None and (settled or num_workers < self._growing_to):
            self._failures = 0 if num_workers >= self._growing_to else self._failures + 1
            self._growing_to = None
        waits, idles = load.wait_fraction > config.wait_fraction, load.idle_fraction > config.idle_fraction
        vote = 1 if waits and not idles else -1 if idles and not waits else 0
        if vote == 0 or not settled:
            self._votes = 0
        elif vote * self._votes < 0:
            self._votes = vote
        else:
            self._votes += vote
        patience_steps = config.patience_steps * (2**self._failures if self._votes > 0 else 1)
        if abs(self._votes) < patience_steps:
            return None
        wanted = min(config.max, max(config.min, num_workers + (1 if self._votes > 0 else -1)))
        self._votes = 0
        if wanted == num_workers:
            return None
        self._growing_to = wanted if wanted > num_workers else None
        return Decision(
            wanted,
            f"in each of {patience_steps} steps "
            + (
                f"the learner waited for samples for more than {config.wait_fraction:.0%} of the time (now "
                f"{load.wait_fraction:.0%})"
                if wanted > num_workers
                else f"workers were idle for more than {config.idle_fraction:.0%} of the time (now "
                f"{load.idle_fraction:.0%})"
            ),
        )
