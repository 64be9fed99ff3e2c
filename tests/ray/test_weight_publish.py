"""After a publish vLLM samples from exactly the learner's weights, as its log-probabilities and versions say."""

from typing import Any

import pytest
import ray
import torch
from transformers import AutoTokenizer

from actors.group import Deadline, fetch
from actors.rollouts.actor import RolloutActor
from actors.rollouts.engine import Request
from actors.weights.load_plan import LoadPlan, keeps_weights_as_loaded
from actors.weights.transports import make_transport
from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch, pack
from rlhf.data.prompts import load_prompts
from rlhf.errors import ActorError, UnwrittenWeightsError
from rlhf.models.loading import load_policy
from rlhf.training.weights import Layout, bucket_layout, bucket_size, pack_bucket

pytestmark = pytest.mark.ray

DEADLINE = Deadline(120, "timeouts.publish_s")
FP32_BOUND = 1e-3  # nats; 4e-6 is what is seen


@pytest.fixture(scope="module")
def prompts(live):
    config, _, _ = live
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return load_prompts(config.data.train, config.data, tokenizer, split="train", seed=0).all()[:8]


def generate(roles, prompts, group_size: int) -> list[list[Rollout]]:
    waiting = set(roles.rollouts.submit(prompts, group_size=group_size))
    groups = []
    while waiting:
        finished = roles.rollouts.next_groups(waiting)
        waiting -= finished.keys()
        groups += finished.values()
    return groups


def sample(roles, prompts, group_size: int = 4) -> tuple[list[Rollout], TrainBatch]:
    groups = sorted(generate(roles, prompts, group_size), key=lambda g: g[0].prompt.id)
    rollouts = [rollout for group in groups for rollout in group]
    return rollouts, pack(rollouts)


def gap(logprobs: torch.Tensor, batch: TrainBatch) -> float:
    assert batch.rollout_logprobs is not None
    return (logprobs - batch.rollout_logprobs).abs().max().item()


def train_once(config, roles, rollouts, batch) -> None:
    rewards = roles.reward.score(rollouts).result().rewards
    (ref_logprobs,) = roles.reference.score([batch]).result()
    batch = batch.with_(rewards=rewards, ref_logprobs=ref_logprobs)
    roles.learner.update(make_algorithm(config.algorithm).assign_advantages(batch)[0], 0).result()


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
    learner, reference = roles.learner.score(batch).result(), roles.reference.score([batch]).result()[0]
    assert (learner - reference).abs().max() > FP32_BOUND


def test_what_a_group_comes_with_does_not_change_its_scores(live, prompts) -> None:
    _, _, roles = live
    roles.rollouts.publish(7)
    groups = generate(roles, prompts, group_size=4)
    batches = [pack(group) for group in groups]
    together = roles.reference.score(batches).result()
    alone = [roles.reference.score([batch]).result()[0] for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    rewards = [scores.rewards.tolist() for scores in roles.reward.score_groups(groups).result()]
    assert rewards == [roles.reward.score(group).result().rewards.tolist() for group in groups]


def test_groups_are_whole_and_each_prompt_comes_once(live, prompts) -> None:
    config, _, roles = live
    roles.rollouts.publish(8)
    groups = generate(roles, prompts, group_size=3)
    assert sorted(g[0].prompt.id for g in groups) == sorted(p.id for p in prompts)
    for group in groups:
        assert [r.sample_index for r in group] == [0, 1, 2]
        assert {r.prompt.id for r in group} == {group[0].prompt.id}
        for rollout in group:
            assert len(rollout.token_ids) == len(rollout.versions) == config.rollout.max_completion_tokens
            assert (rollout.versions == 8).all()
            assert rollout.truncated


def test_prompts_that_do_not_fit_into_one_step_of_the_engine_are_sampled(live) -> None:
    """With seeds, which on a CPU allow no prompt to be cut in two."""
    _, _, roles = live
    roles.rollouts.publish(8)
    members = roles.rollouts.members()
    prompts = [Prompt(id=i, token_ids=[10 + i] * 61, text="") for i in range(80)]
    assert len(generate(roles, prompts, group_size=1)) == 80
    assert roles.rollouts.members() == members, "a worker has been replaced"


def test_samples_do_not_depend_on_which_worker_draws_them(live, prompts) -> None:
    _, _, roles = live
    roles.rollouts.publish(9)
    first, _ = sample(roles, prompts)
    second, _ = sample(roles, list(reversed(prompts)))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]


def test_a_worker_without_committed_weights_does_not_sample(live, prompts) -> None:
    def forget(actor: RolloutActor) -> None:
        actor._loop.version = -1  # as before the first commit

    _, cluster, roles = live
    workers = cluster.group("rollout")
    ray.get([member.handle.__ray_call__.remote(forget) for member in workers.members], timeout=60)
    with pytest.raises(ActorError, match=r"rollout\[\d+\] on .*without a committed weight version"):
        request = Request("a", prompts[0].id, prompts[0].token_ids, 0)
        workers.call("submit", [request], deadline=DEADLINE, doing="queueing").result()
    roles.rollouts.publish(10)
    assert sample(roles, prompts)[1].versions.unique().tolist() == [10]


@pytest.mark.parametrize("route", ["broadcast", "share"])
def test_sessions_reach_vllm_too(live, prompts, route: str, monkeypatch) -> None:
    """What GPUs use, here with gloo and memory of the node, from two ZeRO-3 ranks into vLLM's layer-wise loader."""
    config, cluster, roles = live
    monkeypatch.setattr(roles.rollouts, "_transport", make_transport(cluster.group("learner"), route))
    for version in {"broadcast": (20, 21), "share": (22, 23)}[route]:
        roles.rollouts.publish(version)
        rollouts, batch = sample(roles, prompts)
        assert batch.versions.unique().tolist() == [version]
        assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
        train_once(config, roles, rollouts, batch)
        assert gap(roles.learner.score(batch).result(), batch) > 10 * FP32_BOUND


def plans_as_vllm_loads(worker: Any, layout: Layout) -> bool:
    """In vLLM's worker: whether a plan's copies give a fresh model the weights that vLLM's own loader gives it.

    Fresh, because on CPU vLLM packs the weights of a live one.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    def fresh(prefix: str) -> torch.nn.Module:  # a new name each time: vLLM registers attention layers
        with set_current_vllm_config(worker.vllm_config):
            return initialize_model(vllm_config=worker.vllm_config, prefix=f"{prefix}-{len(layout)}")

    expected, planned = fresh("expected"), fresh("planned")
    tensors = {s.name: torch.randn(s.full_shape, dtype=getattr(torch, s.dtype)) for specs in layout for s in specs}
    expected.load_weights(tensors.items())
    plan = LoadPlan(planned, planned.load_weights, layout)
    for specs in layout:
        pieces = [tensors[s.name].narrow(0, s.first_row, s.shape[0]) for s in specs]
        data = pack_bucket(specs, pieces, torch.empty(bucket_size(specs), dtype=torch.uint8))
        for target, rows in plan.copies(specs, data):
            target.copy_(rows)
    pairs = list(zip(planned.parameters(), expected.parameters(), strict=True))
    return keeps_weights_as_loaded(planned) and len(pairs) > 5 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bucket_bytes", [40_000, 1 << 30])
def test_copies_by_plan_equal_what_vllms_loader_does(live, tiny_model_dir, bucket_bytes: int) -> None:
    _, cluster, _ = live
    policy = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    layout = bucket_layout(policy, bucket_bytes)
    run = plans_as_vllm_loads
    worker = cluster.group("rollout").members[0].handle
    ref = worker.__ray_call__.remote(
        lambda actor: actor._loop.call(lambda engine: engine.llm.collective_rpc(run, args=(layout,)))
    )
    assert ray.get(ref, timeout=120) == [True]


def test_an_update_that_broke_off_is_made_good_by_the_next(live, prompts) -> None:
    config, cluster, roles = live
    roles.rollouts.publish(30)
    rollouts, batch = sample(roles, prompts)
    train_once(config, roles, rollouts, batch)
    stored = cluster.group("learner").call("store_weights", deadline=DEADLINE, doing="gathering").result()[0]
    workers = cluster.group("rollout")
    workers.call("begin_update", deadline=DEADLINE, doing="preparing").result()
    (specs, reference), _ = stored[0]
    after_q = 1 + next(i for i, spec in enumerate(specs) if spec.name == "model.layers.1.self_attn.q_proj.weight")
    part = [(specs[:after_q], reference)]
    workers.call("receive_objects", part, 60.0, deadline=DEADLINE, doing="receiving").result()
    (unfinished, *_) = [member.handle.finish_update.remote() for member in workers.members]
    with pytest.raises(UnwrittenWeightsError, match=r"unwritten \(lm_head|unwritten \(model\.layers\.1"):
        fetch(unfinished, workers.members[0], "finishing")
    roles.rollouts.publish(31)
    _, batch = sample(roles, prompts)
    assert batch.versions.unique().tolist() == [31]
    assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
