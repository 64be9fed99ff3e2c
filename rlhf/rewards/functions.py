"""Built-in reward functions (``built_in`` has all of them), chosen by name with ``reward.functions[i].path``.

They are called like any user's function (see ``loading``): with keywords, and only with the arguments they name.
``completions`` is S strings, or S chats: of one message, or an episode's; ``completion_ids`` is S lists of token ids; a
column such as ``answer`` has S values, where None makes the function abstain for that row. All return S values.
"""

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

Completion = str | list[dict[str, Any]]  # a text; or messages, of an episode also those that are not the model's
Values = list[float | None]

# A minus is a sign only if no word or digit precedes it: '5-3' ends in 3, '5 - -3' in -3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
JSON_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


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


def math_match(completions: Sequence[Completion], answer: Sequence[Any], timeout_s: int = 2) -> Values:
    r"""1 where the completion's final expression is mathematically equal to the answer, else 0: \frac12, 0.5 and 50%.

    By math-verify. The answer is LaTeX or a number, alone, or within text that marks it by $...$ or \boxed{}. An answer
    that cannot be parsed makes the function abstain. Parsing and comparing each end after ``timeout_s``, with 0.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        return parse(text, parsing_timeout=timeout_s)

    values: Values = []
    for completion, expected in zip(completions, answer, strict=True):
        text = "" if expected is None else str(expected).strip()
        is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        wanted = parsed(text if is_marked else f"${text}$") if text else []
        if not wanted:
            values.append(None)
        else:
            values.append(float(verify(wanted, parsed(completion_text(completion)), timeout_seconds=timeout_s)))
    return values


def json_schema(completions: Sequence[Completion], schema: Any) -> Values:
    """1 where the completion is JSON, bare or in one ```json fence, that satisfies ``schema``, else 0.

    ``schema``: one for all (in kwargs), or a column of them; objects, or JSON text. None abstains. References to other
    documents are not fetched. Raises ValueError for what is not a JSON schema.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    def validator(given: Any) -> Any:
        try:
            given = json.loads(given) if isinstance(given, str) else given
            kind = validator_for(given, default=Draft202012Validator)
            kind.check_schema(given)
        except (ValueError, TypeError, SchemaError) as error:
            raise ValueError(f"not a JSON schema: {str(given)[:80]!r}: {str(error).splitlines()[0]}") from error
        return kind(given, registry=Registry())  # an empty registry: nothing is fetched

    def satisfies(text: str, given: Any) -> float:
        checker = validator(given)
        fenced = JSON_FENCE.fullmatch(text.strip())
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse_constant)
            return float(checker.is_valid(value))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply to be what anybody asked for
            return 0.0

    schemas = schema if isinstance(schema, list) else [schema] * len(completions)
    return [
        None if given is None else satisfies(completion_text(completion), given)
        for completion, given in zip(completions, schemas, strict=True)
    ]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def repetition_penalty(completion_ids: Sequence[Sequence[int]], ngram_size: int = 4) -> Values:
    """The share of a completion's n-grams of tokens that occurred in it before, negated: in (-1, 0].

    (distinct / all) - 1 over its windows of ``ngram_size`` tokens; 0 for a completion that is shorter than one.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size} must be at least 1")

    def penalty(ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
        return len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0

    return [penalty(ids) for ids in completion_ids]
