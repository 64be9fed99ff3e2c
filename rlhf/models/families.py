"""Which model families can be trained, and what each needs: supported exactly, or refused with a reason.

What a model's configuration reveals is checked here, before its weights are read. ``probe`` then compares the loaded
model with transformers' own forward pass, so unforeseen families are refused, too.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from rlhf.errors import ConfigError
from rlhf.paths import check_model_directory
from rlhf.planning.shapes import EXPERT_KEYS

PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"})
RECURRENT_KEYS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_L_cache", "lru_width", "time_mix_extra_dim")
STATIC_ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
DROPOUT = re.compile(r"dropout|_pdrop$|^layerdrop$")
MULTIPLIES_LOGITS = frozenset({"hyperclovax"})  # by logits_scaling; all others divide


@dataclass(frozen=True)
class LogitShape:
    """What a model applies to the output of its LM head: ``c tanh(s x / c)``, or ``s x`` without a cap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "LogitShape":
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite and its relatives
        scale *= scaling if config.model_type in MULTIPLIES_LOGITS else 1 / scaling
        return cls(scale, getattr(config, "final_logit_softcapping", None))


@dataclass(frozen=True)
class Adjusted:
    """A model's configuration for training, and the original values of the changed keys, which are what is saved."""

    config: PretrainedConfig
    original: dict[str, Any]


def load_model_config(path: str, *, key: str, max_tokens: int | None, trust_remote_code: bool = False) -> Adjusted:
    """The configuration of the model at ``path``, without dropout and with rotary frequencies that do not depend on
    what a sequence is packed with.

    ``key`` names the model in errors; ``max_tokens``: the longest sequence of the run, None: the model's limit. Raises
    ConfigError if the family is not supported.
    """
    check_model_directory(path, key)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={path}: no model configuration loads from there ({str(error).splitlines()[0]}); give a Hugging "
            "Face directory, or a hub id that this machine can reach"
        ) from error
    if (reason := unsupported(config)) is not None:
        raise ConfigError(f"{key}={path}: {config.model_type} models are not supported: {reason}; see docs/models.md")
    changed: dict[str, Any] = {name: 0.0 for name, value in vars(config).items() if _is_dropout(name, value)}
    if (rope := pinned_longrope(config, max_tokens)) is not None:
        changed["rope_parameters"] = rope
    original = {name: deepcopy(getattr(config, name)) for name in changed}
    for name, value in changed.items():
        setattr(config, name, value)
    return Adjusted(config, original)


def _is_dropout(name: str, value: Any) -> bool:
    return DROPOUT.search(name) is not None and isinstance(value, float) and value != 0


def unsupported(config: PretrainedConfig) -> str | None:
    """Why models with this configuration cannot be trained; None: nothing in it rules them out."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "use_bidirectional_attention", None):
        return "they are not causal decoders"
    if config.get_text_config() is not config:
        return "they take more than text; give the text model by itself"
    layers = set(getattr(config, "layer_types", None) or ())
    if layers & RECURRENT_LAYERS or any(getattr(config, key, None) for key in RECURRENT_KEYS):
        return "state-space, convolution and linear-attention layers carry state from one packed sequence to the next"
    if layers - PLAIN_LAYERS:
        return (
            f"layers of {', '.join(sorted(layers - PLAIN_LAYERS))} attend in a way that packed training does not know"
        )
    if any(getattr(config, key, None) for key in EXPERT_KEYS):
        return "mixtures of experts do not survive a weight publish"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "absolute") == "alibi":
        return "ALiBi's distances do not survive packing"
    ropes = {rope["rope_type"] for rope in _ropes(getattr(config, "rope_parameters", None))}
    if unknown := ropes - STATIC_ROPES - {"longrope"}:
        return (
            f"their rotary frequencies (rope_type={', '.join(sorted(unknown))}) follow the longest sequence of a batch"
        )
    return None


def _ropes(parameters: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The rotary parameters: one set for all layers, or one per layer type."""
    if not parameters:
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [rope for rope in parameters.values() if isinstance(rope, Mapping) and "rope_type" in rope]


def pinned_longrope(config: PretrainedConfig, max_tokens: int | None) -> dict[str, Any] | None:
    """Rotary parameters whose long and short factors are the same; None if there is nothing to pin.

    LongRoPE (arXiv 2402.13753) has one set of factors for short sequences and one for long ones. transformers chooses
    by the longest sequence in the batch, so a packed neighbour would change the choice; vLLM by the longest sequence it
    accepts, and so does this: ``max_tokens``.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not any(rope["rope_type"] == "longrope" for rope in _ropes(parameters)):
        return None
    pinned, longest = deepcopy(dict(parameters or {})), max_tokens or config.max_position_embeddings
    for rope in _ropes(pinned):
        if rope["rope_type"] == "longrope":
            assert isinstance(rope, dict)
            chosen = "long_factor" if longest > rope["original_max_position_embeddings"] else "short_factor"
            rope |= dict.fromkeys(("long_factor", "short_factor"), rope[chosen])
    return pinned
