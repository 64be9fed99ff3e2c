"""Built-in tasks: deterministic, disjoint splits, right answers, errors that name the argument."""

import re
from typing import Any

import pytest

from rlhf.data.corpus import passages
from rlhf.data.tasks import TASKS, make_task, task_rows
from rlhf.environments.builtin.calculator import calculate
from rlhf.errors import ConfigError


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(name: str) -> None:
    rows = task_rows(name, {"num_rows": 50}, split="train", seed=1)
    assert len(rows) == 50
    assert rows == task_rows(name, {"num_rows": 50}, split="train", seed=1)
    assert rows != task_rows(name, {"num_rows": 50}, split="train", seed=2)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("name", "split", "row"),
    [
        ("arithmetic", "train", {"prompt": user("What is 6 - 13? Answer with a number."), "answer": "-7"}),
        ("arithmetic", "eval", {"prompt": user("What is 20 - 18? Answer with a number."), "answer": "2"}),
        ("phrases", "train", {"prompt": "engine cloud stone silver"}),
        (
            "python",
            "train",
            {
                "prompt": user("How many of the integers from 13 to 1803 are divisible by 72 or end in 7?"),
                "answer": "204",
            },
        ),
        ("search", "train", {"prompt": user("What is the year of birth of the mayor of Wesmouth?"), "answer": "1925"}),
        ("calculator", "train", {"prompt": user("What is 32 * (181 * (333 - 797))?"), "answer": "-2687488"}),
        (
            "guess",
            "train",
            {
                "prompt": user("Game 268226: guess my number, from 1 to 9. You have 4 guesses."),
                "secret": 2,
                "num_guesses": 4,
            },
        ),
        (
            "sort_words",
            "train",
            {
                "prompt": user(
                    "Sort these words alphabetically: desert, violin, eagle, basket. Answer with the words only, comma "
                    "separated."
                ),
                "answer": "basket, desert, eagle, violin",
            },
        ),
    ],
)
def test_rows_stay_as_they_are_so_that_runs_can_be_resumed_and_compared(name: str, split: Any, row: Any) -> None:
    assert task_rows(name, {}, split=split, seed=1)[0] == row


@pytest.mark.parametrize("name", sorted(TASKS))
def test_splits_share_no_prompt_even_under_different_seeds(name: str) -> None:
    train = {str(row["prompt"]) for row in task_rows(name, {}, split="train", seed=1)}
    held_out = {str(row["prompt"]) for seed in (1, 2) for row in task_rows(name, {}, split="eval", seed=seed)}
    assert train and held_out
    assert not train & held_out


def test_rows_are_distinct_and_a_small_task_gives_all_it_has() -> None:
    args = {"max_operand": 4, "operations": ["+"]}
    splits = [task_rows("arithmetic", args, split=split, seed=0) for split in ("train", "eval")]
    assert sum(len(rows) for rows in splits) == 25  # 5 x 5 pairs of operands


def test_the_calculator_s_answers_are_those_of_its_tool() -> None:
    rows = task_rows("calculator", {"num_rows": 200, "num_operands": 6}, split="train", seed=0)
    for row in rows:
        asked = row["prompt"][0]["content"].removeprefix("What is ").removesuffix("?")
        assert calculate(asked) == row["answer"]
        assert len(re.findall(r"\d+", asked)) == 6


PROGRAMS = {
    r"How many primes are there from (\d+) to (\d+)": lambda first, last: sum(
        n > 1 and all(n % d for d in range(2, n)) for n in range(first, last + 1)
    ),
    r"What is the sum of the digits of (\d+) \*\* (\d+)": lambda factor, exponent: sum(map(int, str(factor**exponent))),
    r"How many of the integers from (\d+) to (\d+) are divisible by (\d+) or end in 7": lambda first, last, divisor: (
        len([n for n in range(first, last + 1) if n % divisor == 0 or str(n).endswith("7")])
    ),
    r"What is the remainder of (\d+) \*\* (\d+) divided by (\d+)": lambda base, exponent, divisor: (
        base**exponent % divisor
    ),
}


def test_programs_have_the_right_answers_of_every_kind() -> None:
    asked = set()
    for row in task_rows("python", {"largest": 200, "num_rows": 100}, split="train", seed=0):
        text = row["prompt"][0]["content"].removesuffix("?")
        ((pattern, numbers),) = [(p, found.groups()) for p in PROGRAMS if (found := re.fullmatch(p, text))]
        assert row["answer"] == str(PROGRAMS[pattern](*map(int, numbers)))
        asked.add(pattern)
    assert len(asked) == 4


def looked_up(known: str) -> str:
    """The title of the passage about ``known``, by reading the corpus as text."""
    if by_mayor := re.fullmatch(r"the mayor of (.*)", known):
        return re.search(r"The mayor of .* is (.*)\.", passages()[looked_up(by_mayor[1])])[1]  # type: ignore[index]
    if by_birth := re.fullmatch(r"the town where (.*) was born", known):
        return re.search(r"was born in (\w+) in", passages()[looked_up(by_birth[1])])[1]  # type: ignore[index]
    return known


@pytest.mark.parametrize("num_hops", [1, 2, 3, 4])
def test_what_a_search_asks_is_in_the_corpus_as_many_passages_away(num_hops: int) -> None:
    rows = task_rows("search", {"num_hops": num_hops, "num_rows": 100}, split="train", seed=0)
    for row in rows:
        kind, known = re.fullmatch(
            r"What is the (founding year|year of birth) of (.*)\?", row["prompt"][0]["content"]
        ).groups()  # type: ignore[union-attr]
        assert known.count("the mayor of") + known.count("the town where") == num_hops - 1
        said = {
            "year of birth": rf"was born in \w+ in {row['answer']}\.",
            "founding year": f"founded in {row['answer']}\\.",
        }
        assert re.search(said[kind], passages()[looked_up(known)])
    assert len({row["prompt"][0]["content"].split()[3] for row in rows}) == 2


def test_the_corpus_is_the_same_for_all() -> None:
    about = passages()
    assert len(about) == 800
    assert (
        about["Halton"]
        == "Halton is a town on the river Brede. It was founded in 1515. The mayor of Halton is Boris Corwin."
    )
    assert about["Boris Corwin"].startswith("Boris Corwin, a ")


def test_a_task_gives_as_many_rows_as_it_says() -> None:
    assert len(task_rows("phrases", {}, split="train", seed=0)) == 1000


def test_max_rows_overrides_num_rows() -> None:
    assert len(task_rows("phrases", {"num_rows": 5}, split="eval", seed=0, max_rows=7)) == 7


def test_arithmetic_answers_are_right() -> None:
    for row in task_rows("arithmetic", {"operations": ["+", "-", "*"], "max_operand": 30}, split="train", seed=0):
        (message,) = row["prompt"]
        question = message["content"].removeprefix("What is ").removesuffix("? Answer with a number.")
        assert row["answer"] == str(eval(question))


def test_sort_words_answers_are_right() -> None:
    for row in task_rows("sort_words", {"num_words": 3}, split="train", seed=0):
        words = row["prompt"][0]["content"].split(": ")[1].split(". ")[0].split(", ")
        assert row["answer"] == ", ".join(sorted(words))
        assert len(words) == 3


def test_phrases_are_plain_prompts_of_the_asked_length() -> None:
    rows = task_rows("phrases", {"num_words": 2, "num_rows": 10}, split="train", seed=0)
    assert all(isinstance(row["prompt"], str) and len(row["prompt"].split()) == 2 for row in rows)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("arithmetic", {"max_operand": 1, "num_rows": 1, "operations": ("*",)}),
        ("phrases", {"num_words": 1}),
        ("sort_words", {"num_words": 2}),
        ("sort_words", {"num_words": 51}),
        ("guess", {"largest": 1, "num_guesses": 1}),
        ("calculator", {"max_operand": 1, "num_operands": 2}),
        ("calculator", {"num_operands": 8}),
    ],
)
def test_arguments_may_take_their_extreme_values(name: str, args: dict[str, Any]) -> None:
    assert len(task_rows(name, args, split="train", seed=0, max_rows=1)) == 1


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chess", {}, "task:chess does not exist; the tasks are arithmetic, calculator, guess, phrases"),
        (
            "arithmetic",
            {"max_operant": 3},
            "data.task_args.max_operant is not an argument of task:arithmetic; it has num_rows",
        ),
        ("arithmetic", {"max_operand": 0}, "data.task_args.max_operand=0 must be an integer at least 1"),
        ("arithmetic", {"max_operand": "9"}, "data.task_args.max_operand='9' must be an integer"),
        ("arithmetic", {"num_rows": True}, "data.task_args.num_rows=True must be an integer at least 1"),
        (
            "arithmetic",
            {"operations": ["/"]},
            "data.task_args.operations=['/'] must be a list of some of '+', '-', '*'",
        ),
        ("arithmetic", {"operations": []}, "data.task_args.operations=[]"),
        ("arithmetic", {"operations": "+-"}, "data.task_args.operations='+-' must be a list"),
        ("arithmetic", {"operations": 3}, "data.task_args.operations=3 must be a list"),
        ("arithmetic", {"operations": [["+"]]}, "data.task_args.operations=[['+']] must be a list"),
        ("phrases", {"num_words": 0}, "data.task_args.num_words=0"),
        ("sort_words", {"num_words": 1}, "data.task_args.num_words=1 must be an integer from 2 to 51"),
        ("sort_words", {"num_words": 99}, "data.task_args.num_words=99 must be an integer from 2 to"),
        ("guess", {"largest": 0}, "data.task_args.largest=0 must be an integer at least 1"),
        ("guess", {"num_guesses": 0}, "data.task_args.num_guesses=0 must be an integer at least 1"),
        ("guess", {"num_rows": 0}, "data.task_args.num_rows=0 must be an integer at least 1"),
        ("calculator", {"max_operand": 0}, "data.task_args.max_operand=0 must be an integer at least 1"),
        ("calculator", {"num_operands": 1}, "data.task_args.num_operands=1 must be an integer from 2 to 8"),
        ("calculator", {"num_operands": 9}, "data.task_args.num_operands=9 must be an integer from 2 to 8"),
    ],
)
def test_errors_name_the_argument_and_what_would_work(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task(name, args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_split_without_a_prompt_is_an_error() -> None:
    with pytest.raises(ConfigError, match="leave task:arithmetic no prompts for the eval split; allow more distinct"):
        task_rows("arithmetic", {"max_operand": 1, "operations": ["*"]}, split="eval", seed=0)
