"""What the user sees during a run: one live line on a terminal, one plain line per step elsewhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf.tracking.performance import Bottleneck

TEXT_WIDTH = 240  # characters of a prompt or completion in the table
SHOWN_FROM_S = 0.05  # a shorter phase would read 0.0 s
HEADLINES = ("reward", "accuracy", "margin")  # whether a run works: first for a policy, the others for a reward model


@dataclass(frozen=True)
class SampledCompletion:
    """A row of the completions table; None: not finite."""

    prompt: str
    completion: str
    reward: float | None
    advantage: float | None


def step_line(
    step: int, num_steps: int, record: Mapping[str, float | None], bottleneck: Bottleneck | None = None
) -> str:
    """One step in one line: headline numbers, KL if there is one, tokens per second, seconds per phase, bottleneck."""
    parts = [f"step {step}/{num_steps}"]
    shown = {name: name for name in HEADLINES} | {"kl": "kl", "objective/kl": "kl"}
    parts += [f"{label} {_number(record[name])}" for name, label in shown.items() if name in record]
    if (rate := record.get("tokens_per_s")) is not None:
        parts.append(f"{rate:.0f} tokens/s")
    for name, seconds in record.items():
        if name.startswith("time/") and seconds is not None and seconds >= SHOWN_FROM_S:
            parts.append(f"{name.removeprefix('time/').removesuffix('_s')} {seconds:.1f} s")
    if bottleneck is not None and bottleneck.bound is not None:  # the longest phase alone is visible above
        parts.append(f"bound by {bottleneck}")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


class ProgressDisplay:
    """Prints to ``console``; with ``enabled`` False only notes. The live line appears with the first phase."""

    def __init__(self, console: Console, *, num_steps: int, enabled: bool) -> None:
        self._console, self._num_steps, self._enabled = console, num_steps, enabled
        self._step = 0
        self._line = ""
        self._phase: str | None = None
        self._phase_started = 0.0  # seconds, monotonic
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def phase(self, name: str | None) -> None:
        """Phase ``name`` begins; None: nothing is being measured."""
        self._phase, self._phase_started = name, time.monotonic()
        if self._enabled and self._console.is_interactive and self._live is None:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def step(self, step: int, record: Mapping[str, float | None], bottleneck: Bottleneck | None = None) -> None:
        """A step has finished with these metrics."""
        self._step, self._line = step, step_line(step, self._num_steps, record, bottleneck)
        if self._enabled and self._live is None:
            self.note(self._line)

    def resumed(self, step: int) -> None:
        """The run resumes after ``step``."""
        self._step = step

    def evaluation(self, step: int, record: Mapping[str, float | None]) -> None:
        """The held-out data has been evaluated."""
        if self._enabled:
            found = [f"{name} {_number(record[f'eval/{name}'])}" for name in HEADLINES if f"eval/{name}" in record]
            self.note("  ".join([f"evaluation at step {step}/{self._num_steps}", *found]))

    def completions(self, step: int, rows: Sequence[SampledCompletion]) -> None:
        """Sampled completions as a table."""
        if not self._enabled:
            return
        table = Table("prompt", "completion", "reward", "advantage", title=f"completions at step {step}")
        table.show_lines = True
        for row in rows:
            texts = self._excerpt(row.prompt), self._excerpt(row.completion)
            table.add_row(*texts, _number(row.reward), _number(row.advantage))
        self._console.print(table)

    def note(self, message: str) -> None:
        """One line, printed even if the display is disabled."""
        self._console.print(message, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the live line as it is and releases the terminal."""
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        now = f"{self._phase} {time.monotonic() - self._phase_started:.0f} s" if self._phase else ""
        count = f"step {self._step}/{self._num_steps}"
        bar.add_row(self._spinner, ProgressBar(self._num_steps, self._step, width=24), count, Text(now, style="dim"))
        return Group(bar, Text(self._line)) if self._line else Group(bar)

    def _excerpt(self, text: str) -> Text:
        """Beginning and end of a long text; characters that a terminal would interpret or cannot show are escaped."""
        if len(text) > TEXT_WIDTH:
            text = f"{text[: TEXT_WIDTH // 2]} [...] {text[-TEXT_WIDTH // 2 :]}"
        visible = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        encoding = self._console.encoding
        return Text(visible.encode(encoding, "backslashreplace").decode(encoding))
