"""The built-in reward functions by name."""

from collections.abc import Callable
from typing import Any

from rlhf.rewards.code import python_tests
from rlhf.rewards.functions import (
    contains_answer,
    even_tokens,
    exact_match,
    format_regex,
    json_schema,
    length_penalty,
    math_match,
    number_match,
    repetition_penalty,
)
from rlhf.rewards.judge import llm_judge

BUILT_IN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        exact_match,
        contains_answer,
        number_match,
        math_match,
        even_tokens,
        length_penalty,
        repetition_penalty,
        format_regex,
        json_schema,
        python_tests,
        llm_judge,
    )
}
