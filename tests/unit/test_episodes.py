"""Episodes of several turns in one packed batch: what was observed is read, and never learnt from."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.batch import Episode, Prompt, Rollout, TrainBatch, merge_scores, pack
from rlhf.config import AlgorithmConfig
from rlhf.models.inputs import PackedInputs, packed_inputs
from rlhf.models.loading import load_policy, load_scalar
from rlhf.models.scorer import FrozenScorer
from rlhf.packing import batch_spans
from rlhf.tracking.performance import one_prefill_each
from rlhf.training.learner import PolicyLearner

CPU = torch.device("cpu")
Turns = Sequence[tuple[int, int]]  # sampled tokens of each turn, and those observed after it


def episode(
    prompt: Sequence[int], turns: Turns, *, first: int = 100, rewards: Sequence[float] | None = None
) -> Rollout:
    """All that follows the prompt is ``first``, ``first`` + 1, ...; a log-probability is minus its token."""
    sampled = np.concatenate([np.arange(own + seen) < own for own, seen in turns])
    tokens = np.arange(first, first + len(sampled))
    lengths = [own for own, _ in turns]
    told = Episode(sampled, lengths, list(rewards or [0.0] * len(turns)), 0.0, "done", [], {})
    own = tokens[sampled]
    versions = np.repeat(np.arange(len(turns), dtype=np.int32), lengths)
    return Rollout(Prompt(0, list(prompt), ""), 0, tokens.tolist(), versions, "stop", -own.astype(np.float32), told)


def test_pack_by_hand() -> None:
    one = episode([1, 2], [(2, 1), (1, 3)], first=10, rewards=[0.5, -1.0])
    other = episode([3], [(1, 0)], first=20, rewards=[2.0])
    batch = pack([one, other])
    assert batch.tokens.tolist() == [1, 2, 10, 11, 12, 13, 3, 20], "without the three observed last"
    assert batch.sampled is not None and batch.sampled.tolist() == [False] * 2 + [True, True, False, True, False, True]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.completion_lengths.tolist() == [3, 1]
    assert batch.tail_lengths is not None and batch.tail_lengths.tolist() == [4, 1]
    assert batch.sequence_lengths.tolist() == [6, 2]
    assert batch.num_completion_tokens == 4
    assert batch.versions.tolist() == [0, 0, 1, 0]
    assert batch.rollout_logprobs is not None and batch.rollout_logprobs.tolist() == [-10, -11, -13, -20]
    assert batch.turns is not None and batch.turns.tolist() == [0, 0, 1, 0]
    assert batch.turn_rewards is not None and batch.turn_rewards.tolist() == [0, 0.5, -1, 2]
    dtypes = [t.dtype for t in (batch.sampled, batch.tail_lengths, batch.turns, batch.turn_rewards)]
    assert dtypes == [torch.bool, torch.int64, torch.int32, torch.float32]
    assert one.sampled_ids == [10, 11, 13] and one.num_sampled == 3


def test_a_batch_of_single_completions_has_nothing_of_episodes() -> None:
    single = Rollout(Prompt(0, [1], ""), 0, [2, 3], np.zeros(2, np.int32), "stop")
    batch = pack([single])
    assert (batch.sampled, batch.tail_lengths, batch.turns, batch.turn_rewards) == (None,) * 4
    assert batch.lengths_after_prompt is batch.completion_lengths
    with pytest.raises(AssertionError, match="never in one batch"):
        pack([episode([1], [(1, 0)]), single])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"turn_lengths": [1, 2]}, "turns are what was sampled"),
        ({"sampled": np.array([True, True, True])}, "turns are what was sampled"),
        ({"sampled": np.array([True, False, False, True])}, "sampled or observed"),
    ],
)
def test_an_episode_that_contradicts_itself_is_not_packed(change: dict[str, Any], said: str) -> None:
    right = episode([1], [(1, 1), (1, 0)])
    assert right.episode is not None
    with pytest.raises(AssertionError, match=said):
        pack([replace(right, episode=replace(right.episode, **change))])


# ---- any episodes, against lists


def drawn_turns(least: int = 1) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=least, max_size=4)


PROMPTS = [[1, 2, 3], [1, 2], [4]]


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    """Groups of 1 to 3 episodes; a prompt may come again. Nothing that follows a prompt occurs twice."""
    found: list[Rollout] = []
    for prompt in draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4)):
        for turns in draw(st.lists(drawn_turns(), min_size=1, max_size=3)):
            found.append(episode(prompt, turns, first=100 * (len(found) + 1), rewards=range(1, len(turns) + 1)))
    return found


def sequence(rollout: Rollout) -> list[tuple[int, bool]]:
    """Each token and whether it was sampled, up to the last one that was."""
    assert rollout.episode is not None
    told = [(token, False) for token in rollout.prompt.token_ids]
    told += zip(rollout.token_ids, rollout.episode.sampled.tolist(), strict=True)
    while not told[-1][1]:
        told.pop()
    return told


@given(rollouts(), st.data())
def test_any_selection_of_packed_episodes_is_those_episodes_packed(found: list[Rollout], data: st.DataObject) -> None:
    batch = pack(found)
    told = [pair for rollout in found for pair in sequence(rollout)]
    assert batch.sampled is not None
    assert list(zip(batch.tokens.tolist(), batch.sampled.tolist(), strict=True)) == told
    order = data.draw(st.lists(st.sampled_from(range(len(found))), unique=True, min_size=1))
    picked, packed = batch.select(order), pack([found[i] for i in order])
    for name, tensor in vars(packed).items():
        selected = getattr(picked, name)
        assert selected is None if tensor is None else tensor.equal(selected), name
    scores = -batch.tokens[batch.sampled].float()
    parts = [(part, -batch.select(part).rollout_logprobs) for part in ([i] for i in reversed(range(len(found))))]  # type: ignore[operator]
    assert (-merge_scores(batch, parts)).equal(scores)


def read_before_each_target(inputs: PackedInputs) -> list[tuple[list[int], int]]:
    """What the model reads to predict each target, and the target."""
    keys = torch.arange(len(inputs.tokens)) if inputs.attended is None else inputs.attended
    borders, key_borders = inputs.borders.tolist(), inputs.key_borders.tolist()
    found = []
    for place, target in zip(inputs.predictors.tolist(), inputs.targets.tolist(), strict=True):
        span = next(b for b in range(len(borders) - 1) if borders[b] <= place < borders[b + 1])
        unread = borders[span + 1] - 1 - place
        read = keys[key_borders[span] : key_borders[span + 1] - unread]
        assert inputs.positions[read].tolist() == list(range(len(read)))
        found.append((inputs.tokens[read].tolist(), target))
    return found


@given(rollouts(), st.booleans())
def test_each_sampled_token_is_predicted_from_all_that_came_before_it(found: list[Rollout], shared: bool) -> None:
    batch = pack(found)
    inputs = packed_inputs(batch, CPU, share_prompts=shared)
    expected = []
    for rollout in found:
        told = sequence(rollout)
        expected += [([t for t, _ in told[:i]], token) for i, (token, own) in enumerate(told) if own]
    assert read_before_each_target(inputs) == expected
    runs = [len(run) for run in batch.prompt_runs()] if shared else [1]
    assert (inputs.attended is not None) == (max(runs) > 1)
    saved = sum(int(batch.prompt_lengths[run.start]) * (len(run) - 1) for run in batch.prompt_runs()) if shared else 0
    assert len(inputs.tokens) == len(batch.tokens) - saved


def test_what_is_observed_last_changes_nothing() -> None:
    one, other = (episode([1, 2], [(2, 1), (1, seen)]) for seen in (0, 5))
    for name, tensor in vars(pack([one])).items():
        found = getattr(pack([other]), name)
        assert found is None if tensor is None else tensor.equal(found), name


# ---- the model


def random_episodes(seed: int = 0) -> list[Rollout]:
    """Two groups of three episodes, of one to three turns, with random tokens."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, Turns]] = [
        (9, [(4, 3), (2, 2)]),
        (9, [(1, 1), (3, 4), (2, 0)]),
        (9, [(5, 0)]),
        (5, [(2, 6), (1, 0)]),
        (5, [(3, 1), (3, 1), (4, 1)]),
        (5, [(1, 0), (2, 3)]),
    ]
    prompts = {length: rng.integers(3, 500, length).tolist() for length, _ in shapes}
    found = [episode(prompts[length], turns) for length, turns in shapes]
    return [replace(one, token_ids=rng.integers(3, 500, len(one.token_ids)).tolist()) for one in found]


def plain_logprobs(lm: Any, found: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """From whole logits, padded, as transformers computes them: float [S, L], and bool [S, L] where a token is sampled.

    The first L of a sequence are its prompt's; the first column is nobody's.
    """
    told = [sequence(rollout) for rollout in found]
    longest = max(map(len, told))
    ids = torch.tensor([[t for t, _ in one] + [0] * (longest - len(one)) for one in told])
    mask = torch.tensor([[own for _, own in one] + [False] * (longest - len(one)) for one in told])
    attended = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in told])
    log_p = lm(ids, attention_mask=attended).logits.log_softmax(-1)
    of_next = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(told), 1), of_next], 1), mask


class OneRank:
    """An engine without DeepSpeed: gradients add up in the model, and no step is taken."""

    rank, world_size = 0, 1

    def __init__(self, model: Any, micro_batch_tokens: int) -> None:
        self.model = model
        self.config = SimpleNamespace(micro_batch_tokens=micro_batch_tokens)
        self.num_micro_batches = 0

    def release_gathered(self) -> None:
        pass

    def forward(self, micro_batches: Sequence[TrainBatch], pick: Any, *, share_prompts: bool) -> list[Tensor]:
        with torch.no_grad():
            return [pick(self.model(packed_inputs(m, CPU, share_prompts=share_prompts))) for m in micro_batches]

    def step(self, micro_batches: Sequence[TrainBatch], loss_fn: Any, *, share_prompts: bool) -> dict[str, float]:
        self.shared, self.num_micro_batches, total = share_prompts, len(micro_batches), 0.0
        for micro in micro_batches:
            loss, _ = loss_fn(self.model(packed_inputs(micro, CPU, share_prompts=share_prompts)), micro)
            loss.backward()
            total += loss.item()
        return {"loss": total, "skipped": 0.0}


@pytest.mark.parametrize("checkpointed", [0, 2], ids="{} checkpointed".format)
@pytest.mark.parametrize(("loss_type", "micro_batch_tokens"), [("dapo", 1000), ("grpo", 28)])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "whole"])
def test_loss_and_gradient_are_those_of_a_masked_padded_batch(
    tiny_model_dir: Path, shared: bool, loss_type: str, micro_batch_tokens: int, checkpointed: int
) -> None:
    found = random_episodes()
    if not shared:
        found = [found[i] for i in (0, 3, 1, 4, 2, 5)]
    model = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=8).train()
    if checkpointed:
        model.checkpoint_layers(checkpointed)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir).train()
    logprobs, mask = plain_logprobs(plain, found)

    generator = torch.Generator().manual_seed(1)
    num_sampled = int(mask.sum())
    advantages, moved = torch.randn(2, num_sampled, generator=generator)
    old, ref = logprobs[mask].detach() + 0.3 * moved, logprobs[mask].detach() - 0.2 * moved
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, math.nan, 1.0])  # one has none

    batch = pack(found).with_(advantages=advantages, old_logprobs=old, ref_logprobs=ref, rewards=rewards)
    algorithm = AlgorithmConfig(prompts_per_step=2, group_size=3, loss_type=loss_type, beta=0.1)  # type: ignore[arg-type]
    engine: Any = OneRank(model, micro_batch_tokens)
    learner = PolicyLearner(engine, algorithm, seed=0, max_completion_tokens=9)
    share = pickle.loads(pickle.dumps(learner.planner.plan_update(batch, 0).share(0)))
    metrics = learner.update(share)
    assert engine.shared == shared
    assert engine.num_micro_batches >= (1 if micro_batch_tokens > 999 else 3)
    assert share.steps[0].num_tokens == num_sampled - found[4].num_sampled, "it has no reward"

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask, flat)

    counted = mask & ~rewards.isnan()[:, None]
    ratio = (logprobs - padded(old)).exp()
    gain = torch.minimum(ratio * padded(advantages), ratio.clamp(0.8, 1.2) * padded(advantages))
    back = padded(ref) - logprobs
    kl = back.exp() - back - 1
    if algorithm.kl_bias_correction:
        kl = ratio * kl
    per_token = (0.1 * kl - gain) * counted
    per_sequence = per_token.sum(1) / counted.sum(1).clamp(min=1)
    expected = per_token.sum() / counted.sum() if loss_type == "dapo" else per_sequence.mean()
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    expected.backward()
    gradients = {name: p.grad for name, p in model.lm.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * scale, msg=name)


def test_log_probabilities_of_the_learner_and_of_a_reference_are_those_of_sampled_tokens(tiny_model_dir: Path) -> None:
    found = random_episodes()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        logprobs, mask = plain_logprobs(plain, found)
    model = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=8)
    scorer = FrozenScorer(model, token_budget=30, device=CPU)
    torch.testing.assert_close(scorer.score([pack(found)])[0], logprobs[mask], rtol=0, atol=1e-5)
    engine: Any = OneRank(model, 30)
    learner = PolicyLearner(engine, AlgorithmConfig(prompts_per_step=2, group_size=3), seed=0, max_completion_tokens=9)
    plan = learner.planner.plan_scoring(pack(found))
    scores = plan.merge([learner.score(plan.share(0))])
    torch.testing.assert_close(scores, logprobs[mask], rtol=0, atol=1e-5)


def test_a_critic_values_the_state_in_which_each_token_is_chosen(tiny_model_dir: Path) -> None:
    """The first token of a later turn is chosen after what was observed, not after the turn before."""
    found = random_episodes()[1]
    critic = load_scalar(str(tiny_model_dir), dtype=torch.float32, fresh_head="random").eval()
    told, asked = [t for t, _ in sequence(found)], [i for i, (_, own) in enumerate(sequence(found)) if own]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir).model
    hidden = plain(torch.tensor([told])).last_hidden_state[0]
    expected = critic.lm.get_submodule("score")(hidden)[:, 0][[i - 1 for i in asked]]
    torch.testing.assert_close(critic(packed_inputs(pack([found]), CPU)), expected, rtol=0, atol=1e-5)


def test_observations_cost_a_forward_and_no_decoding() -> None:
    batch = pack([episode([1, 2], [(2, 3), (4, 5), (1, 9)]), episode([3], [(7, 0)])])
    assert batch_spans(batch) == [(17, 17), (8, 8)]
    assert one_prefill_each(batch).tolist() == [7 - 2, 7], "later turns begin with a prefill, too"
    assert one_prefill_each(batch.with_(turns=None)) is batch.completion_lengths


def test_a_rank_is_sent_nothing_that_only_advantages_need(tiny_model_dir: Path) -> None:
    batch = pack(random_episodes())
    batch = batch.with_(advantages=torch.zeros(batch.num_completion_tokens))
    planner = PolicyLearner(
        OneRank(SimpleNamespace(lm=SimpleNamespace(config=SimpleNamespace(hidden_size=8))), 40),  # type: ignore[arg-type]
        AlgorithmConfig(prompts_per_step=2, group_size=3),
        seed=0,
        max_completion_tokens=9,
    ).planner
    rows = planner.plan_update(batch, 0).share(0).rows
    assert rows.turns is None and rows.turn_rewards is None
    assert rows.sampled is not None and rows.tail_lengths is not None
