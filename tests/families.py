"""Small random models of the families that are supported, as directories with the tiny tokenizer.

Two key-value heads of width 32 (vLLM on CPU takes no narrower ones), windows of eight tokens, layers of every kind that
the family has, weights wide enough that whatever is left out shows.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SQUARE = {"hidden_size": 128}  # for families whose heads must fill the width
TIED = {"tie_word_embeddings": True}  # for families that vLLM knows no other way
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.02 * i for i in range(16)],
    "long_factor": [1.0 + 0.2 * i for i in range(16)],
}

# name -> (model type, what its configuration says beside SMALL)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", SQUARE),
    "qwen2-window": ("qwen2", {**SQUARE, "use_sliding_window": True, **MIXED}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma": ("gemma", TIED),
    "gemma2": ("gemma2", {**MIXED, **TIED, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {**MIXED, **TIED, "query_pre_attn_scalar": 32}),
    # vLLM 0.25 knows this family with a whole set of key-value heads and four times the width only
    "phi": ("phi", {**SQUARE, "num_key_value_heads": 4, "intermediate_size": 512}),
    "phi3": ("phi3", SQUARE),
    "phi3-longrope": ("phi3", {**SQUARE, "rope_parameters": LONGROPE, "sliding_window": None}),
    "granite": (
        "granite",
        {
            **SQUARE,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
        },
    ),
    "hyperclovax": ("hyperclovax", {**SQUARE, "logits_scaling": 0.5}),
    "cohere": ("cohere", {**SQUARE, **TIED, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**SQUARE, **MIXED, **TIED, "logit_scale": 0.5}),
    "olmo": ("olmo", SQUARE),
    "olmo2": ("olmo2", SQUARE),
    "olmo3": ("olmo3", {**SQUARE, **MIXED}),
    "starcoder2": ("starcoder2", SQUARE),
    "exaone4": ("exaone4", {**SQUARE, **MIXED}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", SQUARE),
    "seed_oss": ("seed_oss", {}),
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {**SQUARE, "rotary_pct": 0.5}),
    "opt": ("opt", {**SQUARE, "ffn_dim": 96, "word_embed_proj_dim": 128}),
}

# what is refused, and a word of the reason
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4}, "experts"),
    "mixtral": ("mixtral", {"num_local_experts": 4}, "experts"),
    "granite_swa": ("granite_swa", {**SQUARE, **MIXED}, "s_aux"),
    "qwen3_next": ("qwen3_next", {}, "state"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "state"),
    "jamba": ("jamba", {}, "state"),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "n_groups": 1}, "state"),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "replaced"),
    "falcon-alibi": ("falcon", {"alibi": True}, "ALiBi"),
    "llama4": ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"] * 2}, "chunked_attention"),
    "bert": ("bert", {}, "causal"),
    "bart": ("bart", {"d_model": 64, "is_encoder_decoder": True}, "other numbers"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "longest"),
}


def small_config(model_type: str, extra: dict[str, Any]) -> Any:
    """The configuration of a small model: what of SMALL its family knows, and ``extra``."""
    known = AutoConfig.for_model(model_type).to_dict()
    return AutoConfig.for_model(model_type, **{k: v for k, v in SMALL.items() if k in known} | extra)


def make_model(directory: Path, config: Any, *, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """A random float32 model of that configuration, with the tokenizer of another directory."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.1)
    model.save_pretrained(directory)
    for file in tokenizer.glob("tokenizer*") if tokenizer else ():
        shutil.copy(file, directory)
    return directory
