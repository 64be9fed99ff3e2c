"""What the user sees during a run: a line per step, and on a terminal what happens now, in live lines below them."""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf.tracking.performance import Bottleneck

TEXT_WIDTH = 240  # characters of a prompt or completion in the table
SHOWN_FROM_S = 0.05  # a shorter phase would read 0.0 s
RECENT_STEPS = 10  # from which the time that is left is estimated
CURVE = "▁▂▃▄▅▆▇█"
CURVE_STEPS = 24
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
    """One step in one line: headline numbers, KL and learning rate if there are any, tokens per second, seconds per
    phase, bottleneck."""
    parts = [f"step {step}/{num_steps}"]
    shown = {name: name for name in HEADLINES} | {"kl": "kl", "objective/kl": "kl", "learning_rate": "lr", "lr": "lr"}
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


def curve(values: Iterable[float]) -> str:
    """One character per value, from the lowest to the highest of them."""
    values = list(values)
    low, high = min(values), max(values)
    return "".join(CURVE[round((value - low) / ((high - low) or 1) * (len(CURVE) - 1))] for value in values)


def duration(seconds: float) -> str:
    """For example ``12 s``, ``5 min`` or ``3 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def printable(text: str) -> str:
    """The text with escapes for what a terminal would interpret, line breaks included."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ProgressDisplay:
    """Prints to ``console``; with ``enabled`` False only notes. The live lines appear with the first phase."""

    def __init__(self, console: Console, *, num_steps: int, enabled: bool) -> None:
        self._console, self._num_steps, self._enabled = console, num_steps, enabled
        self._step = 0
        self._headline = ""  # what the curve shows
        self._curve: deque[float] = deque(maxlen=CURVE_STEPS)
        self._step_times_s: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # when the last steps ended, monotonic
        self._stopping = ""
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
        self._step = step
        self._step_times_s.append(time.monotonic())
        self._headline = next((name for name in HEADLINES if name in record), "")
        if (value := record.get(self._headline)) is not None:
            self._curve.append(value)
        if self._enabled:
            line = step_line(step, self._num_steps, record, bottleneck)
            if self._live is None:
                self.note(line)
            else:  # a line that wraps would be hard to read down
                self._console.print(Text(line), no_wrap=True, overflow="ellipsis", crop=True)

    def resumed(self, step: int) -> None:
        """The run resumes after ``step``."""
        self._step = step

    def stopping(self, message: str) -> bool:
        """Whether the live lines show, from now on, that the run is going to stop. Prints nothing, so that a signal
        handler may call it."""
        self._stopping = message
        return self._live is not None

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

    def step_seconds(self) -> float | None:
        """The median of what the last steps took, evaluations between them included; None: too few are done."""
        ends = list(self._step_times_s)
        return statistics.median(after - before for before, after in pairwise(ends)) if len(ends) > 1 else None

    def seconds_left(self) -> float | None:
        """What the steps that are left will take if they take as long as the last ones; None: too few are done."""
        step_s = self.step_seconds()
        if step_s is None or self._step >= self._num_steps:
            return None
        since_s = min(time.monotonic() - self._step_times_s[-1], step_s)
        return step_s * (self._num_steps - self._step) - since_s

    def close(self) -> None:
        """Leaves the live line as it is and releases the terminal."""
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        line = Table.grid(padding=(0, 1))
        now = f"{self._phase} {time.monotonic() - self._phase_started:.0f} s" if self._phase else ""
        cells: list[RenderableType] = [self._spinner]
        if self._phase != "start":  # until then nobody knows from where it resumes
            bar = ProgressBar(self._num_steps, self._step, width=24 if self._console.width >= 100 else 12)
            cells += [bar, f"step {self._step}/{self._num_steps}"]
            if (left_s := self.seconds_left()) is not None:
                cells.append(f"{duration(left_s)} left")
        line.add_row(*cells, Text(now, style="dim"))
        below = []
        if self._curve and not self._console.options.ascii_only:
            below.append(Text(f"  {self._headline} {curve(self._curve)} {_number(self._curve[-1])}"))
        if self._stopping:
            below.append(Text(self._stopping, style="bold"))
        return Group(line, *below)

    def _excerpt(self, text: str) -> Text:
        """Beginning and end of a long text; characters that a terminal would interpret or cannot show are escaped."""
        if len(text) > TEXT_WIDTH:
            text = f"{text[: TEXT_WIDTH // 2]} [...] {text[-TEXT_WIDTH // 2 :]}"
        encoding = self._console.encoding
        return Text(printable(text).encode(encoding, "backslashreplace").decode(encoding))
