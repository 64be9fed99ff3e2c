"""A policy's adapter inside vLLM's worker processes: kept beside the weights, and replaced by every publish.

vLLM loads adapters from files and forgets what it has no place for. Here they come from memory, and are complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rlhf.training.weights import ADAPTER_SIDES

ADAPTER_ID = 1


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Has every layer that vLLM wrapped to give it an adapter in its place again: the loaders know no others."""
    wrapped = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrapped:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


def install(model: Any, tensors: Mapping[str, Tensor], *, alpha: int) -> list[str]:
    """Puts an adapter in the place of the last one; returns the modules that vLLM has no place for, sorted.

    ``tensors``: its matrices A [r, in] and B [out, r] under PEFT's names; vLLM changes them. ``alpha``: the products
    count ``alpha / r`` times.
    """
    manager = model.lora_manager
    rank = next(len(matrix) for name, matrix in tensors.items() if ADAPTER_SIDES[0] in name)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
        device=manager.device,
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renaming(model),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)  # merges those of layers that vLLM fuses
    manager.activate_adapter(ADAPTER_ID)
    return sorted(adapter.loras.keys() - manager.modules.keys())


def _renaming(model: Any) -> Any:
    """From Hugging Face names to vLLM's, without what tells its loader which layers are fused; None: they are equal."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
