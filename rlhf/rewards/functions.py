"""Built-in reward functions, chosen by name with ``reward.functions[i].path``.

They are called like any user's function (see ``loading``): with keywords, and only with the arguments they name.
``completions`` is S strings, or S chats: of one message, or an episode's; ``completion_ids`` is S lists of token ids; a
column such as ``answer`` has S values, where None makes the function abstain for that row. All return S values.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

Completion = str | list[dict[str, Any]]  # a text; or messages, of an episode also those that are not the model's
Values = list[float | None]

# A minus is a sign only if no word or digit precedes it: '5-3' ends in 3, '5 - -3' in -3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or what the model said last; others may have spoken after it in an episode."""
    if isinstance(completion, str):
        return completion
    return next(message["content"] for message in reversed(completion) if message["role"] == "assistant")


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``: '1,234.50 apples.' gives 1234.50. None if there is no digit."""
    numbers = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def exact_match(completions: Sequence[Completion], answer: Sequence[Any]) -> Values:
    """1 where the completion is the answer, ignoring surrounding whitespace, else 0."""
    return [
        None if expected is None else float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def contains_answer(completions: Sequence[Completion], answer: Sequence[Any]) -> Values:
    """1 where the answer occurs in the completion as whole words ('7' is not in '17'), else 0."""

    def contains(text: str, expected: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text) is not None

    return [
        None if expected is None else float(contains(completion_text(completion), str(expected).strip()))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def number_match(completions: Sequence[Completion], answer: Sequence[Any], tolerance: float = 0.0) -> Values:
    """1 where the completion's last number equals the answer's last number within ``tolerance``, else 0.

    '1,000', '1000' and '1000.0' are the same number. Raises ValueError if an answer contains no number.
    """

    def match(text: str, expected: Any) -> float:
        wanted, found = last_number(str(expected)), last_number(text)
        if wanted is None:
            raise ValueError(f"answer {expected!r} contains no number")
        if found is None:
            return 0.0
        return float(found == wanted or (tolerance > 0 and abs(found - wanted) <= Decimal(str(tolerance))))

    return [
        None if expected is None else match(completion_text(completion), expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def even_tokens(completion_ids: Sequence[Sequence[int]]) -> Values:
    """The fraction of a completion's token ids that are even: smooth, and learnable without any language."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def length_penalty(completion_ids: Sequence[Sequence[int]], max_tokens: int, buffer_tokens: int) -> Values:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-1, 0], for a length of L tokens.

    0 while L <= max_tokens - buffer_tokens; then (max_tokens - buffer_tokens - L) / buffer_tokens; -1 past max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be from 1 to max_tokens={max_tokens}")
    free = max_tokens - buffer_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / buffer_tokens)) for ids in completion_ids]


def format_regex(completions: Sequence[Completion], regex: str) -> Values:
    """1 where the whole stripped completion matches ``regex`` ('.' matches newlines too), else 0."""
    pattern = re.compile(regex, re.DOTALL)
    return [float(pattern.fullmatch(completion_text(completion).strip()) is not None) for completion in completions]


BUILT_IN: dict[str, Callable[..., Values]] = {
    function.__name__: function
    for function in (exact_match, contains_answer, number_match, even_tokens, length_penalty, format_regex)
}
