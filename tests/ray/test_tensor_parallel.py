"""Engines of several processes: their start, weight publishes, and their end. On CPU; on GPUs: tests/gpu."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import ray
from transformers import AutoTokenizer

from actors.cluster import Cluster
from actors.group import Member, fetch
from actors.process_env import PROJECT_ROOT
from actors.rollouts.actor import RolloutActor
from actors.rollouts.engine import WorkerSpec
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from jobs.prepare import prepare_tiny
from rlhf.algorithms import make_algorithm
from rlhf.batch import pack
from rlhf.config import RolloutConfig
from rlhf.data.prompts import load_prompts
from rlhf.errors import ActorError

pytestmark = [pytest.mark.ray, pytest.mark.long]

FP32_BOUND = 1e-4  # nats
ENDS_S = 30.0


def test_two_processes_sample_with_published_weights_and_end_with_their_worker(ray_session, tiny_config) -> None:
    """The weights, sent once, and beside them the adapter of the version, each in halves."""
    config = tiny_config(
        *("rollout.tensor_parallel_size=2", "rollout.logprobs=true", "learner.num_ranks=1", "algorithm.beta=0"),
        recipe="grpo_lora_tiny",
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:4]
    with Cluster(config) as cluster:
        roles = cluster.roles()
        for version in range(2):
            roles.rollouts.publish(version)
            ids = roles.rollouts.submit(prompts, group_size=4)
            groups: dict = {}
            while waiting := set(ids) - groups.keys():
                groups |= roles.rollouts.next_groups(waiting)
            rollouts = [rollout for i in ids for rollout in groups[i]]
            batch = pack(rollouts)
            assert batch.rollout_logprobs is not None
            difference = (roles.learner.score(batch).result() - batch.rollout_logprobs).abs().max()
            assert difference < FP32_BOUND
            batch = batch.with_(rewards=roles.reward.score(rollouts).result().rewards)
            roles.learner.update(make_algorithm(config.algorithm).assign_advantages(batch)[0], 0).result()
            moved = (roles.learner.score(batch).result() - batch.rollout_logprobs).abs().max()
            assert moved > 10 * FP32_BOUND, "the adapter must be visible"

        handle = cluster.group("rollout").members[0].handle
        pid = ray.get(handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=60)
        engine = [p for p in psutil.Process(pid).children(recursive=True) if "Worker_TP" in " ".join(p.cmdline())]
        assert len(engine) == 2
        os.kill(pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(engine, timeout=ENDS_S)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "they end with their worker"
        assert len(gone) + len(alive) == 2


def test_an_engine_that_does_not_start_says_why(ray_session, tmp_path: Path) -> None:
    """In the words of the process that failed; vLLM's own error only points to them."""
    model = prepare_tiny(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])  # a whole header: a worker finds it
    spec = WorkerSpec(
        config=RolloutConfig(tensor_parallel_size=2, cpu_kv_cache_mib=32),
        model_path=str(model),
        trust_remote_code=False,
        max_model_tokens=64,
        device="cpu",
        colocated=False,
        workers_on_gpu=1,
        logprobs=False,
        seed=0,
    )
    environment = {**worker_env("cpu"), "PYTHONPATH": str(PROJECT_ROOT), "CUDA_VISIBLE_DEVICES": ""}
    options = {"max_concurrency": RolloutActor.concurrent_calls, "runtime_env": {"env_vars": environment}}
    handle = ray.remote(RolloutActor).options(**options).remote(spec, VllmEngine)
    with pytest.raises(
        ActorError, match=r"rollout\[0\] on \S+: starting raised .*vLLM did not start: .*SafetensorError"
    ):
        fetch(handle.start.remote(), Member(handle, "rollout", 0, "?"), "starting", timeout_s=120)
    ray.kill(handle)
