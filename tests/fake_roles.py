"""Roles of both loops, that keep a log of what they are told. Their numbers follow from tokens and updates alone."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.batch import Prompt, Rollout, TrainBatch
from rlhf.checkpoint import Written
from rlhf.checks.gate import DIFFERENCE
from rlhf.checks.nonfinite import skip_report
from rlhf.errors import RoleLostError
from rlhf.rewards.total import Scores
from tests.fakes import Done, sums

Event = tuple[Any, ...]


def plain(batch: TrainBatch) -> dict[str, list[Any]]:
    """The tensors that the batch has, as lists."""
    tensors = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    return {name: tensor.tolist() for name, tensor in tensors.items() if tensor is not None}


class Model:
    """A policy, critic or reward model. What it has learnt is how often it was updated, and that is what it saves."""

    def __init__(self, name: str, told: list[Event], first_score: float, metrics: dict[str, float]) -> None:
        self._name, self._told, self._first_score, self._metrics = name, told, first_score, metrics
        self.updates = 0
        self.skips: tuple[int, ...] = ()  # steps whose loss is not finite
        self.before: dict[Any, Callable[[], None]] = {}  # what happens as an update of this step is asked for
        self.slow_to_save = False  # a checkpoint is written only when it is waited for

    def _answer(self, value: Any, done: str) -> Done[Any]:
        return Done(value, lambda: self._told.append((f"{self._name} {done}",)))

    def score(self, batch: TrainBatch) -> Done[Tensor]:
        self._told.append((f"{self._name} scores", plain(batch)))
        scores = self._first_score + 0.125 * self.updates + 0.001 * torch.arange(batch.num_completion_tokens)
        return self._answer(scores, "has scored")

    def score_reference(self, batch: TrainBatch) -> Done[Tensor]:
        self._told.append((f"{self._name} scores as the reference",))
        return self._answer(-0.5 - 0.001 * torch.arange(batch.num_completion_tokens), "has scored as the reference")

    def update(self, batch: TrainBatch, step: int) -> Done[dict[str, float]]:
        self.before.get(step, lambda: None)()
        self._told.append((f"{self._name} learns", step, plain(batch)))
        self.updates += 1
        metrics = {name: value * self.updates for name, value in self._metrics.items()}
        if batch.compared is None:
            metrics.pop(DIFFERENCE, None)
        if step in self.skips:
            metrics |= skip_report([{"loss": math.nan, "grad_norm": math.inf, "skipped": 1.0}])
        return self._answer(metrics, "has learnt")

    def save(self, directory: str) -> None:
        self._told.append((f"{self._name} is saved",))
        self._saved_to = Path(directory)
        self._saved_to.write_text(str(self.updates))

    def finish_save(self, *, wait: bool) -> Done[Written | None]:
        return Done(None if self.slow_to_save and not wait else Written(2.0 * len(self._name), sums(self._saved_to)))

    def load(self, directory: str) -> None:
        self._told.append((f"{self._name} is loaded",))
        self.updates = int(Path(directory).read_text())

    def save_model(self, directory: str) -> None:
        self._told.append((f"{self._name} is exported", Path(directory).name))
        Path(directory).mkdir()


class Pool:
    """Samples two tokens that only prompt and sample decide; groups finish one at a time, the oldest first."""

    def __init__(self, learner: Model, told: list[Event], *, logprobs: bool) -> None:
        self._learner, self._told, self._logprobs = learner, told, logprobs
        self._version = -1
        self._groups: list[list[Rollout]] = []

    def submit(
        self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool = False, with_logprobs: Collection[int] = ()
    ) -> list[int]:
        self._told.append(("samples", [p.id for p in prompts], group_size, greedy, list(with_logprobs)))
        versions = np.full(2, self._version, np.int32)
        for i, prompt in enumerate(prompts):
            logprobs = np.full(2, -1.0, np.float32) if self._logprobs or i in with_logprobs else None
            tokens = [[prompt.id, 40 + k] for k in range(group_size)]
            self._groups.append([Rollout(prompt, k, ids, versions, "stop", logprobs) for k, ids in enumerate(tokens)])
        return list(range(len(self._groups) - len(prompts), len(self._groups)))

    def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
        return {min(ids): self._groups[min(ids)]}

    def publish(self, version: int) -> dict[str, float]:
        self._told.append(("published", version, self._learner.updates))
        self._version = version
        return {"pool/busy_s": 1.0, "pool/live_workers": 1}

    def sleep(self) -> None:
        self._told.append(("sleeps",))


class Judge:
    """Gives 1 to even prompts' completions, 0.5 more for each sample of a group."""

    def __init__(self, told: list[Event]) -> None:
        self._told = told

    def _scores(self, rollouts: Sequence[Rollout]) -> Scores:
        return Scores({"judge": [(r.prompt.id + 1) % 2 + 0.5 * r.sample_index for r in rollouts]}, {"judge": 1.0})

    def score_groups(self, groups: Sequence[Sequence[Rollout]]) -> Done[list[Scores]]:
        self._told.append(("judged", [[r.token_ids for r in group] for group in groups]))
        return Done([self._scores(group) for group in groups])

    def score(self, rollouts: Sequence[Rollout]) -> Done[Scores]:
        self._told.append(("judged in an evaluation", [r.token_ids for r in rollouts]))
        return Done(self._scores(rollouts))


class Reference:
    def __init__(self, told: list[Event]) -> None:
        self._told = told

    def score(self, batches: Sequence[TrainBatch]) -> Done[list[Tensor]]:
        self._told.append(("referred", [batch.tokens.tolist() for batch in batches]))
        return Done([torch.full((batch.num_completion_tokens,), -1.5) for batch in batches])


def lose() -> None:
    """For ``Model.before``."""
    raise RoleLostError("learner[0] died")
