"""A column or a row's key that a reward function cannot do without is missed before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.validate import check_rewards
from rlhf.config import Config
from rlhf.data.columns import first_lacking
from rlhf.data.prompts import PromptSet, load_prompts
from rlhf.errors import DataError
from rlhf.recipes import load_config

ROOT = Path(__file__).resolve().parents[2]
WITH = '{"prompt": "a", "answer": "1", "level": 2}\n'
NULL = '{"prompt": "b", "answer": null}\n'
WITHOUT = '{"prompt": "c", "level": 3}\n'


def test_the_first_row_without_a_key_is_found_by_column() -> None:
    rows: list[tuple[int, dict[str, Any]]] = [(1, {"a": 0, "b": None}), (3, {"a": 1}), (4, {"c": 2})]
    assert first_lacking(rows, ["a", "b", "c"]) == {"a": 4, "b": 3, "c": 1}
    assert first_lacking(rows[:2], ["a"]) == {}


@pytest.fixture
def load(tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> Any:
    def load(content: str, split: Any = "train", **data: Any) -> tuple[Config, PromptSet, str]:
        source = str(tmp_path / f"{split}.jsonl")
        Path(source).write_text(content)
        settings = [f"model.path={tiny_model_dir}", "data.task_args={}", "reward.functions=[{path: exact_match}]"]
        settings += [f"data.{split}={source}", *(f"data.{key}={json.dumps(value)}" for key, value in data.items())]
        config = load_config(ROOT / "conf" / "grpo_tiny.yaml", settings)
        return config, load_prompts(source, config.data, tiny_tokenizer, split=split, seed=0), source

    return load


def test_the_first_line_without_a_key_is_known_and_null_is_a_value(load: Any) -> None:
    _, prompts, _ = load(WITH + "\n" + NULL + WITHOUT + WITHOUT)
    assert prompts.lacking == {"answer": 4, "level": 3}
    assert prompts.columns == {"answer": ["1", None, None, None], "level": [2, None, 3, 3]}
    assert load(WITH + NULL)[1].lacking == {"level": 2}


def test_a_line_without_a_needed_key_is_an_error_in_train(load: Any) -> None:
    config, prompts, source = load(WITH + NULL + WITHOUT)
    with pytest.raises(DataError) as caught:
        check_rewards(config, {"data.train": prompts})
    assert str(caught.value) == (
        f'data.train={source}: line 3 has no "answer", which reward function exact_match needs; add it, or null where '
        "the function may abstain"
    )
    config, prompts, _ = load(WITH + NULL)
    check_rewards(config, {"data.train": prompts})


def test_and_in_eval_within_its_size(load: Any) -> None:
    config, train, _ = load(WITH)
    _, held_out, source = load(WITH + WITHOUT, "eval")
    with pytest.raises(DataError) as caught:
        check_rewards(config, {"data.train": train, "data.eval": held_out})
    assert str(caught.value).startswith(f'data.eval={source}: line 2 has no "answer"')
    check_rewards(config, {"data.train": train, "data.eval": load(WITH + WITHOUT, "eval", eval_size=1)[1]})


def test_a_column_that_no_row_has_is_an_error_too(load: Any) -> None:
    config, train, _ = load(WITH)
    _, held_out, source = load('{"prompt": "a", "solution": 1}\n', "eval")
    with pytest.raises(DataError) as caught:
        check_rewards(config, {"data.train": train, "data.eval": held_out})
    assert str(caught.value) == (
        f'data.eval={source}: has no column "answer", which reward function exact_match needs (its columns: solution); '
        "rename one, or set it in kwargs"
    )
