"""Relative paths start where the command is given, in every key that names a place."""

import socket
from pathlib import Path

import pytest

from actors.rollouts.vllm_engine import VllmEngine
from rlhf.config import Config, ModelConfig
from rlhf.errors import ConfigError
from rlhf.models.families import load_model_config
from rlhf.models.loading import load_tokenizer
from rlhf.paths import with_full_paths
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig
from tests.fake_engine import fake_spec

CONF = Path(__file__).resolve().parents[2] / "conf"


def config(*overrides: str) -> Config:
    return load_config(CONF / "grpo_tiny.yaml", overrides)


def test_local_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    given = config(
        "model.path=models/tiny",
        "reference.path=Qwen/Qwen2.5-7B-Instruct",
        "critic.path=/shared/critic",
        "reward.model.path=../rm",
        "data.eval=~/data/eval.jsonl",
        "checkpoint.resume=runs/old/checkpoints/step-000010",
        "algorithm.advantage=mine/advantage.py:f",
        "algorithm.loss=package.module.loss",
        "reward.functions=[{path: exact_match}, {path: ../r.py:g, weight: 2}]",
    )
    full = with_full_paths(given, tmp_path)
    assert full.model.path == f"{tmp_path}/models/tiny"
    assert (full.reference.path, full.critic.path) == ("Qwen/Qwen2.5-7B-Instruct", "/shared/critic")
    assert full.reward.model is not None and full.reward.model.path == f"{tmp_path.parent}/rm"
    assert (full.data.train, full.data.eval) == ("task:phrases", "/home/me/data/eval.jsonl")
    assert full.run_dir == f"{tmp_path}/runs/grpo_tiny"
    assert full.checkpoint.resume == f"{tmp_path}/runs/old/checkpoints/step-000010"
    assert (full.algorithm.advantage, full.algorithm.loss) == (f"{tmp_path}/mine/advantage.py:f", "package.module.loss")
    assert [(f.path, f.weight) for f in full.reward.functions] == [("exact_match", 1), (f"{tmp_path.parent}/r.py:g", 2)]
    assert with_full_paths(full, Path("/elsewhere")) == full
    assert with_full_paths(config(), tmp_path).checkpoint.resume == "auto"


def test_a_reward_model_s_training_has_the_same_rule(tmp_path: Path) -> None:
    overrides = ["model.path=./m", "data.train=pairs.jsonl", "data.eval=null"]
    full = with_full_paths(load_config(CONF / "reward_tiny.yaml", overrides, RewardTrainingConfig), tmp_path)
    assert (full.model.path, full.data.train, full.data.eval) == (f"{tmp_path}/m", f"{tmp_path}/pairs.jsonl", None)
    assert full.run_dir == f"{tmp_path}/runs/reward_tiny"


def test_a_directory_that_is_not_there_is_named_with_the_node_that_lacks_it(tmp_path: Path) -> None:
    path = f"{tmp_path}/model"
    spec = fake_spec()
    object.__setattr__(spec, "model_path", path)
    for load in (
        lambda: load_tokenizer(ModelConfig(path)),
        lambda: load_model_config(path, key="model.path", max_tokens=None),
        lambda: VllmEngine(spec),
    ):
        with pytest.raises(ConfigError) as caught:
            load()
        assert str(caught.value) == (
            f"model.path={path}: no such directory on {socket.gethostname()}; correct it, or put it where all nodes "
            "see it at that path"
        )
