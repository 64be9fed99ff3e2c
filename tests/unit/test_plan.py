"""Every shipped recipe can be planned, and `rlhf plan` shows the plan."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.cli import main
from jobs.plan import memory_table
from jobs.prepare import QWEN_SHAPES
from rlhf.config import Config
from rlhf.planning.fit import plan_memory
from rlhf.planning.memory import GIB, RoleMemory
from rlhf.planning.topology import Device, plan_topology
from rlhf.recipes import load_config, validate_model
from rlhf.reward_config import RewardTrainingConfig

CONF = Path(__file__).parents[2] / "conf"
RECIPES = [file for file in sorted(CONF.glob("*.yaml")) if file.stem != "base"]
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.fixture(autouse=True)
def models(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config.json of every model that a recipe names, at that path below the working directory; no weights."""
    tiny = json.loads((tiny_model_dir / "config.json").read_text())
    shapes = {
        "models/tiny": tiny,
        "runs/reward_tiny/model": tiny,
        "models/smollm2": SMOLLM2,
        "models/random-0.5b": QWEN_SHAPES["0.5b"],
        "Qwen/Qwen2.5-7B-Instruct": QWEN_SHAPES["7b"],
    }
    for path, shape in shapes.items():
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192} | shape))
    monkeypatch.chdir(tmp_path)


def load(recipe: Path) -> Config | RewardTrainingConfig:
    return load_config(recipe, schema=RewardTrainingConfig if recipe.stem.startswith("reward") else Config)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_has_a_place_for_every_role(recipe: Path, device: Device) -> None:
    config = load(recipe)
    topology = plan_topology(config, device)
    bundles = {group.name: group.bundles for group in topology.groups}
    assert len(topology.slots["learner"]) == config.learner.num_ranks
    for slots in topology.slots.values():
        for slot in slots:
            bundle = bundles[slot.group][slot.bundle]
            assert slot.num_cpus <= bundle["CPU"] and slot.num_gpus <= bundle.get("GPU", 0.0)
    assert ("GPU" in topology.totals()) == (device == "gpu")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_fits_its_model_and_an_80_gib_gpu(recipe: Path) -> None:
    config = load(recipe)
    if isinstance(config, Config):
        validate_model(config)
    plan = plan_memory(config, 80 * GIB)
    assert plan is not None, f"{config.model.path}: tell the fixture what a new recipe's model looks like"
    plan.check()
    assert all(memory.peak > 0 for memory in plan.roles.values())


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `rlhf plan` for the recipe of two nodes."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["rlhf", "plan", "-c", str(CONF / "grpo_7b_2x8a100.yaml"), *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0  # type: ignore[return-value]


def test_the_command_shows_who_sits_where_and_the_memory_of_each_role(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch) == 0
    shown = capsys.readouterr().out
    placement = {line.split("│")[1].strip(): line for line in shown.splitlines() if "│" in line and "CPU" in line}
    assert "8 x [4 CPU, 1 GPU]" in placement["learner"] and "learner[0], learner[1], " in placement["learner"]
    assert "1 x [4 CPU, 2 GPU]" in placement["rollout-1"] and "rollout[1]" in placement["rollout-1"]
    assert "8 x [1 CPU]" in placement["reward"]
    assert "asks for 56 CPU, 16 GPU" in shown
    assert "predicted GiB of each role on one 80 GiB GPU" in shown
    for line in (
        "GPU of learner: 70.8 GiB to train",
        "GPU of reference: 19.0 GiB to score",
        "gradient checkpointing in 10 of 28 layers",
    ):
        assert line in shown
    assert "the KV cache holds" in shown


def test_the_command_fails_where_a_gpu_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "learner.offload=none", "--gpu-memory-gib=20") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: learner: ") and "the GPU has 20.0; raise learner.num_ranks" in error
    assert error.count("\n") == 1


def seconds(shown: str) -> dict[str, list[str]]:
    """The cells of each GPU's row, by its name."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│ ")]
    return {row[0]: row[1:] for row in rows if row[0].startswith(("A100", "H100", "H200"))}


def test_the_command_predicts_a_step_on_each_gpu_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "prompts of 1,024 tokens and completions of 2,048" in shown
    longest = seconds(shown)
    assert longest["A100-80"][0] == "72.8 of 79.2"
    for _, *phases, step in longest.values():
        assert sum(map(float, phases)) == pytest.approx(float(step), abs=0.3)
    slowest_first = [float(cells[-1]) for cells in longest.values()]
    assert list(longest) == ["A100-40", "A100-80", "H100", "H200"] and slowest_first == sorted(slowest_first)[::-1]

    assert plan(monkeypatch, "learner.num_ranks=2", "--prompt-tokens=100", "--completion-tokens=300") == 0
    shown = capsys.readouterr().out
    assert "prompts of 100 tokens and completions of 300" in shown
    rows = seconds(shown)
    assert set(rows["A100-40"][1:]) == {"-"}
    assert "A100-40: seconds not predicted: nothing like learner.offload=optimizer was measured" in shown
    assert plan(monkeypatch, "learner.num_ranks=2", "learner.offload=none") == 0
    shown = capsys.readouterr().out
    assert set(seconds(shown)["A100-40"][1:]) == {"-"} and "A100-40 does not fit: learner: " in shown
    assert float(rows["H200"][-1]) < float(longest["H200"][-1])


def test_no_seconds_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "rollout.extra_kinds.big={num_workers: 1}") == 0
    assert "seconds not predicted: nothing like rollout.extra_kinds was measured" in (shown := capsys.readouterr().out)
    assert not seconds(shown)
    assert plan(monkeypatch, "--completion-tokens=4096") == 2
    error = capsys.readouterr().err
    assert error == (
        "error: --completion-tokens=4096 exceeds rollout.max_completion_tokens=2048: nothing would be that long\n"
    )


def test_on_cpu_or_for_another_architecture_there_is_the_placement_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--device=cpu", "model.path=no/model") == 0
    shown = capsys.readouterr().out
    assert "asks for 56 CPU\n" in shown and "GiB" not in shown
    (tmp_path / "config.json").write_text(json.dumps({"state_size": 16}))
    assert plan(monkeypatch, f"model.path={tmp_path}") == 0
    shown = capsys.readouterr().out
    assert "asks for 56 CPU, 16 GPU" in shown and "memory not predicted: model.path is not Llama-shaped" in shown


def test_a_model_that_is_not_here_is_planned_by_its_name_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch) == 0
    shown = capsys.readouterr().out
    (tmp_path / "Qwen/Qwen2.5-7B-Instruct/config.json").unlink()
    (tmp_path / "Qwen/Qwen2.5-7B-Instruct").rmdir()
    assert plan(monkeypatch) == 0
    told = "model.path=Qwen/Qwen2.5-7B-Instruct: there is no config.json; the shape is that of the model of this name\n"
    assert capsys.readouterr().out == told + shown
    assert plan(monkeypatch, "--gpu-memory-gib=12") == 2
    assert "the GPU has 12.0" in capsys.readouterr().err
    assert plan(monkeypatch, "model.path=models/mine") == 2
    error = capsys.readouterr()
    assert error.err.startswith("error: model.path=models/mine: there is no config.json, so neither memory nor seconds")
    assert error.err.count("\n") == 1 and not error.out


def test_auto_plans_for_the_smallest_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert plan(monkeypatch, "--device=auto", "--gpu-memory-gib=80") == 2
    assert capsys.readouterr().err.startswith("error: --device=auto: this machine has no GPU that torch can use; give")
    sizes = [96 * GIB, 79 * GIB]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert plan(monkeypatch, "--device=auto") == 0
    assert "predicted GiB of each role on one 79 GiB GPU" in capsys.readouterr().out


def test_the_table_of_memory_by_hand() -> None:
    sizes = {"weights": 1, "gradients": 2, "optimizer": 4, "kv_cache": 32, "other": 64}
    memory = RoleMemory(**{name: gib * GIB for name, gib in sizes.items()}, training=8 * GIB, scoring=16 * GIB)
    plan: Any = SimpleNamespace(roles={"learner": memory, "idle": RoleMemory(weights=GIB, other=0.0)})
    table = memory_table(plan, "GiB")
    cells = {column.header: [str(cell).strip() for cell in column.cells] for column in table.columns}
    assert [cells[name][0] for name in ("weights", "grads", "optim.", "working", "KV", "other")] == [
        *("1.0", "2.0", "4.0", "16.0", "32.0", "64.0")
    ]
    assert float(cells["peak"][0]) == pytest.approx(memory.peak / GIB, abs=0.05)
    assert [cells[name][1] for name in ("role", "weights", "grads", "KV")] == ["idle", "1.0", "", ""]
