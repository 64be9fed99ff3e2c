"""Shapes and parameter counts by hand, and which models have one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import LlamaConfig

from rlhf.errors import ConfigError
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
