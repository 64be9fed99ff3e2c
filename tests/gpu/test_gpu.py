"""On NVIDIA GPUs: training stays on its own GPU, weights cross over NCCL and CUDA IPC, shared prompts and compiled
layers give the same gradient, and no loss waits for the GPU.

pytest -m gpu tests/gpu
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch
from transformers import AutoTokenizer

from actors.cluster import Cluster
from actors.connect import connect
from benchmarks.bench_learner import ragged_batch
from jobs.prepare import prepare_random
from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch, pack
from rlhf.config import AlgorithmConfig
from rlhf.data.prompts import load_prompts
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy
from rlhf.models.packed import PolicyModel
from rlhf.models.probe import TOLERANCE, check_packing, probe_batch
from rlhf.recipes import load_config
from rlhf.roles import Roles
from rlhf.training.engine import Engine
from rlhf.training.learner import PolicyLearner, ValueLearner
from tests.families import FAMILIES, make_model, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
BF16_MEAN_BOUND = 0.03  # nats; two different bfloat16 attention and matrix kernels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_random(tmp_path_factory.mktemp("models") / "random-0.5b", size="0.5b")


TENSOR_PARALLEL = ["rollout.tensor_parallel_size=2"]
LIVE: dict[str, tuple[int, list[str]]] = {  # GPUs that it takes, and what it sets
    "separate": (2, ["placement.mode=separate"]),
    "colocate": (1, ["placement.mode=colocate"]),
    "separate-tp2": (3, ["placement.mode=separate", *TENSOR_PARALLEL]),
    "colocate-tp2": (2, ["placement.mode=colocate", "learner.num_ranks=2", *TENSOR_PARALLEL]),
}


@pytest.fixture(params=LIVE)
def live(request: pytest.FixtureRequest, model: Path) -> Iterator:
    num_gpus, settings = LIVE[request.param]
    overrides = [
        *(
            f"model.path={model}",
            *settings,
            "rollout.logprobs=true",
            "rollout.enforce_eager=true",
            "rollout.num_workers=1",
        ),
        *("algorithm.prompts_per_step=8", "rollout.max_completion_tokens=64", "rollout.gpu_memory_fraction=0.3"),
    ]
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    config = load_config(ROOT / "conf" / "grpo_0.5b_1gpu.yaml", overrides)
    with connect(config), Cluster(config) as cluster:
        yield config, cluster, cluster.roles()


def used_mib() -> dict[str, int]:
    """Memory in use by GPU UUID."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return {uuid: int(used) for uuid, used in (row.split(", ") for row in rows)}


def gpus_of(cluster: Cluster, role: str) -> list[str]:
    """UUIDs of every GPU that the first actor of a role can see at all."""

    def visible(actor: object) -> list[str]:
        return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]

    return ray.get(cluster.group(role).members[0].handle.__ray_call__.remote(visible), timeout=120)


def sample(roles: Roles, prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
    """Finished groups in the order of their prompts."""
    ids = roles.rollouts.submit(prompts, group_size=group_size)
    groups: dict[int, list[Rollout]] = {}
    while waiting := set(ids) - groups.keys():
        groups |= roles.rollouts.next_groups(waiting)
    return [rollout for i in ids for rollout in groups[i]]


def test_weights_cross_and_training_stays_where_it_is(live) -> None:
    config, cluster, roles = live
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:8]
    separate = config.placement.mode == "separate"
    learner_gpus = gpus_of(cluster, "learner")
    assert len(learner_gpus) == 1, "a learner rank sees exactly one device"

    for version in range(2):
        roles.rollouts.publish(version)
        rollouts = sample(roles, prompts, group_size=8)
        batch = pack(rollouts)
        assert batch.versions.unique().tolist() == [version]
        rewards = roles.reward.score(rollouts).result().rewards
        roles.rollouts.sleep()  # colocated: weights and cache are gone, and come back with the next publish
        logprobs = roles.learner.score(batch).result()
        assert batch.rollout_logprobs is not None
        assert (logprobs - batch.rollout_logprobs).abs().mean() < BF16_MEAN_BOUND

        before = used_mib()
        roles.learner.update(
            make_algorithm(config.algorithm).assign_advantages(batch.with_(rewards=rewards))[0], version
        ).result()
        if separate:
            rollout_gpus = gpus_of(cluster, "rollout")
            assert len(rollout_gpus) == config.rollout.tensor_parallel_size
            assert not set(rollout_gpus) & set(learner_gpus)
            after = used_mib()
            assert all(after[gpu] == before[gpu] for gpu in rollout_gpus), "training must not touch a worker's GPU"


@pytest.mark.parametrize("live", ["separate", "colocate-tp2", "separate-tp2"], indirect=True)
def test_a_killed_worker_gives_its_gpu_back_and_is_replaced(live) -> None:
    config, cluster, roles = live
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:8]
    roles.rollouts.publish(0)
    sample(roles, prompts, group_size=2)
    gpus = gpus_of(cluster, "rollout")
    used_before = used_mib()
    pid = ray.get(cluster.group("rollout").members[0].handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=60)
    ids = roles.rollouts.submit(prompts, group_size=8)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    waiting = set(ids)
    while waiting:  # with nobody to sample them until there is a new worker, which learns version 0 meanwhile
        finished = roles.rollouts.next_groups(waiting)
        waiting -= finished.keys()
        assert {int(v) for group in finished.values() for rollout in group for v in rollout.versions} == {0}
    print(f"all groups finished {time.monotonic() - killed:.1f} s after the death")
    used_after = used_mib()
    assert all(used_after[gpu] < 1.3 * used_before[gpu] for gpu in gpus), "the dead worker's engine holds its GPUs"


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_prompts_give_the_numbers_of_whole_sequences(model: Path, compiled: bool) -> None:
    """In bfloat16, log-probabilities and the whole gradient; the exact comparison is tests/unit/test_models.py."""
    device = torch.device("cuda")
    batch = ragged_batch(num_sequences=32, prompt_tokens=150, median=100, longest=300, vocab=100_000)
    policy = load_policy(str(model), dtype=torch.bfloat16, temperature=1.0, chunk_tokens=4096).to(device).train()
    if compiled:
        policy.compile_layers()

    def pass_over(*, share_prompts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        policy.zero_grad()
        inputs = packed_inputs(batch, device, share_prompts=share_prompts)
        assert (inputs.attended is not None) == share_prompts
        logprobs, _ = policy(inputs)
        (logprobs * batch.advantages.to(device)).sum().backward()
        return logprobs.detach(), torch.cat([p.grad.float().flatten() for p in policy.parameters()])

    whole, whole_gradient = pass_over(share_prompts=False)
    shared, shared_gradient = pass_over(share_prompts=True)
    assert (shared - whole).abs().mean() < BF16_MEAN_BOUND
    assert torch.nn.functional.cosine_similarity(shared_gradient, whole_gradient, dim=0) > 0.999
    assert shared_gradient.norm().item() == pytest.approx(whole_gradient.norm().item(), rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_zero_stage_has_the_same_gradient_compiled_or_not(ranks: int, model: Path, tmp_path: Path) -> None:
    """Its norm: a graph that loses part of the gradient is too small, and nothing else shows it."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    variants = ("zero1-eager", "zero1", "zero2", "zero2-checkpointed", "zero3-eager", "zero3", "zero3-checkpointed")
    command = [sys.executable, "-m", "benchmarks.bench_learner", str(model), "--sequences", "64", "--repeats", "1"]
    command += ["--ranks", str(ranks), "--out", str(tmp_path / "out.json")]
    subprocess.run([*command, "--variants", *variants], cwd=ROOT, check=True)
    measured = json.loads((tmp_path / "out.json").read_text())["variants"]
    norms = {name: measured[name]["grad_norm"] for name in variants}
    assert all(norm == pytest.approx(norms["zero1-eager"], rel=0.01) for norm in norms.values()), norms


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_same_gradient_when_compiled(family: str, tmp_path: Path) -> None:
    path = str(make_model(tmp_path, small_config(*FAMILIES[family])))
    device = torch.device("cuda")
    policy = load_policy(path, dtype=torch.bfloat16, temperature=1.0, chunk_tokens=64).to(device).train()
    batch = probe_batch(policy.lm.config)

    def gradient() -> torch.Tensor:
        policy.zero_grad()
        logprobs, _ = policy(packed_inputs(batch, device, share_prompts=True))
        logprobs.sum().backward()
        return torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])

    eager = gradient()
    policy.compile_layers()
    compiled = gradient()
    assert torch.nn.functional.cosine_similarity(compiled, eager, dim=0) > 0.99
    assert compiled.norm().item() == pytest.approx(eager.norm().item(), rel=0.03)


LOSSES = {
    "dapo": {"beta": 0.1, "entropy_coef": 0.01, "rollout_correction": "token_truncate", "delta": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "rollout_correction": "token_mask"},
    "gspo": {"importance_sampling_level": "sequence", "rollout_correction": "sequence_mask"},
    "rloo": {"name": "rloo", "loss_type": "rloo", "rollout_correction": "sequence_truncate"},
}


@pytest.fixture(scope="module")
def policy(model: Path) -> PolicyModel:
    loaded = load_policy(str(model), dtype=torch.bfloat16, temperature=1.0, chunk_tokens=4096).cuda().train()
    loaded.compile_layers()
    return loaded


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch_with_everything(policy: PolicyModel, device: torch.device) -> TrainBatch:
    """Every optional tensor there is."""
    batch = ragged_batch(num_sequences=32, prompt_tokens=150, median=100, longest=300, vocab=100_000)
    with torch.no_grad():
        logprobs = policy(packed_inputs(batch, device))[0].cpu()
    return batch.with_(
        **dict.fromkeys(("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns"), logprobs),
        loss_weights=torch.ones_like(logprobs),
        entropy_mask=logprobs < 0,
        compared=logprobs < 0,
    )


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
def test_forward_loss_and_backward_never_wait_for_the_gpu(policy: PolicyModel, settings: dict[str, Any]) -> None:
    """Below DeepSpeed, whose stage 3 waits by itself. So the host prepares a micro-batch while the GPU computes one."""
    device = torch.device("cuda")
    batch = batch_with_everything(policy, device)
    no_engine = cast(Engine, None)  # a loss needs none
    learner = PolicyLearner(no_engine, AlgorithmConfig(**settings), seed=0, max_completion_tokens=300)
    critic = ValueLearner(no_engine, AlgorithmConfig(name="ppo"), seed=0, max_completion_tokens=300)

    def micro_batch() -> list[torch.Tensor]:
        output = policy(packed_inputs(batch, device, share_prompts=True))
        moved = batch.to(device)
        num_tokens = batch.num_completion_tokens
        loss, stats = learner._loss(output, moved, num_tokens, num_compared=num_tokens)
        value_loss, value_stats = critic._loss(output[0], moved)
        (loss + value_loss).backward()
        return [loss, *stats.values(), value_loss, *value_stats.values()]

    micro_batch()  # compiles
    with no_waiting():
        numbers = micro_batch()
    assert all(number.isfinite() for number in numbers)


def test_moving_a_pageable_tensor_counts_as_waiting() -> None:
    """The test above can fail."""
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(4).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_right_when_packed_on_a_gpu(family: str, tmp_path: Path) -> None:
    """In bfloat16, against transformers' eager attention; to the last digit: tests/unit/test_families.py."""
    path = str(make_model(tmp_path, small_config(*FAMILIES[family])))
    device = torch.device("cuda")
    policy = load_policy(path, dtype=torch.bfloat16, temperature=1.0, chunk_tokens=64).to(device).eval()
    check_packing(policy, policy, device, key=family)
    batch = probe_batch(policy.lm.config)
    with torch.no_grad():
        packed = policy(packed_inputs(batch, device, share_prompts=True))[0].cpu()
    plain = load_policy(path, dtype=torch.float32, temperature=1.0, chunk_tokens=64).eval()
    with torch.no_grad():
        exact = plain(packed_inputs(batch, torch.device("cpu")))[0]
    assert (packed - exact).abs().mean() < TOLERANCE[torch.bfloat16]


def test_a_soft_cap_has_the_same_gradient_on_a_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    path = str(make_model(tmp_path, small_config(*FAMILIES["gemma2"])))

    def gradient(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        policy = load_policy(path, dtype=dtype, temperature=1.0, chunk_tokens=64).to(device).train()
        inputs = packed_inputs(probe_batch(policy.lm.config), device, share_prompts=True)
        policy(inputs)[0].sum().backward()
        return torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None]).cpu()

    on_gpu, on_cpu = gradient(torch.bfloat16, torch.device("cuda")), gradient(torch.float32, torch.device("cpu"))
    assert torch.nn.functional.cosine_similarity(on_gpu, on_cpu, dim=0) > 0.99
