"""A critic on the policy's frozen weights: each computes, learns and is saved as if it stood apart from the other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rlhf.config import Config, LoraConfig
from rlhf.errors import ConfigError
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy, load_scalar, lodge_scalar
from rlhf.models.lora import add_adapters, use_own_adapters, without_adapters
from rlhf.models.packed import PolicyModel, ScalarModel
from rlhf.models.probe import probe_batch
from rlhf.planning.fit import plan_memory
from rlhf.planning.memory import GIB
from rlhf.planning.topology import plan_topology
from rlhf.recipes import load_config
from rlhf.training.weights import named_weights, weights_apart
from tests.families import FAMILIES, make_model, small_config
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]
CPU = torch.device("cpu")
RECIPE = Path(__file__).resolve().parents[2] / "conf" / "ppo_lora_tiny.yaml"


def learn(matrices: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for matrix in matrices:
        matrix.data = 0.02 * torch.randn(matrix.shape, generator=generator).to(matrix.dtype)


def both(path: Path, dtype: torch.dtype = torch.float32) -> tuple[PolicyModel, ScalarModel]:
    """A policy and a critic on its layers, with adapters on some and on all of them that have learnt something."""
    policy = load_policy(str(path), dtype=dtype, temperature=1.0, chunk_tokens=64)
    linear = {n.rpartition(".")[2] for n, m in policy.backbone.named_modules() if isinstance(m, nn.Linear)}
    add_adapters(policy, LoraConfig(r=4, alpha=6, target_modules=sorted(linear)[:2]), key="learner.lora")
    critic = lodge_scalar(policy, str(path), dtype=dtype)
    add_adapters(critic, LoraConfig(r=8), key="critic.lora")
    learn([b for _, b, _ in policy.adapters.values()], 1)
    learn([*(b for _, b, _ in critic.adapters.values()), critic.lm.score.weight], 2)
    return policy, critic


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
@torch.no_grad()
def test_each_computes_what_it_would_apart(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, small_config(*FAMILIES[family]))
    policy, critic = both(tmp_path)
    alone = load_scalar(str(tmp_path), dtype=torch.float32, fresh_head="zero")
    plain = load_policy(str(tmp_path), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    base = {name: weight.gather() for name, weight in named_weights(plain).items()}
    add_adapters(alone, LoraConfig(r=8), key="critic.lora")
    for (a, b, _), (a_here, b_here, _) in zip(alone.adapters.values(), critic.adapters.values(), strict=True):
        a.data, b.data = a_here.data, b_here.data
    alone.lm.score.weight.data = critic.lm.score.weight.data
    inputs = packed_inputs(probe_batch(plain.lm.config), CPU, share_prompts=True)
    for _ in range(2):  # whoever was the last
        use_own_adapters(critic)
        assert torch.equal(critic(inputs), alone(inputs)) and critic(inputs).abs().max() > 0
        use_own_adapters(policy)
        with without_adapters(policy):
            assert torch.equal(policy(inputs)[0], plain(inputs)[0])
        merged = load_policy(str(tmp_path), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
        merged.lm.load_state_dict({n: w.gather() for n, w in named_weights(policy).items()}, strict=False)
        torch.testing.assert_close(policy(inputs)[0], merged(inputs)[0], rtol=0, atol=2e-5)
        assert not torch.equal(policy(inputs)[0], plain(inputs)[0])
    apart = weights_apart(policy)
    assert {name: weight.shape for name, weight in apart.items() if "lora" not in name} == {
        name: whole.shape for name, whole in base.items()
    }, "the policy is published without the critic"
    assert len(apart) == len(base) + 2 * len(policy.adapters)


def test_a_critic_may_have_adapters_on_fewer_layers_than_the_policy(tiny_model_dir: Path) -> None:
    policy = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    add_adapters(policy, LoraConfig(r=4), key="learner.lora")
    critic = lodge_scalar(policy, str(tiny_model_dir), dtype=torch.float32)
    add_adapters(critic, LoraConfig(r=8, target_modules=["q_proj"]), key="critic.lora")
    assert critic.adapters and all(".q_proj." in name for name in critic.adapters)
    assert len(policy.adapters) == 7 * len(critic.adapters)


def test_each_has_its_own_parameters_and_saves_only_these(tiny_model_dir: Path) -> None:
    policy, critic = both(tiny_model_dir)
    learning = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in (policy, critic)]
    assert not {id(p) for p in learning[0].values()} & {id(p) for p in learning[1].values()}
    assert len(learning[0]) == 2 * len(policy.adapters) and len(learning[1]) == 2 * len(critic.adapters) + 1
    for model, own in zip((policy, critic), learning, strict=True):
        assert nn.ModuleDict({"module": model}).state_dict().keys() == {f"module.{name}" for name in own}
        use_own_adapters(model)
        output = model(packed_inputs(probe_batch(model.lm.config), CPU))
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        assert all(parameter.grad is not None for parameter in own.values())
        model.zero_grad()
        others = [p for p in (*policy.parameters(), *critic.parameters()) if p.grad is not None]
        assert not others, "and nothing else has a gradient"


SCRIPT = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from benchmarks.bench_learner import ragged_batch
from rlhf.config import CriticConfig, LearnerConfig, LoraConfig, OptimizerConfig
from rlhf.models.loading import load_policy, load_scalar, lodge_scalar
from rlhf.models.lora import without_adapters
from rlhf.training.engine import Engine

path, out, bits = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "4"
RANK, RANKS, CPU = dist.get_rank(), dist.get_world_size(), torch.device("cpu")

def engine(kind, load, stage, dtype, **changes):
    def seeded():
        model = load()
        torch.manual_seed(7)  # adapters begin alike
        return model
    lora = LoraConfig(r=4, dropout=0.1, load_in_4bit=bits)
    config = kind(num_ranks=RANKS, zero_stage=stage, lora=lora, float32_gradients=dtype == torch.bfloat16 and stage > 0,
        checkpointed_layers=1, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3))
    return Engine(seeded, config, dtype=dtype, device=CPU, total_steps=9)

def policy(stage, dtype):
    return engine(LearnerConfig, lambda: load_policy(path, dtype=dtype, temperature=1.0, chunk_tokens=64), stage, dtype)

def critic(stage, dtype, owner=None):
    if owner is None:
        return engine(CriticConfig, lambda: load_scalar(path, dtype=dtype, fresh_head="zero"), stage, dtype)
    return engine(CriticConfig, lambda: lodge_scalar(owner.model, path, dtype=dtype), stage, dtype)

def batch():
    return ragged_batch(8, 4, 6, 12, 500).select(list(range(RANK, 8, RANKS)))

def learn(engine, sign, value=False):
    torch.manual_seed(11)  # of the dropout
    pick = (lambda output: output) if value else (lambda output: output[0])
    loss = lambda output, _: (sign * (pick(output) - 1).square().sum() / 50, {})
    found = engine.step([batch()], loss)
    return found

def scores(engine, value=False):
    return engine.forward([batch()], (lambda output: output) if value else (lambda output: output[0]))[0]

def trained(engine):
    return {n.replace(".lodger.", ".default."): p.detach().clone()
            for n, p in engine.model.named_parameters() if p.requires_grad}

def frozen(engine):
    return {n: p.detach().clone() for n, p in engine.model.named_parameters() if not p.requires_grad}

def same(found, expected):
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in expected)

def rounds(p, c, count):
    seen = []
    for _ in range(count):
        with without_adapters(p.model):
            reference = scores(p)
        seen += [reference, scores(p), scores(c, True), learn(p, 1), learn(c, 1, True), trained(p), trained(c)]
    return seen
"""

APART_AND_TOGETHER = """
for stage, dtype in ((0, torch.float32), (1, torch.float32), (2, torch.float32), (1, torch.bfloat16)):
    p = policy(stage, dtype)
    c = critic(stage, dtype, owner=p)
    before = frozen(p)
    together = rounds(p, c, 3)
    same(frozen(p), before)
    apart = rounds(policy(stage, dtype), critic(stage, dtype), 3)
    for found, expected in zip(together, apart, strict=True):
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected), stage
        elif isinstance(next(iter(found.values())), float):
            assert found == expected, (stage, dtype, found, expected)
        else:
            same(found, expected)
    assert torch.equal(together[0], together[-7]), "the reference stays where it was"
    assert not torch.equal(together[1], together[-6]) and not torch.equal(together[2], together[-5])
"""

GOES_ON = """
p = policy(1, torch.float32)
c = critic(1, torch.float32, owner=p)
rounds(p, c, 1)
for name, engine_ in (("policy", p), ("critic", c)):
    engine_.save(str(out / name))
    engine_.finish_save(wait=True)
dist.barrier()
expected = rounds(p, c, 2)
again = policy(1, torch.float32)
lodger = critic(1, torch.float32, owner=again)
again.load(str(out / "policy"))
lodger.load(str(out / "critic"))
found = rounds(again, lodger, 2)
for a, b in zip(found, expected, strict=True):
    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b if "loss" in a else same(a, b) is None
lodger.save_model(str(out / "value"))
if RANK == 0:
    saved = load_scalar(str(out / "value"), dtype=torch.float32)
    from rlhf.models.inputs import packed_inputs
    torch.testing.assert_close(saved(packed_inputs(batch(), CPU)), scores(lodger, True), rtol=0, atol=1e-5)
dist.barrier()
"""


@pytest.mark.parametrize("bits", ["16", "4"])
def test_they_learn_bit_for_bit_as_they_would_apart(
    ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path, bits: str
) -> None:
    ranks(1).run(SCRIPT + APART_AND_TOGETHER, tiny_model_dir, tmp_path, bits)


def test_both_go_on_from_their_checkpoints_on_two_ranks(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    ranks(2).run(SCRIPT + GOES_ON, tiny_model_dir, tmp_path, "16")


def config(*settings: str) -> Config:
    return load_config(RECIPE, list(settings))


def test_a_critic_with_adapters_stands_on_the_learners_weights_unless_told_otherwise() -> None:
    assert config().critic_on_base and "critic" not in plan_topology(config(), "cpu").slots
    for apart in ("critic.own_base=true", "critic.path=models/other", "critic.lora=null", "learner.lora=null"):
        assert not config(apart).critic_on_base and "critic" in plan_topology(config(apart), "cpu").slots
    two = config("learner.num_ranks=2", "learner.compile=false")
    assert (two.critic.num_ranks, two.critic.compile) == (2, False), "it is where the learner is"
    for setting, says in (
        ("critic.num_ranks=3", r"critic.num_ranks=3: .*learner.num_ranks=1; .*critic.own_base=true"),
        ("critic.lora.load_in_4bit=true", "critic.lora.load_in_4bit=true: .*critic.own_base=true"),
    ):
        with pytest.raises(ConfigError, match=says):
            config(setting)
        assert config(setting, "critic.own_base=true")


def test_the_plan_counts_the_frozen_weights_once(tiny_model_dir: Path) -> None:
    for mode in ("separate", "colocate"):
        settings = (f"model.path={tiny_model_dir}", f"placement.mode={mode}", "placement.device=gpu")
        shared, apart = (plan_memory(config(*settings, *more), 80 * GIB) for more in ((), ("critic.own_base=true",)))
        assert shared and apart
        lodger, own = shared.roles["critic"], apart.roles["critic"]
        assert shared.roles["learner"] == apart.roles["learner"]
        assert (lodger.gradients, lodger.optimizer, lodger.scoring) == (own.gradients, own.optimizer, own.scoring)
        assert lodger.other == 0 and lodger.weights < own.weights / 3
        learner, peaks = shared.roles["learner"], shared.process_peaks()
        assert "critic" not in peaks
        idle = learner.idle + lodger.idle
        assert peaks["learner"] == idle + max(learner.peak - learner.idle, lodger.peak - lodger.idle)
        assert shared.checkpointing["critic"].layers == shared.checkpointing["learner"].layers
        if mode == "separate":
            assert shared.gpus["learner"]["train"] == peaks["learner"] and "critic" not in shared.gpus
        else:
            saved = apart.gpus["shared"]["generate"] - shared.gpus["shared"]["generate"]
            assert saved == pytest.approx(own.idle - lodger.idle)
