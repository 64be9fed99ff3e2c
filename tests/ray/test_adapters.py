"""Adapters published beside frozen weights: what workers sample is what the learner scores, whoever comes or dies."""

from collections.abc import Iterator

import pytest
import ray
import torch
from transformers import AutoTokenizer

from actors.cluster import Cluster
from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch, pack
from rlhf.config import Config
from rlhf.data.prompts import load_prompts
from rlhf.roles import Roles

pytestmark = [pytest.mark.ray, pytest.mark.long]

FP32_BOUND = 1e-5  # nats
Live = tuple[Config, Cluster, Roles]


@pytest.fixture(scope="module", params=["bfloat16 base", "base in 4 bits"])
def live(ray_session: None, tiny_config, request: pytest.FixtureRequest) -> Iterator[Live]:
    """Two learner ranks with adapters, two rollout workers."""
    in_4_bits = str(request.param == "base in 4 bits").lower()
    overrides = ["rollout.num_workers=2", "rollout.logprobs=true", "learner.num_ranks=2", "learner.zero_stage=2"]
    overrides += [f"learner.lora.load_in_4bit={in_4_bits}", "algorithm.beta=0.1", "rollout.max_failures=10"]
    config = tiny_config(*overrides, recipe="grpo_lora_tiny")
    with Cluster(config) as cluster:
        yield config, cluster, cluster.roles()


@pytest.fixture(scope="module")
def prompts(live: Live) -> list[Prompt]:
    config, _, _ = live
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:8]


def sample(roles: Roles, prompts: list[Prompt]) -> tuple[list[Rollout], TrainBatch]:
    waiting = set(roles.rollouts.submit(prompts, group_size=4))
    rollouts: list[Rollout] = []
    while waiting:
        finished = roles.rollouts.next_groups(waiting)
        waiting -= finished.keys()
        rollouts += [rollout for group in finished.values() for rollout in group]
    return rollouts, pack(rollouts)


def gap(logprobs: torch.Tensor, batch: TrainBatch) -> float:
    assert batch.rollout_logprobs is not None
    return (logprobs - batch.rollout_logprobs).abs().max().item()


def train(config: Config, roles: Roles, rollouts: list[Rollout], batch: TrainBatch) -> TrainBatch:
    """One update; the batch with its reference log-probabilities."""
    rewards = roles.reward.score(rollouts).result().rewards
    batch = batch.with_(rewards=rewards, ref_logprobs=roles.learner.score_reference(batch).result())
    roles.learner.update(make_algorithm(config.algorithm).assign_advantages(batch)[0], 0).result()
    return batch


def test_every_version_is_sampled_as_the_learner_scores_it(live: Live, prompts: list[Prompt]) -> None:
    config, _, roles = live
    sent = []
    for version in range(4):
        sent.append(roles.rollouts.publish(version)["weight_sync/sent_mib"])
        rollouts, batch = sample(roles, prompts)
        assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
        train(config, roles, rollouts, batch)
        assert gap(roles.learner.score(batch).result(), batch) > 100 * FP32_BOUND, "the update must be visible"
    assert sent[1] == sent[2] == sent[3] < sent[0] / 2, "the base is sent once"


def test_the_reference_stays_what_it_was_bit_for_bit(live: Live, prompts: list[Prompt]) -> None:
    config, _, roles = live
    roles.rollouts.publish(10)
    rollouts, batch = sample(roles, prompts)
    before = roles.learner.score_reference(batch).result()
    policy = roles.learner.score(batch).result()
    train(config, roles, rollouts, batch)
    assert torch.equal(roles.learner.score_reference(batch).result(), before)
    assert not torch.equal(roles.learner.score(batch).result(), policy)


def test_a_worker_that_comes_later_gets_base_and_adapter(live: Live, prompts: list[Prompt]) -> None:
    config, cluster, roles = live
    roles.rollouts.publish(20)
    rollouts, batch = sample(roles, prompts)
    train(config, roles, rollouts, batch)
    before = {member.handle for member in cluster.group("rollout").members}
    ray.kill(next(iter(before)))
    version = 21
    roles.rollouts.publish(version)
    while len({member.handle for member in cluster.group("rollout").members} - before) < 1:  # it takes a start
        _, batch = sample(roles, prompts)
        assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
        version += 1
        roles.rollouts.publish(version)
    roles.rollouts.publish(version + 1)
    for _ in range(3):  # both take part
        _, batch = sample(roles, prompts)
        assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
