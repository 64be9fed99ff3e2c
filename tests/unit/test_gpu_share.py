"""A run that may take a part of each GPU is planned, and samples, as on a GPU of that size."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.rollouts.engine import WorkerSpec
from actors.rollouts.vllm_settings import share_of_gpu
from rlhf.config import RolloutConfig
from rlhf.planning.fit import plan_memory
from rlhf.planning.memory import GIB
from rlhf.recipes import load_config

CONF = Path(__file__).resolve().parents[2] / "conf"


def test_a_part_of_a_gpu_is_planned_as_a_gpu_of_that_size(tiny_model_dir: Path) -> None:
    given = [f"model.path={tiny_model_dir}", "placement.device=gpu", "placement.mode=colocate"]
    config = load_config(CONF / "grpo_tiny.yaml", given)
    whole = plan_memory(config, 24 * GIB)
    part = plan_memory(replace(config, placement=replace(config.placement, gpu_memory_gib=24)), 80 * GIB)
    assert whole and part and (part.device_bytes, part.roles, part.gpus) == (24 * GIB, whole.roles, whole.gpus)
    small = plan_memory(replace(config, placement=replace(config.placement, gpu_memory_gib=80)), 24 * GIB)
    assert small and small.device_bytes == 24 * GIB, "no more than there is"


@pytest.mark.parametrize(("limit_gib", "share"), [(None, 0.3), (20.0, 0.075), (200.0, 0.3)])
def test_an_engine_takes_its_fraction_of_what_the_run_may_take(
    monkeypatch: pytest.MonkeyPatch, limit_gib: float | None, share: float
) -> None:
    platform = SimpleNamespace(get_device_total_memory=lambda: 80 * GIB)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    spec = WorkerSpec(
        config=RolloutConfig(gpu_memory_fraction=0.6),
        model_path="",
        trust_remote_code=False,
        max_model_tokens=64,
        device="gpu",
        colocated=True,
        workers_on_gpu=2,
        logprobs=False,
        seed=0,
        gpu_memory_gib=limit_gib,
    )
    assert share_of_gpu(spec) == pytest.approx(share)


@pytest.mark.parametrize(
    ("recipe", "card_gib"),
    [("ppo_0.5b_24gb", 23.6), ("grpo_1.5b_lora_24gb", 23.6), ("grpo_7b_qlora_40gb", 39.4), ("ppo_7b_lora_80gb", 79.2)],
)
def test_recipes_for_cards_fit_them_and_the_docs_say_what_they_take(recipe: str, card_gib: float) -> None:
    plan = plan_memory(load_config(CONF / f"{recipe}.yaml", []), card_gib * GIB)
    assert plan is not None
    plan.check()
    needed = max(plan.gpus["shared"].values()) / GIB
    (row,) = [
        line for line in (CONF.parent / "docs" / "lora.md").read_text().splitlines() if f"/{recipe}.yaml`" in line
    ]
    assert row.endswith(f"| {needed:.1f} of {card_gib} |")
