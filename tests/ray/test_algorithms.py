"""PPO, RLOO and adapters as whole runs on the tiny model: the reward rises, and the metrics have TRL's names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.train import train

pytestmark = pytest.mark.ray

REWARD_BOUND = 0.65  # share of even tokens; an untrained policy has 0.5
END_BOUND = 0.9  # of a whole recipe
SEED_BAND = 0.15  # between the curves of two seeds
PPO_NAMES = {
    *("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg"),
    *("val/clipfrac_avg", "val/ratio", "eps", "lr"),
}
RLOO_NAMES = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "reward_std"}


def metrics_of(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_ppo_raises_the_reward_and_adapts_beta_to_the_kl(ray_session, tiny_config) -> None:
    adaptive = ("algorithm.beta=0.001", "algorithm.kl_target=3", "algorithm.kl_horizon=640")
    config = tiny_config("num_steps=18", *adaptive, recipe="ppo_tiny")
    summary = train(config)
    assert summary["eval_before"]["reward"] < 0.55
    assert summary["eval_after"]["reward"] > REWARD_BOUND
    metrics = metrics_of(config.run_dir)
    assert metrics[0].keys() >= PPO_NAMES
    assert metrics[0]["val/ratio"] == pytest.approx(1, abs=0.05)
    assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-3), "policy and reference start as one"
    assert metrics[-1]["loss/value_avg"] < metrics[0]["loss/value_avg"] / 3
    beta = 0.001
    for m in metrics:  # of 64 sequences each
        assert m["objective/kl_coef"] == pytest.approx(beta)
        assert m["objective/scores"] == pytest.approx(m["reward"], abs=1e-5)
        assert m["objective/rlhf_reward"] == pytest.approx(m["reward"] - beta * m["objective/kl"], abs=1e-5)
        beta *= 1 + max(-0.2, min(0.2, m["objective/kl"] / 3 - 1)) * 64 / 640
    assert metrics[1]["objective/kl_coef"] < 0.001 < metrics[-1]["objective/kl_coef"], "below the target, then above"
    assert (Path(config.run_dir) / "critic" / "config.json").is_file(), "the critic is saved beside the policy"


@pytest.mark.long
def test_rloo_raises_the_reward(ray_session, tiny_config) -> None:
    config = tiny_config("num_steps=18", recipe="rloo_tiny")
    summary = train(config)
    assert summary["eval_before"]["reward"] < 0.55
    assert summary["eval_after"]["reward"] > REWARD_BOUND
    metrics = metrics_of(config.run_dir)
    assert metrics[0].keys() >= RLOO_NAMES
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["grpo_lora_tiny", "grpo_qlora_tiny"])
def test_adapters_raise_the_reward_and_are_sampled_from(ray_session, tiny_config, recipe: str) -> None:
    config = tiny_config("num_steps=20", "checks.logprob_every_steps=1", recipe=recipe)
    summary = train(config)
    assert summary["eval_before"]["reward"] < 0.55
    assert summary["eval_after"]["reward"] > REWARD_BOUND
    metrics = metrics_of(config.run_dir)
    assert max(m["sampling/logprob_difference_mean"] for m in metrics) < 1e-5
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-5), "the reference is what the run started from"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ppo_on_one_base_raises_the_reward_and_resumes_exactly(ray_session, tiny_config, tmp_path: Path) -> None:
    def run(name: str, num_steps: int) -> list[dict[str, float]]:
        config = tiny_config(f"num_steps={num_steps}", recipe="ppo_lora_tiny")
        config = replace(config, run_dir=str(tmp_path / name))
        assert config.critic_on_base
        summaries[name] = train(config)
        return metrics_of(config.run_dir)

    summaries: dict[str, dict[str, Any]] = {}
    whole = run("whole", 24)
    assert summaries["whole"]["eval_before"]["reward"] < 0.55
    assert summaries["whole"]["eval_after"]["reward"] > REWARD_BOUND
    assert whole[-1]["loss/value_avg"] < whole[0]["loss/value_avg"] / 3
    assert whole[0]["objective/kl"] == pytest.approx(0, abs=1e-3), "policy and reference start as one"
    run("parts", 2)
    for again, once in zip(run("parts", 4), whole, strict=False):
        for name in ("reward", "loss/policy_avg", "loss/value_avg", "critic/grad_norm", "objective/kl"):
            assert again[name] == once[name], (again["step"], name)
    assert (tmp_path / "whole" / "critic" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["grpo_tiny", "ppo_tiny", "rloo_tiny"])
def test_two_seeds_learn_alike(ray_session, tiny_config, recipe: str) -> None:
    """Whole recipes: both seeds get there, and their reward curves, each mean of five steps, stay within a band."""
    curves, ends = [], []
    for seed in (0, 1):
        config = tiny_config(f"seed={seed}", recipe=recipe)
        ends.append(train(config)["eval_after"]["reward"])
        rewards = [m["reward"] for m in metrics_of(config.run_dir)]
        curves.append([sum(rewards[i : i + 5]) / 5 for i in range(0, len(rewards), 5)])
    print(recipe, "eval", ends, "curves", curves)
    assert min(ends) > END_BOUND
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < SEED_BAND
