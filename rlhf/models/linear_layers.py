"""The names of a model's linear layers, read from its configuration alone."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def linear_layers(path: str, *, trust_remote_code: bool = False) -> list[str]:
    """Last names of all linear layers but the head, such as q_proj, sorted. Takes no memory for weights."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    found = (n for n, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in found})
