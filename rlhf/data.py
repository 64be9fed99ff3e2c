"""Prompts: reading a data source, templating and tokenising it once, and a stream over it that can be resumed.

Every error is one line that names the key and the source. Rows count from 1, blank lines of a JSONL file left out.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.batch import Prompt
from rlhf.config import DataConfig
from rlhf.errors import CheckpointError, ConfigError, DataError
from rlhf.rewards.loading import ARGUMENTS
from rlhf.tasks import Split, task_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]
Table = dict[str, list[Any]]  # column -> one value per row

TASK_PREFIX = "task:"
DIRECTORY_SPLITS: dict[Split, str] = {"train": "train", "eval": "test"}  # of a saved DatasetDict
TOKENIZE_ROWS = 10_000  # at a time, to bound memory


@dataclass(frozen=True)
class PromptReport:
    """What became of a source's rows."""

    num_rows: int  # read, before any was dropped
    num_dropped: int
    num_truncated: int
    longest: int  # tokens of the longest prompt, before dropping and truncating


@dataclass(frozen=True)
class PromptSet:
    """A source's prompts, tokenised. All lists have one entry per prompt that was kept."""

    source: str
    texts: list[str]
    token_ids: list[np.ndarray]  # int32
    chats: list[Chat] | None  # None: plain prompts
    columns: Table
    report: PromptReport

    def __len__(self) -> int:
        return len(self.texts)

    def prompt(self, row: int, *, id: int) -> Prompt:
        return Prompt(
            id=id,
            token_ids=self.token_ids[row].tolist(),
            text=self.texts[row],
            messages=None if self.chats is None else self.chats[row],
            columns={name: values[row] for name, values in self.columns.items()},
        )

    def all(self) -> list[Prompt]:
        """Every prompt once, in the source's order; ids are row numbers from 0."""
        return [self.prompt(row, id=row) for row in range(len(self))]

    def fingerprint(self) -> str:
        """Hex digest of all prompts' tokens, in order: the same data gives the same one, wherever it is stored."""
        digest = hashlib.sha256(np.array([len(ids) for ids in self.token_ids], dtype=np.int64).tobytes())
        for ids in self.token_ids:
            digest.update(ids.tobytes())
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        """One line for the log."""
        r = self.report
        return (
            f"{self.source}: {len(self)} prompts of {r.num_rows} rows ({r.num_dropped} over-long dropped, "
            f"{r.num_truncated} truncated), the longest had {r.longest} tokens"
        )


def load_prompts(
    source: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", *, split: Split, seed: int
) -> PromptSet:
    """Reads ``source``, applies the chat template to chats, tokenises, and drops or truncates over-long prompts.

    Plain prompts get the tokenizer's special tokens; a chat gets those of its template only. ``split='eval'`` keeps the
    first ``data.eval_size`` rows. ``seed`` matters to built-in tasks only. Raises DataError where the source cannot be
    read or holds no usable prompt, ConfigError where ``config`` does not fit it.
    """
    where = f"data.{split}={source}"
    if config.task_args and not any((s or "").startswith(TASK_PREFIX) for s in (source, config.train, config.eval)):
        raise ConfigError(f"data.task_args is set, but {where} is no built-in task; unset it, or use task:NAME")
    table, prompt_column = _read(source, config, split, seed, where)
    values, columns = _part_columns(table, prompt_column, where)
    is_chat = _check_prompts(values, where)
    chats: list[Chat] | None = None
    texts: list[str] = values
    if is_chat:
        chats = [_with_system_prompt(plain_messages(chat), config.system_prompt) for chat in values]
        texts = _render(chats, tokenizer, where)
    elif config.system_prompt is not None:
        raise ConfigError(
            f"data.system_prompt needs chat prompts, but {where} holds plain strings; unset it, or make every prompt a "
            "list of {role, content} messages"
        )
    token_ids = _tokenize(texts, tokenizer, add_special_tokens=not is_chat)
    report = PromptReport(len(token_ids), 0, 0, longest=max(len(ids) for ids in token_ids))
    return _fit_length(PromptSet(source, texts, token_ids, chats, columns, report), config, tokenizer, where)


def _read(source: str, config: DataConfig, split: Split, seed: int, where: str) -> tuple[Table, str]:
    """The table of a source, for eval its first ``eval_size`` rows, and the name of its prompt column."""
    max_rows = config.eval_size if split == "eval" else None
    if source.startswith(TASK_PREFIX):
        name = source.removeprefix(TASK_PREFIX)
        return _columnar(task_rows(name, config.task_args, split=split, seed=seed, max_rows=max_rows)), "prompt"
    path = Path(source).expanduser()
    kinds = "a source is task:NAME, a .jsonl or .parquet file, or a directory saved by datasets"
    if not path.exists():
        raise DataError(f"{where}: no such file or directory; {kinds}")
    readers: dict[str, Callable[[Path, str], Table]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.is_dir():
        table = _read_directory(path, DIRECTORY_SPLITS[split], where)
    elif path.suffix in readers:
        table = readers[path.suffix](path, where)
    else:
        raise DataError(f"{where}: cannot read a {path.suffix or 'file without suffix'}; {kinds}")
    if not any(table.values()):
        raise DataError(f"{where}: holds no rows")
    return {name: column[:max_rows] for name, column in table.items()}, config.prompt_column


def _read_jsonl(path: Path, where: str) -> Table:
    return _columnar([row for _, row in read_json_lines(path, where)])


def read_json_lines(path: Path, where: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank. Raises DataError, which names ``where``."""
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                    raise DataError(f"{where}: line {number} is not valid JSON: {_one_line(error)}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: line {number} is a {type(row).__name__}; every line must be an object")
                rows.append((number, row))
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {_one_line(error)}") from error
    return rows


def _columnar(rows: list[dict[str, Any]]) -> Table:
    """Columns of rows; a row that lacks one has None there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path, where: str) -> Table:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pydict()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{where}: not a readable Parquet file: {_one_line(error)}") from error


def _read_directory(path: Path, split: str, where: str) -> Table:
    import datasets  # slow to import

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged or foreign directory makes datasets raise nearly anything
        raise DataError(
            f"{where}: not a directory that datasets' save_to_disk wrote: {_one_line(error)}; name a file in it instead"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        saved = [str(name) for name in loaded]
        if split not in saved:
            raise DataError(
                f"{where}: needs a split {split!r}, and the saved ones are {', '.join(saved)}; name the directory of "
                f"one, such as {path / saved[0] if saved else path}"
            )
        loaded = loaded[split]
    table = loaded.with_format(None).to_dict()
    assert isinstance(table, dict), "only a batched to_dict gives an iterator"
    return table


def _part_columns(table: Table, prompt_column: str, where: str) -> tuple[list[Any], Table]:
    """The prompts, and the other columns."""
    if prompt_column not in table:
        raise DataError(
            f"{where}: has no column {prompt_column!r}; set data.prompt_column to one of {', '.join(table)}"
        )
    columns = {name: column for name, column in table.items() if name != prompt_column}
    hidden = [name for name in ARGUMENTS if name in columns]
    if hidden:
        raise DataError(f"{where}: rename column {hidden[0]!r}, it would hide an argument of reward functions")
    return table[prompt_column], columns


def _check_prompts(prompts: list[Any], where: str) -> bool:
    """Whether the prompts are chats. Raises DataError naming the first row that is no usable prompt."""
    is_chat = isinstance(prompts[0], list)
    for row, prompt in enumerate(prompts, start=1):
        problem = prompt_problem(prompt, is_chat=is_chat)
        if problem is not None:
            raise DataError(f"{where}: row {row}: {problem}")
    return is_chat


def prompt_problem(prompt: Any, *, is_chat: bool) -> str | None:
    """What is wrong with a prompt, None for nothing."""
    if prompt is not None and not isinstance(prompt, (str, list)):
        return f"the prompt is a {type(prompt).__name__}; it must be a string or a list of {{role, content}} messages"
    if prompt is None or not (prompt.strip() if isinstance(prompt, str) else prompt):
        return "the prompt is empty; remove the row"
    if isinstance(prompt, list) != is_chat:
        return "chats and plain strings are mixed; use one kind"
    return _chat_problem(prompt) if isinstance(prompt, list) else None


def _chat_problem(chat: list[Any]) -> str | None:
    for message in chat:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            return f"the message {str(message)[:80]!r} must have a role and a content that are strings"
    if not any(message["content"].strip() for message in chat):
        return "the prompt is empty; remove the row"
    if chat[-1]["role"] == "assistant":
        return "the chat ends with the assistant, who is to answer; remove that message"
    return None


def plain_messages(chat: Chat) -> Chat:
    """Without keys that are None: Arrow fills in every key that any message of the data has."""
    return [{key: value for key, value in message.items() if value is not None} for message in chat]


def _with_system_prompt(chat: Chat, system_prompt: str | None) -> Chat:
    if system_prompt is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]


def _render(chats: list[Chat], tokenizer: "PreTrainedTokenizerBase", where: str) -> list[str]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: chat prompts need a chat template, and the tokenizer of model.path has none; use an instruct "
            "model, add a chat_template.jinja to its directory, or make the prompts plain strings"
        )
    texts: list[str] = []
    for row, chat in enumerate(chats, start=1):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything, by its own raise_exception too
            raise DataError(f"{where}: row {row}: the model's chat template refuses it: {_one_line(error)}") from error
        assert isinstance(text, str)
        texts.append(text)
    return texts


def _tokenize(texts: list[str], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool) -> list[np.ndarray]:
    """int32 token ids of each text."""
    token_ids: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZE_ROWS):
        chunk = texts[start : start + TOKENIZE_ROWS]
        encoded = tokenizer(chunk, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
        token_ids.extend(np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"])
    return token_ids


def _fit_length(whole: PromptSet, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", where: str) -> PromptSet:
    """Without the over-long prompts, or with only their last ``data.max_prompt_tokens`` tokens."""
    limit = config.max_prompt_tokens
    lengths = [len(ids) for ids in whole.token_ids]
    if 0 in lengths:
        raise DataError(
            f"{where}: row {lengths.index(0) + 1} encodes to no token; use the tokenizer made for the model"
        )
    num_overlong = sum(length > limit for length in lengths)
    if num_overlong == 0:
        return whole
    if config.overlong_prompts == "truncate":
        token_ids = [ids[-limit:] for ids in whole.token_ids]
        texts = [
            str(tokenizer.decode(ids)) if length > limit else text
            for text, ids, length in zip(whole.texts, token_ids, lengths, strict=True)
        ]
        report = replace(whole.report, num_truncated=num_overlong)
        return replace(whole, texts=texts, token_ids=token_ids, report=report)
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    if not kept:
        raise DataError(
            f"{where}: no prompt is left: all {len(lengths)} are longer than data.max_prompt_tokens={limit} (the "
            f"shortest has {min(lengths)}); raise it, or set data.overlong_prompts=truncate"
        )
    return PromptSet(
        source=whole.source,
        texts=[whole.texts[row] for row in kept],
        token_ids=[whole.token_ids[row] for row in kept],
        chats=None if whole.chats is None else [whole.chats[row] for row in kept],
        columns={name: [column[row] for row in kept] for name, column in whole.columns.items()},
        report=replace(whole.report, num_dropped=num_overlong),
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class PromptStream:
    """The prompts for ever, epoch after epoch, each epoch in an order of its own that follows from seed and epoch.

    A prompt's id is its position in the stream: epoch x len(prompts) + its place in the epoch. So ids are unique over a
    run, and a resumed stream goes on with the ids that an uninterrupted one would have given.
    """

    def __init__(self, prompts: PromptSet, *, shuffle: bool, seed: int) -> None:
        assert len(prompts), "load_prompts never returns an empty set"
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0  # prompts taken so far
        self._fingerprint = prompts.fingerprint()
        self._epoch, self._order = 0, self._order_of(0)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [self._next() for _ in range(n)]

    def at(self, position: int) -> Prompt:
        """The prompt with the id ``position``, whether taken or not."""
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self.prompts.prompt(self._order[place], id=position)

    def _next(self) -> Prompt:
        prompt = self.at(self.position)
        self.position += 1
        return prompt

    def _order_of(self, epoch: int) -> list[int]:
        """The row at each place of an epoch."""
        order = list(range(len(self.prompts)))
        if self.shuffle:
            Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it means only together with; JSON types."""
        return {"position": self.position, "source": self.prompts.source, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken. Raises CheckpointError if that was with other data or order."""
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise CheckpointError(
                    f"the checkpoint's data position does not fit data.train={self.prompts.source}: {key} was "
                    f"{state.get(key)} (of {state.get('source')}) and is {ours}; resume with the data, prompt settings "
                    "and seed of that run, or start anew with checkpoint.resume=none"
                )
        self.position = int(state["position"])
