"""From prompts to training batches: one stream of finished groups, at most ``max_staleness`` weight versions ahead.

Prompts are admitted while their groups can still be trained on in time; groups go to rewards and reference as they
finish, while others are still being sampled; a batch takes the first to finish, as long as no group left behind becomes
too old. With ``max_staleness=0`` a step admits exactly its own prompts and waits for all of them: strictly on-policy.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlhf.algorithms.advantages import clip_rewards
from rlhf.algorithms.grpo import zero_variance_groups
from rlhf.batch import Prompt, Rollout, TrainBatch, pack
from rlhf.config import Config
from rlhf.data.prompt_stream import PromptStream
from rlhf.rewards.total import Scores
from rlhf.roles import Pending, Reference, Reward, Rollouts

T = TypeVar("T")


@dataclass(frozen=True)
class Admitted:
    """A prompt whose group is being sampled."""

    prompt: Prompt
    last_step: int  # the last training step that may use it


@dataclass(frozen=True)
class Item(Generic[T]):
    """One group's result from a call for several."""

    call: Pending[list[T]]
    index: int

    def result(self) -> T:
        return self.call.result()[self.index]


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group and its pending scores."""

    admitted: Admitted
    rollouts: list[Rollout]
    scores: Item[Scores]
    ref_logprobs: Item[Tensor] | None


class Batch:
    """One training step's completions, groups contiguous and in the order of their prompts."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self._groups = groups
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.packed: TrainBatch = pack(self.rollouts)

    @cached_property
    def scores(self) -> Scores:
        """Waits for rewards that are still pending."""
        return Scores.concat([group.scores.result() for group in self._groups])

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """float32 [N]: waits for what is still pending; None without a reference."""
        found = [group.ref_logprobs.result() for group in self._groups if group.ref_logprobs]
        return torch.cat(found) if found else None


Phase = Callable[[str], AbstractContextManager[None]]
"""Counts the time spent in its body towards a phase: ``Tracker.phase``."""


class GroupStream:
    """The stream of one run. Not thread-safe."""

    def __init__(
        self,
        prompts: PromptStream,
        rollouts: Rollouts,
        reward: Reward,
        reference: Reference | None,
        config: Config,
        phase: Phase,
    ) -> None:
        self._prompts, self._rollouts, self._reward, self._reference = prompts, rollouts, reward, reference
        self._algorithm, self._max_staleness, self._phase = config.algorithm, config.rollout.max_staleness, phase
        self._last_step = config.num_steps - 1
        self._checks, self._all_compared = config.checks, config.needs_rollout_logprobs
        self._last_comparison: int | None = None  # the step of the last one made
        self._num_comparisons = 0
        self._sampling: dict[int, Admitted] = {}  # by the pool's group id
        self._ready: list[ScoredGroup] = []  # in the order in which they finished
        self._resumed: list[Prompt] = []  # admitted before a checkpoint, not consumed by then

    def next_batch(self, step: int) -> Batch:
        """The batch of training step ``step``, which is also the version of the weights just published.

        With ``dynamic_sampling_max_tries`` a group whose rewards are all equal is replaced by one of a new prompt as
        soon as that is known (DAPO: arXiv 2503.14476, section 3.2). After that many batches' worth of replacements in a
        step, equal groups are taken too, so the batch always has its exact size.
        """
        size = self._algorithm.prompts_per_step
        ahead = min(self._max_staleness, self._last_step - step)  # nothing is sampled beyond the last step
        refills = self._algorithm.dynamic_sampling_max_tries * size
        self._admit(step, (1 + ahead) * size - len(self._sampling) - len(self._ready))
        while (chosen := self._choose(step)) is None:
            num_replaced = 0
            for group in self._next_groups():
                if num_replaced < refills and self._is_equal(group):
                    num_replaced += 1
                else:
                    self._ready.append(group)
            refills -= num_replaced
            self._admit(step, num_replaced)
        taken = sorted((self._ready[i] for i in chosen), key=lambda group: group.admitted.prompt.id)
        self._ready = [group for i, group in enumerate(self._ready) if i not in chosen]
        return Batch(taken)

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompt stream, and the ids of prompts admitted but not consumed."""
        admitted = [*self._sampling.values(), *(group.admitted for group in self._ready)]
        pending = [*(a.prompt.id for a in admitted), *(p.id for p in self._resumed)]
        return {"prompts": self._prompts.state_dict(), "pending": sorted(pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from ``state``; pending prompts are resampled before any other."""
        self._prompts.load_state_dict(state["prompts"])
        self._resumed = [self._prompts.at(position) for position in state["pending"]]

    def compared(self, step: int) -> None:
        """Records that step ``step`` compared log-probabilities. Until a step has done so, the comparison stays due."""
        self._last_comparison = step
        self._num_comparisons += 1

    def _admit(self, step: int, count: int) -> None:
        if count <= 0:
            return
        prompts, self._resumed = self._resumed[:count], self._resumed[count:]
        prompts += self._prompts.take(count - len(prompts))
        compared = () if self._all_compared else self._to_compare(step, count)
        ids = self._rollouts.submit(prompts, group_size=self._algorithm.group_size, with_logprobs=compared)
        for group_id, prompt in zip(ids, prompts, strict=True):
            self._sampling[group_id] = Admitted(prompt, last_step=step + self._max_staleness)

    def _to_compare(self, step: int, count: int) -> range:
        """Which of ``count`` groups are sampled with log-probabilities for the learner to check: different ones each
        time, so that every worker gets a turn."""
        checks, last = self._checks, self._last_comparison
        if last is not None and step - last < checks.logprob_every_steps:
            return range(0)
        num_groups = min(checks.logprob_groups, count)
        start = self._num_comparisons * num_groups % (count - num_groups + 1)
        return range(start, start + num_groups)

    def _next_groups(self) -> list[ScoredGroup]:
        """Waits for one group, takes all that have finished, and requests their rewards and reference log-probabilities
        without waiting for them.

        One call covers them all, since each call costs time, but none is packed with another: numbers must not depend
        on the order in which groups finish.
        """
        finished = self._rollouts.next_groups(self._sampling)
        groups = list(finished.values())
        scores = self._reward.score_groups(groups)
        reference = self._reference.score([pack(rollouts) for rollouts in groups]) if self._reference else None
        scored = []
        for index, (group_id, rollouts) in enumerate(finished.items()):
            admitted = self._sampling.pop(group_id)
            assert rollouts[0].prompt.id == admitted.prompt.id, "the pool mixed up groups"
            ref_logprobs = Item(reference, index) if reference else None
            scored.append(ScoredGroup(admitted, rollouts, Item(scores, index), ref_logprobs))
        return scored

    def _is_equal(self, group: ScoredGroup) -> bool:
        """Whether nothing can be learnt from it."""
        with self._phase("reward"):
            rewards = group.scores.result().rewards
        rewards = clip_rewards(rewards, self._algorithm.reward_clip)  # as the advantages see them
        if not zero_variance_groups(rewards, self._algorithm.group_size).all():
            return False
        if self._algorithm.credit == "episode":
            return True
        given = [rollout for rollout, missing in zip(group.rollouts, rewards.isnan(), strict=True) if not missing]
        return len({tuple(rollout.episode.turn_rewards) for rollout in given if rollout.episode}) < 2

    def _choose(self, step: int) -> set[int] | None:
        if len(self._ready) < self._algorithm.prompts_per_step:
            return None  # told apart first: it is asked after every group
        return choose_batch(
            [group.admitted.last_step for group in self._ready],
            [admitted.last_step for admitted in self._sampling.values()],
            step=step,
            size=self._algorithm.prompts_per_step,
        )


def choose_batch(ready: Sequence[int], sampling: Sequence[int], *, step: int, size: int) -> set[int] | None:
    """Which finished groups make the batch of ``step``; None: wait for more.

    Earliest finished first, provided that all others can still be used in time: for every later step ``s``, at most
    ``size`` x (s - step) groups that must be used by ``s`` are left behind (earliest deadline first, Horn 1974).

    Args:
        ready: the last step that may use each finished group, in the order in which they finished.
        sampling: the same for unfinished groups.
        step: the training step in question; every deadline is at least this.
        size: groups per batch.

    Returns:
        Indices into ``ready``, ``size`` of them.
    """
    chosen: set[int] = set()
    for deadline in sorted({*ready, *sampling}):
        due = [i for i, last in enumerate(ready) if last <= deadline]
        num_due = len(due) + sum(last <= deadline for last in sampling)
        needed = num_due - size * (deadline - step)
        assert needed <= size, "more groups were admitted than can be used in time"
        rest = [i for i in due if i not in chosen]
        missing = needed - (len(due) - len(rest))
        if missing > len(rest):
            return None
        chosen.update(rest[: max(0, missing)])
    rest = [i for i in range(len(ready)) if i not in chosen]
    if len(chosen) + len(rest) < size:
        return None
    return chosen | set(rest[: size - len(chosen)])
