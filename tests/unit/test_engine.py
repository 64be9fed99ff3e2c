"""The schedule of the learning rate, by hand; and parked optimiser state changes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config import OptimizerConfig
from rlhf.engine import lr_factor


def factors(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    return [round(lr_factor(step, config, total), 4) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"schedule": "cosine"}, [1, 0.8536, 0.5, 0.1464]),
    ],
)
def test_lr_factor(settings: dict[str, object], expected: list[float]) -> None:
    assert factors(4, **settings) == expected


# One process with a process group of its own: argv is the model, a directory, and the ZeRO stage.
TRAIN_PARKED_AND_NOT = """
import json, sys, torch
from rlhf.config import LearnerConfig, OptimizerConfig
from rlhf.engine import Engine, init_distributed
from rlhf.models import load_policy
from rlhf.weights import gathered_state_dict
from benchmarks.bench_learner import ragged_batch

model, out, stage = sys.argv[1], sys.argv[2], int(sys.argv[3])
cpu = torch.device("cpu")
init_distributed(cpu, 60)
config = LearnerConfig(zero_stage=stage, optimizer=OptimizerConfig(learning_rate=1e-2))

def make():
    load = lambda: load_policy(model, dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=torch.float32, device=cpu, total_steps=9)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500)
    engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].mean()}))
    return batch

def weights(engine):
    engine.release_gathered()
    return gathered_state_dict(engine.model)

def held(engine):
    return sum(t.untyped_storage().nbytes() for t in engine._optimizer_tensors())

plain, parked = make(), make()
parked.park_optimizer()
for _ in range(3):
    batch = step(plain)
    parked.unpark_optimizer()
    step(parked)
    before = held(parked)
    parked.park_optimizer()
    assert held(parked) == 0
    scores = [engine.forward([batch], lambda output: output[0])[0] for engine in (plain, parked)]
    assert torch.equal(*scores), "a parked learner scores as before"
parked.save(out + "/checkpoint")
assert held(parked) == 0, "saving leaves it parked"
resumed = make()
resumed.load(out + "/checkpoint")
parked.unpark_optimizer()
for engine in (plain, parked, resumed):
    step(engine)
expected = weights(plain)
for engine in (parked, resumed):
    actual = weights(engine)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
count = sum(getattr(p, "ds_numel", p.numel()) for p in plain.model.parameters())
with open(out + "/held.json", "w") as file:
    json.dump({"held": before, "parameters": count}, file)
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parked_optimiser_changes_nothing(tiny_model_dir: Path, tmp_path: Path, stage: int) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | rank | {"MASTER_PORT": "0", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRAIN_PARKED_AND_NOT, str(tiny_model_dir), str(tmp_path), str(stage)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads((tmp_path / "held.json").read_text())
    per_parameter = 8 if stage == 0 else 12  # moments; master weights too, where they are not the model's own
    assert measured["held"] == pytest.approx(per_parameter * measured["parameters"], rel=0.01)
