"""After a publish vLLM samples from exactly the learner's weights, as its log-probabilities and versions say."""

from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.group import Deadline, Member, fetch
from actors.rollouts.actor import RolloutActor
from actors.rollouts.engine import Engine, Output, Request
from actors.weights.load_plan import LoadPlan, keeps_weights_as_loaded
from actors.weights.transports import make_transport
from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout, TrainBatch, pack
from rlhf.data.prompts import load_prompts
from rlhf.errors import UnwrittenWeightsError
from rlhf.models.loading import load_policy
from rlhf.training.weights import Layout, bucket_layout, bucket_size, named_weights, pack_bucket

pytestmark = pytest.mark.ray

DEADLINE = Deadline(120, "timeouts.publish_s")
FP32_BOUND = 1e-3  # nats; 4e-6 is what is seen
GROUP_SIZE = 4


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


def draw(worker: Member, prompts: list[Prompt]) -> list[Rollout]:
    """What this worker samples; the pool would choose one."""
    asked = {(p.id, i): Request(f"{p.id}.{i}", p.id, p.token_ids, i) for p in prompts for i in range(GROUP_SIZE)}

    def answer(actor: RolloutActor) -> tuple[int, list[Output]]:
        def run(engine: Engine) -> list[Output]:
            for request in asked.values():
                engine.add(request, actor._loop.version)
            outputs = []
            while engine.has_unfinished():
                outputs += engine.step()
            return outputs

        return actor._loop.version, actor._loop.call(run)

    version, outputs = ray.get(worker.handle.__ray_call__.remote(answer), timeout=120)
    found = {output.key: output for output in outputs}
    return [
        Rollout(p, i, o.token_ids, np.full(len(o.token_ids), version, np.int32), o.finish_reason, o.logprobs)
        for p in prompts
        for i in range(GROUP_SIZE)
        for o in [found[asked[p.id, i].key]]
    ]


def sample(live, prompts) -> tuple[list[Rollout], TrainBatch]:
    """Half of the groups from each of the two workers."""
    _, cluster, _ = live
    first, second = cluster.group("rollout").members
    rollouts = [*draw(first, prompts[::2]), *draw(second, prompts[1::2])]
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
        rollouts, batch = sample(live, prompts)
        old = roles.learner.score(batch).result()
        assert gap(old, batch) < FP32_BOUND
        assert batch.versions.unique().tolist() == [version]
        train_once(config, roles, rollouts, batch)
        new = roles.learner.score(batch).result()
        assert gap(new, batch) > 10 * FP32_BOUND, "the update must be visible, or this test proves nothing"


def test_the_reference_stays_the_model_that_was_loaded(live, prompts) -> None:
    config, _, roles = live
    roles.rollouts.publish(7)
    rollouts, batch = sample(live, prompts)
    before = roles.learner.score(batch).result()
    train_once(config, roles, rollouts, batch)
    assert (roles.learner.score(batch).result() - before).abs().max() > 10 * FP32_BOUND, "the learner moves"
    model, expected = AutoModelForCausalLM.from_pretrained(config.model.path), []
    for rollout in rollouts:
        ids = torch.tensor([*rollout.prompt.token_ids, *rollout.token_ids])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        expected.append(logprobs[-len(rollout.token_ids) :])
    (reference,) = roles.reference.score([batch]).result()
    torch.testing.assert_close(reference, torch.cat(expected), rtol=0, atol=1e-5)


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
    def tokens(rollouts: list[Rollout]) -> dict[tuple[int, int], list[int]]:
        return {(rollout.prompt.id, rollout.sample_index): rollout.token_ids for rollout in rollouts}

    _, cluster, roles = live
    roles.rollouts.publish(9)
    one, other = (tokens(draw(worker, prompts)) for worker in cluster.group("rollout").members)
    of_pool = tokens([rollout for group in generate(roles, prompts, GROUP_SIZE) for rollout in group])
    assert one == other == of_pool
    assert len(one) == len(set(map(tuple, one.values()))) == len(prompts) * GROUP_SIZE


@pytest.mark.parametrize("route", ["broadcast", "share"])
def test_sessions_reach_vllm_too(live, prompts, route: str, monkeypatch) -> None:
    """What GPUs use, here with gloo and memory of the node, from two ZeRO-3 ranks into vLLM's layer-wise loader."""
    config, cluster, roles = live
    monkeypatch.setattr(roles.rollouts, "_transport", make_transport(cluster.group("learner"), route))
    for version in {"broadcast": (20, 21), "share": (22, 23)}[route]:
        roles.rollouts.publish(version)
        rollouts, batch = sample(live, prompts)
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
    layout = bucket_layout(named_weights(policy), bucket_bytes)
    run = plans_as_vllm_loads
    worker = cluster.group("rollout").members[0].handle
    ref = worker.__ray_call__.remote(
        lambda actor: actor._loop.call(lambda engine: engine.llm.collective_rpc(run, args=(layout,)))
    )
    assert ray.get(ref, timeout=120) == [True]


def test_an_update_that_broke_off_is_made_good_by_the_next(live, prompts) -> None:
    config, cluster, roles = live
    roles.rollouts.publish(30)
    rollouts, batch = sample(live, prompts)
    train_once(config, roles, rollouts, batch)
    stored = cluster.group("learner").call("store_weights", True, deadline=DEADLINE, doing="gathering").result()[0]
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
    _, batch = sample(live, prompts)
    assert batch.versions.unique().tolist() == [31]
    assert gap(roles.learner.score(batch).result(), batch) < FP32_BOUND
