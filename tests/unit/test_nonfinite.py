"""What the loops do about numbers that are not finite, and what a critic's warm-up leaves alone; with fake roles."""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch
from rlhf.checkpoint import CheckpointStore, Written
from rlhf.checks.gate import SamplingGate
from rlhf.checks.nonfinite import SkippedSteps, nonfinite_tensors, skip_report, take_skip_report
from rlhf.config import ChecksConfig
from rlhf.data.preferences import Pair
from rlhf.driver import Driver
from rlhf.errors import ConfigError, NonFiniteError
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig
from rlhf.reward_driver import RewardTraining
from rlhf.stream import Batch
from rlhf.tracking import Tracker
from tests.fakes import Done, batch_of

CONF = Path(__file__).resolve().parents[2] / "conf"
NOTHING: Any = None


class Learner:
    """Scores with one number per token; says of the steps in ``skips`` that they were not taken. Keeps a log."""

    def __init__(self, log: list[tuple[str, Any]], name: str, scores: dict[int, float], skips: Sequence[int]) -> None:
        self._log, self._name, self._scores, self._skips = log, name, scores, skips
        self._calls = 0

    def score(self, batch: TrainBatch) -> Any:
        self._calls += 1
        return Done(torch.full((batch.num_completion_tokens,), self._scores.get(self._calls - 1, -1.0)))

    def update(self, batch: TrainBatch, step: int) -> Any:
        self._log.append((f"{self._name} learns", step))
        bad = {"loss": math.nan, "grad_norm": math.inf, "skipped": 1.0}
        report = skip_report([bad]) if step in self._skips else {}
        prefix = "critic/" if self._name == "critic" else ""
        return Done({f"{prefix}loss": 0.5} | {f"{prefix}{name}": value for name, value in report.items()})

    def save(self, directory: str) -> None:
        self._log.append((f"{self._name} is saved", Path(directory).parent.name))

    def finish_save(self, *, wait: bool) -> Any:
        return Done(Written(0.0, {}))


class Pool:
    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self._log = log

    def sleep(self) -> None:
        pass

    def publish(self, version: int) -> dict[str, float]:
        self._log.append(("published", version))
        return {"pool/busy_s": 1.0, "pool/live_workers": 1}


class Stream:
    """Two groups of two completions each step, sampled from the latest version."""

    def next_batch(self, step: int) -> Batch:
        rollouts = [
            Rollout(Prompt(i, [1], ""), k, [5, 6], np.full(2, step, np.int32), "stop")
            for i in range(2)
            for k in range(2)
        ]
        return batch_of(rollouts, {"judge": [1.0, 0.0, 1.0, 0.0]}, {"judge": 1.0}, torch.full((8,), -2.0))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def ppo_driver(
    run_dir: Path,
    *overrides: str,
    old_logprobs: dict[int, float] | None = None,
    values: dict[int, float] | None = None,
    policy_skips: Sequence[int] = (),
    critic_skips: Sequence[int] = (),
) -> tuple[Driver, list[tuple[str, Any]]]:
    """A PPO run over fakes, and its log. ``old_logprobs``, ``values``: of the steps in which they are not -1."""
    fixed = [
        "tracking.progress=false",
        "tracking.completions_every_steps=1",
        "algorithm.beta=0.1",
        "algorithm.kl_estimator=k3",
    ]
    fixed += ["algorithm.kl_target=0.1", "algorithm.prompts_per_step=2", "algorithm.group_size=2"]
    fixed += ["checkpoint.every_steps=1", "algorithm.num_minibatches=1", "algorithm.num_epochs=1"]
    config = load_config(CONF / "ppo_tiny.yaml", [*fixed, *overrides])
    log: list[tuple[str, Any]] = []
    roles: Any = SimpleNamespace(
        learner=Learner(log, "policy", old_logprobs or {}, policy_skips),
        critic=Learner(log, "critic", values or {}, critic_skips),
        rollouts=Pool(log),
    )
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: ["text"] * len(ids))
    tracking = replace(config.tracking, tensorboard=False)
    driver = Driver(
        config=config,
        roles=roles,
        algorithm=make_algorithm(config.algorithm),
        stream=Stream(),  # type: ignore[arg-type]
        held_out={},
        gate=SamplingGate(math.inf, math.inf),
        tracker=Tracker(tracking, run_dir, num_steps=config.num_steps, tokenizer=tokenizer),
        roofline=SimpleNamespace(figures=lambda *_, **__: {}),  # type: ignore[arg-type]
        checkpoints=CheckpointStore(run_dir, keep=9),
    )
    return driver, log


def recorded(driver: Driver) -> list[dict[str, float]]:
    driver.tracker.close()
    return [json.loads(line) for line in (driver.tracker.run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(log: list[tuple[str, Any]], event: str) -> list[Any]:
    return [value for name, value in log if name == event]


NAN_IN = {
    "log-probabilities": ({"old_logprobs": {2: math.nan}}, r"8 of 8 old_logprobs are not finite"),
    "values": ({"values": {2: math.inf}}, r"8 of 8 values are not finite"),
    "advantages": ({"old_logprobs": {2: -200.0}}, r"8 of 8 advantages are not finite"),  # of k3, exp(198)
    "policy": ({"policy_skips": [2]}, r"the policy's loss is nan in optimiser step 1"),
    "critic": ({"critic_skips": [2]}, r"the critic's loss is nan in optimiser step 1"),
}


@pytest.mark.parametrize("where", NAN_IN)
def test_stop_publishes_and_saves_nothing_of_that_step(tmp_path: Path, where: str) -> None:
    settings, complaint = NAN_IN[where]
    driver, log = ppo_driver(tmp_path, "num_steps=5", **settings)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match=rf"^step 3: {complaint}") as caught:
        driver.run()
    assert "\n" not in str(caught.value) and "checks.on_nonfinite=skip" in str(caught.value)
    assert steps_of(log, "published") == [0, 1, 2]
    assert len(steps_of(log, "policy is saved")) == 2
    assert driver.checkpoints.holds(2) and not driver.checkpoints.holds(3)


@pytest.mark.parametrize("where", NAN_IN)
def test_skip_goes_on_and_counts(tmp_path: Path, where: str) -> None:
    settings, complaint = NAN_IN[where]
    driver, log = ppo_driver(tmp_path, "num_steps=5", "checks.on_nonfinite=skip", **settings)  # type: ignore[arg-type]
    notes: list[str] = []
    driver.tracker.note = notes.append  # type: ignore[method-assign]
    driver.run()
    metrics = recorded(driver)
    assert [m["checks/skipped_steps"] for m in metrics] == [0, 0, 1, 1, 1]
    assert len(notes) == 1 and f"step 3: {complaint}" in notes[0]
    assert not any("skipped/" in name and name != "checks/skipped_steps" for m in metrics for name in m)
    learnt_first = where in ("policy", "critic")  # elsewhere nobody is asked to learn
    assert steps_of(log, "policy learns") == ([0, 1, 2, 3, 4] if learnt_first else [0, 1, 3, 4])
    assert steps_of(log, "policy learns") == steps_of(log, "critic learns")
    assert steps_of(log, "published") == [0, 1, 2, 3, 4, 5]
    betas = [m.get("objective/kl_coef") for m in metrics]
    beta_3 = betas[3]
    assert beta_3 is not None and math.isfinite(beta_3)
    # of the steps before it: one of them moves beta by a factor of 1 + 0.2 * 4 / 10000
    assert beta_3 == pytest.approx(0.1 * (1 + 0.2 * 4 / 10_000) ** 2, rel=1e-12), "a step left out moves no controller"


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    settings = ["num_steps=9", "checks.on_nonfinite=skip", "checks.max_skipped_steps=2"]
    driver, log = ppo_driver(tmp_path, *settings, policy_skips=[0, 1, 3, 5, 6, 7])
    with pytest.raises(NonFiniteError, match=r"^step 8: .* 3 steps in a row .* checks\.max_skipped_steps=2"):
        driver.run()
    assert [m["checks/skipped_steps"] for m in recorded(driver)] == [1, 2, 2, 3, 3, 4, 5]
    assert steps_of(log, "published") == list(range(8))
    assert driver.checkpoints.holds(7) and not driver.checkpoints.holds(8)


def test_the_count_goes_on_with_the_run() -> None:
    skipped = SkippedSteps(ChecksConfig(on_nonfinite="skip", max_skipped_steps=1))
    skipped.record(1, ["a"], lambda _: None)
    resumed = SkippedSteps(skipped.checks)
    resumed.load_state_dict(skipped.state_dict())
    with pytest.raises(NonFiniteError, match=r"^step 2: b"):
        resumed.record(2, ["b"], lambda _: None)


def test_warm_up_moves_only_the_critic(tmp_path: Path) -> None:
    driver, log = ppo_driver(tmp_path, "num_steps=4", "critic.warmup_steps=2")
    driver.run()
    assert steps_of(log, "critic learns") == [0, 1, 2, 3]
    assert steps_of(log, "policy learns") == [2, 3]
    grown = 0.1 * (1 + 0.2 * 4 / 10_000)
    assert [m["objective/kl_coef"] for m in recorded(driver)] == pytest.approx([0.1, 0.1, 0.1, grown], rel=1e-12)


def test_reports_by_hand() -> None:
    fine = {"loss": 1.0, "grad_norm": 2.0, "skipped": 0.0}
    no_norm = {"loss": 1.0, "grad_norm": math.inf, "skipped": 1.0}
    assert skip_report([fine, fine]) == {}
    assert take_skip_report({"loss": 1.0}, "policy") == []
    metrics = {"critic/" + name: value for name, value in skip_report([fine, no_norm, fine, no_norm]).items()}
    (line,) = take_skip_report(metrics, "critic", "critic/")
    assert line == "the critic's gradient norm is inf in optimiser step 2, and 1 more were skipped"
    assert metrics == {}
    batch = Stream().next_batch(0).packed.with_(values=torch.tensor([1.0, math.nan, -math.inf, 0, 0, 0, 0, 0]))
    assert nonfinite_tensors(batch, "old_logprobs", "ref_logprobs", "values") == ["2 of 8 values are not finite"]


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("step 3: a")))
    assert isinstance(error, FloatingPointError) and str(error) == "step 3: a"


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checks\.max_skipped_steps=-1"):
        ChecksConfig(max_skipped_steps=-1)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_reward_training_stops_and_skips_too(tmp_path: Path, on_nonfinite: str) -> None:
    overrides = [f"checks.on_nonfinite={on_nonfinite}", "num_epochs=1", "batch_pairs=1", "checkpoint.every_steps=1"]
    config = load_config(CONF / "reward_tiny.yaml", [*overrides, "tracking.progress=false"], RewardTrainingConfig)
    log: list[tuple[str, Any]] = []
    tracking = replace(config.tracking, tensorboard=False)
    loop = RewardTraining(
        config=config,
        learner=Learner(log, "policy", {}, [1]),  # type: ignore[arg-type]
        pairs=[Pair(np.array([3, 4], np.int32), np.array([3, 5], np.int32)) for _ in range(3)],
        held_out={},
        tracker=Tracker(tracking, tmp_path, num_steps=3, tokenizer=NOTHING),
        checkpoints=CheckpointStore(tmp_path, keep=9),
    )
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match=r"^step 2: the reward model's loss is nan"):
            loop.run()
        assert loop.checkpoints.holds(1) and not loop.checkpoints.holds(2)
    else:
        loop.run()
        assert steps_of(log, "policy learns") == [0, 1, 2]
        assert loop.skipped.state_dict() == {"total": 1, "in_a_row": 0}
