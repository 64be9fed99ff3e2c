"""`rlhf data`: what is shown of data and reward functions before a run, and how their mistakes end it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.cli import main
from rlhf.batch import Prompt
from rlhf.rewards.known_answers import EMPTY, NO_ANSWER, REFERENCE, WRONG, known_answers, reference_column

REWARDS = """
def per_letter(completions, answer, **kwargs):
    return [1 / len(c) for c in completions]

def blind(completions, **kwargs):
    return [0.5 for _ in completions]

def whole(completions, answer, **kwargs):
    return [None if c == "" else float(c == a) for c, a in zip(completions, answer)]
"""
Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Show:
    """Runs the command with these settings; returns its exit code, and what it prints on both streams."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [{"prompt": f"what is {'one and ' * i}one?", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"model": {"path": str(tiny_model_dir)}, "data": {"train": str(tmp_path / "rows.jsonl")}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(base))

    def run(*arguments: str, functions: str = "whole") -> tuple[int, str, str]:
        named = ", ".join(f"{{path: {tmp_path / 'mine.py'}:{name}}}" for name in functions.split())
        command = ["rlhf", "data", "-c", str(tmp_path / "recipe.yaml"), f"reward.functions=[{named}]", *arguments]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err  # type: ignore[return-value]

    return run


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def table_row(shown: str, first: str) -> list[str]:
    return next(found for line in shown.splitlines() if (found := cells(line)) and found[0] == first)


def test_it_shows_rows_columns_lengths_and_prompts(show: Show) -> None:
    code, out, _ = show(
        "data.max_prompt_tokens=30", "data.eval=task:phrases", "data.eval_size=5", "--rows=2", functions="blind"
    )
    assert code == 0
    train, held_out = out.split("data.eval = task:phrases")
    assert re.search(r"8 rows, (\d) of them are used; (\d) dropped: longer than data.max_prompt_tokens=30", train)
    assert table_row(train, "answer") == ["answer", "str", "", "1"]
    assert "what is one?" in train and "what is one and one?" in train and "one and one and one?" not in train
    counts = [int(n) for n in re.findall(r"^ +\d+ to \d+ .* (\d+)$", train, re.MULTILINE)]
    assert sum(counts) == 8, "over-long rows are in the histogram"
    p50, p95, most = map(int, re.search(r"p50 (\d+), p95 (\d+), max (\d+)", train).groups())  # type: ignore[union-attr]
    assert p50 <= 30 < p95 == most
    assert "5 rows, 5 of them are used" in held_out


def test_special_tokens_are_visible_as_the_model_reads_them(show: Show, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<eos>hello", "answer": "1"}) + "\n")
    assert "<eos>hello" in show()[1]


def test_known_answers_are_rewarded_and_a_blind_function_is_pointed_out(show: Show) -> None:
    code, out, _ = show(functions="whole")
    assert code == 0
    assert table_row(out, "whole") == ["whole", "1", "1", "0", "abstains"]
    assert "no more than a wrong answer" not in out
    code, out, _ = show(functions="blind")
    assert table_row(out, "blind") == ["blind", "1", "0.5", "0.5", "0.5"]
    assert "given no more than a wrong answer in row(s) 1, 2, 3" in out


def test_a_mistake_in_a_reward_function_is_one_line_with_its_place(show: Show) -> None:
    code, _, err = show(functions="per_letter")
    assert code == 2
    assert re.search(
        r"^error: reward function per_letter .* ZeroDivisionError: .* \(at mine.py:3\)$", err, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("data.train=nowhere.jsonl", "error: data.train=.*no such file or directory"),
        ("data.extra_eval={hard: nowhere.jsonl}", "error: data.extra_eval.hard=.*no such file or directory"),
        ("data.max_prompt_tokens=1", "error: data.train=.*no prompt is left"),
        ("--answer=solution", r"error: --answer solution: data.train=.* no such column \(its columns: answer\)"),
    ],
)
def test_a_mistake_in_the_data_is_one_line(show: Show, argument: str, said: str) -> None:
    code, _, err = show(argument)
    assert code == 2 and re.match(said, err) and err.count("\n") == 1


def test_without_right_answers_functions_get_a_wrong_and_an_empty_one(show: Show, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    code, out, _ = show(functions="blind")
    assert code == 0 and "no column with right answers (--answer)" in out
    assert table_row(out, "blind") == ["blind", "1", "0.5", "0.5"]


def test_a_wrong_answer_is_another_rows_that_differs() -> None:
    assert reference_column(["level", "solution", "answer"]) == "answer"
    prompts = [Prompt(i, [1], "p", columns={"answer": value}) for i, value in enumerate([7, 7, "8", None, [9]])]
    assert known_answers(prompts, "answer") == [
        {REFERENCE: "7", WRONG: "8", EMPTY: ""},
        {REFERENCE: "7", WRONG: "8", EMPTY: ""},
        {REFERENCE: "8", WRONG: "7", EMPTY: ""},
        {WRONG: "7", EMPTY: ""},
        {WRONG: "7", EMPTY: ""},
    ]
    assert known_answers(prompts[:1], "answer")[0][WRONG] == NO_ANSWER
