"""What reward functions give to answers known to be right, wrong or empty: tried before anything is sampled."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlhf.rewards.scoring import RewardFunctions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.batch import Prompt

# Columns that hold a row's right answer, by the names of public data sets; the first that there is counts.
REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "target", "reference", "final_answer", "label", "response")
REFERENCE, WRONG, EMPTY = "reference", "wrong", "empty"
NO_ANSWER = "I do not know."  # wrong where no other row has another answer

Given = dict[str, dict[str, float]]
"""By kind of answer and by function, what one row was given; NaN where the function abstained."""


def reference_column(columns: Collection[str]) -> str | None:
    """The column that holds the right answers, if one is named like that."""
    return next((name for name in REFERENCE_COLUMNS if name in columns), None)


def known_answers(prompts: Sequence["Prompt"], column: str | None) -> list[dict[str, str]]:
    """For each prompt an answer of every kind: what ``column`` holds, the next row's that differs, and none at all.

    A row without a text or a number in ``column`` has no reference.
    """
    references = [_reference(prompt, column) for prompt in prompts]
    answers = []
    for row, reference in enumerate(references):
        others = (text for text in references[row + 1 :] + references[:row] if text is not None and text != reference)
        known = {} if reference is None else {REFERENCE: reference}
        answers.append(known | {WRONG: next(others, NO_ANSWER), EMPTY: ""})
    return answers


def _reference(prompt: "Prompt", column: str | None) -> str | None:
    value = None if column is None else prompt.columns.get(column)
    return str(value) if isinstance(value, str | int | float) else None


def score_known_answers(
    functions: RewardFunctions,
    prompts: Sequence["Prompt"],
    column: str | None,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Given]:
    """What ``functions`` give to the known answers of each prompt, which are one group to them, as in a run.

    Raises as ``Scoring.result`` does.
    """
    known = known_answers(prompts, column)
    scorings = []
    for prompt, answers in zip(prompts, known, strict=True):
        texts = list(answers.values())
        ids: list[list[int]] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]  # type: ignore[misc]
        scorings.append(functions.submit([prompt] * len(texts), texts, ids))
    given: list[Given] = []
    for answers, scoring in zip(known, scorings, strict=True):
        scores = scoring.result()
        given.append({kind: {name: s[i] for name, s in scores.items()} for i, kind in enumerate(answers)})
    return given
