"""`rlhf export` writes what the learner would have saved, and what PEFT and transformers load; or says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner

from jobs.cli import app
from jobs.export import export
from rlhf.checkpoint import CheckpointStore, FileSum
from rlhf.config import Config
from rlhf.errors import CheckpointError, ConfigError
from rlhf.recipes import load_config
from rlhf.resume import describe_run
from rlhf.reward_config import RewardTrainingConfig
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]
ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"policy": "grpo_tiny", "reward": "reward_tiny"}
TOKENS = torch.arange(3, 23)[None]

# Every rank: argv is the model, a directory, what learns, its adapters, its dtype, and ZeRO stages, 3 the last.
SAVES = """
import json, sys, torch
import torch.distributed as dist
from pathlib import Path
from benchmarks.bench_learner import ragged_batch
from rlhf.config import LearnerConfig, LoraConfig, OptimizerConfig
from rlhf.models.loading import load_policy, load_scalar
from rlhf.training.engine import Engine

path, out, kind, lora, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]
dtype = getattr(torch, dtype)
RANK, RANKS = dist.get_rank(), dist.get_world_size()

def load():
    if kind == "reward":
        return load_scalar(path, dtype=dtype, fresh_head="random")
    return load_policy(path, dtype=dtype, temperature=1.0, chunk_tokens=64)

def loss(output, _):
    return (output.sum() if kind == "reward" else -output[0].sum()) / 50, {}

for stage in map(int, sys.argv[6]):
    torch.manual_seed(0)
    config = LearnerConfig(
        num_ranks=RANKS, zero_stage=stage, float32_gradients=dtype == torch.bfloat16 and stage > 0,
        lora=LoraConfig(**lora) if lora else None, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3))
    engine = Engine(load, config, dtype=dtype, device=torch.device("cpu"), total_steps=9)
    for _ in range(2):
        engine.step([ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))], loss)
    engine.save(str(out / f"saved-{stage}"))
    engine.finish_save(wait=True)
    engine.save_model(str(out / f"model-{stage}"))
"""


def recipe(model: Path, kind: str = "policy", **lora: object) -> Config | RewardTrainingConfig:
    overrides = [f"model.path={model}", *(f"learner.lora.{key}={json.dumps(value)}" for key, value in lora.items())]
    schema = Config if kind == "policy" else RewardTrainingConfig
    return load_config(ROOT / "conf" / f"{RECIPES[kind]}.yaml", overrides, schema)


def make_run(
    run_dir: Path, saved: Path, config: Config | RewardTrainingConfig, tokenizer: PreTrainedTokenizerBase, step: int = 2
) -> Path:
    """Gives a run's directory a checkpoint with what an engine has ``saved``; returns the checkpoint."""
    store = CheckpointStore(run_dir, keep=9)
    store.run = describe_run(config, tokenizer, data="", num_steps=9)
    partial = store.begin(step, {"step": step})
    shutil.copytree(saved, partial / "learner")
    store.complete(step, {str(path): FileSum.of(path) for path in partial.rglob("*.pt")})
    return store.path(step)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("dtype", "stages", "num_ranks"), [("float32", "0123", 2), ("bfloat16", "0123", 2), ("bfloat16", "3", 1)]
)
def test_a_whole_model_is_what_the_learner_would_have_saved(
    ranks: WarmRanks,
    tiny_model_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    dtype: str,
    stages: str,
    num_ranks: int,
) -> None:
    ranks(num_ranks).run(SAVES, tiny_model_dir, tmp_path, "policy", "null", dtype, stages)
    for stage in stages:
        make_run(tmp_path / f"run-{stage}", tmp_path / f"saved-{stage}", recipe(tiny_model_dir), tiny_tokenizer)
        out, expected = tmp_path / f"out-{stage}", tmp_path / f"model-{stage}"
        export(tmp_path / f"run-{stage}", out, merge=False)
        assert_same(weights(out), weights(expected))
        for name in ("config.json", "generation_config.json"):
            assert json.loads((out / name).read_text()) == json.loads((expected / name).read_text()), name
        assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_tokenizer.get_vocab()
    learnt, base = weights(tmp_path / f"out-{stages[0]}"), weights(tiny_model_dir)
    assert not any(torch.equal(learnt[name], base[name].to(learnt[name].dtype)) for name in base)


@pytest.mark.parametrize(
    ("lora", "dtype", "stages", "num_ranks"),
    [
        ({"r": 4, "alpha": 8}, "float32", "012", 2),
        ({"r": 3, "target_modules": ["q_proj", "layers.1.mlp.down_proj"]}, "bfloat16", "1", 1),
        ({"r": 4, "load_in_4bit": True}, "float32", "1", 2),
    ],
)
def test_an_adapter_loads_in_peft_and_merged_it_is_what_the_learner_would_have_saved(
    ranks: WarmRanks,
    tiny_model_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    lora: dict[str, Any],
    dtype: str,
    stages: str,
    num_ranks: int,
) -> None:
    ranks(num_ranks).run(SAVES, tiny_model_dir, tmp_path, "policy", json.dumps(lora), dtype, stages)
    for stage in stages:
        config = recipe(tiny_model_dir, **lora)
        checkpoint = make_run(tmp_path / f"run-{stage}", tmp_path / f"saved-{stage}", config, tiny_tokenizer)
        merged, adapter = tmp_path / f"merged-{stage}", tmp_path / f"adapter-{stage}"
        told = export(checkpoint, merged, merge=True)
        assert ("4 bits" in told) == ("load_in_4bit" in lora)
        assert_same(weights(merged), weights(tmp_path / f"model-{stage}"))
        export(checkpoint, adapter, merge=False)
        quantised: dict[str, Any] = {}
        if "load_in_4bit" in lora:
            quantised["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, **quantised)
        # trained, it computes in float32; scoring, bitsandbytes does so in bfloat16 on CPUs that can
        model = PeftModel.from_pretrained(base, str(adapter)).train("load_in_4bit" in lora)
        assert {str(config.base_model_name_or_path) for config in model.peft_config.values()} == {str(tiny_model_dir)}
        named = get_peft_model_state_dict(model)
        assert load_file(adapter / "adapter_model.safetensors").keys() == named.keys(), "as PEFT would save it"
        expected = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        with torch.no_grad():
            found, wanted = model(TOKENS).logits, expected(TOKENS).logits
            plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)(TOKENS).logits
        bound = 1e-4 if dtype == "float32" else 0.05  # a sum in bfloat16 is rounded
        assert (found - wanted).abs().max() < bound < (plain - wanted).abs().max()
        assert AutoTokenizer.from_pretrained(adapter).get_vocab() == tiny_tokenizer.get_vocab()


def test_a_reward_model_with_adapters_takes_its_head_along(
    ranks: WarmRanks, tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ranks(1).run(SAVES, tiny_model_dir, tmp_path, "reward", '{"r": 4}', "float32", "1")
    make_run(tmp_path / "run", tmp_path / "saved-1", recipe(tiny_model_dir, "reward", r=4), tiny_tokenizer)
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert_same(weights(tmp_path / "merged"), weights(tmp_path / "model-1"))
    export(tmp_path / "run", tmp_path / "adapter", merge=False)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1, dtype=torch.float32)
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(TOKENS).logits
        torch.testing.assert_close(found, expected(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def saved(ranks: WarmRanks, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine has saved of a whole model."""
    directory = tmp_path_factory.mktemp("saved")
    ranks(1).run(SAVES, tiny_model_dir, directory, "policy", "null", "float32", "1")
    return directory / "saved-1"


def test_the_newest_whole_checkpoint_of_a_run_is_taken_and_a_damaged_one_named(
    saved: Path, tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capfd
) -> None:
    older, newer = (make_run(tmp_path / "run", saved, recipe(tiny_model_dir), tiny_tokenizer, step) for step in (5, 3))
    (tmp_path / "out").mkdir()
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert done.exit_code == 0 and str(newer) in done.output, "into an empty directory; the last one written is newest"
    damaged = next((newer / "learner").rglob("*optim_states.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert str(older) in export(tmp_path / "run", tmp_path / "again", merge=False)
    assert f"passed over: {newer}: the checksum of learner/engine/{damaged.name} differs" in capfd.readouterr().out
    with pytest.raises(CheckpointError, match=f"step-000003: the checksum of learner/engine/{damaged.name} differs"):
        export(newer, tmp_path / "never", merge=False)
    (older / "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000005: not a complete checkpoint"):
        export(older, tmp_path / "never", merge=False)
    assert not (tmp_path / "never").exists()


def test_what_cannot_be_exported_is_refused_in_one_line(
    saved: Path, tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "base")
    checkpoint = make_run(tmp_path / "run", saved, recipe(model), tiny_tokenizer)
    full, out = tmp_path / "full", tmp_path / "out"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(ConfigError, match=r"full: already exists and is not an empty directory"):
        export(checkpoint, full, merge=False)
    with pytest.raises(ConfigError, match=r"--merge: .*step-000002 holds a whole model and no adapters"):
        export(checkpoint, out, merge=True)
    (tmp_path / "ended" / "checkpoints").mkdir(parents=True)
    (tmp_path / "ended" / "model").mkdir()
    with pytest.raises(CheckpointError, match=r"ended: the run has no checkpoint; its final model is in .*ended/model"):
        export(tmp_path / "ended", out, merge=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 256}))
    with pytest.raises(CheckpointError, match=r"config.json of model.path=\S+base is not the one"):
        export(checkpoint, out, merge=False)
    assert not out.exists() and [path.name for path in full.iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"
