"""Adapters on frozen weights: what they add, what is published of them, what learns, what is saved, what it takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf.config import LearnerConfig, LoraConfig
from rlhf.errors import ConfigError
from rlhf.ignored import ignored_settings
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy, load_scalar
from rlhf.models.lora import add_adapters, without_adapters
from rlhf.models.packed import PolicyModel
from rlhf.models.probe import probe_batch
from rlhf.planning.fit import open_stages, safe_stage
from rlhf.planning.topology import plan_topology
from rlhf.recipes import load_config
from rlhf.training.weights import first_adapter_bucket, named_weights, publish_layout, weights_apart
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]
CPU = torch.device("cpu")
ALPHA, R = 6, 4


def policy(path: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return load_policy(str(path), dtype=dtype, temperature=1.0, chunk_tokens=64)


def adapted(path: Path, *targets: str, dtype: torch.dtype = torch.float32, learnt: bool = True) -> PolicyModel:
    """A policy with adapters, which have learnt something, unless told otherwise."""
    model = policy(path, dtype)
    add_adapters(model, LoraConfig(r=R, alpha=ALPHA, target_modules=list(targets)), key="learner.lora")
    generator = torch.Generator().manual_seed(0)
    for _, b, _ in model.adapters.values() if learnt else ():
        b.data = 0.02 * torch.randn(b.shape, generator=generator).to(dtype)
    return model


def test_adapters_add_nothing_at_first_and_only_they_learn(tiny_model_dir: Path) -> None:
    plain, model = policy(tiny_model_dir), adapted(tiny_model_dir, "all-linear", learnt=False)
    inputs = packed_inputs(probe_batch(plain.lm.config), CPU)
    logprobs, _ = model(inputs)
    assert torch.equal(logprobs, plain(inputs)[0])
    logprobs.sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    targets = 7 * len(plain.layers)  # q, k, v, o, gate, up, down
    assert len(learning) == 2 * targets and all(".lora_" in name for name in learning), "never the LM head"
    saved = nn.ModuleDict({"module": model}).state_dict()
    assert saved.keys() == {f"module.{name}" for name in learning}, "frozen weights are not saved, under any name"


def test_the_inputs_of_adapters_have_the_configured_dropout(tiny_model_dir: Path) -> None:
    model = policy(tiny_model_dir)
    add_adapters(model, LoraConfig(dropout=0.25), key="learner.lora")
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_are_given_the_sum_of_weight_and_adapter_rounded_once(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    plain, model = (
        named_weights(policy(tiny_model_dir, dtype)),
        adapted(tiny_model_dir, "q_proj", "down_proj", dtype=dtype),
    )
    merged = named_weights(model)
    assert list(merged) == list(plain), "under the names of the model that was loaded"
    for name, weight in merged.items():
        base = plain[name].gather()
        assert (weight.shape, weight.dtype) == (base.shape, dtype)
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(weight.gather(), base), name
            continue
        a, b, _ = model.adapters[f"lm.{name.removesuffix('.weight')}.base_layer.weight"]
        product = b.double() @ a.double()
        expected = (base.double() + ALPHA / R * product).to(torch.float32)
        assert not torch.equal(weight.gather(), base)
        torch.testing.assert_close(weight.gather().float(), expected.to(dtype).float(), rtol=2**-8, atol=1e-6)


def test_what_is_published_scores_as_the_learner_does(tiny_model_dir: Path) -> None:
    plain, model = policy(tiny_model_dir), adapted(tiny_model_dir, "all-linear")
    merged = named_weights(model)
    for name, parameter in plain.lm.named_parameters():
        parameter.data = merged[name].gather()
    batch = probe_batch(plain.lm.config)
    for share_prompts in (False, True):
        inputs = packed_inputs(batch, CPU, share_prompts=share_prompts)
        torch.testing.assert_close(model(inputs)[0], plain(inputs)[0], rtol=0, atol=1e-5)


def test_apart_the_weights_are_the_base_and_adapters_follow_in_buckets_of_their_own(tiny_model_dir: Path) -> None:
    plain, model = named_weights(policy(tiny_model_dir)), adapted(tiny_model_dir, "q_proj", "down_proj")
    apart = weights_apart(model)
    assert list(apart)[: len(plain)] == list(plain)
    for name, weight in plain.items():
        assert torch.equal(apart[name].gather(), weight.gather()), "bit for bit as it was loaded"
    expected = {}
    for name, (a, b, _) in model.adapters.items():
        layer = name.removeprefix("lm.").removesuffix("base_layer.weight")
        expected |= {f"{layer}lora_A.weight": a, f"{layer}lora_B.weight": b}
    assert list(apart)[len(plain) :] == list(expected)
    assert all(torch.equal(apart[name].gather(), matrix) for name, matrix in expected.items())
    layout = publish_layout(apart, 20_000)
    first = first_adapter_bucket(layout)
    assert 0 < first < len(layout)
    frozen, learning = ({s.name for specs in part for s in specs} for part in (layout[:first], layout[first:]))
    assert frozen == set(plain) and learning == set(expected)
    assert first_adapter_bucket(publish_layout(named_weights(model), 20_000)) == 0, "merged, all may change"


@pytest.mark.parametrize("layers", [0, 2])
def test_without_its_adapters_a_policy_is_the_base_bit_for_bit_and_has_them_again_after(
    tiny_model_dir: Path, layers: int
) -> None:
    plain, model = policy(tiny_model_dir), adapted(tiny_model_dir, "all-linear")
    model.checkpoint_layers(layers)
    inputs = packed_inputs(probe_batch(plain.lm.config), CPU, share_prompts=True)
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        before = model(inputs)[0]
        with pytest.raises(KeyError), without_adapters(model):
            assert torch.equal(model(inputs)[0], plain(inputs)[0]) and not torch.equal(before, plain(inputs)[0])
            raise KeyError  # whatever goes wrong meanwhile
        assert torch.equal(model(inputs)[0], before)
    assert learning == [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_policy_with_adapters_is_its_own_reference_unless_another_is_named() -> None:
    recipe = Path(__file__).resolve().parents[2] / "conf" / "grpo_lora_tiny.yaml"
    own = load_config(recipe, ["algorithm.beta=0.1"])
    assert own.base_is_reference and not own.uses_reference
    assert "reference" not in plan_topology(own, "cpu").slots
    other = load_config(recipe, ["algorithm.beta=0.1", "reference.path=models/other"])
    assert other.uses_reference and not other.base_is_reference
    assert "reference" in plan_topology(other, "cpu").slots
    without = load_config(recipe, ["algorithm.beta=0"])
    assert not (without.uses_reference or without.base_is_reference)
    (line,) = [line for line in ignored_settings(load_config(recipe, ["reference.num_ranks=3"])) if "reference" in line]
    assert line.startswith("learner.lora.r=16 ignores") and "reference.num_ranks=3" in line


def test_a_critics_head_is_trained_whole(tiny_model_dir: Path) -> None:
    critic = load_scalar(str(tiny_model_dir), dtype=torch.float32, fresh_head="zero")
    add_adapters(critic, LoraConfig(), key="critic.lora")
    whole = [n for n, p in critic.named_parameters() if p.requires_grad and ".lora_" not in n]
    assert whole == ["lm.score.weight"]
    assert "score.weight" in named_weights(critic)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["nowhere"], r"learner.lora.target_modules=\['nowhere'\]: .*not found"),
        (["embed_tokens"], "learner.lora.target_modules: .*embed_tokens is a Embedding, not linear"),
    ],
)
def test_targets_that_do_not_fit_are_named(tiny_model_dir: Path, targets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        add_adapters(policy(tiny_model_dir), LoraConfig(target_modules=targets), key="learner.lora")


def test_frozen_weights_are_whole_on_every_rank() -> None:
    for given, says in [
        ({"zero_stage": 3}, "learner.zero_stage=3"),
        ({"lora": LoraConfig(target_modules=[])}, "empty"),
    ]:
        with pytest.raises(ConfigError, match=says):
            LearnerConfig(**{"lora": LoraConfig(), **given})
    settings = LearnerConfig(num_ranks=4, lora=LoraConfig())
    assert (open_stages(settings), safe_stage(settings)) == ((1,), 1)
    assert (open_stages(LearnerConfig(num_ranks=4)), safe_stage(LearnerConfig(num_ranks=1))) == ((1, 2, 3), 3)


SCRIPT = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from benchmarks.bench_learner import ragged_batch
from rlhf.config import LearnerConfig, LoraConfig, OptimizerConfig
from rlhf.models.loading import load_policy
from rlhf.training.engine import Engine
from tests.gathered import gathered_state_dict

model, out, cpu = sys.argv[1], Path(sys.argv[2]), torch.device("cpu")
RANK, RANKS = dist.get_rank(), dist.get_world_size()

def make(stage, dtype=torch.float32):
    torch.manual_seed(0)
    config = LearnerConfig(
        num_ranks=RANKS, zero_stage=stage, lora=LoraConfig(r=4), float32_gradients=dtype == torch.bfloat16,
        checkpointed_layers=1, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3))
    load = lambda: load_policy(model, dtype=dtype, temperature=1.0, chunk_tokens=64)
    return Engine(load, config, dtype=dtype, device=cpu, total_steps=9)

def step(engine):
    batch = ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))
    return engine.step([batch], lambda output, _: (-output[0].sum() / 50, {"entropy": output[1].sum() / 50}))

def adapters(engine):
    return {n: p.detach().clone() for n, p in engine.model.named_parameters() if p.requires_grad}

def frozen(engine):
    return {n: p.detach().clone() for n, p in engine.model.named_parameters() if not p.requires_grad}

def check_same(found, expected, **close):
    assert found.keys() == expected.keys() and found
    for name in expected:
        close = close or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[name], expected[name], msg=lambda m: f"{name}: {m}", **close)
"""

LEARNS = """
for stage in (0, 1, 2):
    engine = make(stage)
    loaded, started = frozen(engine), adapters(engine)
    metrics = [step(engine), step(engine)]
    check_same(frozen(engine), loaded)
    assert all(not torch.equal(started[name], now) for name, now in adapters(engine).items())
    file = out / f"after-{stage}-{RANKS}.pt"
    if RANK == 0:
        torch.save((adapters(engine), metrics), file)
    dist.barrier()
    expected, same = torch.load(out / "after-0-1.pt")
    check_same(adapters(engine), expected, rtol=1e-4, atol=1e-6)
    for found, other in zip(metrics, same, strict=True):
        for name, value in found.items():
            assert abs(value - other[name]) < 1e-4 * max(1, abs(value)), (stage, name, value, other[name])
"""

SAVES = """
engine = make(int(sys.argv[3]))
step(engine), step(engine)
engine.save(str(out / "before"))
engine.finish_save(wait=True)
kept = adapters(engine)
metrics = step(engine)
if RANK == 0:
    torch.save((kept, metrics, adapters(engine)), out / "expected.pt")
dist.barrier()
again = make(int(sys.argv[3]))
again.load(str(out / "before"))
check_same(adapters(again), kept)
assert step(again) == metrics
check_same(adapters(again), adapters(engine))
"""

GOES_ON_ELSEWHERE = """
kept, metrics, after = torch.load(out / "expected.pt")
for stage in (0, 1, 2):
    engine = make(stage)
    engine.load(str(out / "before"))
    check_same(adapters(engine), kept)
    for name, value in step(engine).items():
        assert abs(value - metrics[name]) < 1e-4 * max(1, abs(value)), (name, value, metrics)
    check_same(adapters(engine), after, rtol=1e-4, atol=1e-5)
"""

EXPORTS = """
from transformers import AutoModelForCausalLM
engine = make(1)
step(engine)
engine.save_model(str(out / "exported"))
state = gathered_state_dict(engine.model)
if RANK == 0:
    loaded = dict(AutoModelForCausalLM.from_pretrained(out / "exported").named_parameters())
    check_same({name: loaded[name].data for name in state}, state)
"""


def test_only_adapters_change_and_alike_at_every_stage_and_on_any_ranks(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path
) -> None:
    for num_ranks in (1, 2):
        ranks(num_ranks).run(SCRIPT + LEARNS, tiny_model_dir, tmp_path)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_run_goes_on_from_its_adapters_on_the_same_ranks_and_on_others(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, stage: str
) -> None:
    ranks(2).run(SCRIPT + SAVES, tiny_model_dir, tmp_path, stage)
    saved = torch.load(tmp_path / "before" / "engine" / "mp_rank_00_model_states.pt", weights_only=False)
    assert {name for name in saved["module"] if ".lora_" not in name} <= set(saved["buffer_names"]), "no frozen weights"
    assert not saved["frozen_param_fragments"], "nor in DeepSpeed's own place for them"
    assert saved["module"], "but the adapters"
    for num_ranks in (1, 2):
        ranks(num_ranks).run(SCRIPT + GOES_ON_ELSEWHERE, tiny_model_dir, tmp_path)


def test_the_exported_model_is_the_sum(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    ranks(2).run(SCRIPT + EXPORTS, tiny_model_dir, tmp_path)
