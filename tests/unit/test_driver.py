"""The loop's own decisions: which rewards a step may go on with, and what an evaluation without any records."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch
from rlhf.checkpoint import CheckpointStore, Written
from rlhf.checks.gate import SamplingGate
from rlhf.driver import Driver
from rlhf.errors import RewardError
from rlhf.recipes import load_config
from rlhf.rewards.total import Scores
from rlhf.roles import Roles
from rlhf.stream import Batch, GroupStream
from rlhf.tracking import Tracker
from tests.clock import Clock
from tests.fakes import Done, batch_of

ROOT = Path(__file__).resolve().parents[2]
NOTHING: Any = None
WEIGHTS = {"judge": 1.0, "shown": 0.0}


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

    def given(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        return {"judge": [math.nan if r.prompt.id % 2 else 1.0 for r in rollouts], "shown": [0.0] * len(rollouts)}

    def score(self, rollouts: Sequence[Rollout]) -> Done[Scores]:
        return Done(Scores(self.given(rollouts), WEIGHTS))


def driver(tmp_path: Path, *overrides: str, held_out: list[Prompt]) -> Driver:
    config = load_config(ROOT / "conf" / "grpo_tiny.yaml", [*overrides, "tracking.progress=false"])
    roles: Any = SimpleNamespace(reward=Abstaining(), rollouts=Pool(), critic=None, learner=None)
    tracking = replace(config.tracking, tensorboard=False)
    return Driver(
        config=config,
        roles=roles,
        algorithm=make_algorithm(config.algorithm),
        stream=NOTHING,
        held_out={"": held_out} if held_out else {},
        gate=SamplingGate(math.inf, math.inf),
        tracker=Tracker(tracking, tmp_path, num_steps=config.num_steps, tokenizer=NOTHING),
        roofline=NOTHING,
        checkpoints=CheckpointStore(tmp_path, keep=1),
    )


def sampled(*prompt_ids: int) -> Batch:
    rollouts = [rollout(Prompt(i, [1], ""), k) for i in prompt_ids for k in range(2)]
    return batch_of(rollouts, Abstaining().given(rollouts), WEIGHTS)


def test_a_step_goes_on_with_as_many_rewards_missing_as_allowed(tmp_path: Path) -> None:
    loop = driver(tmp_path, held_out=[])
    assert loop.rewards(sampled(0, 1)).isnan().tolist() == [False, False, True, True]
    with pytest.raises(RewardError) as caught:
        loop.rewards(sampled(0, 1, 3))
    assert str(caught.value).startswith(
        "4 of 6 completions of this step (67%) have no reward: every reward function with"
    )
    assert "(judge) abstained" in str(caught.value)
    assert str(caught.value).endswith("or raise reward.max_abstained=0.5")
    driver(tmp_path, "reward.max_abstained=1", held_out=[]).rewards(sampled(1, 3))


def test_without_held_out_data_there_is_no_evaluation(tmp_path: Path) -> None:
    loop = driver(tmp_path, held_out=[])
    loop.evaluate()
    assert loop.evaluations == {} and not (tmp_path / "eval.jsonl").exists()


def test_an_evaluation_is_the_mean_of_those_that_have_a_reward(tmp_path: Path) -> None:
    loop = driver(tmp_path, held_out=[Prompt(i, [1], "") for i in range(4)])
    loop.evaluate()
    assert loop.evaluations[0]["reward"] == 1.0
    assert loop.evaluations[0]["reward/abstained"] == 0.5


def test_an_evaluation_without_any_reward_is_recorded_as_null(tmp_path: Path) -> None:
    loop = driver(tmp_path, held_out=[Prompt(i, [1], "") for i in (1, 3)])
    with pytest.warns(UserWarning, match=r"eval/reward is nan at step 0; it is null in eval\.jsonl"):
        loop.evaluate()
    loop.tracker.close()
    record = json.loads((tmp_path / "eval.jsonl").read_text())
    assert record["eval/reward"] is None
    assert record["eval/reward/abstained"] == 1.0


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_slow_judge_shows_as_reward_and_the_reference_as_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    clock = Clock(monkeypatch)

    def answer(value: Any, seconds: float) -> Done[Any]:
        """It takes so long, once."""
        left = [seconds]

        def wait() -> None:
            clock.now_s += left.pop() if left else 0.0

        return Done(value, wait)

    class SlowPool(Pool):
        def submit(self, prompts: list[Prompt], *, group_size: int, **_: Any) -> list[int]:
            self._prompts = {p.id: p for p in prompts}
            return list(self._prompts)

        def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
            clock.now_s += 1
            return {i: [rollout(self._prompts[i], k) for k in range(2)] for i in ids}

        def publish(self, version: int) -> dict[str, float]:
            clock.now_s += 2
            return {"pool/busy_s": 1.0, "pool/live_workers": 1}

    def judged(groups: list[list[Rollout]]) -> Done[list[Scores]]:
        return answer([Scores({"judge": [1.0, 0.0]}, WEIGHTS) for _ in groups], 30)

    def referred(batches: list[TrainBatch]) -> Done[list[Tensor]]:
        return answer([torch.full((b.num_completion_tokens,), -1.0) for b in batches], 20)

    loop = driver(tmp_path, "num_steps=1", "algorithm.group_size=2", "algorithm.prompts_per_step=2", held_out=[])
    config = replace(loop.config, algorithm=replace(loop.config.algorithm, dynamic_sampling_max_tries=replaced))
    reward, reference = SimpleNamespace(score_groups=judged), SimpleNamespace(score=referred)
    learner = SimpleNamespace(
        update=lambda batch, step: answer({"loss": 0.5}, 10),
        save=lambda directory: None,
        finish_save=lambda wait: Done(Written(0.0, {})),
    )
    pool: Any = SlowPool()
    loop.roles = Roles(learner, pool, reward, reference)  # type: ignore[arg-type]
    prompts = SimpleNamespace(take=lambda n: [Prompt(i, [1], "") for i in range(n)], state_dict=dict)
    loop.stream = GroupStream(prompts, pool, reward, reference, config, loop.tracker.phase)  # type: ignore[arg-type]
    loop.roofline = SimpleNamespace(figures=lambda *_, **__: {})  # type: ignore[assignment]
    loop.run()
    loop.tracker.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    phases = {name: record[f"time/{name}_s"] for name in ("generate", "reward", "reference", "update")}
    assert phases == {"generate": 1, "reward": 30, "reference": 20, "update": 10}
    assert record["bottleneck"] == "reward"
