"""A frozen base in four bits: how it is rounded, what it computes, what others are given of it, what it takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn

from rlhf.config import LearnerConfig, LoraConfig
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy, load_scalar
from rlhf.models.lora import add_adapters, without_adapters
from rlhf.models.nf4 import Nf4Linear, keep_in_4_bits
from rlhf.models.packed import PolicyModel
from rlhf.models.probe import probe_batch
from rlhf.planning.memory import learner_memory
from rlhf.planning.shapes import ModelShape
from rlhf.training.weights import bucket_layout, named_weights, walk_buckets
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]
CPU = torch.device("cpu")


def rounded(weight: torch.Tensor) -> Nf4Linear:
    """The only layer of a model, in four bits."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    keep_in_4_bits(nn.Sequential(layer), CPU)
    assert isinstance(layer, Nf4Linear)
    return layer


def policy(path: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return load_policy(str(path), dtype=dtype, temperature=1.0, chunk_tokens=64)


def qlora(path: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """A policy on a base in four bits, whose adapters have learnt something."""
    model = policy(path, dtype)
    keep_in_4_bits(model, CPU)
    add_adapters(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), key="learner.lora")
    generator = torch.Generator().manual_seed(0)
    for _, b, _ in model.adapters.values():
        b.data = 0.02 * torch.randn(b.shape, generator=generator).to(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 96), (3, 5)])
def test_weights_are_rounded_as_bitsandbytes_rounds_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[-1] = 0
    # as rows of whole blocks: on some CPUs, bitsandbytes' own kernels take no others right
    blocks = nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    rows = dequantize_4bit(*quantize_4bit(blocks, blocksize=64, quant_type="nf4"))
    expected = rows.flatten()[: weight.numel()].view(shape)
    layer = rounded(weight)
    assert torch.equal(layer.dense(), expected) and layer.dense().dtype == dtype
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == -(-weight.numel() // 64) * 36, "half a byte each, and a scale for 64"


def test_the_nearest_of_sixteen_values_times_the_largest_of_its_block() -> None:
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([-2.0, 0.7, 0.17, 0.1])  # over 2: -1, 0.35, 0.085, 0.05
    nearest = torch.tensor([-1.0, 0.33791524171829224, 0.07958029955625534, 0.07958029955625534])  # the paper, app. E
    assert torch.equal(rounded(weight).dense()[0, :4], 2 * nearest)


def test_a_layer_computes_and_differentiates_as_its_dense_weight_does() -> None:
    layer = rounded(torch.randn(32, 64, generator=torch.Generator().manual_seed(0))).eval()
    kept = layer.weight.clone()
    for requires_grad in (True, False):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)
        expected = nn.functional.linear(x, layer.dense(), layer.bias)
        assert torch.equal(layer(x), expected)
        if requires_grad:
            (found,) = torch.autograd.grad(layer(x).square().sum(), x)
            assert torch.equal(found, torch.autograd.grad(expected.square().sum(), x)[0])
    assert torch.equal(layer.weight, kept), "scoring does not repack it"


def test_compiled_layers_keep_no_dense_weight_for_their_backward() -> None:
    layers = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    keep_in_4_bits(layers, CPU)
    x = torch.randn(4, 128, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    compiled = torch.compile(layers, backend="aot_eager_decomp_partition")  # torch's choice of what to keep, uncompiled
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compiled(x)
    assert kept and max(tensor.nbytes for tensor in kept if tensor.dtype != torch.uint8) < 128 * 256 * 2
    output.sum().backward()
    found, x.grad = x.grad, None
    layers(x).sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_are_given_the_rounded_base_with_the_adapters(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    loaded, model = policy(tiny_model_dir, dtype), qlora(tiny_model_dir, dtype)
    weights = named_weights(model)
    assert list(weights) == list(named_weights(loaded)), "under the names of the model that was loaded"
    for name, parameter in loaded.lm.named_parameters():
        weight = weights[name]
        assert (weight.shape, weight.dtype) == (parameter.shape, dtype)
        if "_proj" not in name:
            assert torch.equal(weight.gather(), parameter), "neither embeddings nor norms are rounded"
            continue
        base = dequantize_4bit(*quantize_4bit(parameter.data, blocksize=64, quant_type="nf4"))
        assert not torch.equal(base, parameter)
        assert torch.equal(weight.gather(), base) == (not name.endswith(("q_proj.weight", "down_proj.weight"))), name
    published = {}
    for specs, pieces in walk_buckets(named_weights(model), bucket_layout(named_weights(model), 1 << 30)):
        published |= {spec.name: piece.clone() for spec, piece in zip(specs, pieces, strict=True)}
    for name, parameter in loaded.lm.named_parameters():
        parameter.data = published[name]
    inputs = packed_inputs(probe_batch(loaded.lm.config), CPU)
    bound = 1e-5 if dtype == torch.float32 else 0.1  # the sum is rounded to bfloat16
    torch.testing.assert_close(model(inputs)[0], loaded(inputs)[0], rtol=0, atol=bound)


def test_a_critics_head_is_not_rounded(tiny_model_dir: Path) -> None:
    critic = load_scalar(str(tiny_model_dir), dtype=torch.float32, fresh_head="zero")
    keep_in_4_bits(critic, CPU)
    add_adapters(critic, LoraConfig(), key="critic.lora")
    assert [n for n, p in critic.named_parameters() if p.requires_grad and ".lora_" not in n] == ["lm.score.weight"]


def test_the_reference_is_the_rounded_base(tiny_model_dir: Path) -> None:
    base, model = policy(tiny_model_dir), policy(tiny_model_dir)
    for each in (base, model):
        keep_in_4_bits(each, CPU)
    add_adapters(model, LoraConfig(load_in_4bit=True), key="learner.lora")
    for _, b, _ in model.adapters.values():
        b.data = torch.full_like(b, 0.01)
    inputs = packed_inputs(probe_batch(model.lm.config), CPU)
    with torch.no_grad(), without_adapters(model):
        assert torch.equal(model(inputs)[0], base(inputs)[0])
    assert not torch.equal(model(inputs)[0], base(inputs)[0])


def test_memory_of_a_base_in_four_bits_by_hand() -> None:
    shape = ModelShape(
        num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_size=16,
        vocab_size=1000, tied=True,
    )  # fmt: skip
    saved = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 128) * (2 - 0.5 - 4 / 64)  # a code, and 4 bytes for 64 of them
    largest = 64 * 128 * 2

    def memory(load_in_4bit: bool):
        lora = LoraConfig(load_in_4bit=load_in_4bit)
        settings = LearnerConfig(zero_stage=1, micro_batch_tokens=1000, logits_chunk_tokens=1, lora=lora)
        return learner_memory(settings, shape, checkpointed_layers=0, bucket_bytes=100)

    whole, less = memory(False), memory(True)
    assert whole.weights - less.weights == saved
    assert less.scoring - whole.scoring == less.training - whole.training == largest, "one layer at a time is dense"
    assert less.optimizer == whole.optimizer
    assert less.other - whole.other == largest, "and for a publish"


SCRIPT = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from benchmarks.bench_learner import ragged_batch
from rlhf.config import LearnerConfig, LoraConfig, OptimizerConfig
from rlhf.models.loading import load_policy
from rlhf.training.engine import Engine

model, out, cpu = sys.argv[1], Path(sys.argv[2]), torch.device("cpu")
RANK, RANKS = dist.get_rank(), dist.get_world_size()

def make(stage, dtype=torch.float32):
    torch.manual_seed(0)
    config = LearnerConfig(
        num_ranks=RANKS, zero_stage=stage, lora=LoraConfig(r=4, load_in_4bit=True), checkpointed_layers=1,
        float32_gradients=dtype == torch.bfloat16 and stage > 0,
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3))
    load = lambda: load_policy(model, dtype=dtype, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=dtype, device=cpu, total_steps=9)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))
    return engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].sum() / 50}))

def parameters(engine, learning):
    return {n: p.detach().clone() for n, p in engine.model.named_parameters() if p.requires_grad is learning}

def check_same(found, expected):
    assert found.keys() == expected.keys() and found
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=lambda m: f"{name}: {m}")
"""

LEARNS = """
for dtype in (torch.float32, torch.bfloat16):
    for stage in (0, 1, 2):
        engine = make(stage, dtype)
        loaded, started = parameters(engine, False), parameters(engine, True)
        assert sum(w.dtype == torch.uint8 for w in loaded.values()) == 14
        assert {w.dtype for w in started.values()} == {dtype}
        step(engine), step(engine)
        check_same(parameters(engine, False), loaded)
        assert all(not torch.equal(started[name], now) for name, now in parameters(engine, True).items())
"""

GOES_ON = """
engine = make(1)
step(engine), step(engine)
engine.save(str(out / "before"))
engine.finish_save(wait=True)
kept, metrics = parameters(engine, True), step(engine)
again = make(1)
again.load(str(out / "before"))
check_same(parameters(again, True), kept)
assert step(again) == metrics
check_same(parameters(again, True), parameters(engine, True))
"""


def test_only_adapters_change_and_the_base_keeps_every_byte(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path
) -> None:
    for num_ranks in (1, 2):
        ranks(num_ranks).run(SCRIPT + LEARNS, tiny_model_dir, tmp_path)


def test_a_run_goes_on_exactly_and_its_checkpoint_does_not_hold_the_base(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path
) -> None:
    ranks(2).run(SCRIPT + GOES_ON, tiny_model_dir, tmp_path)
    saved = torch.load(tmp_path / "before" / "engine" / "mp_rank_00_model_states.pt", weights_only=False)
    assert {name for name in saved["module"] if ".lora_" not in name} <= set(saved["buffer_names"])
