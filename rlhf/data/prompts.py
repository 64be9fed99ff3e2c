"""Prompts: reading a data source, templating and tokenising it once, and a stream over it that can be resumed.

Every error is one line that names the key and the source. Rows count from 1, blank lines of a JSONL file left out.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.batch import Prompt
from rlhf.config import DataConfig
from rlhf.data.chat import Chat, check_template_kwargs, drop_second_bos, render_chat
from rlhf.data.tasks import Split, task_rows
from rlhf.errors import CheckpointError, ConfigError, DataError
from rlhf.rewards.loading import ARGUMENTS

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

Table = dict[str, list[Any]]  # column -> one value per row

TASK_PREFIX = "task:"
DIRECTORY_SPLITS: dict[Split, str] = {"train": "train", "eval": "test"}  # of a saved DatasetDict
TOKENIZE_ROWS = 10_000  # at a time, to bound memory
MAX_NESTING = 100  # levels of a JSON line; pickle, which takes columns to actors, gives up before json does


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
    lacking: dict[str, int] = field(default_factory=dict)  # column -> first line of a JSONL file without that key

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
    table, lacking = _read(source, config, split, seed, where)
    prompt_column = "prompt" if source.startswith(TASK_PREFIX) else config.prompt_column
    values, columns = _part_columns(table, prompt_column, where)
    is_chat = _check_prompts(values, where)
    chats: list[Chat] | None = None
    texts: list[str] = values
    if is_chat:
        chats = [_with_system_prompt(plain_messages(chat), config.system_prompt) for chat in values]
        texts = _render(chats, config, tokenizer, where)
    for key, is_set in {
        "system_prompt": config.system_prompt is not None,
        "chat_template_kwargs": bool(config.chat_template_kwargs),
    }.items():
        if is_set and not is_chat:
            raise ConfigError(
                f"data.{key} needs chat prompts, but {where} holds plain strings; unset it, or make every prompt a "
                "list of {role, content} messages"
            )
    token_ids = _tokenize(texts, tokenizer, add_special_tokens=not is_chat)
    report = PromptReport(len(token_ids), 0, 0, longest=max(len(ids) for ids in token_ids))
    return _fit_length(PromptSet(source, texts, token_ids, chats, columns, report, lacking), config, tokenizer, where)


def _read(source: str, config: DataConfig, split: Split, seed: int, where: str) -> tuple[Table, dict[str, int]]:
    """The table of a source, for eval its first ``eval_size`` rows, and ``PromptSet.lacking``."""
    max_rows = config.eval_size if split == "eval" else None
    if source.startswith(TASK_PREFIX):
        name = source.removeprefix(TASK_PREFIX)
        return _columnar(task_rows(name, config.task_args, split=split, seed=seed, max_rows=max_rows)), {}
    path = Path(source).expanduser()
    kinds = "a source is task:NAME, a .jsonl or .parquet file, or a directory saved by datasets"
    if not path.exists():
        raise DataError(f"{where}: no such file or directory; {kinds}")
    lacking: dict[str, int] = {}
    if path.is_dir():
        table = _read_directory(path, DIRECTORY_SPLITS[split], where)
    elif path.suffix == ".jsonl":
        numbered = read_json_lines(path, where)[:max_rows]
        table = _columnar([row for _, row in numbered])
        lacking = _first_lacking(numbered, table)
    elif path.suffix == ".parquet":
        table = _read_parquet(path, where)
    else:
        raise DataError(f"{where}: cannot read a {path.suffix or 'file without suffix'}; {kinds}")
    if not any(table.values()):
        raise DataError(f"{where}: holds no rows")
    return {name: column[:max_rows] for name, column in table.items()}, lacking


def read_json_lines(path: Path, where: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank. Raises DataError, which names ``where``."""
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                rows.append((number, _read_json_line(line, f"{where}: line {number}")))
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {_one_line(error)}") from error
    return rows


def _read_json_line(line: bytes, where: str) -> dict[str, Any]:
    too_deep = f"{where} is nested more than {MAX_NESTING} levels deep; flatten it"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(f"{where} is not valid JSON: {_one_line(error)}") from error
    except RecursionError as error:
        raise DataError(too_deep) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}; every line must be an object")
    if line.count(b"[") + line.count(b"{") > MAX_NESTING and _nesting(row) > MAX_NESTING:
        raise DataError(too_deep)
    if b"\\u" in line:  # JSON may spell what UTF-8 cannot
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise DataError(
                f"{where} has {half}, half of a surrogate pair, which is no character; write both halves, or remove it"
            ) from error
    return row


def _nesting(value: Any) -> int:
    """Levels of lists and objects."""
    levels, current = 0, [value]
    while current := [inner for inner in current if isinstance(inner, dict | list)]:
        current = [x for inner in current for x in (inner.values() if isinstance(inner, dict) else inner)]
        levels += 1
    return levels


def _first_lacking(numbered: Sequence[tuple[int, dict[str, Any]]], names: Iterable[str]) -> dict[str, int]:
    """By column, the first line that lacks the key: null is a value, a key that is not there is a slip."""
    first = {name: next((number for number, row in numbered if name not in row), None) for name in names}
    return {name: number for name, number in first.items() if number is not None}


def _columnar(rows: list[dict[str, Any]]) -> Table:
    """Columns of rows; a row that lacks one has None there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path, where: str) -> Table:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{where}: not a readable Parquet file: {_one_line(error)}") from error
    try:
        return table.to_pydict()
    except UnicodeDecodeError as error:
        raise _not_utf8(table, where) from error


def _not_utf8(table: "pyarrow.Table", where: str) -> DataError:
    """Names the first value that does not decode: Arrow takes any bytes for a string."""
    for name in table.column_names:
        for row, value in enumerate(table[name], start=1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                return DataError(f"{where}: row {row}: column {name!r} is not valid UTF-8: {_one_line(error)}")
    raise AssertionError("one of the values did not decode")


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
    try:
        table = loaded.with_format(None).to_dict()
    except UnicodeDecodeError as error:
        raise _not_utf8(loaded.with_format("arrow")[:], where) from error
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


def _render(chats: list[Chat], config: DataConfig, tokenizer: "PreTrainedTokenizerBase", where: str) -> list[str]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: chat prompts need a chat template, and the tokenizer of model.path has none; use an instruct "
            "model, add a chat_template.jinja to its directory, or make the prompts plain strings"
        )
    kwargs = config.chat_template_kwargs
    check_template_kwargs(kwargs, tokenizer)
    texts: list[str] = []
    for row, chat in enumerate(chats, start=1):
        try:
            text = render_chat(tokenizer, chat, date=config.date, add_generation_prompt=True, kwargs=kwargs)
        except Exception as error:  # a template may raise anything, by its own raise_exception too
            raise DataError(f"{where}: row {row}: the model's chat template refuses it: {_one_line(error)}") from error
        texts.append(text)
    return texts


def _tokenize(texts: list[str], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool) -> list[np.ndarray]:
    """int32 token ids of each text, with one BOS where special tokens are added, even if the text spells it too."""
    token_ids: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZE_ROWS):
        chunk = texts[start : start + TOKENIZE_ROWS]
        encoded = tokenizer(chunk, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            single = drop_second_bos(ids, tokenizer) if add_special_tokens else ids
            token_ids.append(np.asarray(single, dtype=np.int32))
    return token_ids


def _fit_length(whole: PromptSet, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", where: str) -> PromptSet:
    """Without the over-long prompts, or with only their last tokens, behind the BOS that a prompt begins with."""
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
        token_ids = [_truncated(ids, limit, tokenizer) for ids in whole.token_ids]
        texts = [
            _truncated_text(text, ids, tokenizer) if length > limit else text
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
    return replace(
        whole,
        texts=[whole.texts[row] for row in kept],
        token_ids=[whole.token_ids[row] for row in kept],
        chats=None if whole.chats is None else [whole.chats[row] for row in kept],
        columns={name: [column[row] for row in kept] for name, column in whole.columns.items()},
        report=replace(whole.report, num_dropped=num_overlong),
    )


def _truncated(ids: np.ndarray, limit: int, tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    if len(ids) <= limit:
        return ids
    num_kept = 1 if ids[0] == tokenizer.bos_token_id else 0
    return np.concatenate([ids[:num_kept], ids[len(ids) - limit + num_kept :]])


def _truncated_text(text: str, ids: np.ndarray, tokenizer: "PreTrainedTokenizerBase") -> str:
    """What is left of ``text``, with BOS only where the text itself spelt it."""
    bos_is_ours = ids[0] == tokenizer.bos_token_id and not text.startswith(str(tokenizer.bos_token))
    return str(tokenizer.decode(ids[1:] if bos_is_ours else ids))


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
