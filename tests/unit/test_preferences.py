"""Preference pairs: what is read, what is refused and with which words, and what the tokens are."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf.data.preferences import Pair, PreferenceSet, epoch_batches, load_preferences, pair_batch
from rlhf.errors import ConfigError, DataError
from rlhf.reward_config import PreferenceDataConfig

PLAIN = {"prompt": "Say hello.", "chosen": " hello", "rejected": " goodbye"}
CHAT = {
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": "5",
    "margin": 0.5,
}


def write(directory: Path, *rows: Any) -> str:
    file = directory / "pairs.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


def load(source: str, tokenizer, *, split="train", seed: int = 0, **config: Any) -> PreferenceSet:
    return load_preferences(source, PreferenceDataConfig(train=source, **config), tokenizer, split=split, seed=seed)


def test_plain_and_chat_pairs_are_tokenised_as_the_reward_model_reads_them(tmp_path: Path, tiny_tokenizer) -> None:
    plain, chat = load(write(tmp_path, PLAIN, "", CHAT), tiny_tokenizer).pairs
    assert plain.chosen.tolist() == tiny_tokenizer("Say hello. hello")["input_ids"]
    assert plain.margin == 0
    messages = [*CHAT["prompt"], {"role": "assistant", "content": "5"}]
    assert tiny_tokenizer.decode(chat.rejected) == tiny_tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat.margin == 0.5


def test_compressed_pairs_are_those_of_the_plain_file(tmp_path: Path, tiny_tokenizer) -> None:
    plain = write(tmp_path, PLAIN, CHAT)
    compressed = tmp_path / "pairs.jsonl.gz"
    compressed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    assert load(str(compressed), tiny_tokenizer).fingerprint() == load(plain, tiny_tokenizer).fingerprint()


def test_the_template_is_told_the_run_s_date(tmp_path: Path, tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + tokenizer.chat_template
    (pair,) = load(write(tmp_path, CHAT), tokenizer, date="2001-02-03").pairs
    assert tokenizer.decode(pair.chosen).startswith("2001-02-03user: What is 2 + 2?")
    assert load(write(tmp_path, CHAT), tokenizer, date="2001-02-04").pairs[0].chosen.tolist() != pair.chosen.tolist()
    with pytest.raises(ConfigError, match=r"data\.date=3 February is not a date"):
        load(write(tmp_path, CHAT), tokenizer, date="3 February")


def test_a_fingerprint_follows_tokens_order_and_margins(tmp_path: Path, tiny_tokenizer) -> None:
    rows = [[PLAIN, CHAT], [CHAT, PLAIN], [PLAIN, CHAT | {"margin": 0.25}], [PLAIN], [PLAIN, CHAT]]
    prints = [load(write(tmp_path, *of), tiny_tokenizer).fingerprint() for of in rows]
    assert len(set(prints)) == 4 and prints[0] == prints[4]

    def of(chosen: list[int], rejected: list[int]) -> str:
        pair = Pair(np.array(chosen, np.int32), np.array(rejected, np.int32))
        return PreferenceSet("s", [pair], 0).fingerprint()

    assert len({of([1, 2], [3]), of([1, 4], [3]), of([1, 2], [4]), of([3], [1, 2]), of([1], [2, 3])}) == 5


def test_the_end_of_a_long_text_is_kept(tmp_path: Path, tiny_tokenizer) -> None:
    whole = load(write(tmp_path, PLAIN), tiny_tokenizer).pairs[0]
    cut = load(write(tmp_path, PLAIN), tiny_tokenizer, max_tokens=6)
    assert cut.pairs[0].chosen.tolist() == whole.chosen.tolist()[-6:]
    assert cut.num_truncated == 2 and "2 texts truncated" in cut.summary()
    lengths = sorted([len(whole.chosen), len(whole.rejected)])
    assert lengths[0] < lengths[1]
    of_limit = [load(write(tmp_path, PLAIN), tiny_tokenizer, max_tokens=n).num_truncated for n in lengths]
    assert of_limit == [1, 0], "a text of exactly the limit is whole"


def test_eval_keeps_the_first_pairs(tmp_path: Path, tiny_tokenizer) -> None:
    source = write(tmp_path, PLAIN, CHAT, PLAIN)
    held_out = load(source, tiny_tokenizer, split="eval", eval_size=2).pairs
    assert [pair.margin for pair in held_out] == [0.0, 0.5]
    assert len(load(source, tiny_tokenizer, eval_size=2).pairs) == 3, "training takes all"
    assert len(load("task:phrases", tiny_tokenizer, split="eval", eval_size=2).pairs) == 2


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "line 2 is not valid JSON"),
        ([1], "line 2 is a list; every line must be an object"),
        ({"prompt": "a", "chosen": "b"}, "line 2: has no 'rejected'; every line needs prompt, chosen and rejected"),
        (PLAIN | {"prompt": " "}, "line 2: the prompt is empty"),
        (
            PLAIN | {"prompt": [{"role": "assistant", "content": "a"}]},
            "line 2: the chat ends with an assistant message",
        ),
        (PLAIN | {"rejected": " hello"}, "line 2: chosen and rejected are the same"),
        (PLAIN | {"chosen": ["a", "b"]}, "line 2: chosen must be a string, or a list of one assistant message"),
        (
            PLAIN | {"rejected": [{"role": "user", "content": "a"}]},
            "line 2: rejected must be a string, or a list of one assistant message",
        ),
        (
            PLAIN | {"rejected": [{"role": "assistant", "content": "a"}] * 2},
            "line 2: rejected must be a string, or a list of one assistant message",
        ),
        (PLAIN | {"margin": math.inf}, "line 2: margin=inf must be a number of at least 0"),
        (PLAIN | {"margin": -1}, "line 2: margin=-1 must be a number of at least 0"),
        (PLAIN | {"margin": True}, "line 2: margin=True must be a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tiny_tokenizer, row: Any, complaint: str) -> None:
    source = write(tmp_path, PLAIN, row)
    with pytest.raises(DataError) as caught:
        load(source, tiny_tokenizer)
    assert str(caught.value).startswith(f"data.train={source}: {complaint}")
    assert "\n" not in str(caught.value)


def test_an_impossible_source_says_what_one_is(tmp_path: Path, tiny_tokenizer) -> None:
    with pytest.raises(DataError, match=r"no such file; a source is task:NAME or a \.jsonl file"):
        load(str(tmp_path / "none.jsonl"), tiny_tokenizer)
    with pytest.raises(DataError, match="holds no preference pairs"):
        load(write(tmp_path), tiny_tokenizer)
    with pytest.raises(ConfigError, match="task:sort_words has no preference pairs; tasks that do are arithmetic, phr"):
        load("task:sort_words", tiny_tokenizer)


def test_phrases_prefers_even_tokens(tiny_tokenizer) -> None:
    pairs = load("task:phrases", tiny_tokenizer, task_args={"num_rows": 50}).pairs
    assert len(pairs) == 50

    def evenness(ids: Any) -> float:
        return sum(id % 2 == 0 for id in ids.tolist()) / len(ids)

    # the text is tokenised anew, bytes that are no text come back as others: most pairs keep their order, not all
    assert sum(evenness(pair.chosen) > evenness(pair.rejected) for pair in pairs) >= 35


def test_arithmetic_prefers_the_right_answer(tiny_tokenizer) -> None:
    for pair in load("task:arithmetic", tiny_tokenizer, task_args={"num_rows": 20}).pairs:
        question, answer = tiny_tokenizer.decode(pair.chosen, skip_special_tokens=True).split("assistant: ")
        right = eval(question.split("What is ")[1].split("?")[0])
        assert int(answer) == right
        assert int(tiny_tokenizer.decode(pair.rejected, skip_special_tokens=True).split("assistant: ")[1]) != right


def test_built_in_pairs_repeat_and_splits_share_none(tiny_tokenizer) -> None:
    args = {"num_rows": 30}
    first, again = (load("task:phrases", tiny_tokenizer, task_args=args).pairs for _ in range(2))
    held_out = load("task:phrases", tiny_tokenizer, task_args=args, split="eval").pairs
    texts = [[tuple(pair.chosen) for pair in pairs] for pairs in (first, again, held_out)]
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])
    sums = [load("task:arithmetic", tiny_tokenizer, task_args=args, seed=seed).pairs for seed in (0, 1)]
    right = [[tuple(pair.chosen) for pair in pairs] for pairs in sums]
    assert right[0] != right[1]


def test_a_batch_weighs_each_pair_alike(tmp_path: Path, tiny_tokenizer) -> None:
    pairs = load(write(tmp_path, PLAIN, CHAT), tiny_tokenizer).pairs
    batch = pair_batch(pairs)
    lengths = [len(ids) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    assert batch.prompt_lengths.tolist() == lengths
    assert batch.completion_lengths.tolist() == [1, 1, 1, 1]
    assert batch.margins.tolist() == [0, 0, 0.5, 0.5]
    assert batch.loss_weights.tolist() == [0.5] * 4
    second = batch.select([2, 3])
    assert second.margins.tolist() == [0.5, 0.5]
    assert second.tokens.tolist() == [*pairs[1].chosen, pairs[1].chosen[-1], *pairs[1].rejected, pairs[1].rejected[-1]]


def test_an_epoch_is_every_pair_once_in_an_order_of_its_own(tiny_tokenizer) -> None:
    pairs: list[Pair] = load("task:phrases", tiny_tokenizer, task_args={"num_rows": 10}).pairs
    orders = [(0, 0), (1, 0), (0, 1)]
    epochs = [epoch_batches(pairs, 4, epoch=epoch, seed=seed, shuffle=True) for epoch, seed in orders]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(id(pair) for batch in batches for pair in batch) == sorted(map(id, pairs))
    assert len({tuple(id(p) for b in batches for p in b) for batches in epochs}) == 3
    straight = epoch_batches(pairs, 4, epoch=0, seed=0, shuffle=False)
    assert [id(p) for b in straight for p in b] == [id(p) for p in pairs]
