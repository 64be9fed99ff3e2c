"""Preference pairs: read, checked, and tokenised exactly as the reward model will read its texts in use.

A pair is a prompt with two answers, one of them preferred, and optionally a margin. Every error is one line that names
the key, the source and the line.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf.batch import TrainBatch, last_token_batch
from rlhf.data.chat import Chat, answer_tokens, plain_messages, prompt_problem, truncate_tail
from rlhf.data.readers import is_text, read_json_lines
from rlhf.data.tasks import Row, Split, task_name, task_rows
from rlhf.errors import ConfigError, DataError, one_line
from rlhf.reward_config import PreferenceDataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RANDOM_ANSWER_TOKENS = 24  # per answer to task:phrases
MAX_WRONG_BY = 9  # error of wrong answers to task:arithmetic


@dataclass(frozen=True)
class Preference:
    """One comparison as text; ``where`` names it in errors."""

    prompt: str | Chat
    chosen: str
    rejected: str
    where: str
    margin: float = 0.0


@dataclass(frozen=True)
class Pair:
    """One comparison as tokens: prompt and answer, int32 [tokens]."""

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PreferenceSet:
    """A source's pairs, in its order."""

    source: str
    pairs: list[Pair]
    num_truncated: int  # texts cut to their last data.max_tokens tokens

    def fingerprint(self) -> str:
        """Hex digest of all pairs' tokens and margins, in order."""
        digest = hashlib.sha256()
        for pair in self.pairs:
            digest.update(f"{len(pair.chosen)} {len(pair.rejected)} {pair.margin!r};".encode())
            digest.update(pair.chosen.tobytes() + pair.rejected.tobytes())
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        """One line for the log."""
        longest = max(len(ids) for pair in self.pairs for ids in (pair.chosen, pair.rejected))
        return (
            f"{self.source}: {len(self.pairs)} preference pairs ({self.num_truncated} texts truncated), the longest "
            f"text has {longest} tokens"
        )


def load_preferences(
    source: str, config: PreferenceDataConfig, tokenizer: "PreTrainedTokenizerBase", *, split: Split, seed: int
) -> PreferenceSet:
    """Reads and tokenises ``source``. ``split='eval'`` keeps the first ``data.eval_size`` pairs.

    ``seed`` affects only built-in tasks. Raises DataError if the source cannot be read or a line is not a usable pair,
    ConfigError if ``config`` does not fit it.
    """
    where = f"data.{split}={source}"
    max_rows = config.eval_size if split == "eval" else None
    if (task := task_name(source)) is not None:
        found = list(task_preferences(task, config.task_args, tokenizer, split=split, seed=seed, max_rows=max_rows))
    else:
        found = list(read_preferences(Path(source).expanduser(), where))[:max_rows]
    if not found:
        raise DataError(f"{where}: holds no preference pairs")
    pairs, num_truncated = [], 0
    for preference in found:
        answers = (preference.chosen, preference.rejected)
        pair = [_tokenise(preference, answer, tokenizer, config.date) for answer in answers]
        num_truncated += sum(len(ids) > config.max_tokens for ids in pair)
        chosen, rejected = (np.asarray(truncate_tail(ids, config.max_tokens), dtype=np.int32) for ids in pair)
        pairs.append(Pair(chosen, rejected, preference.margin))
    return PreferenceSet(source, pairs, num_truncated)


def read_preferences(path: Path, where: str) -> Iterator[Preference]:
    """The pairs of a JSONL file. Raises DataError naming the first invalid line."""
    if not path.is_file() or not is_text(path, ".jsonl"):
        kinds = (
            "a source is task:NAME or a .jsonl file (also .gz or .zst) with prompt, chosen, rejected and, optionally, "
            "margin"
        )
        raise DataError(f"{where}: {'not a .jsonl file' if path.exists() else 'no such file'}; {kinds}")
    for number, row in read_json_lines(path, where):
        yield _checked(row, f"{where}: line {number}")


def _checked(row: dict[str, Any], where: str) -> Preference:
    missing = [key for key in ("prompt", "chosen", "rejected") if row.get(key) is None]
    if missing:
        raise DataError(f"{where}: has no {missing[0]!r}; every line needs prompt, chosen and rejected")
    prompt = row["prompt"]
    problem = prompt_problem(prompt, is_chat=isinstance(prompt, list))
    if problem is not None:
        raise DataError(f"{where}: {problem}")
    chosen, rejected = (_answer(row[key], key, where) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, so neither is preferred; remove the line")
    margin = row.get("margin", 0.0)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin) or margin < 0:
        raise DataError(f"{where}: margin={margin!r} must be a number of at least 0; omit it if there is none")
    return Preference(
        prompt if isinstance(prompt, str) else plain_messages(prompt), chosen, rejected, where, float(margin)
    )


def _answer(value: Any, key: str, where: str) -> str:
    """The text of an answer: a string, or a chat's continuation by one assistant message."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    raise DataError(f"{where}: {key} must be a string, or a list of one assistant message; it is {str(value)[:80]!r}")


def _tokenise(preference: Preference, answer: str, tokenizer: "PreTrainedTokenizerBase", date: str | None) -> list[int]:
    prompt, where = preference.prompt, preference.where
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise DataError(
            f"{where}: the prompt is a chat, but the tokenizer of model.path has no chat template; use an instruct "
            "model, add a chat_template.jinja to its directory, or make the prompts plain strings"
        )
    try:
        ids = answer_tokens(tokenizer, prompt, answer, date=date)
    except Exception as error:  # a chat template may raise anything, even on purpose: raise_exception
        raise DataError(f"{where}: cannot be tokenised: {one_line(error)}") from error
    if not ids:
        raise DataError(f"{where}: encodes to no tokens; use the tokenizer made for the model")
    return ids


def task_preferences(
    name: str,
    args: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    seed: int,
    max_rows: int | None = None,
) -> Iterator[Preference]:
    """A built-in task's prompts, each with a better and a worse answer; the same arguments give the same pairs.

    Raises ConfigError for a task that has none.
    """
    if name not in ANSWERS:
        raise ConfigError(f"data.{split}=task:{name} has no preference pairs; tasks that do are {', '.join(ANSWERS)}")
    rng = Random(f"preferences/{name}/{split}/{seed}")
    for number, row in enumerate(task_rows(name, args, split=split, seed=seed, max_rows=max_rows), start=1):
        chosen, rejected = ANSWERS[name](row, rng, tokenizer)
        yield Preference(row["prompt"], chosen, rejected, where=f"task:{name}: row {number}")


def _right_and_wrong(row: Row, rng: Random, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """The right number, and one that is slightly off."""
    wrong_by = rng.choice((-1, 1)) * rng.randint(1, MAX_WRONG_BY)
    return row["answer"], str(int(row["answer"]) + wrong_by)


def _more_and_less_even(row: Row, rng: Random, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """Two texts of random tokens; the one with more even token ids is better: ``even_tokens`` as a preference.

    Each text draws its own share of even ids, from 0 to 1, because a policy that learns will leave the middle.
    """
    ordinary = set(range(len(tokenizer))) - set(tokenizer.all_special_ids)
    by_parity = [sorted(id for id in ordinary if id % 2 == parity) for parity in (0, 1)]

    def draw() -> list[int]:
        share = rng.random()
        return [rng.choice(by_parity[rng.random() >= share]) for _ in range(RANDOM_ANSWER_TOKENS)]

    def evenness(ids: list[int]) -> int:
        return sum(id % 2 == 0 for id in ids)

    a, b = draw(), draw()
    while evenness(a) == evenness(b):
        b = draw()
    better, worse = sorted((a, b), key=evenness, reverse=True)
    return str(tokenizer.decode(better)), str(tokenizer.decode(worse))


ANSWERS: dict[str, Callable[[Row, Random, "PreTrainedTokenizerBase"], tuple[str, str]]] = {
    "arithmetic": _right_and_wrong,
    "phrases": _more_and_less_even,
}


def pair_batch(pairs: Sequence[Pair]) -> TrainBatch:
    """P pairs as 2 P sequences: chosen, rejected, chosen, rejected, ...; each pair weighs 1 / P in the loss."""
    sequences = [ids.tolist() for pair in pairs for ids in (pair.chosen, pair.rejected)]
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    return last_token_batch(sequences).with_(
        margins=margins.repeat_interleave(2), loss_weights=torch.full((len(sequences),), 1 / len(pairs))
    )


def epoch_batches(pairs: Sequence[Pair], batch_pairs: int, *, epoch: int, seed: int, shuffle: bool) -> list[list[Pair]]:
    """Every pair once, in an order set by seed and epoch; the last batch may be smaller."""
    order = list(range(len(pairs)))
    if shuffle:
        Random(f"{seed}/{epoch}").shuffle(order)
    return [[pairs[i] for i in order[start : start + batch_pairs]] for start in range(0, len(order), batch_pairs)]
