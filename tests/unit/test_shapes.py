"""Shapes and parameter counts by hand, and which models have one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import LlamaConfig

from rlhf.config import LoraConfig
from rlhf.errors import ConfigError
from rlhf.planning.known_models import KNOWN_MODELS, known_model
from rlhf.planning.shapes import ModelShape, read_shape

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    vocab_size=100,
    tied=True,
)


def test_counts_by_hand() -> None:
    assert (SHAPE.attention_size, SHAPE.kv_size) == (32, 16)
    # q and o: 16 x 32 each; k and v: 16 x 16 each; gate, up, down: 16 x 32 each
    assert SHAPE.matrix_parameters == 3 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32)
    assert SHAPE.body_parameters == SHAPE.matrix_parameters + 3 * 2 * 16  # two norms a layer
    assert SHAPE.embedding_parameters == SHAPE.largest_tensor == 1600
    assert dataclasses.replace(SHAPE, intermediate_size=200).largest_tensor == 3200
    untied = dataclasses.replace(SHAPE, tied=False)
    for shape, lm_head, outer in (
        (SHAPE, True, 1600),
        (SHAPE, False, 1600),
        (untied, True, 3200),
        (untied, False, 1600),
    ):
        assert shape.outer_parameters(lm_head=lm_head) == outer
        assert shape.parameters(lm_head=lm_head) == shape.body_parameters + outer


@pytest.mark.parametrize(("num_heads", "attention", "intermediate"), [(4, 32, 64), (16, 128, 32)])
def test_adapters_by_hand(num_heads: int, attention: int, intermediate: int) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=num_heads, intermediate_size=intermediate)

    def parameters(*targets: str) -> int:
        return shape.adapter_parameters(LoraConfig(r=5, target_modules=list(targets)))

    sides = {"q_proj": attention, "k_proj": 16, "v_proj": 16, "o_proj": attention}  # the other has 16
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), intermediate)
    assert {name: parameters(name) for name in sides} == {name: 3 * 5 * (16 + side) for name, side in sides.items()}
    assert parameters("all-linear") == parameters(*sides) == 3 * 5 * sum(16 + side for side in sides.values())
    assert parameters("W_pack") == 3 * 5 * (16 + max(attention, intermediate)), "unknown: as the largest"


@pytest.mark.parametrize(
    ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab", "tied", "count"),
    [
        (24, 896, 4864, 14, 2, 151_936, True, 494e6),  # Qwen2.5 0.5B, 1.5B, 7B
        (28, 1536, 8960, 12, 2, 151_936, True, 1.544e9),
        (28, 3584, 18944, 28, 4, 152_064, False, 7.616e9),
    ],
)
def test_published_parameter_counts(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, tied: bool, count: float
) -> None:
    shape = ModelShape(layers, hidden, intermediate, heads, kv_heads, hidden // heads, vocab, tied)
    assert shape.parameters(lm_head=True) == pytest.approx(count, rel=1e-3)


def test_of_a_configuration() -> None:
    assert ModelShape.of(CONFIG) == SHAPE
    sparse = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "head_dim")}
    assert ModelShape.of(sparse) == dataclasses.replace(SHAPE, num_kv_heads=4, head_size=4)
    uneven = ModelShape.of(sparse | {"hidden_size": 18})
    assert uneven is not None and uneven.head_size == 4
    untied = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    assert ModelShape.of(untied) == dataclasses.replace(SHAPE, tied=False)
    assert ModelShape.of(LlamaConfig(**CONFIG).to_dict()) == SHAPE


def test_only_dense_llama_like_models_have_a_shape() -> None:
    assert ModelShape.of({"n_embd": 768, "n_layer": 12}) is None
    assert ModelShape.of(CONFIG | {"num_experts": 8}) is None
    assert ModelShape.of(CONFIG | {"num_local_experts": 0}) == SHAPE


def test_a_shape_is_read_from_disk(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_shape(str(tmp_path)) == SHAPE
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    assert read_shape(str(tmp_path)) == SHAPE


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_configuration_that_is_no_json_object_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.path=.*: its config\.json is not a JSON object"):
        read_shape(str(tmp_path))


def test_a_hub_model_has_one_if_it_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "cached.json"
    cached.write_text(json.dumps(CONFIG))
    known = {("org/model", "config.json"): str(cached), ("org/absent", "config.json"): object()}  # known not to exist
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: known.get(args))
    assert read_shape("org/model") == SHAPE
    assert read_shape("org/absent") is None
    assert read_shape("org/unknown") is None


def test_a_model_that_is_not_at_hand_has_none() -> None:
    assert read_shape("nobody/has-this-model") is None
    assert read_shape("/no/where") is None


PUBLISHED = {  # parameters, as the hub counts them
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "/models/gemma-3-1b-it/": 999_885_952,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


def test_a_model_known_by_name_has_as_many_parameters_as_published() -> None:
    for name, published in PUBLISHED.items():
        shape = read_shape(name)
        assert shape is not None, name
        assert shape.parameters(lm_head=True) == pytest.approx(published, rel=0.001), name
    assert len(PUBLISHED) == len(KNOWN_MODELS)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen3-30B-A3B", "my-qwen2.5-7b", "7b", ""])
def test_a_name_that_is_only_similar_is_not_known(name: str) -> None:
    assert known_model(name) is None
