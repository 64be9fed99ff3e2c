"""What is not finite changes nothing, and gradients add up in float32: real DeepSpeed on one rank and on two."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf.config import LearnerConfig, Offload
from rlhf.errors import ConfigError
from rlhf.training.setup import deepspeed_config
from tests.ranks import Ranks

WarmRanks = Callable[[int], Ranks]

# Run by every rank; argv is the model. Stage 3 comes last: its context outlives its engines.
PRELUDE = """
import math, sys, torch
import torch.distributed as dist
from rlhf.config import LearnerConfig, OptimizerConfig
from rlhf.training.engine import Engine
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy
from tests.gathered import gathered_state_dict
from benchmarks.bench_learner import ragged_batch

cpu = torch.device("cpu")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
BF16, F32 = torch.bfloat16, torch.float32

def load(dtype):
    return load_policy(sys.argv[1], dtype=dtype, temperature=1.0, chunk_tokens=64)

def make(stage, dtype, float32, **optimizer):
    config = LearnerConfig(
        num_ranks=RANKS, zero_stage=stage, float32_gradients=float32, optimizer=OptimizerConfig(**optimizer)
    )
    return Engine(lambda: load(dtype), config, dtype=dtype, device=cpu, total_steps=9)

def batches(seed, count, size=8):
    whole = ragged_batch(size * RANKS * count, 4, 6, 12, 500)
    order = torch.randperm(whole.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    return [whole.select(order[i::RANKS * count]) for i in range(RANK, RANKS * count, RANKS)]
"""

ADAMW = (
    PRELUDE
    + """
RATE, STEPS, CLIP = 1e-2, 2, 0.1
ADAM = {"betas": (0.5, 0.8), "eps": 1e-2, "weight_decay": 0.1}  # such an eps: the size of a gradient matters

def loss(output, batch):
    return -(output[0] * batch.advantages).sum() / 50, {"tokens": batch.advantages.new_tensor(len(batch.advantages))}

def dealt(seed):
    whole = ragged_batch(16 * RANKS, 4, 6, 12, 500)
    order = torch.randperm(whole.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [whole.select(order[i::2 * RANKS]) for i in range(2 * RANKS)]
    return [*parts[:-1], None]  # every rank gets two, in turns: the last rank has nothing in the second round

expected, plain = [], load(F32)
optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
for step in range(STEPS):
    batches = [batch for batch in dealt(step) if batch is not None]
    optimizer.zero_grad()
    total = sum(loss(plain(packed_inputs(batch, cpu, share_prompts=False)), batch)[0] for batch in batches)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    assert norm > 2 * CLIP
    rate = RATE * (1 - step / STEPS)  # the linear schedule
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    tokens = sum(len(batch.advantages) for batch in batches)
    metrics = {"loss": total.item(), "tokens": tokens, "grad_norm": norm.item(), "learning_rate": rate, "skipped": 0.0}
    expected.append((metrics, {n: p.detach().clone() for n, p in plain.lm.named_parameters()}))

for stage in range(4):
    config = LearnerConfig(
        num_ranks=RANKS,
        zero_stage=stage,
        optimizer=OptimizerConfig(learning_rate=RATE, schedule="linear", max_grad_norm=CLIP, **ADAM),
    )
    engine = Engine(lambda: load(F32), config, dtype=F32, device=cpu, total_steps=STEPS)
    for step, (metrics, weights) in enumerate(expected):
        found = engine.step(dealt(step)[RANK::RANKS], loss)
        assert found.keys() == metrics.keys(), found
        for name, value in metrics.items():
            assert math.isclose(found[name], value, rel_tol=1e-4), (stage, step, name, found[name], value)
        engine.release_gathered()
        state = gathered_state_dict(engine.model)
        for name, tensor in weights.items() if RANK == 0 else ():
            torch.testing.assert_close(
                state[name], tensor, rtol=0, atol=1e-6, msg=lambda m: f"stage {stage}, step {step}, {name}: {m}"
            )
"""
)

SKIPS = (
    PRELUDE
    + """
def good(output, batch):
    return -(output[0] * batch.advantages).sum() / 50, {"entropy": output[1].mean()}

def loss_is_nan(output, batch):
    loss, stats = good(output, batch)
    return loss * math.nan, stats

def loss_is_inf_without_a_gradient(output, batch):
    return output[0].sum() * 0 + output[0].detach().new_tensor(math.inf), {}

def only_gradient_is_inf(output, batch):
    loss, stats = good(output, batch)
    return loss + (output[0].sum() - output[0].sum().detach()).sqrt(), stats

def state(engine):
    engine.release_gathered()
    optimizer = [v for s in engine._optimizer.state.values() for _, v in sorted(s.items())]
    return [*(gathered_state_dict(engine.model) or {}).values(), *optimizer, torch.tensor(engine.engine.get_lr())]

def same(one, other):
    one, other = state(one), state(other)
    assert len(one) == len(other)
    return all(torch.equal(a, b) for a, b in zip(one, other))

def run(stage, dtype, float32):
    settings = {"learning_rate": 1e-2, "schedule": "linear", "max_grad_norm": 0.1, "weight_decay": 0.1}
    never, saw = (make(stage, dtype, float32, **settings) for _ in range(2))
    for seed in range(2):
        if seed == 1:
            for bad in (loss_is_nan, loss_is_inf_without_a_gradient, only_gradient_is_inf):
                calls = []
                def spoiled(output, batch):
                    calls.append(batch)
                    mine = RANK == RANKS - 1 and len(calls) == 2  # one micro-batch of one rank
                    return bad(output, batch) if mine else good(output, batch)
                result = saw.step([*batches(7, 3), None], spoiled)
                assert result["skipped"] == 1, (bad.__name__, result)
                assert math.isfinite(result["loss"]) == (bad is only_gradient_is_inf), (bad.__name__, result)
                assert not math.isfinite(result["grad_norm"]), (bad.__name__, result)
                assert same(never, saw), f"{bad.__name__} left something behind"
        results = [engine.step([*batches(seed, 2), None], good) for engine in (never, saw)]
        assert results[0] == results[1], results
        assert results[0]["skipped"] == 0 and math.isfinite(results[0]["grad_norm"])
        assert same(never, saw)
    return results[0]["grad_norm"]

norms = {}
for stage, dtype, float32 in [
    (0, F32, None), (0, BF16, None),
    (1, F32, None), (1, BF16, True),
    (2, F32, True), (2, BF16, True),
    (3, F32, None), (3, BF16, True),
]:
    try:
        norms[stage, dtype] = run(stage, dtype, float32)
    except Exception as error:
        raise AssertionError(f"stage {stage}, {dtype}, float32_gradients={float32}") from error
in_float32 = [norms[stage, F32] for stage in range(4)]
assert max(in_float32) < 1.01 * min(in_float32), "the stages see the same gradients, over all ranks"
"""
)

SUMS = (
    PRELUDE
    + """
from deepspeed.utils import safe_get_full_optimizer_state

MICRO_BATCHES, SIZE = 32, 2

def loss(output, batch):
    return -(output[0] * batch.advantages).sum() / 50, {}

def exact(model):
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for batch in batches(0, MICRO_BATCHES, SIZE):
        model.zero_grad()
        (loss(model(packed_inputs(batch, cpu, share_prompts=False)), batch)[0]).backward()
        for name, p in model.named_parameters():
            total[name] += p.grad.double()
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total

def summed(engine):
    # the first moment after a first, unclipped step from zero: 1 - beta1 = 1/2 of the gradient
    return {n: 2 * safe_get_full_optimizer_state(p, "exp_avg").double() for n, p in engine.model.named_parameters()}

def error(found, expected):
    squared = sum((found[name] - expected[name]).square().sum() for name in expected)
    return float((squared / sum(t.square().sum() for t in expected.values())).sqrt())

plain = load(BF16)
buffers, expected = dict(plain.named_buffers()), exact(plain)
for stage in (1, 2, 3):
    for float32 in (False, True):
        engine = make(stage, BF16, float32, max_grad_norm=1e9, betas=(0.5, 0.9), learning_rate=1e-3)
        for name, buffer in engine.model.named_buffers():
            assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), f"{stage}: {name}"
        result = engine.step(batches(0, MICRO_BATCHES, SIZE), loss)
        found = error(summed(engine), expected)
        norm = math.sqrt(sum(float(t.square().sum()) for t in expected.values()))
        print(stage, float32, found, result["grad_norm"] / norm)
        assert abs(result["grad_norm"] / norm - 1) < 1e-2
        if not float32:
            assert found > 4e-3, f"stage {stage}: bfloat16 sums off by {found}"
        elif stage == 1 or RANKS == 1:
            assert found < 1e-5, f"stage {stage}: float32 sums off by {found}"
        else:  # each micro-batch's mean over the ranks is rounded to bfloat16 as it is sent
            assert found < 2.5e-3, f"stage {stage}: float32 sums off by {found}"
"""
)


RESUMES = (
    PRELUDE
    + """
def step(engine):
    return engine.step(batches(0, 3), lambda output, _: (-output[0].sum() / 50, {}))

def weights(engine):
    engine.release_gathered()
    return gathered_state_dict(engine.model)

def held(engine):
    return sum(t.untyped_storage().nbytes() for t in engine._optimizer_tensors())

for stage in (1, 2, 3):
    where = f"{sys.argv[2]}/{stage}"
    plain, parked, resumed = (make(stage, BF16, True, learning_rate=1e-2, schedule="linear") for _ in range(3))
    parked.park_optimizer()
    for _ in range(2):
        parked.unpark_optimizer()
        assert step(plain) == step(parked)
        before = held(parked)
        parked.park_optimizer()
        assert held(parked) == 0
    count = sum(getattr(p, "ds_numel", p.numel()) for p in plain.model.parameters())
    assert abs(before / count - 12) < 0.1, f"stage {stage}: master weights and moments, not {before / count} bytes"
    parked.save(where)
    parked.finish_save(wait=True)
    resumed.load(where)
    parked.unpark_optimizer()
    results = [step(engine) for engine in (plain, parked, resumed)]
    assert results[0] == results[1] == results[2], (stage, results)
    expected = weights(plain)
    for engine in (parked, resumed):
        actual = weights(engine)
        assert all(torch.equal(actual[name], expected[name]) for name in expected), stage
"""
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_is_adamw_s_on_the_clipped_gradient_of_all_micro_batches(
    ranks: WarmRanks, tiny_model_dir: Path, num_ranks: int
) -> None:
    """At every ZeRO stage, with a rank that has no micro-batch in one round, against torch's own optimiser."""
    ranks(num_ranks).run(ADAMW, tiny_model_dir)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_is_not_finite_is_as_if_it_had_never_been(
    ranks: WarmRanks, tiny_model_dir: Path, num_ranks: int
) -> None:
    """At every ZeRO stage, bit for bit, and with two ranks where only the second one sees it."""
    ranks(num_ranks).run(SKIPS, tiny_model_dir)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_add_up_in_float32(ranks: WarmRanks, tiny_model_dir: Path, num_ranks: int) -> None:
    """32 micro-batches of a bfloat16 model, against the exact sum of their gradients."""
    ranks(num_ranks).run(SUMS, tiny_model_dir)


def test_float32_gradients_park_save_and_resume(ranks: WarmRanks, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Master weights, moments and schedule survive, bit for bit, at the stages that can add up in float32."""
    ranks(1).run(RESUMES, tiny_model_dir, tmp_path)


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "optimizer"), (2, "optimizer")])
def test_float32_gradients_are_refused_where_they_cannot_be(stage: int, offload: Offload) -> None:
    asked = LearnerConfig(zero_stage=stage, offload=offload, float32_gradients=True)
    with pytest.raises(
        ConfigError, match=rf"^learner\.float32_gradients=true.*learner\.zero_stage={stage} and offload"
    ):
        deepspeed_config(asked, torch.bfloat16)
    deepspeed_config(asked, torch.float32)  # there they are float32 anyway
    deepspeed_config(LearnerConfig(zero_stage=stage, offload=offload), torch.bfloat16)
