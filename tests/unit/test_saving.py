"""What is saved while training goes on is the state at the time of saving; what is exported loads elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.group import ActorGroup, Member
from actors.proxies import LearnerGroup
from rlhf.checkpoint import FileSum, Written
from rlhf.config import TimeoutConfig
from tests.fake_ray import FakeRay
from tests.families import FAMILIES, make_model, small_config
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]

# Run by every rank; argv is the model and a directory. Stage 3 comes last: its context outlives its engines.
PRELUDE = """
import sys, threading, weakref, torch
import torch.distributed as dist
from pathlib import Path
from rlhf.checkpoint import FileSum
from rlhf.config import LearnerConfig, OptimizerConfig
from rlhf.errors import CheckpointError
from rlhf.models.loading import load_policy
from rlhf.training.engine import Engine
from rlhf.training.export import export
from benchmarks.bench_learner import ragged_batch
from tests.gathered import gathered_state_dict

model, out = sys.argv[1], Path(sys.argv[2])
cpu = torch.device("cpu")
RANK, RANKS = dist.get_rank(), dist.get_world_size()

def make(stage):
    config = LearnerConfig(num_ranks=RANKS, zero_stage=stage, optimizer=OptimizerConfig(learning_rate=1e-2))
    load = lambda: load_policy(model, dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=torch.float32, device=cpu, total_steps=9)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))
    return engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].mean()}))

def weights(engine):
    engine.release_gathered()
    return {name: tensor.clone() for name, tensor in (gathered_state_dict(engine.model) or {}).items()}

def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

def block(engine):
    # the thread that writes waits for the event
    gate = threading.Event()
    engine._writer._thread.submit(gate.wait)
    return gate
"""

WHILE_TRAINING = (
    PRELUDE
    + """
for stage in map(int, sys.argv[3]):
    engine, resumed, memory = make(stage), make(stage), []
    for visit in ("plain", "parked"):
        step(engine)
        if visit == "parked":
            engine.park_optimizer()
        gate, where = block(engine), out / f"{stage}-{visit}"
        engine.save(str(where))
        assert engine.finish_save(wait=False) is None
        memory.append([len(block) for block in engine._writer._memory._blocks])
        engine.unpark_optimizer()
        after = [(step(engine), weights(engine)) for _ in range(2)]
        dist.barrier()
        assert not list(where.rglob("*states.pt")), "nothing is written so far"
        dist.barrier()
        gate.set()
        written = engine.finish_save(wait=True)
        assert engine.finish_save(wait=False) == written, "until the next one"
        total = [None] * RANKS
        dist.all_gather_object(total, written.num_bytes)
        assert sum(total) == sum(path.stat().st_size for path in where.rglob("*states.pt"))
        assert written.files == {path: FileSum.of(Path(path)) for path in written.files}, "as they are on the disk"

        resumed.load(str(where))
        for metrics, expected in after:
            assert step(resumed) == metrics, (stage, visit)
            assert same(weights(resumed), expected), (stage, visit)
    assert memory[0] == memory[1], "the same host memory again"
    assert len(memory[0]) == 1, "what was reserved after the first step was enough"
"""
)

WRITER_FAILS = (
    PRELUDE
    + """
engine = make(1)
step(engine)
full = out / "full"
(full / "engine").mkdir(parents=True)
(full / "engine" / "mp_rank_00_model_states.pt").symlink_to("/dev/full")
engine.save(str(full))
for _ in range(2):
    try:
        engine.finish_save(wait=True)
    except CheckpointError as error:
        message = str(error)
        assert message.startswith(f"{full}: a checkpoint could not be written (OSError"), message
        assert "No space left on device" in message and "\\n" not in message
    else:
        raise AssertionError("a full disk went unnoticed")
engine.save(str(out / "next"))
engine.finish_save(wait=True)
make(1).load(str(out / "next"))
"""
)

SAVES_TWICE = (
    PRELUDE
    + """
engine = make(1)
step(engine)
gate, first = block(engine), weights(engine)
engine.save(str(out / "first"))
step(engine)
second = weights(engine)
saving = threading.Thread(target=engine.save, args=[str(out / "second")])
saving.start()
saving.join(1.0)  # what does not wait has copied over the first one by now
gate.set()
saving.join()
engine.finish_save(wait=True)
for name, expected in (("first", first), ("second", second)):
    resumed = make(1)
    resumed.load(str(out / name))
    assert same(weights(resumed), expected), name
"""
)


SAVES_EARLY = (
    PRELUDE
    + """
engine = make(1)
writer, taking = engine._writer, threading.Event()
reserve = writer._memory.reserve
writer._memory.reserve = lambda num_bytes: (taking.wait(), reserve(num_bytes))
step(engine)
saving = threading.Thread(target=engine.save, args=[str(out / "early")])
saving.start()
saving.join(1.0)  # what does not wait has taken memory of its own by now
taking.set()
saving.join()
engine.finish_save(wait=True)
assert len(writer._memory._blocks) == 1
"""
)


def test_a_save_waits_for_its_memory(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    ranks(1).run(SAVES_EARLY, tiny_model_dir, tmp_path)


@pytest.mark.parametrize(("num_ranks", "stages"), [(1, "02"), (2, "13")])
def test_what_is_on_disk_is_the_state_at_the_time_of_saving(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, num_ranks: int, stages: str
) -> None:
    """Bit for bit, with two optimiser steps between the copy and the first byte written, parked or not."""
    ranks(num_ranks).run(WHILE_TRAINING, tiny_model_dir, tmp_path, stages)


def test_a_full_disk_is_told_and_does_not_spoil_the_next_save(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path
) -> None:
    ranks(1).run(WRITER_FAILS, tiny_model_dir, tmp_path)


def test_a_second_save_waits_until_the_first_is_written(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    ranks(1).run(SAVES_TWICE, tiny_model_dir, tmp_path)


ONE, OTHER = {"one": FileSum(10, 1)}, {"other": FileSum(5, 2)}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Written(1.0, ONE), Written(3.0, OTHER)], Written(3.0, ONE | OTHER)),
        ([Written(1.0, ONE), None], None),
    ],
)
def test_a_role_has_written_when_all_its_ranks_have(
    monkeypatch: pytest.MonkeyPatch, answers: list[Written | None], expected: Written | None
) -> None:
    fake_ray = FakeRay(monkeypatch)
    members = [Member(fake_ray.actor(finish_save=a), "learner", i, "10.0.0.1") for i, a in enumerate(answers)]
    assert LearnerGroup(ActorGroup(members), TimeoutConfig()).finish_save(wait=False).result() == expected


# ---- the trained model


EXPORT = (
    PRELUDE
    + """
import os
import rlhf.training.export as exporting

held, peak, synced, fsync = {}, 0, set(), os.fsync

def noted(descriptor):
    synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    fsync(descriptor)

class Whole:
    # a gathered parameter, whose copies on the host are counted

    def __init__(self, tensor):
        self._tensor = tensor

    def to(self, device, copy):
        global peak
        tensor = self._tensor.to(device, copy=copy)
        held[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, held.pop, id(tensor))
        peak = max(peak, sum(held.values()))
        return tensor

class Counted:
    def __init__(self, weight):
        self.shape, self.dtype, self.gather = weight.shape, weight.dtype, lambda: Whole(weight.gather())

os.fsync, named = noted, exporting.named_weights
exporting.named_weights = lambda model: {name: Counted(weight) for name, weight in named(model).items()}
try:
    for stage in map(int, sys.argv[3]):
        engine = make(stage)
        step(engine)
        torch.save(weights(engine), out / f"{stage}-{RANK}.pt")
        for name, limit in (("one", 1 << 30), ("many", 100_000)):
            peak = 0
            synced.clear()
            export(engine.model, out / f"{stage}-{name}", max_shard_bytes=limit)
            files = {path.name for path in (out / f"{stage}-{name}").iterdir()}
            own = files if RANK == 0 else {file for file in files if f"-{RANK + 1:05d}-of" in file}
            assert own <= synced, own - synced
            assert not held, "nothing is left of the last shard"
            (out / f"{stage}-{name}-{RANK}.peak").write_text(str(peak))
finally:
    os.fsync, exporting.named_weights = fsync, named
"""
)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's files, by the names in them."""
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    assert sum(len(tensors) for tensors in files) == len({name for tensors in files for name in tensors})
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


@pytest.mark.parametrize(("num_ranks", "stages"), [(1, "03"), (2, "13")])
def test_an_export_loads_elsewhere_and_no_rank_holds_more_than_a_shard(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, num_ranks: int, stages: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.config.attention_dropout = 0.5  # off in training
    model.save_pretrained(tmp_path / "model")
    ranks(num_ranks).run(EXPORT, tmp_path / "model", tmp_path, stages)
    for stage in stages:
        expected = torch.load(tmp_path / f"{stage}-0.pt")
        sizes = {name: tensor.nbytes for name, tensor in expected.items()}
        for kind, limit in (("one", 1 << 30), ("many", 100_000)):
            directory = tmp_path / f"{stage}-{kind}"
            loaded = AutoModelForCausalLM.from_pretrained(directory)
            assert loaded.config.attention_dropout == 0.5
            assert (directory / "generation_config.json").is_file()
            parameters = dict(loaded.named_parameters())
            assert parameters.keys() == expected.keys() == stored(directory).keys()
            assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
            for rank in range(num_ranks):
                peak = int((tmp_path / f"{stage}-{kind}-{rank}.peak").read_text())
                assert peak <= max(limit, max(sizes.values())), f"rank {rank} held {peak} bytes at once"
                assert bool(peak) == (kind == "many" or rank == 0), "every rank has its share of the shards"
        assert (tmp_path / f"{stage}-one" / "model.safetensors").is_file()
        index = json.loads((tmp_path / f"{stage}-many" / "model.safetensors.index.json").read_text())
        shards = sorted(path.name for path in (tmp_path / f"{stage}-many").glob("*.safetensors"))
        assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        assert len(shards) > 2 * num_ranks and sorted(set(index["weight_map"].values())) == shards
        assert index["metadata"]["total_size"] == sum(sizes.values())
        for file in shards:
            with safe_open(tmp_path / f"{stage}-many" / file, framework="pt") as tensors:
                assert all(index["weight_map"][name] == file for name in tensors.keys())  # noqa: SIM118
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"model", *(f"{stage}-{kind}" for stage in stages for kind in ("one", "many"))}


def test_an_export_has_the_names_and_the_files_of_the_directory_that_was_loaded(
    ranks: WarmRanks, tmp_path: Path
) -> None:
    """In a family whose parameters transformers renames when it loads them; over an older export."""
    source = make_model(tmp_path / "model", small_config(*FAMILIES["gpt_neox"]))
    (tmp_path / "0-many").mkdir()
    (tmp_path / "0-many" / "model.safetensors").write_text("of an older export")
    ranks(1).run(EXPORT, source, tmp_path, "0")
    assert "embed_out.weight" in stored(source)
    for kind in ("one", "many"):
        assert stored(tmp_path / f"0-{kind}").keys() == stored(source).keys()
