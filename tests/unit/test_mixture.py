"""Several sources with weights, and curricula: exact proportions, the order of rows, and resuming anywhere."""

import json
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.validate import load_held_out, load_training
from rlhf.batch import Prompt, Rollout
from rlhf.config import Config
from rlhf.data.mixture import Mixture, Schedule
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import PromptReport, PromptSet
from rlhf.errors import CheckpointError, ConfigError, DataError
from rlhf.evaluation import Evaluation
from rlhf.recipes import load_config, to_yaml
from rlhf.rewards.total import Scores
from rlhf.tracking import source_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE = Path(__file__).parents[2] / "conf" / "grpo_tiny.yaml"


def prompt_set(name: str, num_prompts: int, **columns: list[Any]) -> PromptSet:
    texts, ids = [f"{name}{i}" for i in range(num_prompts)], [np.array([i], np.int32) for i in range(num_prompts)]
    return PromptSet(f"{name}.jsonl", texts, ids, None, columns, PromptReport(num_prompts, 0, 0, 1), name=name)


def mixture(weights: dict[str, float], sizes: dict[str, int], curriculum: str | None = None, **columns: Any) -> Mixture:
    return Mixture({name: prompt_set(name, size, **columns) for name, size in sizes.items()}, weights, curriculum)


@given(st.lists(st.sampled_from([0.1, 0.25, 0.3, 1, 2, 3, 7.5, 40]), min_size=1, max_size=7), st.integers(0, 2000))
def test_every_prefix_has_each_source_within_one_of_its_share(weights: list[float], length: int) -> None:
    schedule, counts = Schedule(weights), [0] * len(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    for position in range(length):
        source, drawn = schedule.at(position)
        assert drawn == counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(Fraction(str(weight)) / total * (position + 1) - count) < 1
    if length:
        assert Schedule(weights).at(length - 1) == schedule.at(length - 1), "found without what came before"


def test_a_batch_has_the_proportions_that_were_asked_for() -> None:
    stream = PromptStream(mixture({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 4, "b": 5, "c": 6}), shuffle=True, seed=0)
    for _ in range(20):
        sources = [prompt.source for prompt in stream.take(10)]
        assert [sources.count(name) for name in "abc"] == [7, 2, 1]


def test_each_source_has_epochs_of_its_own() -> None:
    stream = PromptStream(mixture({"a": 1, "b": 3}, {"a": 5, "b": 3}), shuffle=True, seed=0)
    taken = stream.take(40)
    assert [prompt.id for prompt in taken] == list(range(40))
    for name, size in (("a", 5), ("b", 3)):
        texts = [prompt.text for prompt in taken if prompt.source == name]
        epochs = [texts[start : start + size] for start in range(0, len(texts), size)]
        assert all(sorted(epoch) == [f"{name}{i}" for i in range(size)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "another order in another epoch"


@given(st.integers(0, 60), st.integers(0, 5), st.booleans())
def test_a_stream_resumes_exactly_where_it_was(position: int, seed: int, shuffle: bool) -> None:
    weights, sizes = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 7, "b": 2, "c": 11}
    levels = [3, 1, 2, 2, 0, 5, 5, 1, 9, 8, 8]
    sets = {name: prompt_set(name, size, level=levels[:size]) for name, size in sizes.items()}

    def start() -> PromptStream:
        return PromptStream(Mixture(sets, weights, "level"), shuffle=shuffle, seed=seed)

    whole = start()
    expected = whole.take(position + 30)
    first = start()
    first.take(position)
    again = start()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.take(30) == expected[position:]
    assert [start().at(prompt.id) for prompt in expected] == expected, "and any prompt is found by its id"


def test_another_mixture_is_not_resumed() -> None:
    sizes = {"a": 4, "b": 4}
    state = PromptStream(mixture({"a": 1, "b": 1}, sizes), shuffle=True, seed=0).state_dict()
    PromptStream(mixture({"a": 1, "b": 1}, sizes), shuffle=True, seed=0).load_state_dict(state)
    levels = {"level": [1, 2, 3, 4]}
    eased = PromptStream(mixture({"a": 1, "b": 1}, sizes, "level", **levels), shuffle=True, seed=0)
    others = [
        PromptStream(mixture({"a": 1, "b": 2}, sizes), shuffle=True, seed=0),
        PromptStream(mixture({"a": 1, "c": 1}, {"a": 4, "c": 4}), shuffle=True, seed=0),
        eased,
    ]
    for other in others:
        with pytest.raises(
            CheckpointError, match=r"does not fit data.mixture.a=a.jsonl, data.mixture.*fingerprint was"
        ):
            other.load_state_dict(state)
    levels = {"level": [1, 2, 4, 3]}
    with pytest.raises(CheckpointError, match="fingerprint was"):
        PromptStream(mixture({"a": 1, "b": 1}, sizes, "level", **levels), shuffle=True, seed=0).load_state_dict(
            eased.state_dict()
        )


@pytest.mark.parametrize("values", [[10, 1, 9, 1, 2, 1], ["10", "1", "9", "1", "2", "1.0"]])
def test_a_curriculum_sorts_the_first_epoch_and_leaves_ties_as_they_were(values: list[Any]) -> None:
    prompts = prompt_set("p", 6, level=values)
    stream = PromptStream(Mixture.of_one(prompts, "level"), shuffle=True, seed=2)
    epochs = [[prompt.text for prompt in stream.take(6)] for _ in range(3)]
    plain = PromptStream(prompts, shuffle=True, seed=2)
    usual = [[prompt.text for prompt in plain.take(6)] for _ in range(3)]
    levels = dict(zip(prompts.texts, map(float, values), strict=True))
    assert [levels[text] for text in epochs[0]] == [1, 1, 1, 2, 9, 10]
    assert epochs[0][:3] == [text for text in usual[0] if levels[text] == 1]
    assert epochs[1:] == usual[1:]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, r"^data.curriculum=level: data.train=p.jsonl has no such column \(its columns: none\)"),
        ({"level": [1, None]}, "a row has 'None'; a curriculum needs a finite number in every row"),
        ({"level": [1, "hard"]}, "a row has 'hard'"),
        ({"level": [1, float("nan")]}, "a row has 'nan'"),
        ({"level": [1, [2]]}, r"a row has '\[2\]'"),
    ],
)
def test_a_curriculum_without_numbers_is_refused(values: dict[str, list[Any]], said: str) -> None:
    prompts = PromptSet("p.jsonl", ["x", "y"], [np.array([1], np.int32)] * 2, None, values, PromptReport(2, 0, 0, 1))
    with pytest.raises(DataError, match=said):
        Mixture.of_one(prompts, "level")


def read(tmp_path: Path, *overrides: str) -> Config:
    for name in ("math", "code"):
        rows = [
            {"prompt": f"{name} {i}", "data_source": "mine"} if name == "code" else {"prompt": f"{name} {i}"}
            for i in range(5)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = f"{{math: {{path: {tmp_path / 'math.jsonl'}, weight: 3}}, code: {{path: {tmp_path / 'code.jsonl'}}}}}"
    return load_config(RECIPE, ["data.train=null", f"data.mixture={sources}", *overrides])


def test_rows_carry_the_name_of_their_source(tmp_path: Path, tiny_tokenizer: "PreTrainedTokenizerBase") -> None:
    config = read(tmp_path, "data.extra_eval={hard: task:phrases}", "data.mixture.code.weight=1")
    training = load_training(config, tiny_tokenizer)
    taken = PromptStream(training, shuffle=True, seed=0).take(8)
    assert [prompt.source for prompt in taken].count("math") == 6
    columns = {(prompt.source, prompt.columns["data_source"]) for prompt in taken}
    assert columns == {("math", "math"), ("code", "mine")}, "a column of that name in the data stays"
    assert [line.partition(":")[0] for line in training.summary()] == [
        "0.75 of the prompts are from math",
        "0.25 of the prompts are from code",
    ]
    held_out = load_held_out(config, tiny_tokenizer)
    assert {name: data.columns["data_source"][0] for name, data in held_out.items()} == {"": "eval", "hard": "hard"}


def test_one_source_has_no_such_column(tiny_tokenizer: "PreTrainedTokenizerBase") -> None:
    config = load_config(RECIPE)
    training = load_training(config, tiny_tokenizer)
    assert training.sets[""].columns == {} and training.fingerprint() == training.sets[""].fingerprint()
    assert load_held_out(config, tiny_tokenizer)[""].columns == {}


def test_a_recipe_with_a_mixture_is_read_back(tmp_path: Path) -> None:
    config = read(tmp_path)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train=x"], "data.train=x and data.mixture are both set"),
        (["data.mixture.math.weight=0"], r"data.mixture.math.weight=0.0 must lie in \(0, 1000000\]"),
        (["data.mixture.a/b={path: x}"], "data.mixture: 'a/b' names metrics reward/by_source/NAME"),
        (["data.mixture.more={weight: 2}"], "data.mixture.more.path: no value given"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, *overrides)


def test_rewards_by_source() -> None:
    sources, rewards = ["a", "a", "b", "b", "c", ""], [1.0, 0.0, 2.0, torch.nan, torch.nan, 9.0]
    rollouts = [
        Rollout(Prompt(0, [1], "p", columns={"data_source": s}, source=s), 0, [2], [0], "stop") for s in sources
    ]
    assert source_metrics(rollouts, torch.tensor(rewards)) == {"reward/by_source/a": 0.5, "reward/by_source/b": 2.0}
    evaluation = Evaluation(rollouts, Scores({"f": rewards}, {"f": 1.0}), num_samples=1)
    assert evaluation.by("data_source")["a"].metrics(None)["reward"] == 0.5
