"""After a publish vLLM samples from exactly the learner's weights, as its log-probabilities and versions say."""

import pytest
import torch
from transformers import AutoTokenizer

from rlhf.algorithms import make_algorithm
from rlhf.batch import Rollout, TrainBatch, pack
from rlhf.data import load_prompts
from rlhf.rewards import combine

pytestmark = pytest.mark.ray

FP32_BOUND = 1e-3  # nats; 4e-6 is what is seen


@pytest.fixture(scope="module")
def prompts(live):
    config, _, _ = live
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:8]


def sample(roles, prompts, group_size: int = 4) -> tuple[list[Rollout], TrainBatch]:
    groups = sorted(roles.rollouts.generate(prompts, group_size=group_size), key=lambda g: g[0].prompt.id)
    rollouts = [rollout for group in groups for rollout in group]
    return rollouts, pack(rollouts)


def gap(logprobs: torch.Tensor, batch: TrainBatch) -> float:
    assert batch.rollout_logprobs is not None
    return (logprobs - batch.rollout_logprobs).abs().max().item()


def train_once(config, roles, rollouts, batch) -> None:
    scores = roles.reward.score(rollouts).result()
    batch = batch.with_(
        rewards=combine(scores, roles.reward.weights()), ref_logprobs=roles.reference.score(batch).result()
    )
    roles.learner.update(make_algorithm(config.algorithm).assign_advantages(batch)[0]).result()


def test_logprobs_equal_the_learners_after_every_publish(live, prompts) -> None:
    config, _, roles = live
    for version in range(3):
        roles.rollouts.publish(version)
        rollouts, batch = sample(roles, prompts)
        old = roles.learner.score(batch).result()
        assert gap(old, batch) < FP32_BOUND
        assert batch.versions.unique().tolist() == [version]
        train_once(config, roles, rollouts, batch)
        new = roles.learner.score(batch).result()
        assert gap(new, batch) > 10 * FP32_BOUND, "the update must be visible, or this test proves nothing"


def test_reference_stays_where_it_was(live, prompts) -> None:
    _, _, roles = live
    roles.rollouts.publish(7)
    _, batch = sample(roles, prompts)
    learner, reference = roles.learner.score(batch), roles.reference.score(batch)
    assert (learner.result() - reference.result()).abs().max() > FP32_BOUND


def test_groups_are_whole_and_each_prompt_comes_once(live, prompts) -> None:
    config, _, roles = live
    roles.rollouts.publish(8)
    groups = list(roles.rollouts.generate(prompts, group_size=3))
    assert sorted(g[0].prompt.id for g in groups) == sorted(p.id for p in prompts)
    for group in groups:
        assert [r.sample_index for r in group] == [0, 1, 2]
        assert {r.prompt.id for r in group} == {group[0].prompt.id}
        for rollout in group:
            assert len(rollout.token_ids) == len(rollout.versions) == config.rollout.max_completion_tokens
            assert (rollout.versions == 8).all()
            assert rollout.truncated


def test_samples_do_not_depend_on_which_worker_draws_them(live, prompts) -> None:
    _, _, roles = live
    roles.rollouts.publish(9)
    first, _ = sample(roles, prompts)
    second, _ = sample(roles, list(reversed(prompts)))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]


def test_a_worker_without_committed_weights_does_not_sample(live, prompts) -> None:
    from actors.rollout import Request
    from rlhf.errors import ActorError

    _, cluster, roles = live
    from actors.group import Deadline

    workers, deadline = cluster.group("rollout"), Deadline(60, "timeouts.publish_s")
    workers.call("begin_update", deadline=deadline, doing="preparing").result()
    with pytest.raises(ActorError, match=r"rollout\[0\] on .*without a committed weight version"):
        workers.call("submit", [Request(prompts[0], 0)], deadline=deadline, doing="queueing").result()
    # the session that was begun is finished by a whole publish's own transfer
    transfer = roles.rollouts._transport
    transfer.transfer()
    workers.call("finish_update", deadline=deadline, doing="loading").result()
    roles.rollouts.publish(10)
    assert sample(roles, prompts)[1].versions.unique().tolist() == [10]
