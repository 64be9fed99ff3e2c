"""Built-in verifiable tasks: prompts and their answers, generated on the fly, the same for the same seed.

A hash of a prompt's text alone decides its split, so train and eval never share a prompt, whatever their seeds.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, Literal

from rlhf.data.corpus import people, towns
from rlhf.errors import ConfigError

Split = Literal["train", "eval"]
Row = dict[str, Any]

PREFIX = "task:"  # marks a source that is a task
EVAL_SHARE = 8  # one prompt in eight is held out
MAX_FRUITLESS_DRAWS = 1000  # in a row, before a task counts as having no more prompts

OPERATIONS = ("+", "-", "*")
WORD_LIST = (
    "apple bear cloud door eagle field grape house island jacket kettle lemon moon night ocean paper queen river "
    "stone tree uncle valley water yellow zebra anchor bridge candle desert engine forest garden hammer iron jungle "
    "king ladder mirror needle orange pencil quiet rabbit silver table umbrella violin window yard basket copper"
)
WORDS = WORD_LIST.split()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"data.task_args.{message}")


def _require_count(key: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    bound = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    _require(
        is_integer and value >= minimum and (maximum is None or value <= maximum),
        f"{key}={value!r} must be an integer {bound}",
    )


@dataclass(frozen=True)
class Task:
    """What all tasks share. The fields of a task are its arguments: ``data.task_args``."""

    num_rows: int = 1000  # of the train split, all distinct; fewer if the task has no more

    def __post_init__(self) -> None:
        _require_count("num_rows", self.num_rows, 1)

    def draw(self, rng: Random) -> Row:
        """One row: ``prompt`` (a string, or a list of messages) and the columns its reward functions need."""
        raise NotImplementedError


@dataclass(frozen=True)
class Arithmetic(Task):
    """Chat: 'What is 3 + 4? Answer with a number.' Column ``answer``: '7'. Made for ``number_match``."""

    max_operand: int = 20
    operations: Sequence[str] = ("+", "-")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("max_operand", self.max_operand, 1)
        _require(
            isinstance(self.operations, (list, tuple))
            and bool(self.operations)
            and all(o in OPERATIONS for o in self.operations),
            f"operations={self.operations!r} must be a list of some of '+', '-', '*'",
        )

    def draw(self, rng: Random) -> Row:
        a, b = rng.randint(0, self.max_operand), rng.randint(0, self.max_operand)
        operation = rng.choice(self.operations)
        answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
        return {"prompt": _user(f"What is {a} {operation} {b}? Answer with a number."), "answer": str(answer)}


@dataclass(frozen=True)
class Phrases(Task):
    """Plain prompts of a few random words and no answer, for rewards on the tokens alone, such as ``even_tokens``.

    A randomly initialised two-layer model learns it within a minute or two: the end-to-end test of a whole loop.
    """

    num_words: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("num_words", self.num_words, 1)

    def draw(self, rng: Random) -> Row:
        return {"prompt": " ".join(rng.choices(WORDS, k=self.num_words))}


@dataclass(frozen=True)
class SortWords(Task):
    """Chat: sort a few words alphabetically. Column ``answer``: 'apple, moon, tree'. Made for ``exact_match``."""

    num_words: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("num_words", self.num_words, 2, len(WORDS))

    def draw(self, rng: Random) -> Row:
        words = rng.sample(WORDS, k=self.num_words)
        question = f"Sort these words alphabetically: {', '.join(words)}. Answer with the words only, comma separated."
        return {"prompt": _user(question), "answer": ", ".join(sorted(words))}


@dataclass(frozen=True)
class Guess(Task):
    """Chat: 'Guess my number, from 1 to 9.' Columns ``secret`` and ``num_guesses``. Made for environment.path=guess."""

    largest: int = 9
    num_guesses: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("largest", self.largest, 1)
        _require_count("num_guesses", self.num_guesses, 1)

    def draw(self, rng: Random) -> Row:
        game = rng.randrange(10**6)  # rows are told apart by their prompts, and many have the same number
        question = f"Game {game}: guess my number, from 1 to {self.largest}. You have {self.num_guesses} guesses."
        return {
            "prompt": _user(question),
            "secret": rng.randint(1, self.largest),
            "num_guesses": self.num_guesses,
        }


@dataclass(frozen=True)
class Calculator(Task):
    """Chat: 'What is 417 * (38 - 512) + 96?' Column ``answer``: '-197562'. Made for environment.path=calculator."""

    max_operand: int = 999
    num_operands: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("max_operand", self.max_operand, 1)
        _require_count("num_operands", self.num_operands, 2, 8)

    def draw(self, rng: Random) -> Row:
        text, value = self._sum(rng, self.num_operands)
        return {"prompt": _user(f"What is {text}?"), "answer": str(value)}

    def _sum(self, rng: Random, num_operands: int) -> tuple[str, int]:
        """Its text, and its value."""
        if num_operands == 1:
            number = rng.randint(1, self.max_operand)
            return str(number), number
        size = rng.randint(1, num_operands - 1)
        (left, a), (right, b) = self._sum(rng, size), self._sum(rng, num_operands - size)
        operation = rng.choice(OPERATIONS)
        left, right = (f"({text})" if " " in text else text for text in (left, right))
        return f"{left} {operation} {right}", {"+": a + b, "-": a - b, "*": a * b}[operation]


@dataclass(frozen=True)
class Program(Task):
    """Chat: 'How many primes are there from 312 to 987?' Column ``answer``: '102'. Made for environment.path=python."""

    largest: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("largest", self.largest, 10, 100_000)

    def draw(self, rng: Random) -> Row:
        first, last = sorted(rng.sample(range(1, self.largest + 1), k=2))
        factor, exponent = rng.randint(2, 9), rng.randint(20, 200)
        divisor = rng.randint(3, 97)
        question, answer = rng.choice(
            [
                (f"How many primes are there from {first} to {last}?", _num_primes(first, last)),
                (f"What is the sum of the digits of {factor} ** {exponent}?", sum(map(int, str(factor**exponent)))),
                (
                    f"How many of the integers from {first} to {last} are divisible by {divisor} or end in 7?",
                    sum(n % divisor == 0 or n % 10 == 7 for n in range(first, last + 1)),
                ),
                (
                    f"What is the remainder of {first} ** {last} divided by {divisor}?",
                    pow(first, last, divisor),
                ),
            ]
        )
        return {"prompt": _user(question), "answer": str(answer)}


def _num_primes(first: int, last: int) -> int:
    is_prime = [n > 1 for n in range(last + 1)]
    for n in range(2, math.isqrt(last) + 1):
        if is_prime[n]:
            is_prime[n * n :: n] = [False] * len(range(n * n, last + 1, n))
    return sum(is_prime[first:])


@dataclass(frozen=True)
class Search(Task):
    """Chat: 'What is the year of birth of the mayor of Halton?' Column ``answer``: '1959'. For environment.path=search.

    ``num_hops``: how many passages of the corpus it takes to answer.
    """

    num_hops: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("num_hops", self.num_hops, 1, 4)

    def draw(self, rng: Random) -> Row:
        """A chain of towns and people: who is a town's mayor, and where somebody was born, leads to the next one."""
        of_town = rng.random() < 0.5
        name = rng.choice(list(towns() if of_town else people()))
        known = name
        for _ in range(self.num_hops - 1):
            known = f"the mayor of {known}" if of_town else f"the town where {known} was born"
            name = towns()[name].mayor if of_town else people()[name].birthplace
            of_town = not of_town
        year = towns()[name].founded if of_town else people()[name].born
        question = f"What is the {'founding year' if of_town else 'year of birth'} of {known}?"
        return {"prompt": _user(question), "answer": str(year)}


TASKS: dict[str, type[Task]] = {
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "guess": Guess,
    "phrases": Phrases,
    "python": Program,
    "search": Search,
    "sort_words": SortWords,
}


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def task_name(source: str) -> str | None:
    """The task that a source names; None for any other source."""
    return source.removeprefix(PREFIX) if source.startswith(PREFIX) else None


def make_task(name: str, args: dict[str, Any]) -> Task:
    """The task called ``name``. Raises ConfigError for an unknown task, an unknown argument or an impossible value."""
    if name not in TASKS:
        raise ConfigError(f"task:{name} does not exist; the tasks are {', '.join(sorted(TASKS))}")
    task_type = TASKS[name]
    known = [spec.name for spec in fields(task_type)]
    for key in args:
        if key not in known:
            raise ConfigError(f"data.task_args.{key} is not an argument of task:{name}; it has {', '.join(known)}")
    return task_type(**args)


def task_rows(name: str, args: dict[str, Any], *, split: Split, seed: int, max_rows: int | None = None) -> list[Row]:
    """Distinct rows of one split: at most ``max_rows`` (default: the task's ``num_rows``).

    The same arguments give the same rows. No prompt of one split occurs in the other, under any seed.
    Raises ConfigError if the arguments leave the split without prompts.
    """
    task = make_task(name, args)
    limit = task.num_rows if max_rows is None else max_rows
    rng = Random(f"{name}/{split}/{seed}")
    rows: dict[str, Row] = {}  # by prompt
    fruitless = 0
    while len(rows) < limit and fruitless < MAX_FRUITLESS_DRAWS:
        row = task.draw(rng)
        key = str(row["prompt"])
        fruitless += 1
        if key not in rows and _split_of(key) == split:
            rows[key] = row
            fruitless = 0
    if not rows:
        raise ConfigError(
            f"data.task_args={args} leave task:{name} no prompts for the {split} split; allow more distinct prompts"
        )
    return list(rows.values())


def _split_of(prompt: str) -> Split:
    return "eval" if zlib.crc32(prompt.encode()) % EVAL_SHARE == 0 else "train"
