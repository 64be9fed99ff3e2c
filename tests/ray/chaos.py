"""Kills rollout workers at random moments of a real run, and keeps a record of what the run did about it."""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from actors.cluster import Cluster
from benchmarks.common import actor_pids
from jobs.train import make_driver
from rlhf.batch import TrainBatch
from rlhf.checkpoint import CheckpointStore
from rlhf.config import Config
from rlhf.data.prompts import load_prompts
from rlhf.driver import Driver
from rlhf.roles import Metrics
from rlhf.stream import Batch
from rlhf.tracking import Tracker

PHASES = ("generate", "update", "publish")
VICTIMS = (1, 1, 2, 1, 3)  # at once
PHASE_S = 300.0  # for a phase to come: with no worker left, the driver waits for a new one


@dataclass
class RecordedRun:
    """A run, and every prompt and token version that it trained on."""

    config: Config
    driver: Driver
    cluster: Cluster
    prompts: list[int] = field(default_factory=list)
    lags: list[tuple[int, int]] = field(default_factory=list)  # (smallest, largest) staleness of each step
    metrics: list[Metrics] = field(default_factory=list)
    completions: list[list[list[int]]] = field(default_factory=list)  # the token ids, by step
    phase: str = "start"


@contextlib.contextmanager
def recorded_run(config: Config, notes: list[str]) -> Iterator[RecordedRun]:
    """All actors of a run, its driver not yet running."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = load_prompts(config.data.train, config.data, tokenizer, split="train", seed=config.seed)
    held_out = load_prompts(config.data.train, config.data, tokenizer, split="eval", seed=config.seed).all()[:32]
    run_dir = Path(config.run_dir)
    tracker = Tracker(config.tracking, run_dir, num_steps=config.num_steps, tokenizer=tokenizer)
    with contextlib.closing(tracker), Cluster(config, notes.append) as cluster:
        driver = make_driver(
            config,
            cluster,
            prompts=prompts,
            held_out={"": held_out},
            tracker=tracker,
            checkpoints=CheckpointStore(run_dir, keep=1),
        )
        run = RecordedRun(config, driver, cluster)
        spy(run)
        yield run


def spy(run: RecordedRun) -> None:
    """Notes what goes through the driver, and in which phase it is."""
    record, phase = run.driver.record, run.driver.tracker.phase

    def recording(sampled: Batch, batch: TrainBatch, metrics: Metrics) -> None:
        group_size = run.config.algorithm.group_size
        run.prompts += [r.prompt.id for r in sampled.rollouts[::group_size]]
        lag = run.driver.step - 1 - batch.versions
        run.lags.append((int(lag.min()), int(lag.max())))
        run.metrics.append(metrics)
        run.completions.append([r.token_ids for r in sampled.rollouts])
        record(sampled, batch, metrics)

    @contextlib.contextmanager
    def noting(name: str) -> Iterator[None]:
        run.phase = name
        with phase(name):
            yield

    run.driver.record = recording  # type: ignore[method-assign]
    run.driver.tracker.phase = noting  # type: ignore[method-assign]


class Killer(threading.Thread):
    """``kill -9`` for random rollout workers at random moments of every phase in turn: for one, two or all at once."""

    def __init__(self, run: RecordedRun, kills: int, pause_s: tuple[float, float], seed: int) -> None:
        super().__init__(daemon=True)
        self.kills: list[tuple[str, int]] = []  # (the driver's phase, workers alive at that time)
        self._run, self._wanted, self._pause_s, self._random = run, kills, pause_s, Random(seed)

    def run(self) -> None:
        for phase, num_victims in zip(itertools.cycle(PHASES), itertools.cycle(VICTIMS), strict=False):
            if len(self.kills) == self._wanted:
                break
            time.sleep(self._random.uniform(*self._pause_s))
            pids = actor_pids(self._run.config.name, "RolloutActor")  # before: it takes longer than a publish
            self._await(phase)
            num_victims = min(num_victims, len(pids), self._wanted - len(self.kills))
            for killed, pid in enumerate(self._random.sample(pids, num_victims)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills.append((self._run.phase, len(pids) - killed))

    def _await(self, phase: str) -> None:
        """Waits for a moment of this phase; publishing takes a twentieth of a second."""
        until(lambda: self._run.phase == phase, PHASE_S, f"a moment of {phase}", pause_s=0.001)
        time.sleep(self._random.uniform(0, 0.02))


def until(condition: Callable[[], bool], timeout_s: float, what: str, pause_s: float = 0.1) -> None:
    """Waits for a condition. Raises TimeoutError."""
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)
