"""Relative paths start where the command is given, in every key that names a place."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

import rlhf.paths
from actors.rollouts.vllm_engine import VllmEngine
from rlhf.config import Config, ModelConfig
from rlhf.errors import ConfigError
from rlhf.models.families import load_model_config
from rlhf.models.loading import load_tokenizer
from rlhf.paths import hub_is_silent, with_full_paths
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


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the hub is asked for. It does not answer, and the cache is empty."""
    requests: list[str] = []

    def head(url: str, timeout: float) -> None:
        requests.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr(rlhf.paths, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub_is_silent.cache_clear()
    yield requests
    hub_is_silent.cache_clear()


def test_what_is_neither_a_directory_nor_to_be_had_from_the_hub_is_said_at_the_first_request(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(ModelConfig("models/tiny"))
        assert str(caught.value) == (
            f"model.path=models/tiny: no such directory in {tmp_path}, and no hub id that can be loaded: it is not in "
            "the cache, and https://huggingface.co does not answer (Name or service not known); correct it, or give a "
            "model's directory"
        )
    assert asked == ["https://huggingface.co"]


def test_a_hub_model_in_the_cache_loads_without_the_hub(asked: list[str], tiny_model_dir: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--some--tiny"
    shutil.copytree(tiny_model_dir, cached / "snapshots" / "abc", ignore=shutil.ignore_patterns("*.safetensors"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert len(load_tokenizer(ModelConfig("some/tiny"))) == 512
    assert asked == ["https://huggingface.co"]
    assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (True, "1")
