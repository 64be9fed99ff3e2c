"""The schedule of the learning rate, by hand; a parked optimiser is torch's AdamW; loading takes new settings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.config import OptimizerConfig
from rlhf.training.setup import lr_factor
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]


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


# Run by one rank: argv is the model and a directory, then what the script says.
ENGINES = """
import json, sys, torch
from rlhf.config import LearnerConfig, OptimizerConfig
from rlhf.models.inputs import packed_inputs
from rlhf.training.engine import Engine
from rlhf.models.loading import load_policy
from tests.gathered import gathered_state_dict
from benchmarks.bench_learner import ragged_batch

model, out = sys.argv[1], sys.argv[2]
cpu = torch.device("cpu")

def make(stage, total_steps=9, learning_rate=1e-2, **settings):
    config = LearnerConfig(zero_stage=stage, optimizer=OptimizerConfig(learning_rate=learning_rate, **settings))
    load = lambda: load_policy(model, dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=torch.float32, device=cpu, total_steps=total_steps)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500)
    metrics = engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].mean()}))
    return batch, metrics

def weights(engine):
    engine.release_gathered()
    return gathered_state_dict(engine.model)
"""

# argv[3]: the ZeRO stage
TRAIN_PARKED = """
ADAM = {"betas": (0.5, 0.8), "eps": 1e-2, "weight_decay": 0.1}  # such an eps: the size of a gradient matters
stage, plain = int(sys.argv[3]), load_policy(model, dtype=torch.float32, temperature=1.0, chunk_tokens=64)
adamw = torch.optim.AdamW(plain.parameters(), 1e-2, **ADAM)

def by_hand():
    inputs = packed_inputs(ragged_batch(8, 4, 6, 12, 500), cpu, share_prompts=False)
    adamw.zero_grad()
    (-plain(inputs)[0].sum() / 50).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    adamw.step()
    with torch.no_grad():
        return plain(inputs)[0]

def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

def held(engine):
    return sum(t.untyped_storage().nbytes() for t in engine._optimizer_tensors())

parked = make(stage, **ADAM)
parked.park_optimizer()
for _ in range(3):
    expected = by_hand()
    parked.unpark_optimizer()
    batch, _ = step(parked)
    before = held(parked)
    parked.park_optimizer()
    assert held(parked) == 0
    close(parked.forward([batch], lambda output: output[0])[0], expected)
parked.save(out + "/checkpoint")
parked.finish_save(wait=True)
assert held(parked) == 0, "saving leaves it parked"
resumed = make(stage, **ADAM)
resumed.load(out + "/checkpoint")
parked.unpark_optimizer()
by_hand()
for engine in (parked, resumed):
    step(engine)
    found = weights(engine)
    for name, tensor in plain.lm.named_parameters():
        close(found[name], tensor.detach())
count = sum(getattr(p, "ds_numel", p.numel()) for p in parked.model.parameters())
with open(out + "/held.json", "w") as file:
    json.dump({"held": before, "parameters": count}, file)
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimiser_that_is_parked_between_steps_is_adamw(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, stage: int
) -> None:
    ranks(1).run(ENGINES + TRAIN_PARKED, tiny_model_dir, tmp_path, str(stage))
    measured = json.loads((tmp_path / "held.json").read_text())
    per_parameter = 8 if stage == 0 else 12  # moments; master weights too, where they are not the model's own
    assert measured["held"] == pytest.approx(per_parameter * measured["parameters"], rel=0.01)


LOAD_WITH_OTHER_SETTINGS = """
schedule = {"schedule": "linear", "warmup_steps": 3, "weight_decay": 0.1}
for stage in (0, 1, 2, 3):  # 3 last: transformers remembers that it is on
    first = make(stage, **schedule)
    for _ in range(4):
        step(first)
    first.save(f"{out}/{stage}")
    first.finish_save(wait=True)
    _, straight = step(first)

    same = make(stage, **schedule)
    same.load(f"{out}/{stage}")
    _, resumed = step(same)
    assert resumed == straight, (stage, resumed, straight)
    expected = weights(first)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(same).items()), stage

    longer = make(stage, total_steps=15, learning_rate=5e-3, max_grad_norm=0.25, **schedule)
    longer.load(f"{out}/{stage}")
    for done in (1, 2):  # of the 12 steps that the linear schedule takes down to zero, after 3 of warm-up
        metrics = step(longer)[1]
        assert abs(metrics["learning_rate"] - 5e-3 * (1 - done / 12)) < 1e-12, (stage, metrics)
    assert stage == 0 or longer.engine.optimizer.clip_grad == 0.25

    still = make(stage, learning_rate=1e-30)  # no weight decay either: what moves a weight now is an old setting
    still.load(f"{out}/{stage}")
    before = {name: tensor.clone() for name, tensor in weights(still).items()}
    assert step(still)[1]["learning_rate"] == 1e-30
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(still).items()), stage

    decays = make(stage, learning_rate=1e-30, weight_decay=5e29)
    decays.load(f"{out}/{stage}")
    step(decays)
    for name, tensor in weights(decays).items():  # AdamW: w <- (1 - learning rate x weight decay) w
        torch.testing.assert_close(tensor, before[name] / 2, rtol=1e-6, atol=0)
"""


def test_loading_takes_the_new_settings_and_repeats_the_old_ones(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path
) -> None:
    ranks(1).run(ENGINES + LOAD_WITH_OTHER_SETTINGS, tiny_model_dir, tmp_path)
