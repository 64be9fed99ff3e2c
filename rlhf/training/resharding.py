"""Loads a checkpoint into another number of ranks, or another ZeRO stage, than the one that wrote it.

A parameter's float32 weights and moments lie in pieces: in the files of a checkpoint, and on the ranks that load it.
Both sides are described by parameter name and position within the parameter, so any layout can be read into any other.
Files are mapped: a rank reads the parts that it needs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.errors import CheckpointError

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Layout(NamedTuple):
    """How a model and its optimiser state lie on ranks; DeepSpeed's own loading needs the same."""

    stage: int
    num_parts: int  # as many as ranks; 1 at stage 0, where every rank has everything
    padded: bool  # as DeepSpeed's BF16_Optimizer does, which it uses at stage 1 where gradients are summed in float32
    on_cpu: bool  # the CPU computes the optimizer's steps

    @staticmethod
    def of(stage: int, num_ranks: int, *, padded: bool, on_cpu: bool) -> "Layout":
        return Layout(stage, num_ranks if stage else 1, padded, on_cpu)


@dataclass(frozen=True)
class Piece:
    """The elements of a parameter from ``start`` on, ``size`` of them, at ``offset`` in flat tensors."""

    start: int
    size: int
    offset: int
    flat: dict[str, Tensor]  # by WEIGHTS and MOMENTS


class SavedState:
    """What a DeepSpeed checkpoint holds."""

    def __init__(self, directory: Path) -> None:
        """Raises FileNotFoundError if files are missing."""
        first = min(directory.glob("*model_states.pt"), default=directory / "mp_rank_00_model_states.pt", key=_rank)
        self.common: dict[str, Any] = _read(first)
        """Of the first rank: what all ranks have in common, and its own random state."""
        zero, num_ranks = self.common["ds_config"]["zero_optimization"], self.common["dp_world_size"]
        stage = zero["stage"]
        self._paths = sorted(directory.glob("*optim_states.pt"), key=_rank) if stage else []
        if stage and [_rank(path) for path in self._paths] != list(range(num_ranks)):
            raise FileNotFoundError(f"{len(self._paths)} files of optimizer state where {num_ranks} ranks wrote")
        padded = stage > 0 and "zero_stage" not in _read(self._paths[0])["optimizer_state_dict"]
        self.layout = Layout.of(stage, num_ranks, padded=padded, on_cpu="offload_optimizer" in zero)

    @cached_property
    def _ranks(self) -> list[dict[str, Any]]:
        """Each rank's optimiser state; none at stage 0."""
        return [_read(path)["optimizer_state_dict"] for path in self._paths]

    @property
    def _groups(self) -> dict[int, dict[str, Any]]:
        """Moments and step of the first rank's parameters or flat groups, by number; empty before the first step."""
        return self._inner(self._ranks[0]) if self._ranks else self.common["optimizer"]["state"]

    def _inner(self, rank: dict[str, Any]) -> dict[int, dict[str, Any]]:
        return rank["optimizer_state_dict" if self.layout.stage == 3 else "base_optimizer_state"]["state"]

    @property
    def step(self) -> Any:
        """How many steps the optimiser has made, in its own type; None before the first."""
        return next((state["step"] for state in self._groups.values()), None)

    def sizes(self) -> dict[str, int]:
        """How many elements every trained parameter has."""
        return {name: sum(piece.size for piece in pieces) for name, pieces in self._pieces.items()}

    def read_weights(self, name: str, size: int) -> Tensor:
        """[size]: a whole parameter, in float32 unless the model has no such weights."""
        return self.read(name, WEIGHTS, 0, size)

    def read(self, name: str, key: str, start: int, size: int) -> Tensor:
        """[size] of a parameter's weights or moments."""
        parts, at = [], start
        for piece in self._pieces[name]:
            skip, rest = at - piece.start, start + size - at
            if rest > 0 and 0 <= skip < piece.size:
                parts.append(piece.flat[key].narrow(0, piece.offset + skip, min(rest, piece.size - skip)))
                at += len(parts[-1])
        assert at == start + size, f"{name}: the checkpoint lacks elements {at} to {start + size}"
        return torch.cat(parts)

    @cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        """By parameter, in the order of their elements."""
        pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for name, piece in self._sharded() if self._ranks else self._whole():
            pieces[name].append(piece)
        return pieces

    def _whole(self) -> Iterator[tuple[str, Piece]]:
        """Stage 0: every parameter is one piece, and the optimiser numbers them in the model's order.

        A bfloat16 model's moments are not read: its optimiser keeps them in a form of its own.
        """
        state, tied, number = self.common["optimizer"].get("state"), set(), 0
        for name, weights in self.common["module"].items():
            if name in self.common["buffer_names"] or weights.data_ptr() in tied:
                continue
            tied.add(weights.data_ptr())
            moments = {key: state[number][key] for key in MOMENTS if state}
            assert all(moment.shape == weights.shape for moment in moments.values()), name
            flat = {key: tensor.flatten() for key, tensor in {WEIGHTS: weights, **moments}.items()}
            yield name, Piece(0, weights.numel(), 0, flat)
            number += 1

    def _sharded(self) -> Iterator[tuple[str, Piece]]:
        ends: defaultdict[str, int] = defaultdict(int)
        for number, rank in enumerate(self._ranks):
            weights = rank["fp32_flat_groups" if self.layout.stage == 3 else "single_partition_of_fp32_groups"]
            states = self._inner(rank)
            flats = [
                {WEIGHTS: group} | {key: states[i][key] for key in MOMENTS if i in states}
                for i, group in enumerate(weights)
            ]
            if self.layout.stage == 3:
                yield from self._of_stage_3(number, flats)
                continue
            for flat, mapping in zip(flats, rank["param_slice_mappings"], strict=True):
                for name, address in mapping.items():
                    yield name, Piece(ends[name], address.numel, address.start, flat)
                    ends[name] += address.numel

    def _of_stage_3(self, rank: int, flats: Sequence[dict[str, Tensor]]) -> Iterator[tuple[str, Piece]]:
        """Each parameter is cut into equal shares, the last one padded; shares fill one flat group after another."""
        group, offset = 0, 0
        for shapes in self.common["param_shapes"]:
            for name, shape in shapes.items():
                share = math.ceil(shape.numel() / self.layout.num_parts)
                if offset == len(flats[group][WEIGHTS]):
                    group, offset = group + 1, 0
                start = min(rank * share, shape.numel())
                yield name, Piece(start, min(share, shape.numel() - start), offset, flats[group])
                offset += share


def _rank(path: Path) -> int:
    """The rank in a file's name; 0 if one file is for all."""
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


class LiveState:
    """What this rank holds of an engine's float32 weights and moments, to be overwritten."""

    def __init__(self, engine: Any, inner: torch.optim.Optimizer, layout: Layout) -> None:
        """``inner``: the optimiser that DeepSpeed wraps."""
        self._engine, self._inner, self._layout = engine, inner, layout
        self._wrapper: Any = engine.optimizer
        self._names: dict[nn.Parameter, str] = {
            p: name for name, p in engine.module.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
        """Takes over everything that ``saved`` holds. Raises CheckpointError where that is not possible."""
        bfloat16 = self._engine.bfloat16_enabled() or saved.common["ds_config"]["bf16"]["enabled"]
        if bfloat16 and 0 in (self._layout.stage, saved.layout.stage):
            raise CheckpointError(
                f"the checkpoint was written at zero_stage={saved.layout.stage} and cannot be loaded at "
                f"{self._layout.stage}: stage 0 keeps the state of a bfloat16 model in a form of its own; resume with "
                f"learner.zero_stage={saved.layout.stage}"
            )
        keys = [WEIGHTS] if saved.step is None else [WEIGHTS, *MOMENTS]
        flats: dict[int, dict[str, Tensor]] = {}
        for master, *_ in self._shares():
            if id(master) not in flats:
                flats[id(master)] = {WEIGHTS: master.view(-1), **self._moments(master, saved.step)}
        for master, parameter, start, size, offset in self._shares():
            for key in keys:
                part = saved.read(self._names[parameter], key, start, size)
                flats[id(master)][key].narrow(0, offset, size).copy_(part)
        self._update_model(saved)
        for name in saved.common["buffer_names"]:
            self._engine.module.get_buffer(name).copy_(saved.common["module"][name])
        self._engine.lr_scheduler.load_state_dict(saved.common["lr_scheduler"])
        for count in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self._engine, count, saved.common[count])

    def _shares(self) -> Iterator[tuple[Tensor, nn.Parameter, int, int, int]]:
        """(flat tensor, parameter, where its share begins in the parameter, size, where that lies in the tensor)."""
        if self._layout.stage == 3:
            rank = dist.get_rank()
            for master, group in zip(
                self._wrapper.fp32_partitioned_groups_flat, self._wrapper.fp16_groups, strict=True
            ):
                offset = 0
                for parameter in group:
                    share = math.ceil(parameter.ds_numel / self._layout.num_parts)
                    start = min(rank * share, parameter.ds_numel)
                    yield master, parameter, start, min(share, parameter.ds_numel - start), offset
                    offset += share
            return
        if self._layout.stage == 0:
            for parameter in self._names:
                yield parameter, parameter, 0, parameter.numel(), 0
            return
        masters = self._inner.param_groups
        for parameter in self._names:
            fragment: Any = getattr(parameter, "_hp_mapping", None)
            if fragment is not None:
                (master,) = masters[fragment.param_group_index]["params"]
                here, there = fragment.lp_fragment_address, fragment.hp_fragment_address
                yield master, parameter, here.start, here.numel, there.start

    def _moments(self, master: Tensor, step: Any) -> dict[str, Tensor]:
        """Zeros, in the optimiser's own state; nothing is there before its first step."""
        if step is None:
            return {}
        state = self._inner.state[master]
        # torch's optimiser counts in a tensor, DeepSpeed's for the CPU in a number
        state["step"] = int(step) if self._layout.on_cpu else torch.tensor(float(step), device=master.device)
        for key in MOMENTS:
            state[key] = torch.zeros_like(master)
        return {key: state[key].view(-1) for key in MOMENTS}

    def _update_model(self, saved: SavedState) -> None:
        """Brings the weights that the model computes with in line with the float32 ones."""
        if self._layout.stage == 3:
            wrapper = self._wrapper
            as_it_is = {key: getattr(wrapper, key) for key in ("loss_scaler", "dynamic_loss_scale", "overflow")}
            flat = {"fp32_flat_groups": wrapper.fp32_partitioned_groups_flat}
            wrapper._rigid_load_state_dict(as_it_is | flat, load_optimizer_states=False)
            return
        for parameter, name in self._names.items():
            parameter.copy_(saved.read(name, WEIGHTS, 0, parameter.numel()).view_as(parameter))
