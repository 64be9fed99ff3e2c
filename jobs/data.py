"""`rlhf data`: what a run would read and reward, shown before anything is started."""

import math
import re
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from jobs.validate import check_environment, check_rewards, load_held_out, load_training
from rlhf.config import Config, eval_key, require
from rlhf.data.prompts import PromptSet
from rlhf.models.loading import load_tokenizer
from rlhf.recipes import validate_model
from rlhf.rewards import RewardFunctions, load_reward_functions
from rlhf.rewards.known_answers import EMPTY, REFERENCE, WRONG, Given, reference_column, score_known_answers
from rlhf.tracking.progress import printable

NUM_BINS = 10  # of the histogram
EXAMPLE_WIDTH = 60  # characters of a column's first value


def show_data(config: Config, *, num_rows: int, answer: str | None, console: Console | None = None) -> None:
    """Prints every source's rows, columns, lengths and first ``num_rows`` prompts, and what the reward functions give
    to known answers of those rows.

    ``answer``: the column with the right answers (None: the first that is named like one). Raises as a run would
    before it starts Ray, and RewardError or DeadlineError for what a reward function does.
    """
    console = console or Console()
    validate_model(config)
    tokenizer = load_tokenizer(config.model)
    training = load_training(config, tokenizer)
    held_out = {eval_key(name): prompts for name, prompts in load_held_out(config, tokenizer).items()}
    sources = training.by_key() | held_out
    for key, prompts in sources.items():
        require(
            answer is None or answer in prompts.columns,
            f"--answer {answer}: {key}={prompts.source} has no such column (its columns: "
            f"{', '.join(prompts.columns) or 'none'})",
        )
        console.print(describe(key, prompts, config, tokenizer, num_rows=num_rows))
    check_rewards(config, sources)
    for note in check_environment(config, tokenizer, sources):
        console.print(Text(note))
    if config.environment is not None:
        console.print(Text("reward functions and environment are not tried: they need whole episodes"))
        return
    if config.reward.model is not None:
        console.print(Text(f"reward.model={config.reward.model.path} is not asked: nothing is loaded here"))
    functions = RewardFunctions(
        load_reward_functions(config.reward.functions),
        timeout_s=config.reward.function_timeout_s,
        start_timeout_s=config.timeouts.start_s,
    )
    if not functions.functions:
        return
    with closing(functions):
        for key, prompts in sources.items():
            column = answer or reference_column(prompts.columns)
            rows = [prompts.prompt(row, id=row) for row in range(min(num_rows, len(prompts)))]
            console.print(reward_table(key, column, functions, score_known_answers(functions, rows, column, tokenizer)))


def describe(
    key: str, prompts: PromptSet, config: Config, tokenizer: PreTrainedTokenizerBase, *, num_rows: int
) -> RenderableType:
    """A source's rows, columns, lengths and first prompts."""
    report, limit = prompts.report, config.data.max_prompt_tokens
    lines = [f"{report.num_rows} rows, {len(prompts)} of them are used"]
    if report.num_dropped:
        lines.append(f"{report.num_dropped} dropped: longer than data.max_prompt_tokens={limit}")
    if report.num_truncated:
        lines.append(f"{report.num_truncated} cut to their last data.max_prompt_tokens={limit}")
    shown = [prompt_panel(prompts, row, tokenizer) for row in range(min(num_rows, len(prompts)))]
    title = Text(f"{key} = {prompts.source}", style="bold")
    return Group(title, Text("; ".join(lines)), column_table(prompts), histogram(prompts.read_lengths, limit), *shown)


def column_table(prompts: PromptSet) -> RenderableType:
    """Each column with its types, its empty values and its first value; of the rows that are used."""
    if not prompts.columns:
        return Text("no columns but the prompts")
    table = Table("column", "type", "null", "first value")
    for name, values in prompts.columns.items():
        types = sorted({type(value).__name__ for value in values if value is not None})
        first = next((str(value) for value in values if value is not None), "")
        example = first if len(first) <= EXAMPLE_WIDTH else f"{first[:EXAMPLE_WIDTH]} ..."
        num_null = sum(value is None for value in values)
        table.add_row(Text(name), ", ".join(types), str(num_null or ""), Text(printable(example)))
    return table


def histogram(lengths: Sequence[int], limit: int) -> RenderableType:
    """The rows that were read by their number of tokens; those above ``limit`` in red."""
    p50, p95 = (int(np.percentile(lengths, share, method="higher")) for share in (50, 95))
    counts, edges = np.histogram(lengths, bins=min(NUM_BINS, max(lengths) - min(lengths) + 1))
    grid = Table.grid(padding=(0, 1))
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first, last = math.ceil(low), math.ceil(high) - 1 if high < edges[-1] else math.floor(high)
        bar = Bar(max(counts.tolist()), 0, count, width=40, color="red" if first > limit else "cyan")
        grid.add_row(f"{first:>7} to {last:<7}", bar, str(count))
    return Group(Text(f"tokens of a prompt: p50 {p50}, p95 {p95}, max {max(lengths)}"), grid)


def prompt_panel(prompts: PromptSet, row: int, tokenizer: PreTrainedTokenizerBase) -> Panel:
    """A prompt as the model reads it, decoded from its tokens, with the special ones standing out."""
    ids = prompts.token_ids[row].tolist()
    read = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    text = Text("\n".join(printable(line) for line in read.split("\n")))
    special = [re.escape(token) for token in tokenizer.all_special_tokens]
    if special:
        text.highlight_regex("|".join(special), style="bold magenta")
    return Panel(text, title=f"prompt {row + 1}, {len(ids)} tokens", title_align="left")


def reward_table(key: str, column: str | None, functions: RewardFunctions, given: Sequence[Given]) -> RenderableType:
    """By function, what each kind of answer was given over the rows; and rows whose right answer gains nothing."""
    kinds = [kind for kind in (REFERENCE, WRONG, EMPTY) if any(kind in row for row in given)]
    answers = f"the reference is column {column!r}" if REFERENCE in kinds else "no column with right answers (--answer)"
    title = Text(f"{key}: rewards of {len(given)} row(s), {answers}", style="bold")
    table = Table("function", "weight", *kinds)
    for function in functions.functions:
        cells = [_spread([row[kind][function.name] for row in given if kind in row]) for kind in kinds]
        table.add_row(Text(function.name), f"{function.weight:g}", *cells)
    blind = [
        number
        for number, row in enumerate(given, start=1)
        if REFERENCE in row and _total(functions, row[REFERENCE]) <= _total(functions, row[WRONG])
    ]
    if not blind:
        return Group(title, table)
    rows = ", ".join(map(str, blind))
    warning = Text(f"the reference is given no more than a wrong answer in row(s) {rows}", style="yellow")
    return Group(title, table, warning)


def _spread(values: Sequence[float]) -> str:
    """'1', or the mean with the lowest and the highest."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return "abstains"
    low, high = min(numbers), max(numbers)
    mean = f"{sum(numbers) / len(numbers):.4g}"
    return mean if low == high else f"{mean} ({low:.4g} to {high:.4g})"


def _total(functions: RewardFunctions, scores: dict[str, float]) -> float:
    weights = functions.weights()
    return sum(weights[name] * score for name, score in scores.items() if not math.isnan(score))
