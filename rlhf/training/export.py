"""The trained model as a Hugging Face directory, gathered and written one shard at a time."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlhf.checkpoint import put_in_place, sync_file
from rlhf.models.packed import PackedModel
from rlhf.training.weights import named_weights

MAX_SHARD_BYTES = 5 * 10**9  # of one file, unless a single parameter is larger
WEIGHTS = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"


class Gathered(Protocol):
    """A weight that is there in full when it is asked for; all ranks ask at the same time."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def gather(self) -> Tensor: ...


def export(
    model: PackedModel,
    directory: str | Path,
    weights: Mapping[str, Gathered] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes what ``from_pretrained`` loads: ``weights``, or the model's own. Collective if there are ranks, and the
    directory's parent is shared by all.

    Shards are dealt out to the ranks, each of which holds one at a time. What was in ``directory`` is replaced when
    everything is written.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    final = Path(directory)
    partial, removed = (final.with_name(f".{state}-{final.name}") for state in ("partial", "removed"))
    weights = weights or named_weights(model)
    shapes = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in weights.items()}
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=WEIGHTS, max_shard_size=max_shard_bytes)
    shards = list(split.filename_to_tensors.items())
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        with model.original_config():
            model.lm.save_pretrained(partial, state_dict={})  # all but the weights
    _meet()
    for first in range(0, len(shards), num_ranks):
        held: dict[str, Tensor] = {}
        for owner, (_, names) in enumerate(shards[first : first + num_ranks]):
            for name in names:
                whole = weights[name].gather()
                if owner == rank:
                    held[name] = whole.to("cpu", copy=True)
        if held:
            _write_shard(model, partial / shards[first + rank][0], held)
    _meet()
    if rank == 0:
        if split.is_sharded:
            _write_index(partial, [file for file, _ in shards], split.metadata)
        for file in partial.iterdir():  # the other ranks' too: it costs nothing if they have done so
            sync_file(file)
        put_in_place(partial, final, removed)
        shutil.rmtree(removed)
    _meet()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _write_shard(model: PackedModel, path: Path, held: dict[str, Tensor]) -> None:
    """The tensors, with the names and the layout that transformers gives them in files."""
    save_file(revert_weight_conversion(model.lm, held), path, metadata={"format": "pt"})
    sync_file(path)  # on the node that wrote it


def _write_index(directory: Path, files: list[str], metadata: dict[str, int]) -> None:
    """Which file holds which tensor, by the names in the files."""
    weight_map = {}
    for file in files:
        with safe_open(directory / file, framework="pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), file)
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")
