"""The policy, or reward model, of a checkpoint as files that others load: in one process, on the CPU.

Weights are read from what the ranks wrote, whatever their number and ZeRO stage, and rounded once, to the dtype that
the learner computes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf.config import ALL_LINEAR, LoraConfig, ModelConfig
from rlhf.models.loading import load_policy, load_scalar
from rlhf.models.lora import add_adapters, peft_config
from rlhf.models.nf4 import keep_in_4_bits
from rlhf.models.packed import OWN_ADAPTER, PackedModel
from rlhf.training.export import export
from rlhf.training.resharding import SavedState
from rlhf.training.weights import MODEL_PREFIX

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's name
PEFT_PREFIX = "base_model.model."  # of every name in it


@dataclass(frozen=True)
class Trained:
    """What a checkpoint says of the model in it."""

    base: ModelConfig  # where it started from
    lora: LoraConfig | None
    scalar: bool  # a reward model
    saved: SavedState

    @staticmethod
    def of(checkpoint: Path, config: Mapping[str, Any]) -> "Trained":
        """``config``: its run's, as the checkpoint holds it."""
        lora = config["learner"]["lora"]
        return Trained(
            base=ModelConfig(**config["model"]),
            lora=LoraConfig(**lora) if lora else None,
            scalar="algorithm" not in config,
            saved=SavedState(checkpoint / "learner" / "engine"),
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.saved.common["ds_config"]["bf16"]["enabled"] else torch.float32

    def write_adapter(self, directory: Path) -> None:
        """Writes what ``PeftModel.from_pretrained`` loads onto the base."""
        assert self.lora is not None
        tensors, targets, whole = {}, set(), set()
        for name, num_elements in self.saved.sizes().items():
            module, _, matrix = name.removeprefix(MODEL_PREFIX).removesuffix(".weight").partition(".lora_")
            shape = {f"A.{OWN_ADAPTER}": (self.lora.r, -1), f"B.{OWN_ADAPTER}": (-1, self.lora.r), "": (1, -1)}[matrix]
            (targets if matrix else whole).add(module.rpartition(".")[2])
            tensor = self.saved.read_weights(name, num_elements).view(shape).to(self.dtype)
            tensors[PEFT_PREFIX + name.removeprefix(MODEL_PREFIX).replace(f".{OWN_ADAPTER}.", ".")] = tensor
        directory.mkdir()
        save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        named = sorted(targets) if ALL_LINEAR in self.lora.target_modules else self.lora.target_modules
        peft_config(
            self.lora,
            target_modules=named,
            modules_to_save=sorted(whole) or None,
            task_type="SEQ_CLS" if self.scalar else "CAUSAL_LM",
            base_model_name_or_path=self.base.path,
            inference_mode=True,
        ).save_pretrained(str(directory))

    def write_model(self, directory: Path) -> None:
        """Writes what transformers' ``from_pretrained`` loads, adapters added to the base.

        Holds one shard at a time; with adapters, also the base.
        """
        model = self._load(empty=self.lora is None)
        if self.lora is None:
            weights = {
                name.removeprefix(MODEL_PREFIX): SavedWeight(self.saved, name, weight.shape, weight.dtype)
                for name, weight in model.named_parameters()
            }
            export(model, directory, weights)
            return
        if self.lora.load_in_4bit:
            keep_in_4_bits(model, torch.device("cpu"))
        add_adapters(model, self.lora, key="learner.lora")
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.data.copy_(self.saved.read_weights(name, weight.numel()).view_as(weight))
        export(model, directory)

    def _load(self, *, empty: bool) -> PackedModel:
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "trust_remote_code": self.base.trust_remote_code,
            "empty": empty,
        }
        if self.scalar:
            return load_scalar(self.base.path, fresh_head="zero", **settings)
        return load_policy(self.base.path, temperature=1.0, chunk_tokens=1, **settings)


@dataclass(frozen=True)
class SavedWeight:
    """A parameter in a checkpoint."""

    saved: SavedState
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def gather(self) -> Tensor:
        """All of it."""
        return self.saved.read_weights(self.name, self.shape.numel()).view(self.shape).to(self.dtype)
