"""One way from chats to text: the template's arguments, the date it is told, and BOS once."""

import inspect
from datetime import datetime
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.config import DataConfig
from rlhf.data.chat import RESERVED, answer_tokens, check_template_kwargs, drop_second_bos, render_chat
from rlhf.errors import ConfigError

CHAT = [{"role": "user", "content": "hi"}]
DATED = (
    "{% macro today() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}"
    "{% if strftime_now is defined %}{{ today() }}: {% endif %}{{ messages[0].content }}"
    "{% if add_generation_prompt %}{{ '' if enable_thinking is false else '<think>' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model_dir: Any) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = DATED
    return tokenizer


def test_a_template_is_told_the_run_s_date(tokenizer: PreTrainedTokenizerBase) -> None:
    assert render_chat(tokenizer, CHAT, date="2020-02-01") == "01 Feb 2020: hi"
    days = {datetime.now().strftime("%d %b %Y: hi")}
    today = render_chat(tokenizer, CHAT, date=None)
    assert today in days | {datetime.now().strftime("%d %b %Y: hi")}, "midnight may come between"


def test_a_template_gets_its_arguments(tokenizer: PreTrainedTokenizerBase) -> None:
    def prompt(**kwargs: Any) -> str:
        check_template_kwargs(kwargs, tokenizer)
        return render_chat(tokenizer, CHAT, date="2020-02-01", add_generation_prompt=True, kwargs=kwargs)

    assert prompt() == "01 Feb 2020: hi<think>"
    assert prompt(enable_thinking=False) == "01 Feb 2020: hi"


def test_every_argument_of_transformers_is_reserved_or_meant_for_templates() -> None:
    passed = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    passed |= {*inspect.signature(render_jinja_template).parameters}
    assert passed - RESERVED == {"self", "kwargs", "tools", "documents"}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_kwarg_that_collides_is_an_error(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=rf"data\.chat_template_kwargs\.{name} collides with"):
        check_template_kwargs({name: 1}, tokenizer)


def test_the_date_has_a_key_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"strftime_now is what data\.date sets; use that"):
        check_template_kwargs({"strftime_now": "x"}, tokenizer)
    for wrong in ("31.1.2026", "today", "2026-02-30", "2026-1-5", ""):
        with pytest.raises(ConfigError, match=rf"data\.date={wrong} is not a date; write it as YYYY-MM-DD"):
            DataConfig(date=wrong)


def test_a_kwarg_that_the_template_never_reads_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"enable_thinkin: the chat template of model\.path never reads"):
        check_template_kwargs({"enable_thinkin": False}, tokenizer)


@pytest.mark.parametrize(("ids", "expected"), [([1, 1, 5], [1, 5]), ([1, 5, 1], [1, 5, 1]), ([1], [1]), ([5], [5])])
def test_one_bos_is_enough(tokenizer: PreTrainedTokenizerBase, ids: list[int], expected: list[int]) -> None:
    assert tokenizer.bos_token_id == 1
    assert drop_second_bos(ids, tokenizer) == expected
    tokenizer.bos_token = None
    assert drop_second_bos(ids, tokenizer) == ids


def test_a_reward_model_reads_the_same_date_and_one_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d') }} {{ messages[-1].content }}"
    assert tokenizer.decode(answer_tokens(tokenizer, CHAT, "yes", date="2020-02-01")) == "01 yes"
    adds_bos = AutoTokenizer.from_pretrained(tokenizer.name_or_path, add_bos_token=True)
    adds_bos.chat_template = "<bos>{{ messages[-1].content }}"
    assert adds_bos.decode(answer_tokens(adds_bos, CHAT, " yes")) == "<bos> yes"
    ids = answer_tokens(adds_bos, "<bos>hi", " yes")
    assert ids == answer_tokens(adds_bos, "hi", " yes")
    assert ids.count(1) == 1
