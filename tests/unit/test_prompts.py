"""Prompts: sources, templates, lengths, the resumable stream, and every error's key part."""

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf.config import DataConfig
from rlhf.data import prompts as prompts_module
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import PromptReport, PromptSet, load_prompts
from rlhf.errors import CheckpointError, ConfigError, DataError

TEMPLATE = (
    "<bos>{% for m in messages %}{% if m['role'] == 'forbidden' %}{{ raise_exception('no such\nrole') }}{% endif %}"
    "{{m['role']}}: {{m['content']}}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(6)]


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts <bos> before every text it encodes with special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["question answer user assistant system"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def config(**values: Any) -> DataConfig:
    return DataConfig(train="unused", **values)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source: str, tokenizer: PreTrainedTokenizerFast, split: Any = "train", **values: Any) -> PromptSet:
    return load_prompts(source, config(**values), tokenizer, split=split, seed=0)


def error_of(
    kind: type[Exception], source: str, tokenizer: PreTrainedTokenizerFast, split: Any = "train", **values: Any
) -> str:
    with pytest.raises(kind) as caught:
        load(source, tokenizer, split, **values)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- sources


COMPRESSED = {"jsonl.gz": "gzip", "jsonl.zst": "zstd", "csv": None, "csv.gz": "gzip", "csv.zst": "zstd"}


def save_as(kind: str, directory: Path) -> str:
    if kind == "jsonl":
        return write_jsonl(directory / "rows.jsonl", ROWS)
    if kind in COMPRESSED:
        name = directory / f"rows.{kind}"
        with pa.output_stream(str(name), compression=COMPRESSED[kind]) as file:
            if "jsonl" in kind:
                file.write(Path(write_jsonl(directory / "rows.jsonl", ROWS)).read_bytes())
            else:
                lines = [f'{row["answer"]},"{row["prompt"]}"' for row in ROWS]
                file.write("\r\n".join(["\ufeffanswer,prompt", *lines, ""]).encode())
        return str(name)
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), directory / "rows.parquet")
        return str(directory / "rows.parquet")
    saved = datasets.Dataset.from_list(ROWS)
    if kind == "dataset_dict":
        saved = datasets.DatasetDict(train=saved, test=saved.select([3, 4]))
    saved.save_to_disk(str(directory / "saved"))
    return str(directory / "saved")


@pytest.mark.parametrize("kind", ["jsonl", *COMPRESSED, "parquet", "dataset", "dataset_dict"])
def test_every_source_gives_the_same_prompts(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = load(save_as(kind, tmp_path), tokenizer)
    assert [p.text for p in prompts.all()] == [row["prompt"] for row in ROWS]
    assert [p.columns for p in prompts.all()] == [{"answer": row["answer"]} for row in ROWS]
    assert [p.id for p in prompts.all()] == list(range(6))
    assert prompts.lacking == {}
    assert prompts.all()[2].messages is None
    assert prompts.all()[2].token_ids == tokenizer("question 2")["input_ids"]
    assert prompts.all()[2].token_ids[0] == tokenizer.bos_token_id


def test_eval_takes_the_test_split_and_at_most_eval_size(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert load(save_as("dataset_dict", tmp_path), tokenizer, "eval").texts == ["question 3", "question 4"]
    for kind in ("jsonl", "csv.gz", "parquet"):
        prompts = load(save_as(kind, tmp_path), tokenizer, "eval", eval_size=2)
        assert prompts.texts == ["question 0", "question 1"]
        assert prompts.report.num_rows == 2


def test_tasks_take_their_arguments_and_stay_disjoint(tokenizer: PreTrainedTokenizerFast) -> None:
    args = {"max_operand": 9, "num_rows": 40}
    train = load("task:arithmetic", tokenizer, task_args=args)
    held_out = load("task:arithmetic", tokenizer, "eval", task_args=args, eval_size=5)
    assert (len(train), len(held_out)) == (40, 5)
    assert not set(train.texts) & set(held_out.texts)
    assert train.columns["answer"]
    assert load("task:arithmetic", tokenizer, task_args=args, prompt_column="text").texts == train.texts
    other = load_prompts("task:arithmetic", config(task_args=args), tokenizer, split="train", seed=1)
    assert other.texts != train.texts


def test_columns_keep_their_types_and_a_missing_value_is_none(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"question": "a", "tests": ["x", 1]}, {"question": "b", "level": 3}]
    prompts = load(write_jsonl(tmp_path / "p.jsonl", rows), tokenizer, prompt_column="question")
    assert [p.columns for p in prompts.all()] == [{"tests": ["x", 1], "level": None}, {"tests": None, "level": 3}]
    assert prompts.lacking == {"level": 1, "tests": 2}, "the first line without it"


def test_blank_lines_and_a_byte_order_mark_are_fine(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert load(str(path), tokenizer).texts == ["a", "b"]


# ---- chats


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_get_the_template_and_no_second_bos(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = [{"role": "system", "content": "be brief", "name": None}, {"role": "user", "content": "hi", "name": "Al"}]
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat}])
    if kind == "parquet":
        source = str(tmp_path / "p.parquet")
        parquet.write_table(pa.Table.from_pylist([{"prompt": chat}]), source)
    (prompt,) = load(source, tokenizer).all()
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "Al"},
    ]
    assert prompt.text == "<bos>system: be brief\nuser: hi\nassistant:"
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    (doubled,) = load(source, make_tokenizer("<bos>" + TEMPLATE)).all()
    assert doubled.token_ids.count(tokenizer.bos_token_id) == 2, "a chat's are those of its template, whatever they are"


def test_the_system_prompt_is_given_to_chats_that_have_none(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    own = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": own}, {"prompt": own[1:]}])
    first, second = load(source, tokenizer, system_prompt="default").all()
    assert first.messages == own, "an empty message of its own is one, too"
    assert second.messages == [{"role": "system", "content": "default"}, own[1]]
    assert second.text.startswith("<bos>system: default\n")


@pytest.mark.parametrize(("key", "value"), [("system_prompt", "be brief"), ("chat_template_kwargs", {"x": 1})])
def test_what_is_for_chats_needs_chats(
    key: str, value: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = save_as("jsonl", tmp_path)
    message = error_of(ConfigError, source, tokenizer, **{key: value})
    assert f"data.{key} needs chat prompts, but data.train={source} holds plain strings" in message
    assert "unset it, or make every prompt a list" in message


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_template_gets_its_arguments_and_the_date(split: str, tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y') }} {{ messages[0].content }}{% if enable_thinking is false %} quick{% endif %}"
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    thinking = {"enable_thinking": False}
    tokenizer = make_tokenizer(template)
    assert load(source, tokenizer, split, date="1999-12-31").texts == ["1999 hi"]
    assert load(source, tokenizer, split, date="1999-12-31", chat_template_kwargs=thinking).texts == ["1999 hi quick"]
    message = error_of(ConfigError, source, tokenizer, split, chat_template_kwargs={"add_generation_prompt": False})
    assert "data.chat_template_kwargs.add_generation_prompt collides" in message
    assert "data.date=tomorrow is not a date" in error_of(ConfigError, source, tokenizer, split, date="tomorrow")


def test_the_template_is_told_of_tools_where_there_are_any(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }} {% endif %}{{ messages[0].content }}"
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    for tools, text in (([{"name": "add"}], "add hi"), ([], "hi")):
        found = load_prompts(source, config(), make_tokenizer(template), split="train", seed=0, tools=tools)
        assert found.texts == [text]
        assert found.read_lengths == [len(ids) for ids in found.token_ids]


def test_chats_need_a_chat_template(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    message = error_of(DataError, source, make_tokenizer(chat_template=None))
    assert (
        "chat prompts need a chat template, but the tokenizer of model.path has none; use an instruct model" in message
    )


def test_a_template_that_refuses_a_chat_names_the_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": [{"role": role, "content": "hi"}]} for role in ("user", "forbidden")]
    message = error_of(DataError, write_jsonl(tmp_path / "p.jsonl", rows), tokenizer)
    assert message.endswith("p.jsonl: row 2: the model's chat template rejects it: no such role")


# ---- lengths


def overlong_rows(tmp_path: Path) -> str:
    """Of 4, 31, 6 and 21 tokens."""
    return write_jsonl(tmp_path / "p.jsonl", [{"prompt": "z" * n, "n": n} for n in (3, 30, 5, 20)])


def test_a_prompt_of_exactly_the_limit_is_kept_and_one_above_it_dropped(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = overlong_rows(tmp_path)
    assert [load(source, tokenizer, max_prompt_tokens=n).columns["n"] for n in (5, 6, 20, 21)] == [
        [3],
        [3, 5],
        [3, 5],
        [3, 5, 20],
    ]
    whole = load(source, tokenizer, max_prompt_tokens=31)
    assert whole.report == PromptReport(num_rows=4, num_dropped=0, num_truncated=0, longest=31)


def test_chats_that_are_kept_stay_with_their_texts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chats = [[{"role": "user", "content": content}] for content in ("z" * 99, "hi", "z" * 99, "there")]
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat} for chat in chats])
    prompts = load(source, tokenizer, max_prompt_tokens=60)
    assert prompts.chats == [chats[1], chats[3]]
    assert [p.text for p in prompts.all()] == ["<bos>user: hi\nassistant:", "<bos>user: there\nassistant:"]


def test_more_rows_than_are_tokenised_at_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "TOKENIZE_ROWS", 4)
    found = load(save_as("jsonl", tmp_path), tokenizer)
    assert [ids.tolist() for ids in found.token_ids] == [tokenizer(row["prompt"])["input_ids"] for row in ROWS]
    assert {ids.dtype for ids in found.token_ids} == {np.dtype(np.int32)}, "the fingerprint is of these bytes"


def test_overlong_prompts_are_dropped_with_their_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = load(overlong_rows(tmp_path), tokenizer, max_prompt_tokens=10)
    assert prompts.texts == ["zzz", "zzzzz"]
    assert [p.token_ids for p in prompts.all()] == tokenizer(["zzz", "zzzzz"])["input_ids"]
    assert prompts.columns == {"n": [3, 5]}
    assert prompts.report == PromptReport(num_rows=4, num_dropped=2, num_truncated=0, longest=31)
    assert "2 prompts of 4 rows (2 over-long dropped, 0 truncated), the longest had 31 tokens" in prompts.summary()


def test_truncation_keeps_bos_and_the_last_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "0123456789"}, {"prompt": "ab"}])
    prompts = load(source, tokenizer, max_prompt_tokens=4, overlong_prompts="truncate")
    assert prompts.texts == ["789", "ab"]
    assert prompts.all()[0].token_ids == tokenizer("789")["input_ids"]
    assert prompts.all()[0].token_ids[0] == tokenizer.bos_token_id
    assert prompts.report == PromptReport(num_rows=2, num_dropped=0, num_truncated=1, longest=11)


def test_a_prompt_that_fits_keeps_its_text_though_others_are_truncated(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ABCDEF"}, {"prompt": "AB"}, {"prompt": "A"}])
    prompts = load(source, tokenizer, max_prompt_tokens=3, overlong_prompts="truncate")
    assert prompts.texts == ["ef", "AB", "A"]


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, "<bos>assistant:"), (TEMPLATE[5:], "\nassistant:")])
def test_a_truncated_chat_keeps_the_bos_of_its_template(tmp_path: Path, template: str, expected: str) -> None:
    tokenizer = make_tokenizer(template)
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "z" * 30}]}])
    limit = len(tokenizer(expected, add_special_tokens=False)["input_ids"])
    (prompt,) = load(source, tokenizer, max_prompt_tokens=limit, overlong_prompts="truncate").all()
    assert prompt.text == expected
    assert prompt.token_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_plain_prompt_that_spells_bos_gets_no_second_one(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "<bos>user: hi"}, {"prompt": "user: hi"}])
    rendered, plain = load(source, tokenizer).all()
    assert rendered.text == "<bos>user: hi"
    assert rendered.token_ids == plain.token_ids == tokenizer("user: hi")["input_ids"]
    rendered, plain = load(source, tokenizer, max_prompt_tokens=3, overlong_prompts="truncate").all()
    assert rendered.token_ids == plain.token_ids
    assert (rendered.text, plain.text) == ("<bos>hi", "hi")


def test_no_prompt_left_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = overlong_rows(tmp_path)
    message = error_of(DataError, source, tokenizer, max_prompt_tokens=2)
    assert message.startswith(f"data.train={source}: no prompt is left")
    assert "all 4 are longer than data.max_prompt_tokens=2 (the shortest has 4)" in message
    assert "data.overlong_prompts=truncate" in message


# ---- errors of the source


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl: line 2 is not valid JSON"),
        (b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n', "p.jsonl: line 3 is not valid JSON"),
        (b'["a"]\n', "p.jsonl: line 1 is a list; every line must be an object"),
        (b'{"prompt": "a"}\n\n{"prompt": "\\ud83d!"}\n', 'line 3 has "\\ud83d", half of a surrogate pair'),
        (b'{"prompt": "a", "x": [{"\\udc00": 1}]}\n', 'line 1 has "\\udc00", half of a surrogate pair'),
        (b'{"prompt": "a"}\n{"x": ' + b"[" * 100_000 + b"\n", "line 2 is nested more than 100 levels deep"),
        (b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}\n", "line 1 is nested more than 100 levels deep"),
        (b"", "p.jsonl: holds no rows"),
        (b'{"text": "a", "answer": 1}\n', "has no column 'prompt'; set data.prompt_column to one of text, answer"),
        (b'{"prompt": "a", "completions": 1}\n', "rename column 'completions', which would hide an argument"),
        (b'{"prompt": "a"}\n{"prompt": " "}\n', "row 2: the prompt is empty; remove the row"),
        (b'{"prompt": "a"}\n{"prompt": null}\n', "row 2: the prompt is empty"),
        (b'{"prompt": []}\n', "row 1: the prompt is empty"),
        (b'{"prompt": [{"role": "user", "content": ""}]}\n', "row 1: the prompt is empty"),
        (b'{"prompt": 3}\n', "row 1: the prompt is a int; it must be a string or a list of {role, content} messages"),
        (b'{"prompt": "a"}\n{"prompt": {"role": "user"}}\n', "row 2: the prompt is a dict; it must be"),
        (b'{"prompt": "a"}\n{"prompt": [{}]}\n', "row 2: chats and plain strings are mixed; use one kind"),
        (b'{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": "b"}\n', "row 2: chats and plain strings"),
        (b'{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": 4}\n', "row 2: the prompt is a int"),
        (b'{"prompt": ["hi"]}\n', "must have a role and a content, both strings"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}\n', "a role and a content, both strings"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
            "the chat ends with an assistant message",
        ),
    ],
)
def test_what_is_wrong_with_a_jsonl_file(
    content: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    text = error_of(DataError, str(path), tokenizer)
    assert text.startswith(f"data.train={path}: ")
    assert message in text


def test_whole_surrogate_pairs_and_moderate_nesting_are_fine(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'{"prompt": "\\ud83d\\ude00", "x": ' + b"[" * 99 + b"]" * 99 + b', "y": "[[[[' + b"{" * 99 + b'"}'
    )
    prompts = load(str(path), tokenizer)
    assert prompts.texts == ["\N{GRINNING FACE}"]
    pickle.dumps(prompts)


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_that_are_no_text_are_named(
    kind: str, nested: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    strings = pa.array([b"good", b"b\xffd"]).view(pa.string())
    answers = pa.ListArray.from_arrays(pa.array([0, 1, 2]), strings) if nested else strings
    table = pa.table({"prompt": ["a", "b"], "answer": answers})
    source = str(tmp_path / "rows.parquet")
    if kind == "parquet":
        parquet.write_table(table, source)
    else:
        source = str(tmp_path / "saved")
        datasets.Dataset(table).save_to_disk(source)
    message = error_of(DataError, source, tokenizer)
    assert message == (
        f"data.train={source}: row 2: column 'answer' is not valid UTF-8: 'utf-8' codec can't decode byte 0xff in "
        "position 1: invalid start byte"
    )


def test_what_cannot_be_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, content in dict.fromkeys(("p.xlsx", "noise", "p.parquet", "p.jsonl.gz"), "not what it says").items():
        (tmp_path / name).write_text(content)
    (tmp_path / "empty").mkdir()
    expected = {
        "nowhere.jsonl": "no such file or directory; a source is task:NAME, a .jsonl, .csv (both also .gz",
        "p.jsonl.gz": "cannot be read: ",
        "p.xlsx": "cannot read a .xlsx; a source is",
        "noise": "cannot read a file without suffix; a source is",
        "p.parquet": "not a readable Parquet file",
        "empty": "not a directory written by datasets' save_to_disk",
    }
    for name, message in expected.items():
        assert f"data.train={tmp_path / name}: {message}" in error_of(DataError, str(tmp_path / name), tokenizer)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_was_cut_short_is_not_taken_for_a_short_one(
    suffix: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = Path(save_as(f"jsonl{suffix}", tmp_path))
    path.write_bytes(path.read_bytes()[:-6])
    assert "cannot be read: Truncated compressed stream" in error_of(DataError, str(path), tokenizer)


def test_values_of_a_csv_file_are_strings_as_they_are_written(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "p.csv"
    path.write_text('prompt,answer\n"a, ""b""\nc",007\n\n' + "x" * 200_000 + ",\n")
    prompts = load(str(path), tokenizer, max_prompt_tokens=1_000_000)
    assert prompts.texts == ['a, "b"\nc', "x" * 200_000]
    assert prompts.columns == {"answer": ["007", ""]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "p.csv: holds no rows"),
        (b"prompt\n", "p.csv: holds no rows"),
        (b"prompt,answer\na,1\nb\n", "row 2 has 1 fields, but the first line names 2 columns; quote fields that"),
        (b"prompt,answer\na,b,1\n", "row 1 has 3 fields, but the first line names 2 columns"),
        (b"prompt,x,x\na,1,2\n", "its first line names column 'x' twice; rename one"),
        (b'prompt\n"a', "not a readable CSV file in UTF-8: unexpected end of data"),
        (b"prompt\n\xff\n", "not a readable CSV file in UTF-8: 'utf-8' codec can't decode"),
    ],
)
def test_what_is_wrong_with_a_csv_file(
    content: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(content)
    assert message in error_of(DataError, str(path), tokenizer)


def test_a_hub_id_is_answered_with_how_to_save_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    how = 'datasets.load_dataset("openai/gsm8k", SUBSET).save_to_disk("openai/gsm8k"); of its splits, data.train takes'
    assert how in error_of(DataError, str(tmp_path / "openai/gsm8k"), tokenizer)
    files = ("prompts/gsm8k.jsonl", "prompts/gsm8k.parquet", "prompts/gsm8k.csv.gz")
    for path in ("data/gsm8k", "gsm8k", "../openai", *files, "a/b/c"):
        assert error_of(DataError, str(tmp_path / path), tokenizer).endswith("or a directory saved by datasets")


def test_a_saved_dict_without_the_split_lists_those_it_has(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, dev=rows).save_to_disk(str(tmp_path / "saved"))
    message = error_of(DataError, str(tmp_path / "saved"), tokenizer, "eval")
    assert "data.eval=" in message
    assert "needs a split 'test', but the saved ones are train, dev; name the directory of one, such as" in message
    assert len(load(str(tmp_path / "saved" / "dev"), tokenizer, "eval")) == len(ROWS)


def test_task_errors_pass_through(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert "task:chess does not exist" in error_of(ConfigError, "task:chess", tokenizer)
    assert "task_args.x is not an argument" in error_of(ConfigError, "task:phrases", tokenizer, task_args={"x": 1})
    message = error_of(ConfigError, save_as("jsonl", tmp_path), tokenizer, task_args={"num_rows": 1})
    assert "data.task_args is set, but" in message and "is not a built-in task" in message


def test_a_tokenizer_that_encodes_to_nothing_is_an_error(tmp_path: Path) -> None:
    deaf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"x": 0}, [])))
    message = error_of(DataError, save_as("jsonl", tmp_path), deaf)
    assert "row 1 encodes to no tokens; use the tokenizer made for the model" in message


# ---- the stream


def test_a_fingerprint_follows_tokens_their_order_and_where_a_prompt_ends() -> None:
    def of(*prompts: list[int]) -> str:
        token_ids = [np.array(ids, dtype=np.int32) for ids in prompts]
        report = PromptReport(len(prompts), 0, 0, 9)
        return PromptSet("s", ["text"] * len(prompts), token_ids, None, {}, report).fingerprint()

    # from hashlib and struct: lengths 2 and 1 as int64, then 1, 2 and 3 as int32; checkpoints hold it
    assert of([1, 2], [3]) == "4fc021cf0ccf0caa"
    different = [of([1, 2], [3]), of([1, 2], [4]), of([1], [2, 3]), of([3], [1, 2]), of([2, 1], [3]), of([1, 2, 3])]
    assert len(set(different)) == 6


def test_a_prompt_keeps_what_belongs_to_it_and_its_id_finds_it_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"question {i}"}], "answer": i} for i in range(6)]
    stream = PromptStream(load(write_jsonl(tmp_path / "p.jsonl", rows), tokenizer), shuffle=True, seed=0)
    taken = stream.take(15)
    for prompt in taken:
        question = f"question {prompt.columns['answer']}"
        assert prompt.messages == [{"role": "user", "content": question}]
        assert prompt.text == f"<bos>user: {question}\nassistant:" == tokenizer.decode(prompt.token_ids)
    assert [stream.at(prompt.id) for prompt in reversed(taken)] == taken[::-1], "of earlier epochs, too"
    assert [prompt.id for prompt in stream.take(2)] == [15, 16]


@pytest.fixture(scope="module")
def phrases(tokenizer: PreTrainedTokenizerFast) -> PromptSet:
    return load("task:phrases", tokenizer, task_args={"num_rows": 10})


def test_without_shuffling_the_order_is_the_sources_in_every_epoch(phrases: PromptSet) -> None:
    taken = PromptStream(phrases, shuffle=False, seed=0).take(23)
    assert [p.text for p in taken] == (phrases.texts * 3)[:23]
    assert [p.id for p in taken] == list(range(23))


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own(phrases: PromptSet) -> None:
    stream = PromptStream(phrases, shuffle=True, seed=0)
    epochs = [[p.text for p in stream.take(10)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(phrases.texts) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PromptStream(phrases, shuffle=True, seed=0)
    assert [p.text for p in again.take(30)] == [text for epoch in epochs for text in epoch]
    assert [p.text for p in PromptStream(phrases, shuffle=True, seed=1).take(10)] != epochs[0]


@pytest.mark.parametrize("taken", [0, 7, 10, 25])
def test_a_resumed_stream_goes_on_as_the_first_would_have(taken: int, phrases: PromptSet) -> None:
    first = PromptStream(phrases, shuffle=True, seed=3)
    first.take(taken)
    state = json.loads(json.dumps(first.state_dict()))
    expected = first.take(15)
    for already_taken in (0, 4):
        second = PromptStream(phrases, shuffle=True, seed=3)
        second.take(already_taken)
        second.load_state_dict(state)
        assert second.take(15) == expected


def test_resuming_with_other_data_or_order_is_an_error(phrases: PromptSet, tokenizer: PreTrainedTokenizerFast) -> None:
    state = PromptStream(phrases, shuffle=True, seed=0).state_dict()
    fewer = load("task:phrases", tokenizer, task_args={"num_rows": 9})
    other = load("task:phrases", tokenizer, task_args={"num_rows": 10, "num_words": 3})
    cases = {
        "num_prompts was 10 (of task:phrases) and is now 9": PromptStream(fewer, shuffle=True, seed=0),
        "fingerprint was": PromptStream(other, shuffle=True, seed=0),
        "shuffle was True": PromptStream(phrases, shuffle=False, seed=0),
        "seed was 0 (of task:phrases) and is now 1": PromptStream(phrases, shuffle=True, seed=1),
    }
    for message, stream in cases.items():
        with pytest.raises(CheckpointError) as caught:
            stream.load_state_dict(state)
        assert message in str(caught.value)
        assert "checkpoint.resume=none" in str(caught.value)
        assert stream.position == 0


def test_a_moved_file_is_still_the_same_data(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    old = write_jsonl(tmp_path / "old.jsonl", ROWS)
    new = write_jsonl(tmp_path / "new.jsonl", ROWS)
    state = PromptStream(load(old, tokenizer), shuffle=True, seed=0).state_dict()
    PromptStream(load(new, tokenizer), shuffle=True, seed=0).load_state_dict(state)
