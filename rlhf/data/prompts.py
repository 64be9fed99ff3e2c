"""Prompts: the rows of a source, templated, tokenised and cut to length once.

Every error is one line that names the key and the source. Rows count from 1, without blank lines of a JSONL file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.batch import Prompt
from rlhf.config import DataConfig
from rlhf.data.chat import (
    Chat,
    check_template_kwargs,
    drop_second_bos,
    plain_messages,
    prompt_problem,
    render_chat,
)
from rlhf.data.columns import Table, split_columns
from rlhf.data.readers import read_table
from rlhf.data.tasks import Split, task_name
from rlhf.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE_COLUMN = "data_source"  # as verl calls it
TOKENIZE_ROWS = 10_000  # rows per call, to bound memory


@dataclass(frozen=True)
class PromptReport:
    """What became of a source's rows."""

    num_rows: int  # read, before any was dropped
    num_dropped: int
    num_truncated: int
    longest: int  # tokens of the longest prompt, before dropping and truncating


@dataclass(frozen=True)
class PromptSet:
    """A source's prompts, tokenised. All lists have one entry per kept prompt."""

    source: str
    texts: list[str]
    token_ids: list[np.ndarray]  # int32
    chats: list[Chat] | None  # None: plain prompts
    columns: Table
    report: PromptReport
    lacking: dict[str, int] = field(default_factory=dict)  # column -> first line of a JSONL file without that key
    read_lengths: list[int] = field(default_factory=list)  # tokens of every row that was read, over-long ones included
    name: str = ""  # among the sources of a mixture; '': it is the only one

    def __len__(self) -> int:
        return len(self.texts)

    def prompt(self, row: int, *, id: int) -> Prompt:
        return Prompt(
            id=id,
            token_ids=self.token_ids[row].tolist(),
            text=self.texts[row],
            messages=None if self.chats is None else self.chats[row],
            columns={name: values[row] for name, values in self.columns.items()},
            source=self.name,
        )

    def all(self) -> list[Prompt]:
        """Every prompt once, in the source's order; ids are row numbers from 0."""
        return [self.prompt(row, id=row) for row in range(len(self))]

    def fingerprint(self) -> str:
        """Hex digest of all prompts' tokens, in order: the same data gives the same digest, wherever it is stored."""
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
    source: str,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    seed: int,
    key: str | None = None,
    name: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """Reads ``source``, applies the chat template to chats, tokenises, and drops or truncates over-long prompts.

    Plain prompts get the tokenizer's special tokens; a chat gets those of its template only. ``split='eval'`` keeps the
    first ``data.eval_size`` rows. ``seed`` affects only built-in tasks; ``tools`` are schemas that chats tell of;
    ``key``: where the configuration names the source, for errors (None: data.train or data.eval); ``name``: the
    source's in a mixture, which its rows carry as column ``data_source`` if they have none. Raises DataError if the
    source cannot be read or has no usable prompt, ConfigError if ``config`` does not fit it.
    """
    where = f"{key or f'data.{split}'}={source}"
    named = (source, config.eval, *(train.path for train in config.train_sources().values()))
    if config.task_args and all(task_name(s or "") is None for s in named):
        raise ConfigError(f"data.task_args is set, but {where} is not a built-in task; unset it, or use task:NAME")
    table, lacking = read_table(source, config, split=split, seed=seed, where=where)
    prompt_column = config.prompt_column if task_name(source) is None else "prompt"
    values, columns = split_columns(table, prompt_column, where)
    if name:
        columns.setdefault(SOURCE_COLUMN, [name] * len(values))
    is_chat = _check_prompts(values, where)
    if is_chat:
        chats = [_with_system_prompt(plain_messages(chat), config.system_prompt) for chat in values]
        texts = _render(chats, config, tokenizer, where, tools)
    else:
        _refuse_chat_settings(config, where)
        chats, texts = None, values
    token_ids = _tokenize(texts, tokenizer, add_special_tokens=not is_chat)
    lengths = [len(ids) for ids in token_ids]
    report = PromptReport(len(lengths), 0, 0, longest=max(lengths))
    whole = PromptSet(source, texts, token_ids, chats, columns, report, lacking, lengths, name)
    return _fit_length(whole, config, tokenizer, where)


def _check_prompts(prompts: list[Any], where: str) -> bool:
    """Whether the prompts are chats. Raises DataError naming the first row that is not a usable prompt."""
    is_chat = isinstance(prompts[0], list)
    for row, prompt in enumerate(prompts, start=1):
        problem = prompt_problem(prompt, is_chat=is_chat)
        if problem is not None:
            raise DataError(f"{where}: row {row}: {problem}")
    return is_chat


def _refuse_chat_settings(config: DataConfig, where: str) -> None:
    """Raises ConfigError for settings that plain prompts cannot use."""
    for key, unset in (("system_prompt", None), ("chat_template_kwargs", {})):
        if getattr(config, key) != unset:
            raise ConfigError(
                f"data.{key} needs chat prompts, but {where} holds plain strings; unset it, or make every prompt a "
                "list of {role, content} messages"
            )


def _with_system_prompt(chat: Chat, system_prompt: str | None) -> Chat:
    if system_prompt is None or any(message["role"] == "system" for message in chat):
        return chat
    return [{"role": "system", "content": system_prompt}, *chat]


def _render(
    chats: list[Chat],
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    where: str,
    tools: Sequence[Mapping[str, Any]],
) -> list[str]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: chat prompts need a chat template, but the tokenizer of model.path has none; use an instruct "
            "model, add a chat_template.jinja to its directory, or make the prompts plain strings"
        )
    kwargs = config.chat_template_kwargs
    check_template_kwargs(kwargs, tokenizer)
    kwargs = {**kwargs, **({"tools": list(tools)} if tools else {})}
    texts: list[str] = []
    for row, chat in enumerate(chats, start=1):
        try:
            text = render_chat(tokenizer, chat, date=config.date, add_generation_prompt=True, kwargs=kwargs)
        except Exception as error:  # a template may raise anything, even on purpose: raise_exception
            raise DataError(f"{where}: row {row}: the model's chat template rejects it: {one_line(error)}") from error
        texts.append(text)
    return texts


def _tokenize(texts: list[str], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool) -> list[np.ndarray]:
    """int32 token ids of each text; with special tokens, only one BOS even if the text begins with one too."""
    token_ids: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZE_ROWS):
        chunk = texts[start : start + TOKENIZE_ROWS]
        encoded = tokenizer(chunk, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            single = drop_second_bos(ids, tokenizer) if add_special_tokens else ids
            token_ids.append(np.asarray(single, dtype=np.int32))
    return token_ids


def _fit_length(whole: PromptSet, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", where: str) -> PromptSet:
    """Drops over-long prompts, or keeps their last tokens, after the BOS if a prompt begins with one."""
    limit = config.max_prompt_tokens
    lengths = [len(ids) for ids in whole.token_ids]
    if 0 in lengths:
        raise DataError(
            f"{where}: row {lengths.index(0) + 1} encodes to no tokens; use the tokenizer made for the model"
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
    """What is left of ``text``, with BOS only if the text itself began with it."""
    bos_is_ours = ids[0] == tokenizer.bos_token_id and not text.startswith(str(tokenizer.bos_token))
    return str(tokenizer.decode(ids[1:] if bos_is_ours else ids))
