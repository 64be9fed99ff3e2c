"""The loop's own decisions: which rewards a step may go on with, and what an evaluation without any records."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, pack
from rlhf.checkpoint import CheckpointStore
from rlhf.checks.gate import SamplingGate
from rlhf.driver import Driver
from rlhf.errors import RewardError
from rlhf.recipes import load_config
from rlhf.stream import Batch
from rlhf.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
NOTHING: Any = None


def rollout(prompt: Prompt, sample_index: int = 0) -> Rollout:
    return Rollout(prompt, sample_index, [5, 6], np.zeros(2, np.int32), "stop")


class Pool:
    def sleep(self) -> None:
        pass

    def submit(self, prompts: list[Prompt], *, group_size: int, greedy: bool) -> list[int]:
        self._prompts = prompts
        return list(range(len(prompts)))

    def next_groups(self, ids: set[int]) -> dict[int, list[Rollout]]:
        return {i: [rollout(self._prompts[i])] for i in ids}


class Abstaining:
    """Gives 1 to every completion of even prompts, nothing to the others."""

    def weights(self) -> dict[str, float]:
        return {"judge": 1.0, "shown": 0.0}

    def score(self, groups: list[list[Rollout]]) -> Any:
        scores = [[math.nan if r.prompt.id % 2 else 1.0 for r in group] for group in groups]
        return SimpleNamespace(result=lambda: [{"judge": s, "shown": [0.0] * len(s)} for s in scores])


def driver(tmp_path: Path, *overrides: str, eval_prompts: list[Prompt]) -> Driver:
    config = load_config(ROOT / "conf" / "grpo_tiny.yaml", [*overrides, "tracking.progress=false"])
    roles: Any = SimpleNamespace(reward=Abstaining(), rollouts=Pool(), critic=None, learner=None)
    tracking = replace(config.tracking, tensorboard=False)
    return Driver(
        config=config,
        roles=roles,
        algorithm=make_algorithm(config.algorithm),
        stream=NOTHING,
        eval_prompts=eval_prompts,
        gate=SamplingGate(math.inf, math.inf),
        tracker=Tracker(tracking, tmp_path, num_steps=config.num_steps, tokenizer=NOTHING),
        roofline=NOTHING,
        checkpoints=CheckpointStore(tmp_path, keep=1),
    )


def sampled(*prompt_ids: int) -> Batch:
    rollouts = [rollout(Prompt(i, [1], ""), k) for i in prompt_ids for k in range(2)]
    (scores,) = Abstaining().score([rollouts]).result()
    return Batch(rollouts, pack(rollouts), scores)


def test_a_step_goes_on_with_as_many_rewards_missing_as_allowed(tmp_path: Path) -> None:
    loop = driver(tmp_path, eval_prompts=[])
    batch = loop.score(sampled(0, 1))
    assert batch.abstained.tolist() == [False, False, True, True]
    with pytest.raises(RewardError) as caught:
        loop.score(sampled(0, 1, 3))
    assert str(caught.value).startswith(
        "4 of 6 completions of this step (67%) have no reward: every reward function of"
    )
    assert "(judge) abstained" in str(caught.value)
    assert str(caught.value).endswith("or raise reward.max_abstained=0.5")
    driver(tmp_path, "reward.max_abstained=1", eval_prompts=[]).score(sampled(1, 3))


def test_an_evaluation_is_the_mean_of_those_that_have_a_reward(tmp_path: Path) -> None:
    loop = driver(tmp_path, eval_prompts=[Prompt(i, [1], "") for i in range(4)])
    loop.evaluate()
    assert loop.evaluations[0]["reward"] == 1.0
    assert loop.evaluations[0]["reward/abstained"] == 0.5


def test_an_evaluation_without_any_reward_is_recorded_as_null(tmp_path: Path) -> None:
    loop = driver(tmp_path, eval_prompts=[Prompt(i, [1], "") for i in (1, 3)])
    with pytest.warns(UserWarning, match=r"eval/reward is nan at step 0; it is null in eval\.jsonl"):
        loop.evaluate()
    loop.tracker.close()
    record = json.loads((tmp_path / "eval.jsonl").read_text())
    assert record["eval/reward"] is None
    assert record["eval/reward/abstained"] == 1.0
