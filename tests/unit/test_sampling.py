"""Dynamic sampling: groups that teach nothing are replaced, the batch keeps its exact size, and tries are bounded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rlhf.batch import Prompt, Rollout
from rlhf.config import AlgorithmConfig
from rlhf.sampling import Done, in_order, sample_groups


@dataclass
class Counting:
    """A prompt stream that counts up."""

    taken: int = 0

    def take(self, count: int) -> list[Prompt]:
        prompts = [Prompt(id=self.taken + i, token_ids=[1], text="") for i in range(count)]
        self.taken += count
        return prompts


class Backwards:
    """A pool whose groups finish in reverse order."""

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool = False) -> Iterator[list[Rollout]]:
        for prompt in reversed(prompts):
            yield [Rollout(prompt, i, [5], np.zeros(1, np.int32), "stop") for i in range(group_size)]


@dataclass
class EveryThird:
    """Groups of prompts 0, 3, 6, ... have one good sample; all others are equal."""

    calls: list[int] = field(default_factory=list)

    def weights(self) -> dict[str, float]:
        return {"right": 1.0}

    def score(self, rollouts: Sequence[Rollout]) -> Done:
        self.calls.append(len(rollouts))
        return Done({"right": [float(r.prompt.id % 3 == 0 and r.sample_index == 0) for r in rollouts]})


def config(tries: int) -> AlgorithmConfig:
    return AlgorithmConfig(prompts_per_step=4, group_size=2, dynamic_sampling_max_tries=tries)


def run(tries: int) -> tuple[list[Rollout], dict[str, list[float]], Counting, EveryThird]:
    prompts, reward = Counting(), EveryThird()
    rollouts, pending = sample_groups(prompts, Backwards(), reward, config(tries))  # type: ignore[arg-type]
    return rollouts, pending.result(), prompts, reward


def test_off_takes_one_round_in_prompt_order() -> None:
    rollouts, scores, prompts, _ = run(0)
    assert [(r.prompt.id, r.sample_index) for r in rollouts] == [(p, i) for p in range(4) for i in range(2)]
    assert prompts.taken == 4
    assert len(scores["right"]) == 8


def test_equal_groups_are_refilled_exactly() -> None:
    rollouts, scores, prompts, reward = run(10)
    assert [r.prompt.id for r in rollouts] == [0, 0, 3, 3, 6, 6, 9, 9]
    assert scores["right"] == [1.0, 0.0] * 4
    assert prompts.taken == 10, "4, then 2 missing, then 1 three times, then 1"
    assert sum(reward.calls) == 20


def test_out_of_tries_the_batch_is_filled_with_equal_groups() -> None:
    rollouts, scores, _, reward = run(1)
    ids = [r.prompt.id for r in rollouts]
    assert len(ids) == len(scores["right"]) == 8
    assert ids[:4] == [0, 0, 3, 3], "what teaches comes first"
    assert all(i % 3 for i in ids[4:])
    assert len(reward.calls) == 2


def test_a_lost_prompt_is_a_bug() -> None:
    prompts = Counting().take(2)
    with pytest.raises(AssertionError, match="lost or repeated"):
        in_order(Backwards().generate(prompts[:1], group_size=1), prompts)
