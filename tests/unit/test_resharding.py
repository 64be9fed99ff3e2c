"""A checkpoint loaded into other ranks or another ZeRO stage: every number arrives, and training goes on as before."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]

# Run by every rank; argv is the model, a directory, and a ZeRO stage with its numbers and options: 'summed' is in
# float32, the others say what is in host memory.
PRELUDE = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
import rlhf.training.engine
from benchmarks.bench_learner import ragged_batch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from rlhf.config import OFFLOADS, LearnerConfig, OptimizerConfig
from rlhf.models.loading import load_policy
from rlhf.training.engine import Engine
from rlhf.training.setup import deepspeed_config
from tests.gathered import gathered_state_dict

model, out = sys.argv[1], Path(sys.argv[2])
stage, numbers, *options = sys.argv[3].split(",")
stage, offload = int(stage), next((option for option in options if option in OFFLOADS), "none")
cpu, dtype = torch.device("cpu"), getattr(torch, numbers)
RANK, RANKS = dist.get_rank(), dist.get_world_size()

def in_several_groups(config, dtype):  # as stage 3 keeps the parameters of a large model
    settings = deepspeed_config(config, dtype)
    settings["zero_optimization"]["sub_group_size"] = 100_000
    return settings

rlhf.training.engine.deepspeed_config = in_several_groups

def make():
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="linear", eps=1e-3)  # where the size of a gradient matters
    more = {"offload": offload, "float32_gradients": "summed" in options}
    config = LearnerConfig(num_ranks=RANKS, zero_stage=stage, optimizer=optimizer, **more)
    load = lambda: load_policy(model, dtype=dtype, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=dtype, device=cpu, total_steps=9)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))
    return engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].sum() / 50}))

def weights(engine):
    engine.release_gathered()
    gathered = [gathered_state_dict(engine.model)]
    dist.broadcast_object_list(gathered)
    return gathered[0]

def held(engine):
    # float32 weights and moments as DeepSpeed itself gathers them
    if hasattr(engine.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if stage == 0:
                found[name], found[f"{name} {moment}"] = parameter.data, engine._optimizer.state[parameter][moment]
            else:
                found[name] = safe_get_full_fp32_param(parameter)
                found[f"{name} {moment}"] = safe_get_full_optimizer_state(parameter, moment)
    steps = {float(state["step"]) for state in engine._optimizer.state.values()}
    return {name: tensor.clone().flatten() for name, tensor in found.items()}, steps

def save(engine, name):
    engine.save(str(out / name))
    engine.finish_save(wait=True)

def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
"""

SAVES = """
engine = make()
step(engine), step(engine)
save(engine, "before")
kept, computed_with = held(engine), weights(engine)
metrics = step(engine)
after = held(engine)
if RANK == 0:
    torch.save((kept, computed_with, metrics, after), out / "expected.pt")
"""

GOES_ON_ELSEWHERE = """
engine = make()
engine.load(str(out / "before"))
kept, computed_with, metrics, after = torch.load(out / "expected.pt")
found, steps = held(engine)
assert steps == kept[1] == {2.0}
check_same(found, kept[0])
check_same(weights(engine), computed_with)
save(engine, "elsewhere")
exact = numbers == "float32"
for name, value in step(engine).items():
    assert abs(value - metrics[name]) < (1e-5 if exact else 0.1) * max(1, abs(metrics[name])), (name, value, metrics)
assert engine.engine.global_steps == 3
if exact:
    for name, tensor in held(engine)[0].items():
        torch.testing.assert_close(tensor, after[0][name], rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
"""

COMES_BACK = """
engine = make()
engine.load(str(out / "elsewhere"))
kept, computed_with, metrics, after = torch.load(out / "expected.pt")
check_same(weights(engine), computed_with)
assert step(engine) == metrics
found, steps = held(engine)
assert steps == after[1] == {3.0}
check_same(found, after[0])
"""


@pytest.mark.parametrize(
    ("here", "num_ranks", "there"),
    [
        ("3,float32", 1, "1,float32"),
        ("3,float32", 3, "3,float32"),
        ("3,float32", 2, "2,float32"),
        ("2,float32", 1, "0,float32"),
        ("1,float32", 3, "2,float32"),
        ("0,float32", 3, "3,float32"),
        ("3,bfloat16", 3, "2,bfloat16"),
        ("1,bfloat16,summed", 3, "3,bfloat16,summed"),
        ("2,bfloat16", 1, "1,bfloat16,summed"),
        ("1,bfloat16", 2, "1,bfloat16,summed"),
        pytest.param("3,float32,optimizer", 2, "3,float32", marks=pytest.mark.long),
        pytest.param("2,bfloat16", 2, "2,bfloat16,optimizer", marks=pytest.mark.long),
        pytest.param("1,float32", 1, "3,float32,all", marks=pytest.mark.long),
        pytest.param("3,bfloat16,all", 3, "1,bfloat16,optimizer", marks=pytest.mark.long),
    ],
)
def test_two_ranks_go_on_elsewhere_and_come_back(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, here: str, num_ranks: int, there: str
) -> None:
    ranks(2).run(PRELUDE + SAVES, tiny_model_dir, tmp_path, here)
    ranks(num_ranks).run(PRELUDE + GOES_ON_ELSEWHERE, tiny_model_dir, tmp_path, there)
    ranks(2).run(PRELUDE + COMES_BACK, tiny_model_dir, tmp_path, here)


IS_REFUSED = """
import re
from rlhf.errors import CheckpointError

try:
    make().load(str(out / "before"))
except CheckpointError as error:
    assert re.search(sys.argv[4], str(error)), error
else:
    raise AssertionError("it was loaded")
"""


def test_what_cannot_be_loaded_is_refused(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    ranks(2).run(PRELUDE + SAVES, tiny_model_dir, tmp_path, "2,bfloat16")
    message = r"at zero_stage=2 and cannot be loaded at 0: .* bfloat16 .*; resume with learner\.zero_stage=2$"
    ranks(1).run(PRELUDE + IS_REFUSED, tiny_model_dir, tmp_path, "0,bfloat16", message)
    next(tmp_path.glob("before/engine/*rank_1_*optim_states.pt")).unlink()
    message = "does not load into 1 ranks .* 1 files of optimizer state where 2 ranks wrote"
    ranks(1).run(PRELUDE + IS_REFUSED, tiny_model_dir, tmp_path, "1,bfloat16", message)
