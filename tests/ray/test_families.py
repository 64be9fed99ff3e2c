"""Through a weight publish into a real vLLM engine, the supported families sample with the learner's probabilities."""

import os
import pickle
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from actors.rollouts.engine import WorkerSpec
from benchmarks.common import python_module
from rlhf.batch import Prompt, Rollout, pack
from rlhf.config import LoraConfig, RolloutConfig
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy
from rlhf.models.lora import add_adapters
from rlhf.models.packed import PolicyModel
from rlhf.training.weights import bucket_size, named_weights, pack_bucket, publish_layout, walk_buckets, weights_apart
from tests.families import FAMILIES, make_model, small_config
from tests.vllm_child import Job

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = (
    *("mistral", "qwen3", "gemma2", "gemma3", "phi", "phi3", "phi3-longrope", "granite"),
    *("olmo2", "olmo3", "starcoder2"),
)
# Ranks and scales that vLLM pads and folds; layers that it fuses, of which only one may have an adapter.
WITH_ADAPTERS: dict[str, LoraConfig | None] = {
    "qwen3": LoraConfig(r=4, alpha=8),
    "mistral": LoraConfig(r=3, alpha=7, target_modules=["v_proj", "up_proj"]),
    "gemma2": LoraConfig(r=8, alpha=16),
    "phi3": LoraConfig(r=2, alpha=2),
}
MAX_TOKENS = 64  # of prompt and completion; longer than a window, and than what LongRoPE calls short
FP32_BOUND = 2e-4  # nats


def policy_of(path: Path) -> PolicyModel:
    return load_policy(str(path), dtype=torch.float32, temperature=1.0, chunk_tokens=64, max_tokens=MAX_TOKENS).eval()


def make_job(
    family: str, directory: Path, tokenizer: Path, adapter: LoraConfig | None = None
) -> tuple[Job, PolicyModel]:
    """An engine that starts from one random model and is given the weights of another, and an adapter beside them."""
    config = small_config(*FAMILIES[family])
    start = make_model(directory / "start", config, seed=0, tokenizer=tokenizer)
    policy = policy_of(make_model(directory / "trained", config, seed=1))
    if adapter:
        give_adapters(policy, adapter)
    weights = weights_apart(policy) if adapter else named_weights(policy)
    layout = publish_layout(weights, 1 << 16)
    buckets = [
        pack_bucket(specs, pieces, torch.empty(bucket_size(specs), dtype=torch.uint8)).numpy()
        for specs, pieces in walk_buckets(weights, layout)
    ]
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(i, torch.randint(3, 500, (13 + i,), generator=generator).tolist(), "") for i in range(2)]
    settings = RolloutConfig(max_completion_tokens=24, ignore_eos=True, max_num_seqs=8, cpu_kv_cache_mib=32)
    spec = WorkerSpec(
        config=settings,
        model_path=str(start),
        trust_remote_code=False,
        max_model_tokens=MAX_TOKENS,
        device="cpu",
        colocated=False,
        workers_on_gpu=1,
        logprobs=True,
        seed=0,
        adapter=adapter,
    )
    return Job(spec, layout, buckets, prompts, group_size=3), policy


def give_adapters(policy: PolicyModel, adapter: LoraConfig) -> None:
    """Adapters that change what the model says."""
    add_adapters(policy, adapter, key="learner.lora")
    generator = torch.Generator().manual_seed(2)
    for _, b, _ in policy.adapters.values():
        b.data = 0.1 * torch.randn(b.shape, generator=generator)


def sample(
    directory: Path, tokenizer: Path, families: Mapping[str, LoraConfig | None]
) -> dict[str, tuple[list[Rollout] | str, PolicyModel]]:
    """What the engines sampled, and the learner's models, by family."""
    made = {family: make_job(family, directory / family, tokenizer, adapter) for family, adapter in families.items()}
    jobs, results = directory / "jobs", directory / "results"
    jobs.write_bytes(pickle.dumps({family: job for family, (job, _) in made.items()}))
    command = python_module("tests.vllm_child", str(jobs), str(results))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240, capture_output=True)
    found = pickle.loads(results.read_bytes())
    return {family: (found[family], policy) for family, (_, policy) in made.items()}


def check(rollouts: list[Rollout] | str, policy: PolicyModel) -> None:
    """The engine's probabilities are the learner's."""
    assert isinstance(rollouts, list), rollouts
    batch = pack(rollouts)
    assert batch.rollout_logprobs is not None
    for share_prompts in (False, True):
        with torch.no_grad():
            logprobs, _ = policy(packed_inputs(batch, torch.device("cpu"), share_prompts=share_prompts))
        assert (logprobs - batch.rollout_logprobs).abs().max() < FP32_BOUND


@pytest.fixture(scope="module")
def sampled(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> dict[str, tuple[list[Rollout] | str, PolicyModel]]:
    return sample(tmp_path_factory.mktemp("families"), tiny_model_dir, dict.fromkeys(SAMPLED))


@pytest.mark.parametrize("family", SAMPLED)
def test_a_publish_gives_vllm_the_learners_probabilities(
    family: str, sampled: dict[str, tuple[list[Rollout] | str, PolicyModel]]
) -> None:
    check(*sampled[family])


@pytest.mark.long
def test_so_does_a_publish_of_weights_and_an_adapter_beside_them(tmp_path: Path, tiny_model_dir: Path) -> None:
    for rollouts, policy in sample(tmp_path, tiny_model_dir, WITH_ADAPTERS).values():
        check(rollouts, policy)
