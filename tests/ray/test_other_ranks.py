"""A whole run goes on with other ranks, ZeRO stages and rollout workers than those that wrote its checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import actors.cluster
from jobs.train import train
from tests.storm.engine import StormEngine

pytestmark = [pytest.mark.ray, pytest.mark.long]

SAVED, NUM_STEPS = 2, 4
NUMBERS = (
    *("reward", "num_tokens", "lr", "critic/learning_rate", "grad_norm", "critic/grad_norm", "loss/policy_avg"),
    *("loss/value_avg", "objective/kl", "objective/entropy", "policy/approxkl_avg", "policy/clipfrac_avg", "val/ratio"),
)

Trained = Callable[..., tuple[Path, list[dict[str, float]]]]


@pytest.fixture(scope="module")
def trained(ray_session: None, tiny_config) -> Iterator[Trained]:
    """Runs PPO with an engine whose samples depend on nothing but the prompt: its directory, and what it recorded."""

    def run(*overrides: str, checkpoint: Path | None = None) -> tuple[Path, list[dict[str, float]]]:
        config = tiny_config(
            *(f"num_steps={NUM_STEPS}", f"checkpoint.every_steps={SAVED}", "checkpoint.save_final_model=false"),
            *("checks.logprob_groups=0", "data.eval=null", "tracking.tensorboard=false"),
            *overrides,
            recipe="ppo_tiny",
        )
        run_dir = Path(config.run_dir)
        if checkpoint:
            shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
        train(config)
        return run_dir, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors.cluster, "VllmEngine", StormEngine)
        yield run


def shape(learner: tuple[int, int], critic: tuple[int, int], num_workers: int) -> list[str]:
    """(ranks, ZeRO stage) of each model that learns, and how many rollout workers."""
    models = {"learner": learner, "critic": critic}
    ranks = [f"{role}.num_ranks={num_ranks}" for role, (num_ranks, _) in models.items()]
    stages = [f"{role}.zero_stage={stage}" for role, (_, stage) in models.items()]
    return [*ranks, *stages, f"rollout.num_workers={num_workers}"]


@pytest.fixture(scope="module")
def whole_run(trained: Trained) -> tuple[Path, list[dict[str, float]]]:
    return trained(*shape((2, 3), (1, 2), 1))


@pytest.mark.parametrize(
    "other", [shape((1, 1), (2, 3), 2), shape((3, 2), (1, 0), 3)], ids=["a rank less", "a rank more"]
)
def test_a_run_resumed_in_another_shape_has_the_numbers_of_one_that_was_left_alone(
    trained: Trained, whole_run: tuple[Path, list[dict[str, float]]], other: list[str]
) -> None:
    """But for the order in which ranks and micro-batches are summed up in float32: 3e-6 was seen after two steps."""
    run_dir, expected = whole_run
    _, resumed = trained(*other, checkpoint=run_dir / "checkpoints" / f"step-{SAVED:06d}")
    assert [row["step"] for row in resumed] == [SAVED + 1, NUM_STEPS], "nothing is done again"
    for ours, theirs in zip(resumed, expected[SAVED:], strict=True):
        assert {name: ours[name] for name in NUMBERS} == pytest.approx(
            {name: theirs[name] for name in NUMBERS}, rel=1e-4, abs=1e-6
        )
