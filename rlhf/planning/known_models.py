"""The shapes of well-known models by name, to plan for one whose ``config.json`` is not here."""

import re
from typing import Any

QWEN, LLAMA, GEMMA2, GEMMA3, SMOL = 151_936, 128_256, 256_000, 262_144, 49_152  # vocabularies
VARIANT = re.compile(r"-(instruct|it|chat|base|hf|v\d+(\.\d+)?|\d{4})$")  # of the same shape


def _config(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, *, head: int | None = None, tied: bool
) -> dict[str, Any]:
    """What matters of a ``config.json``. ``head``: the width of one, where it is not hidden / heads."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **({} if head is None else {"head_dim": head}),
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {  # by the model's name on the hub, in lower case and without its variant
    "qwen2.5-0.5b": _config(24, 896, 4864, 14, 2, QWEN, tied=True),
    "qwen2.5-1.5b": _config(28, 1536, 8960, 12, 2, QWEN, tied=True),
    "qwen2.5-3b": _config(36, 2048, 11008, 16, 2, QWEN, tied=True),
    "qwen2.5-7b": _config(28, 3584, 18944, 28, 4, 152_064, tied=False),
    "qwen2.5-14b": _config(48, 5120, 13824, 40, 8, 152_064, tied=False),
    "qwen2.5-32b": _config(64, 5120, 27648, 40, 8, 152_064, tied=False),
    "qwen2.5-72b": _config(80, 8192, 29568, 64, 8, 152_064, tied=False),
    "qwen2.5-math-1.5b": _config(28, 1536, 8960, 12, 2, QWEN, tied=True),
    "qwen2.5-math-7b": _config(28, 3584, 18944, 28, 4, 152_064, tied=False),
    "qwen3-0.6b": _config(28, 1024, 3072, 16, 8, QWEN, head=128, tied=True),
    "qwen3-1.7b": _config(28, 2048, 6144, 16, 8, QWEN, head=128, tied=True),
    "qwen3-4b": _config(36, 2560, 9728, 32, 8, QWEN, head=128, tied=True),
    "qwen3-8b": _config(36, 4096, 12288, 32, 8, QWEN, head=128, tied=False),
    "qwen3-14b": _config(40, 5120, 17408, 40, 8, QWEN, head=128, tied=False),
    "qwen3-32b": _config(64, 5120, 25600, 64, 8, QWEN, head=128, tied=False),
    "llama-3-8b": _config(32, 4096, 14336, 32, 8, LLAMA, tied=False),
    "llama-3-70b": _config(80, 8192, 28672, 64, 8, LLAMA, tied=False),
    "llama-3.1-8b": _config(32, 4096, 14336, 32, 8, LLAMA, tied=False),
    "llama-3.1-70b": _config(80, 8192, 28672, 64, 8, LLAMA, tied=False),
    "llama-3.1-405b": _config(126, 16384, 53248, 128, 8, LLAMA, tied=False),
    "llama-3.2-1b": _config(16, 2048, 8192, 32, 8, LLAMA, head=64, tied=True),
    "llama-3.2-3b": _config(28, 3072, 8192, 24, 8, LLAMA, head=128, tied=True),
    "llama-3.3-70b": _config(80, 8192, 28672, 64, 8, LLAMA, tied=False),
    "mistral-7b": _config(32, 4096, 14336, 32, 8, 32_000, tied=False),
    "mistral-7b-v0.3": _config(32, 4096, 14336, 32, 8, 32_768, tied=False),
    "mistral-7b-instruct-v0.3": _config(32, 4096, 14336, 32, 8, 32_768, tied=False),
    "gemma-2-2b": _config(26, 2304, 9216, 8, 4, GEMMA2, head=256, tied=True),
    "gemma-2-9b": _config(42, 3584, 14336, 16, 8, GEMMA2, head=256, tied=True),
    "gemma-2-27b": _config(46, 4608, 36864, 32, 16, GEMMA2, head=128, tied=True),
    "gemma-3-270m": _config(18, 640, 2048, 4, 1, GEMMA3, head=256, tied=True),
    "gemma-3-1b": _config(26, 1152, 6912, 4, 1, GEMMA3, head=256, tied=True),
    "smollm2-135m": _config(30, 576, 1536, 9, 3, SMOL, tied=True),
    "smollm2-360m": _config(32, 960, 2560, 15, 5, SMOL, tied=True),
    "smollm2-1.7b": _config(24, 2048, 8192, 32, 32, SMOL, tied=True),
}


def known_model(path: str) -> dict[str, Any] | None:
    """What matters of the ``config.json`` of the model that ``path``, a hub id or a directory, is named after; None:
    no known one."""
    name = path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while name not in KNOWN_MODELS and VARIANT.search(name):
        name = VARIANT.sub("", name)
    return KNOWN_MODELS.get(name)
