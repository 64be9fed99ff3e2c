"""`rlhf chat` around a stream of tokens: what the model is asked, and what the terminal shows."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.chat import make_spec, talk
from rlhf.config import DataConfig, ModelConfig, RolloutConfig

ANSWER = "größe"


def conversation(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, lines: str, max_model_tokens: int = 512, **data: Any
) -> list[str]:
    """The prompts of a conversation in which every answer is the same, token by token."""
    prompts: list[str] = []

    def stream(prompt: list[int]) -> Iterator[list[int]]:
        prompts.append(tokenizer.decode(prompt))
        for token in [*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
            yield [token]

    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    talk(stream, tokenizer, DataConfig(train="", **data), max_model_tokens)
    return prompts


def rendered(tokenizer: Any, *contents: str, system: str = "") -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    before = [{"role": "system", "content": system}] if system else []
    return tokenizer.apply_chat_template([*before, *messages], tokenize=False, add_generation_prompt=True)


def test_the_model_is_asked_with_its_template_all_that_was_said_since_the_reset(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = conversation(monkeypatch, tiny_tokenizer, "hi\n\nmore\n/reset\nhi\n/quit\nno\n", system_prompt="Be brief.")
    first = rendered(tiny_tokenizer, "hi", system="Be brief.")
    assert asked == [first, rendered(tiny_tokenizer, "hi", ANSWER, "more", system="Be brief."), first]
    shown = capsys.readouterr().out
    assert shown.count(f"{ANSWER}\n") == 3 and "\ufffd" not in shown, "halves of a character wait for each other"


def test_the_end_of_the_input_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conversation(monkeypatch, tiny_tokenizer, "hi\n") == [rendered(tiny_tokenizer, "hi")]
    assert capsys.readouterr().out.endswith("> \n")


def test_what_is_too_long_for_the_model_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = len(tiny_tokenizer(rendered(tiny_tokenizer, "hi"), add_special_tokens=False)["input_ids"])
    assert conversation(monkeypatch, tiny_tokenizer, f"{'hello ' * 99}\nhi\n", limit) == []
    assert f"the model takes {limit}; /reset begins anew" in capsys.readouterr().out
    assert len(conversation(monkeypatch, tiny_tokenizer, f"{'hello ' * 99}\nhi\n", limit + 1)) == 1


def test_the_engine_samples_as_the_run_did_but_ends_answers_and_repeats_none(tiny_model_dir: Path) -> None:
    rollout = RolloutConfig(temperature=0.7, top_p=0.9, ignore_eos=True, max_num_seqs=64)
    spec = make_spec(ModelConfig(path=str(tiny_model_dir)), rollout, "cpu", None, 99)
    config = spec.config
    assert (config.temperature, config.top_p, config.max_completion_tokens) == (0.7, 0.9, 99)
    assert (config.ignore_eos, config.seed_requests, config.max_num_seqs) == (False, False, 1)
    assert make_spec(ModelConfig(path=str(tiny_model_dir)), rollout, "cpu", 0.1, 99).config.temperature == 0.1
