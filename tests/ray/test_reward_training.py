"""A reward model learns a taste from pairs; what it saves scores the same wherever it is loaded, and feeds a critic."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.learner import CriticActor
from actors.scorers import RewardModelActor
from benchmarks.common import actor_pids, steps_of
from jobs.train_reward import train_reward
from rlhf.batch import Prompt, Rollout, last_token_batch
from rlhf.data.chat import answer_tokens
from rlhf.models.loading import load_scalar
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig
from rlhf.rewards.model import RewardModel
from tests.ray.chaos import until
from tests.ray.warm import WarmRanks

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
ACCURACY_BOUND = 0.75  # about 0.85 is what is seen; an untrained model has 0.5
TEXTS = [" moon river", " lemon", " a b c d e f g", " zebra"]
PROMPT = "apple bear cloud door"


def run(tiny_model_dir: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    fixed = [f"model.path={tiny_model_dir}", f"run_dir={run_dir}", "placement.device=cpu", "tracking.progress=false"]
    return train_reward(load_config(ROOT / "conf" / "reward_tiny.yaml", [*fixed, *overrides], RewardTrainingConfig))


@pytest.fixture(scope="module")
def trained(ray_session, tiny_model_dir: Path, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    run_dir = tmp_path_factory.mktemp("reward")
    return run(tiny_model_dir, run_dir, "data.task_args.num_rows=2048"), run_dir


@pytest.fixture(scope="module")
def model_dir(trained: tuple[dict[str, Any], Path]) -> Path:
    return trained[1] / "model"


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [answer_tokens(tokenizer, PROMPT, text) for text in TEXTS]


@pytest.fixture(scope="module")
def reward_model(model_dir: Path) -> RewardModel:
    model, device = load_scalar(str(model_dir), dtype=torch.float32), torch.device("cpu")
    return RewardModel(str(model_dir), model, max_tokens=128, token_budget=256, device=device)


def test_held_out_accuracy_rises(trained: tuple[dict[str, Any], Path]) -> None:
    summary, run_dir = trained
    before, after = summary["eval_before"], summary["eval_after"]
    assert after["accuracy"] > ACCURACY_BOUND > before["accuracy"]
    assert after["margin"] > before["margin"] and after["loss"] < before["loss"]
    assert {**json.loads((run_dir / "summary.json").read_text()), "signal": 0} == summary
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(1, 2048 // 64 + 1))
    assert {"loss", "accuracy", "margin", "mean_reward", "grad_norm", "learning_rate"} <= metrics[0].keys()
    assert abs(metrics[-1]["mean_reward"]) < 1, "the centring term keeps scores around zero"


def test_saved_directory_scores_alike_in_transformers(
    model_dir: Path, reward_model: RewardModel, sequences: list[list[int]]
) -> None:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(model_dir), reward_model.tokenizer
    padded = tokenizer([PROMPT + text for text in TEXTS], return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad():
        expected = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits[:, 0]
    assert expected.std() > 1e-2, "the scores must differ, or this test proves nothing"
    torch.testing.assert_close(torch.tensor(*reward_model.score_tokens([sequences])), expected, rtol=0, atol=1e-5)


def test_the_actor_scores_with_it(
    tiny_config, model_dir: Path, reward_model: RewardModel, sequences: list[list[int]]
) -> None:
    actor = RewardModelActor(tiny_config(f"reward.model.path={model_dir}", recipe="ppo_rm_tiny"))
    actor.start()
    prompt = Prompt(id=0, token_ids=reward_model.tokenizer(PROMPT)["input_ids"], text=PROMPT)
    answers = [reward_model.tokenizer(text)["input_ids"] for text in TEXTS]
    rollouts = [Rollout(prompt, i, ids, np.zeros(len(ids), np.int32), "stop") for i, ids in enumerate(answers)]
    expected = pytest.approx(*reward_model.score_tokens([sequences]), abs=1e-5)
    assert actor.score([rollouts, rollouts]) == [{"model": expected}] * 2


@pytest.fixture(scope="module")
def critic(ray_session: None, tiny_config) -> Iterator[WarmRanks]:
    """One ZeRO-3 rank."""
    rank = WarmRanks(CriticActor, tiny_config(recipe="ppo_tiny"), 1)
    yield rank
    rank.close()


def test_a_critic_starts_from_its_head(
    critic: WarmRanks, tiny_config, model_dir: Path, reward_model: RewardModel, sequences: list[list[int]]
) -> None:
    fresh = critic.start(tiny_config(f"reward.model.path={model_dir}", recipe="ppo_rm_tiny"))
    expected = torch.tensor(*reward_model.score_tokens([sequences]))
    torch.testing.assert_close(fresh.score(last_token_batch(sequences)).result(), expected, rtol=0, atol=1e-5)


def test_a_critic_from_a_language_model_starts_at_zero(
    critic: WarmRanks, tiny_config, sequences: list[list[int]]
) -> None:
    fresh = critic.start(tiny_config(recipe="ppo_tiny"))
    assert (fresh.score(last_token_batch(sequences)).result() == 0).all()


@pytest.mark.long
def test_training_depends_neither_on_budget_nor_ranks(ray_session, tiny_model_dir: Path, tmp_path: Path) -> None:
    # eps this large keeps Adam from magnifying the rounding of near-zero gradients into whole steps
    small = ["data.task_args.num_rows=50", "data.eval_size=20", "batch_pairs=20", "learner.optimizer.eps=1e-3"]
    one = run(tiny_model_dir, tmp_path / "one", *small, "learner.num_ranks=1")
    two = run(tiny_model_dir, tmp_path / "two", *small, "learner.num_ranks=2", "learner.micro_batch_tokens=258")
    assert one["eval_after"]["loss"] != pytest.approx(one["eval_before"]["loss"], abs=1e-2)
    assert two["eval_after"] == pytest.approx(one["eval_after"], abs=1e-4)


@pytest.mark.long
def test_a_run_that_is_stopped_and_loses_its_learner_ends_like_any_other(
    ray_session, tiny_model_dir: Path, tmp_path: Path, capfd
) -> None:
    few = ["data.task_args.num_rows=240", "data.eval_size=20", "batch_pairs=10", "num_epochs=2", "learner.num_ranks=1"]
    expected = run(tiny_model_dir, tmp_path / "whole", *few)
    run_dir = tmp_path / "broken"
    arguments = (tiny_model_dir, run_dir, *few, "name=broken", "checkpoint.every_steps=2", "checkpoint.max_restarts=1")

    stop = after_steps(run_dir, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupted = run(*arguments)
    stop.join()
    assert interrupted["status"] == "interrupted" and 3 <= interrupted["steps"] < 48
    assert not (run_dir / "model").exists()

    at = interrupted["steps"] + 3
    kill = after_steps(run_dir, at, lambda: os.kill(actor_pids("broken", "RewardLearnerActor")[0], signal.SIGKILL))
    resumed = run(*arguments)
    kill.join()
    assert "restarting from the last checkpoint (0 restart(s) left): learner[0]" in capfd.readouterr().out
    assert resumed["status"] == "completed"
    assert resumed["eval_before"] == expected["eval_before"]
    assert resumed["eval_after"] == expected["eval_after"], "to the last bit, on CPU"
    assert [row["step"] for row in steps_of(run_dir)] == list(range(1, 49)), "each step once"


def after_steps(run_dir: Path, steps: int, act: Callable[[], None]) -> threading.Thread:
    """Does something once a run has made so many steps."""

    def wait() -> None:
        until(lambda: len(steps_of(run_dir)) >= steps, 240, f"{steps} steps")
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
