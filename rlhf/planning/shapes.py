"""The shape of a dense Llama-like model, from which FLOPs, bytes and memory follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config import ALL_LINEAR, LoraConfig
from rlhf.errors import ConfigError
from rlhf.planning.known_models import known_model

NEEDED_KEYS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelShape:
    """Sizes from the model's configuration, and the parameter counts that follow."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool  # the LM head is the input embedding

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelShape | None":
        """From a ``config.json``; None if the formulas do not hold: mixtures of experts, other architectures."""
        if any(not isinstance(config.get(key), int) for key in NEEDED_KEYS):
            return None
        if any(config.get(key) for key in EXPERT_KEYS):
            return None
        num_heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def attention_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, or value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers' matrices, which determine a token's FLOPs."""
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a decoder layer's linear layers, by the names that Llama gives them."""
        h, i, attention, kv = self.hidden_size, self.intermediate_size, self.attention_size, self.kv_size
        projections = {"q_proj": (h, attention), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (attention, h)}
        return {**projections, "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Parameters of all adapters. Targets of unknown names count as the largest layer."""
        layers = self.linear_layers()
        largest = max(layers.values(), key=sum)
        names = layers if ALL_LINEAR in lora.target_modules else lora.target_modules
        return self.num_layers * sum(lora.r * sum(layers.get(name, largest)) for name in names)

    @property
    def largest_linear_layer(self) -> int:
        """Parameters of the largest linear layer."""
        return max(inputs * outputs for inputs, outputs in self.linear_layers().values())

    @property
    def body_parameters(self) -> int:
        """Parameters of the layers' matrices and norms, which take memory."""
        return self.matrix_parameters + self.num_layers * 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, and of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor."""
        return self.hidden_size * max(self.vocab_size, self.intermediate_size, self.attention_size)

    def outer_parameters(self, *, lm_head: bool) -> int:
        """Parameters outside the layers: of a causal LM, or of the same backbone with a scalar head."""
        return self.embedding_parameters * (2 if lm_head and not self.tied else 1)

    def parameters(self, *, lm_head: bool) -> int:
        """All parameters; ``lm_head`` as in ``outer_parameters``."""
        return self.body_parameters + self.outer_parameters(lm_head=lm_head)


def read_model_config(path: str) -> dict[str, Any] | None:
    """The ``config.json`` of a local model directory, or of a hub model in the cache; None for others.

    Never uses the network. Raises ConfigError if the file is not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        cached = _cached_config(path)
        if cached is None:
            return None
        file = cached
    try:
        shape = json.loads(file.read_text())
        return shape.get("text_config", shape)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model.path={path}: its config.json is not a JSON object ({error})") from error


def _cached_config(path: str) -> Path | None:
    """A hub model's ``config.json`` in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not a hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_shape(path: str) -> ModelShape | None:
    """The shape of a model whose configuration ``read_model_config`` finds, or known by name; None for others."""
    config = read_model_config(path) or known_model(path)
    return ModelShape.of(config) if config is not None else None
