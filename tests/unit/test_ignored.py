"""Settings that a run's algorithm never reads are named, by the key that decides; what is read is not."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from rlhf.ignored import ignored_settings
from rlhf.recipes import load_config

CONF = Path(__file__).parents[2] / "conf"
RECIPES = [file for file in sorted(CONF.glob("*.yaml")) if file.stem != "base" and not file.stem.startswith("reward")]
PPO = ("algorithm.name=ppo",)
RLOO = ("algorithm.name=rloo",)
NOTHING: list[str] = []


def ignored(tmp_path: Path, *overrides: str) -> list[str]:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: {path: m}\ndata: {train: 'task:arithmetic'}\nreward: {functions: [{path: f}]}\n")
    return ignored_settings(load_config(recipe, overrides))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_shipped_recipes_set_nothing_in_vain(recipe: Path) -> None:
    assert ignored_settings(load_config(recipe)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], NOTHING),
        (["algorithm.lam=0.95", "critic.num_ranks=1"], NOTHING),  # the defaults
        # PPO's own
        (
            ["algorithm.lam=0.9", "algorithm.gamma=0.5", "algorithm.whiten_advantages=false"],
            ["algorithm.name=grpo ignores algorithm.gamma=0.5, algorithm.lam=0.9, algorithm.whiten_advantages=false"],
        ),
        (
            [*RLOO, "algorithm.value_clip=0.1", "algorithm.missing_eos_penalty=1", "algorithm.kl_horizon=100"],
            [
                "algorithm.name=rloo ignores algorithm.kl_horizon=100, algorithm.value_clip=0.1, "
                "algorithm.missing_eos_penalty=1.0"
            ],
        ),
        (
            ["critic.num_ranks=2", "critic.optimizer.betas=[0.8, 0.9]", "critic.path=c"],
            ["algorithm.name=grpo ignores critic.num_ranks=2, critic.optimizer.betas=[0.8, 0.9], critic.path=c"],
        ),
        (
            [*PPO, "algorithm.lam=0.9", "algorithm.gamma=0.5", "algorithm.value_clip=0.1", "critic.num_ranks=2"],
            NOTHING,
        ),
        ([*PPO, "algorithm.whiten_advantages=false", "algorithm.missing_eos_penalty=1"], NOTHING),
        ([*PPO, "algorithm.group_size=4"], NOTHING),
        ([*PPO, "algorithm.kl_horizon=100"], ["algorithm.kl_target=null ignores algorithm.kl_horizon=100"]),
        ([*PPO, "algorithm.kl_horizon=100", "algorithm.kl_target=6", "algorithm.beta=0.1"], NOTHING),
        # how rewards become advantages
        (["algorithm.scale_rewards=none"], NOTHING),
        ([*RLOO, "algorithm.scale_rewards=none"], ["algorithm.name=rloo ignores algorithm.scale_rewards=none"]),
        ([*PPO, "algorithm.scale_rewards=batch"], ["algorithm.name=ppo ignores algorithm.scale_rewards=batch"]),
        # the KL: none at all, in the loss, or in the reward
        (
            ["algorithm.kl_estimator=k3", "algorithm.kl_bias_correction=false", "reference.num_ranks=2"],
            [
                "algorithm.beta=0.0 ignores algorithm.kl_estimator=k3, algorithm.kl_bias_correction=false, "
                "reference.num_ranks=2"
            ],
        ),
        (
            ["algorithm.beta=0.1", "algorithm.kl_estimator=k3", "algorithm.kl_bias_correction=false"],
            ["algorithm.name=grpo ignores algorithm.kl_estimator=k3"],
        ),
        (
            [*RLOO, "algorithm.beta=0.1", "algorithm.kl_estimator=k3", "algorithm.kl_bias_correction=false"],
            ["algorithm.name=rloo ignores algorithm.kl_bias_correction=false"],
        ),
        ([*PPO, "algorithm.beta=0.1", "algorithm.kl_estimator=k3", "reference.num_ranks=2"], NOTHING),
        # the loss
        (["algorithm.epsilon_low=0.1", "algorithm.delta=4", "algorithm.dual_clip=3"], NOTHING),
        (
            [
                *("algorithm.loss_type=cispo", "algorithm.epsilon_high=5"),
                *("algorithm.epsilon_low=0.1", "algorithm.delta=4", "algorithm.dual_clip=3"),
            ],
            [
                "algorithm.loss_type=cispo ignores algorithm.epsilon_low=0.1, algorithm.delta=4.0, "
                "algorithm.dual_clip=3.0"
            ],
        ),
        # the user's own functions
        (
            ["algorithm.advantage=m.f", "algorithm.scale_rewards=none", "algorithm.advantage_kwargs={a: 1}"],
            ["algorithm.advantage=m.f ignores algorithm.scale_rewards=none"],
        ),
        (
            ["algorithm.advantage_kwargs={a: 1}", "algorithm.loss_kwargs={b: 2}"],
            [
                'algorithm.advantage=null ignores algorithm.advantage_kwargs={"a": 1}',
                'algorithm.loss=null ignores algorithm.loss_kwargs={"b": 2}',
            ],
        ),
        (
            [
                *("algorithm.loss=m.f", "algorithm.loss_kwargs={b: 2}", "algorithm.epsilon_low=0.1"),
                *("algorithm.epsilon_high=0.3", "algorithm.delta=1.1", "algorithm.dual_clip=3"),
            ],
            [
                "algorithm.loss=m.f ignores algorithm.epsilon_low=0.1, algorithm.epsilon_high=0.3, "
                "algorithm.delta=1.1, algorithm.dual_clip=3.0"
            ],
        ),
        (["algorithm.loss=m.f", "algorithm.importance_sampling_level=sequence", "algorithm.loss_type=grpo"], NOTHING),
        # the correction, which rollout.max_staleness may turn on
        (
            ["algorithm.rollout_correction_cap=3", "algorithm.rollout_correction_floor=0.5"],
            [
                "algorithm.rollout_correction=none ignores algorithm.rollout_correction_cap=3.0, "
                "algorithm.rollout_correction_floor=0.5"
            ],
        ),
        (["algorithm.rollout_correction_cap=3", "rollout.max_staleness=1"], NOTHING),
        # several at once
        (
            ["algorithm.lam=0.9", "reference.num_ranks=2"],
            ["algorithm.name=grpo ignores algorithm.lam=0.9", "algorithm.beta=0.0 ignores reference.num_ranks=2"],
        ),
    ],
)
def test_what_is_ignored_is_named_with_the_reason(tmp_path: Path, overrides: list[str], expected: list[str]) -> None:
    assert ignored(tmp_path, *overrides) == expected


SETTINGS = ["-c", str(CONF / "grpo_tiny.yaml"), "algorithm.lam=0.9", "critic.num_ranks=2"]
WARNING = "warning: algorithm.name=grpo ignores algorithm.lam=0.9, critic.num_ranks=2\n"


def test_train_warns_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(settings: object) -> dict[str, str]:
        print("training", file=sys.stderr)
        return {"status": "completed"}

    monkeypatch.setitem(sys.modules, "jobs.train", SimpleNamespace(train=train))
    done = CliRunner().invoke(app, ["train", *SETTINGS])
    assert (done.exit_code, done.stderr) == (0, f"{WARNING}training\n")


def test_plan_warns_in_one_line() -> None:
    done = CliRunner().invoke(app, ["plan", *SETTINGS, "--device", "cpu"])
    assert (done.exit_code, done.stderr) == (0, WARNING)


def test_without_anything_ignored_there_is_no_warning() -> None:
    done = CliRunner().invoke(app, ["plan", *SETTINGS[:2], "--device", "cpu"])
    assert (done.exit_code, done.stderr) == (0, "")
