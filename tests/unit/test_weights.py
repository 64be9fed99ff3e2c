"""Buckets carry every byte of every parameter once, and their checksum notices what a transport may do to them."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.weights.load_plan import LoadPlan, UnplannableError, keeps_weights_as_loaded
from rlhf.models.loading import load_policy
from rlhf.training.weights import (
    TensorSpec,
    bucket_layout,
    bucket_size,
    checksum,
    from_plain,
    named_weights,
    pack_bucket,
    to_plain,
    view_bucket,
    walk_buckets,
)


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path):
    return load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)


@pytest.mark.parametrize("bucket_bytes", [3_000, 50_000, 1 << 30])
def test_buckets_hold_every_parameter_once(policy, bucket_bytes: int) -> None:
    expected = {name: weight.parameter for name, weight in named_weights(policy).items()}
    seen = {name: torch.full_like(parameter, torch.nan) for name, parameter in expected.items()}
    layout = bucket_layout(named_weights(policy), bucket_bytes)
    buffer = torch.empty(max(bucket_size(specs) for specs in layout), dtype=torch.uint8)
    for specs, pieces in walk_buckets(named_weights(policy), layout):
        data = pack_bucket(specs, pieces, buffer)
        assert len(data) == bucket_size(specs) <= bucket_bytes
        for spec in specs:
            rows = seen[spec.name] if spec.is_whole else seen[spec.name].narrow(0, spec.first_row, spec.shape[0])
            assert rows.isnan().all(), f"{spec.name} comes twice"
            rows.copy_(view_bucket(data, spec))
    assert all(torch.equal(seen[name], parameter) for name, parameter in expected.items())


def test_a_layout_survives_a_way_that_knows_lists_only(policy) -> None:
    layout = bucket_layout(named_weights(policy), 50_000)
    assert from_plain(json.loads(json.dumps(to_plain(layout)))) == layout


def test_a_layout_by_hand() -> None:
    """44 bytes hold 32 that are aligned: two rows of 12 bytes, or two that are aligned to 16."""
    source = source_of({"a": torch.ones(5, 3), "b": torch.ones(2, 3), "c": torch.ones((), dtype=torch.bfloat16)})
    a, b, c = ("a", "float32"), ("b", "float32"), ("c", "bfloat16")
    layout = bucket_layout(named_weights(source), 44)
    assert layout == [
        (TensorSpec(*a, shape=(2, 3), full_shape=(5, 3), first_row=0, offset=0, num_bytes=24),),
        (TensorSpec(*a, shape=(2, 3), full_shape=(5, 3), first_row=2, offset=0, num_bytes=24),),
        (
            TensorSpec(*a, shape=(1, 3), full_shape=(5, 3), first_row=4, offset=0, num_bytes=12),
            TensorSpec(*b, shape=(1, 3), full_shape=(2, 3), first_row=0, offset=16, num_bytes=12),
        ),
        (
            TensorSpec(*b, shape=(1, 3), full_shape=(2, 3), first_row=1, offset=0, num_bytes=12),
            TensorSpec(*c, shape=(), full_shape=(), first_row=0, offset=16, num_bytes=2),
        ),
    ]
    for specs, pieces in walk_buckets(named_weights(source), layout):
        data = pack_bucket(specs, pieces, torch.full((48,), 255, dtype=torch.uint8))
        held = torch.zeros(bucket_size(specs), dtype=torch.bool)
        for spec in specs:
            held[spec.offset : spec.offset + spec.num_bytes] = True
        assert not data[~held].any(), "padding is zero"


def test_a_row_larger_than_a_bucket_gets_one_of_its_own(policy) -> None:
    layout = bucket_layout(named_weights(policy), 16)
    assert {len(specs) for specs in layout} == {1}
    assert sum(spec.num_bytes for (spec,) in layout) == sum(4 * w.shape.numel() for w in named_weights(policy).values())


def test_names_are_hugging_faces_and_tied_weights_come_once(policy) -> None:
    names = [spec.name for specs in bucket_layout(named_weights(policy), 1 << 30) for spec in specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied


@pytest.mark.parametrize("size", [1, 16, 8 * 8191, 3 * 8 * 8191, 200_003])
def test_checksum_notices_changes_and_swaps(size: int) -> None:
    data = torch.randint(1, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    original = int(checksum(data))
    assert int(checksum(data.clone())) == original
    for position in (0, size // 2, size - 1):
        for bit in (1, 128):
            changed = data.clone()
            changed[position] ^= bit
            assert int(checksum(changed)) != original
    if size > 16:
        swapped = data.clone()
        swapped[:8], swapped[8:16] = data[8:16].clone(), data[:8].clone()
        assert int(checksum(swapped)) != original


def test_checksum_by_hand() -> None:
    words = torch.zeros(8191 + 2, dtype=torch.int64)
    words[0], words[1], words[8191 + 1] = 5, 7, 11
    assert int(checksum(words.view(torch.uint8))) == 5 * 1 + 7 * 3 + 11 * 3


class Fused(nn.Module):
    """As vLLM keeps a layer: queries and keys in one parameter, this process's half of the columns of the output and of
    some rows of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 6), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.up = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(16, 6), requires_grad=False)  # two rows of padding

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk[:8].data.copy_(tensor)
            elif name == "k":
                self.qk.data.narrow(0, 8, 4).copy_(tensor, non_blocking=True)
            elif name == "out":
                self.out.data.copy_(tensor.narrow(1, 4, 4))
            elif name == "up":
                self.up.data.copy_(tensor[3:7])
            elif name == "embed":
                self.embed[:14].data.copy_(tensor)
                self.embed[14:].data.fill_(0)


def source_of(weights: dict[str, Tensor]) -> Any:
    """A model of these weights alone."""
    source: Any = nn.ParameterDict(weights)
    source.adapters = {}
    return source


def checkpoint() -> Any:
    shapes = {"q": (8, 6), "k": (4, 6), "out": (6, 8), "up": (8, 6), "embed": (14, 6), "unused": (5, 6)}
    return source_of({name: torch.randn(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("bucket_bytes", [40, 100, 1 << 20])
def test_a_load_plan_copies_what_the_loader_would(bucket_bytes: int) -> None:
    source, expected, model = checkpoint(), Fused(), Fused()
    expected.load_weights(source.named_parameters())
    layout = bucket_layout(named_weights(source), bucket_bytes)
    plan = LoadPlan(model, model.load_weights, layout)
    assert not any(parameter.any() for parameter in model.parameters()), "planning must not write"
    for specs, pieces in walk_buckets(named_weights(source), layout):
        data = pack_bucket(specs, pieces, torch.empty(bucket_size(specs), dtype=torch.uint8))
        for target, rows in plan.copies(specs, data):
            target.copy_(rows)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("bucket_bytes", [40, 100, 1 << 20])
def test_no_copy_is_empty_and_all_together_are_what_the_loader_takes(bucket_bytes: int) -> None:
    model = Fused()
    layout = bucket_layout(named_weights(checkpoint()), bucket_bytes)
    plan = LoadPlan(model, model.load_weights, layout)
    buckets = [(specs, torch.zeros(bucket_size(specs), dtype=torch.uint8)) for specs in layout]
    copies = [copy for specs, data in buckets for copy in plan.copies(specs, data)]
    assert all(target.shape == rows.shape and target.numel() for target, rows in copies)
    assert sum(target.numel() for target, _ in copies) == (8 + 4) * 6 + 6 * 4 + 4 * 6 + 14 * 6


def test_planning_shows_the_loader_every_weight_as_it_is_but_without_memory() -> None:
    source = source_of({"a": torch.randn(3, 2).bfloat16(), "b": torch.randn(4)})
    shown: list[tuple[str, torch.Size, torch.dtype, bool]] = []
    model = nn.ParameterDict({name: torch.empty_like(p) for name, p in source.items()})

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            shown.append((name, tensor.shape, tensor.dtype, tensor.is_meta))
            model[name].copy_(tensor)

    LoadPlan(model, load, bucket_layout(named_weights(source), 1000))
    assert shown == [("a", (3, 2), torch.bfloat16, True), ("b", (4,), torch.float32, True)]


def test_loaders_that_do_more_than_copy_are_not_planned() -> None:
    layout = bucket_layout(named_weights(checkpoint()), 100)  # type: ignore[arg-type]
    model = Fused()

    def transforming(weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights((name, tensor * 2) for name, tensor in weights)

    def forgetful(weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights((name, tensor) for name, tensor in weights if name != "k")

    with pytest.raises(UnplannableError, match=r"aten\.mul"):
        LoadPlan(model, transforming, layout)
    with pytest.raises(UnplannableError, match="qk: the loader writes 48 elements"):
        LoadPlan(model, forgetful, layout)
    scaled = source_of({"scale": torch.ones(1)})
    with pytest.raises(UnplannableError, match="scale: the loader writes 0 elements"):
        LoadPlan(scaled, lambda weights: None, layout)

    def rounding(weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights(weights)
        model.embed.data.fill_(1)

    def repeating(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            model.load_weights([(name, tensor[:1] if name == "q" else tensor)])

    def inventing(weights: Iterable[tuple[str, Tensor]]) -> None:
        model.load_weights((name, torch.empty_like(tensor)) for name, tensor in weights)

    with pytest.raises(UnplannableError, match=r"aten\.fill_"):
        LoadPlan(model, rounding, layout)
    with pytest.raises(UnplannableError, match="transforms a weight before it copies it"):
        LoadPlan(model, repeating, layout)
    with pytest.raises(UnplannableError, match=r"aten\.empty_like|transforms a weight"):
        LoadPlan(model, inventing, layout)


def test_tensors_cut_by_rows_must_be_taken_by_rows() -> None:
    source, model = source_of({"w": torch.randn(4, 6)}), nn.Linear(4, 6, bias=False)

    def transposing(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            model.weight.data.copy_(tensor.t())

    LoadPlan(model, transposing, bucket_layout(named_weights(source), 1000))
    with pytest.raises(UnplannableError, match="w is cut by rows"):
        LoadPlan(model, transposing, bucket_layout(named_weights(source), 50))  # type: ignore[arg-type]

    def by_element(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            for i in range(4):
                for j in range(6):
                    model.weight.data[j, i].copy_(tensor[i, j])

    with pytest.raises(UnplannableError, match="w is cut by rows"):
        LoadPlan(model, by_element, bucket_layout(named_weights(source), 50))  # type: ignore[arg-type]


def test_only_plain_layers_keep_their_weights() -> None:
    def layer(method: str) -> nn.Module:
        module = nn.Linear(2, 2)
        module.quant_method = type(method, (), {})()  # type: ignore[assignment]
        return module

    class MLAAttention(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    class Attention(MLAAttention):
        def __init__(self, **impl: object) -> None:
            super().__init__()
            self.impl = SimpleNamespace(**impl)

    bare = nn.Linear(2, 2)
    bare.quant_method = None  # type: ignore[assignment]
    assert keeps_weights_as_loaded(nn.Sequential(bare, Attention(), Attention(sinks=None), bare))
    assert not keeps_weights_as_loaded(nn.Sequential(Attention(), Attention(sinks=torch.zeros(1))))
    assert not keeps_weights_as_loaded(nn.Sequential(bare, layer("UnquantizedFusedMoEMethod")))
    assert keeps_weights_as_loaded(nn.Sequential(layer("UnquantizedLinearMethod"), layer("UnquantizedEmbeddingMethod")))
    assert not keeps_weights_as_loaded(nn.Sequential(layer("UnquantizedFusedMoEMethod")))
    assert not keeps_weights_as_loaded(nn.Sequential(layer("UnquantizedLinearMethod"), MLAAttention()))
