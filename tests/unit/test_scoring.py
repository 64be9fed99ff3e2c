"""Scores of many groups: divided among replicas, joined again, each group's own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.cluster import reward_weights
from actors.proxies import RewardGroup, divide
from actors.scorers import RewardActor
from benchmarks.bench_learner import ragged_batch
from rlhf.batch import Episode, Prompt, Rollout, TrainBatch
from rlhf.config import RewardFunctionConfig
from rlhf.errors import RewardError
from rlhf.models.loading import load_policy, load_tokenizer
from rlhf.models.scorer import FrozenScorer
from rlhf.recipes import load_config
from rlhf.rewards import RewardFunction, RewardFunctions
from rlhf.rewards.model import RewardModel
from tests.fakes import Done

CONF = Path(__file__).resolve().parents[2] / "conf"


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_every_item_goes_to_one_replica_in_order(items: list[int], count: int) -> None:
    divided = divide(items, count)
    assert [item for share in divided for item in share] == items
    assert len(divided) <= count
    assert all(divided) and (not divided or max(map(len, divided)) - min(map(len, divided)) <= 1)


WEIGHTS = {"right": 1.0, "short": 0.5, "model": 2.0, "environment": 1.0}


class Replicas:
    """One role's actors, without any: each completion's score is its only token."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        self.names, self.count = names, count
        self.groups: list[list[int]] = []

    def score(self, groups: Sequence[Sequence[Rollout]]) -> Done[list[dict[str, list[float]]]]:
        tokens = [[rollout.token_ids[0] for rollout in group] for group in groups]
        self.groups += tokens
        return Done([{name: [float(token) for token in group] for name in self.names} for group in tokens])


def reward_of(*scorers: Replicas, environment: bool = False) -> RewardGroup:
    names = [name for scorer in scorers for name in scorer.names] + (["environment"] if environment else [])
    return RewardGroup(scorers, {name: WEIGHTS[name] for name in names})  # type: ignore[arg-type]


def said(*tokens: int) -> list[Rollout]:
    return [Rollout(Prompt(0, [1], ""), 0, [token], np.zeros(1, np.int32), "stop") for token in tokens]


def episode(token: int, *turn_rewards: float, reward: float) -> Rollout:
    lengths = [1] * len(turn_rewards)
    told = Episode(np.ones(len(lengths), bool), lengths, list(turn_rewards), reward, "done", [], {})
    return Rollout(Prompt(0, [1], ""), 0, [token] * len(lengths), np.zeros(len(lengths), np.int32), "stop", None, told)


def test_an_environment_adds_what_it_gave_for_turns_and_at_the_end() -> None:
    groups = [[episode(1, 0.5, -0.25, reward=2.0), episode(3, 0.0, reward=0.0)]]
    (scores,) = reward_of(Replicas(["right"], 1), environment=True).score_groups(groups).result()
    assert scores.given == {"right": [1.0, 3.0], "environment": [2.25, 0.0]}
    assert scores.rewards.tolist() == [3.25, 3.0]
    (alone,) = reward_of(environment=True).score_groups(groups).result()
    assert alone.rewards.tolist() == [2.25, 0.0]


def test_tools_alone_give_no_reward() -> None:
    config = load_config(CONF / "guess_smollm2.yaml")
    assert config.environment is not None
    assert reward_weights(config) == {"environment": 1.0}
    function = RewardFunctionConfig("exact_match", weight=0.5)
    tools = replace(config.environment, path=None, tools=["calc.py:calculate"])
    config = replace(config, environment=tools, reward=replace(config.reward, functions=[function]))
    assert reward_weights(config) == {"exact_match": 0.5}


def test_a_failed_episode_is_seen_by_no_scorer_and_has_no_reward_from_anybody() -> None:
    failed = episode(9, 0.0, reward=math.nan)
    groups = [[failed, episode(2, 0.0, reward=1.0)], [failed, failed], [episode(4, 0.0, reward=3.0), failed]]
    functions = Replicas(["right"], 1)
    given = [scores.given for scores in reward_of(functions, environment=True).score_groups(groups).result()]
    assert functions.groups == [[2], [4]]
    nan = math.nan
    expected = [([nan, 2.0], [nan, 1.0]), ([nan, nan], [nan, nan]), ([4.0, nan], [3.0, nan])]
    assert str(given) == str([{"right": right, "environment": own} for right, own in expected])
    whole = reward_of(Replicas(["right"], 2), environment=True).score([failed, *groups[0]]).result()
    assert str(whole.rewards.tolist()) == "[nan, nan, 3.0]"
    nobody = reward_of(Replicas(["right"], 2), environment=True).score([failed]).result()
    assert str(nobody.given) == "{'right': [nan], 'environment': [nan]}"


def test_functions_and_models_join_group_by_group() -> None:
    groups = [said(1, 2), said(3)]
    first, second = reward_of(Replicas(["right", "short"], 1), Replicas(["model"], 2)).score_groups(groups).result()
    assert first.given == {"right": [1.0, 2.0], "short": [1.0, 2.0], "model": [1.0, 2.0]}
    assert first.rewards.tolist() == [3.5, 7.0]
    assert second.given == {"right": [3.0], "short": [3.0], "model": [3.0]}


def test_completions_that_are_no_group_are_divided_among_each_roles_replicas() -> None:
    rollouts = said(1, 2, 3, 4, 5)
    functions, models = Replicas(["right"], 1), Replicas(["model"], 2)
    scores = reward_of(functions, models).score(rollouts).result()
    assert scores.given == {"right": [1.0, 2.0, 3.0, 4.0, 5.0], "model": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert functions.groups == [[1, 2, 3, 4, 5]]
    assert models.groups == [[1, 2], [3, 4, 5]]


def test_a_frozen_model_scores_each_batch_as_if_it_came_alone(tiny_model_dir) -> None:
    model = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)
    scorer = FrozenScorer(model, token_budget=64, device=torch.device("cpu"))  # several micro-batches each
    batches = [ragged_batch(n, prompt_tokens=5, median=12, longest=24, vocab=500) for n in (3, 8, 1)]
    together = scorer.score(batches)
    assert [len(scores) for scores in together] == [batch.num_completion_tokens for batch in batches]
    for batch, scores in zip(batches, together, strict=True):
        assert torch.equal(scores, scorer.score([batch])[0])


def test_a_reward_model_reads_a_prompt_with_its_own_template_the_date_and_the_end(tiny_model_dir, monkeypatch) -> None:
    read: list[list[int]] = []

    def score(self: FrozenScorer, batches: Sequence[TrainBatch]) -> list[torch.Tensor]:
        for batch in batches:
            sequences = batch.tokens.split((batch.prompt_lengths + 1).tolist())
            read.extend(sequence[:-1].tolist() for sequence in sequences)
        return [torch.zeros(len(batch.prompt_lengths)) for batch in batches]

    def rollout(prompt: Prompt) -> Rollout:
        return Rollout(prompt, 0, [7], np.zeros(1, np.int32), "stop")

    monkeypatch.setattr(FrozenScorer, "score", score)
    messages = [{"role": "user", "content": "hi"}]
    chat, plain = rollout(Prompt(0, [5], "as the policy reads it", messages)), rollout(Prompt(1, [5], "2 + 2 ="))
    for max_tokens, kept in ((60, slice(None)), (3, slice(-3, None))):
        model = RewardModel(
            str(tiny_model_dir),
            torch.nn.Identity(),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            token_budget=64,
            device=torch.device("cpu"),
            date="2001-02-03",
        )
        model.tokenizer.chat_template = "{{ strftime_now('%Y') }} {{ messages[0].content }}: {{ messages[1].content }}"
        read.clear()
        assert model.score([[chat], [plain, plain]], [["yes"], [" 4", " 5"]]) == [[0.0], [0.0, 0.0]]
        texts = ["2001 hi: yes", "2 + 2 = 4", "2 + 2 = 5"]
        assert read == [model.tokenizer(text)["input_ids"][kept] for text in texts]


def test_a_reward_model_that_gives_no_number_is_named(tiny_model_dir, monkeypatch) -> None:
    path = str(tiny_model_dir)
    model = RewardModel(path, torch.nn.Identity(), max_tokens=8, token_budget=64, device=torch.device("cpu"))  # type: ignore[arg-type]
    for bad in (torch.nan, torch.inf):
        scores = [torch.tensor([0.5, 1.0]), torch.tensor([2.0, bad])]
        monkeypatch.setattr(FrozenScorer, "score", lambda self, batches, scores=scores: scores)
        with pytest.raises(
            RewardError, match=rf"^reward\.model\.path={path}: it gave {bad} for a completion; look for"
        ):
            model.score_tokens([[[1, 2], [3]], [[4], [5]]])
    monkeypatch.setattr(FrozenScorer, "score", lambda self, batches: [torch.tensor([0.5, 1.0])])
    assert model.score_tokens([[[1, 2], [3]]]) == [[0.5, 1.0]]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_scorer_s_tokenizers_are_trusted_as_all_are(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, trusted: bool
) -> None:
    asked: list[tuple[str, bool]] = []

    def load(path: str, *, trust_remote_code: bool = False) -> None:
        asked.append((path, trust_remote_code))

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    overrides = [f"model.path={tiny_model_dir}", f"model.trust_remote_code={str(trusted).lower()}"]
    config = load_config(CONF / "grpo_tiny.yaml", overrides)
    load_tokenizer(config.model)
    limits: dict[str, Any] = {"max_tokens": 8, "token_budget": 64, "device": torch.device("cpu")}
    RewardModel("r", torch.nn.Identity(), **limits, trust_remote_code=trusted)  # type: ignore[arg-type]
    assert asked == [(str(tiny_model_dir), trusted), ("r", trusted)]


def in_environment(messages: list[dict[str, Any]], **notes: Any) -> Rollout:
    """An episode of two sampled tokens, 4 and 6, and an observed one between them."""
    told = Episode(np.array([True, False, True]), [1, 1], [0.5, 0.0], 1.0, "done", messages, notes)
    prompt = Prompt(0, [1], "as rendered", [{"role": "user", "content": "hi"}], {"answer": "7"})
    return Rollout(prompt, 0, [4, 5, 6], np.zeros(2, np.int32), "stop", None, told)


SAID = [
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
]


def test_reward_functions_get_an_episode_s_messages_its_sampled_tokens_and_its_notes(monkeypatch) -> None:
    seen: list[dict[str, Any]] = []

    async def spy(**arguments: Any) -> list[float]:
        seen.append(arguments)
        return [2.0] * len(arguments["prompts"])

    actor = RewardActor(None)  # type: ignore[arg-type]
    actor._functions = RewardFunctions([RewardFunction("spy", 1.0, spy, "spy")], timeout_s=5)
    actor._decoder = None  # type: ignore[assignment]
    group = [in_environment(SAID, guesses=3), in_environment(SAID[:1])]
    assert actor.score([group]) == [{"spy": [2.0, 2.0]}]
    assert seen == [
        {
            "prompts": [[{"role": "user", "content": "hi"}]] * 2,
            "completions": [SAID, SAID[:1]],
            "completion_ids": [[4, 6]] * 2,
            "answer": ["7", "7"],
            "guesses": [3, None],
        }
    ]
    for name in ("answer", "completions"):
        with pytest.raises(RewardError, match=rf"chat\.notes\['{name}'\] would hide what reward functions get"):
            actor.score([[in_environment(SAID, **{name: 1})]])


def test_a_reward_model_reads_the_whole_conversation(tiny_model_dir, monkeypatch) -> None:
    read: list[list[int]] = []

    def score(self: FrozenScorer, batches: Sequence[TrainBatch]) -> list[torch.Tensor]:
        read.extend(batch.tokens[:-1].tolist() for batch in batches)
        return [torch.zeros(1) for _ in batches]

    monkeypatch.setattr(FrozenScorer, "score", score)
    path, device = str(tiny_model_dir), torch.device("cpu")
    model = RewardModel(path, torch.nn.Identity(), max_tokens=60, token_budget=64, device=device)  # type: ignore[arg-type]
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }} {% endfor %}"
    model.score([[in_environment(SAID)]], [[SAID]])
    assert read == [model.tokenizer("uhi aa ub ac ", add_special_tokens=False)["input_ids"]]
    model.tokenizer.chat_template = "{{ raise_exception('no tools') }}"
    with pytest.raises(RewardError) as caught:
        model.score([[in_environment(SAID)]], [[SAID]])
    assert str(caught.value) == (
        f"reward.model.path={path}: its chat template cannot render what followed prompt 0 (assistant, user, "
        "assistant): TemplateError: no tools; use a model whose template can"
    )
