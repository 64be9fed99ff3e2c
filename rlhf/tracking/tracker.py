"""The driver's logbook: measures phases, counts tokens, and passes each step's numbers to every writer."""

import json
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import Tensor

from rlhf.batch import Episode, Rollout
from rlhf.config import TrackingConfig
from rlhf.tracking.performance import find_bottleneck
from rlhf.tracking.progress import ProgressDisplay, SampledCompletion
from rlhf.tracking.writers import JsonLines, ScalarWriter, TensorBoard, WeightsAndBiases, finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN_TOKENS = 512  # of a sampled completion's, with their log-probabilities
KEPT_NOTES = 5  # for `rlhf status`
OUTSIDE_STEPS = frozenset({"start", "evaluate", "checkpoint"})  # phases that do not count towards a step's time


class Tracker:
    """Records one run under ``run_dir``: metrics.jsonl, eval.jsonl, completions.jsonl, TensorBoard and W&B; and in
    notes.jsonl what the user was told meanwhile.

    The files open at the first record, cut back to the step from which the run resumes, so a run that dies during
    start-up leaves the previous records alone. Raises ConfigError if W&B is requested but unavailable.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: str | Path,
        *,
        num_steps: int,
        tokenizer: "PreTrainedTokenizerBase",
        console: Console | None = None,
        writers: Sequence[ScalarWriter] = (),
    ) -> None:
        """``writers`` get every record, in addition to those that ``config`` asks for."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.num_tokens = 0  # prompt and completion tokens of all steps
        self.phases: dict[str, float] = {}  # wall seconds of each phase, over the whole run
        self._config, self._tokenizer = config, tokenizer
        self._has_steps = False
        self._step = -1  # of the last record that is kept; -1: none
        self._with_next_step: dict[str, float] = {}
        self._since_step: dict[str, float] = {}  # wall seconds of each phase since the last step's record
        self._phase: str | None = None
        self._phase_started_s = 0.0
        self._started_s = time.perf_counter()
        self._warned: set[str] = set()
        self._files: dict[str, JsonLines] = {}
        self._notes: list[tuple[float, str]] = []  # from before the files are open: when, and what
        self._noting = threading.Lock()  # the rollout pool has threads of its own
        self._writers: list[ScalarWriter] = [*writers]
        self._last: dict[str, dict[str, Any]] = {}  # the newest record of each file that this process has written
        self._newest_notes: deque[dict[str, str]] = deque(maxlen=KEPT_NOTES)
        self._num_steps = num_steps
        if config.wandb_project is not None:
            self._writers.append(WeightsAndBiases(config.wandb_project, self.run_dir))
        self._display = ProgressDisplay(console or Console(), num_steps=num_steps, enabled=config.progress)

    @property
    def has_steps(self) -> bool:
        """Whether a step has been recorded here, not only before the checkpoint that was resumed."""
        return self._has_steps

    @property
    def wall_s(self) -> float:
        """Wall seconds of the run, including those before the checkpoint it resumed from."""
        return time.perf_counter() - self._started_s

    @property
    def step_phases(self) -> dict[str, float]:
        """Wall seconds of each phase since the last step's record, without the phases outside steps."""
        return {name: seconds for name, seconds in self._since_step.items() if name not in OUTSIDE_STEPS}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall seconds of its body to phase ``name``. An enclosing phase does not count them."""
        outer = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, phase: str | None) -> None:
        """Ends the current phase and begins ``phase``; None: begins none."""
        now_s = time.perf_counter()
        if self._phase is not None:
            for seconds in (self.phases, self._since_step):
                seconds[self._phase] = seconds.get(self._phase, 0.0) + now_s - self._phase_started_s
        self._phase, self._phase_started_s = phase, now_s
        self._display.phase(phase)

    def log_step(
        self, step: int, metrics: Mapping[str, float], *, num_tokens: int, num_episodes: int | None = None
    ) -> None:
        """Records training step ``step``, which trained on ``num_tokens`` prompt and completion tokens.

        ``num_episodes``: completions it sampled, for ``eps``, TRL's name for episodes per second.

        ``time/<phase>_s`` are seconds since the last step's record, so an evaluation or a checkpoint appears with the
        step after it; ``tokens_per_s`` and ``eps`` leave those out. They are absent if no phase was measured, and so is
        ``bottleneck``, a name: the phase that took longest, and what bounds it if ``metrics`` show that.
        """
        assert step > self._step, f"step {step} was recorded before"
        self.num_tokens += num_tokens
        phases = self.step_phases
        step_s = sum(phases.values())
        bottleneck = find_bottleneck(phases, metrics)
        counts = {"tokens_per_s": num_tokens} | ({} if num_episodes is None else {"eps": num_episodes})
        values = {
            **{f"time/{name}_s": seconds for name, seconds in self._since_step.items()},
            **({name: count / step_s for name, count in counts.items()} if step_s > 0 else {}),
            "num_tokens": self.num_tokens,
            **self._with_next_step,
            **metrics,
        }
        names = {} if bottleneck is None else {"bottleneck": bottleneck.name}
        self._display.step(step, self._record("metrics", step, values, names), bottleneck)
        self._step, self._has_steps = step, True
        self._since_step, self._with_next_step = {}, {}

    def log_with_next_step(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of what ends between two steps to the record of the next one."""
        self._with_next_step |= metrics

    def log_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation after step ``step``, every metric under ``eval/``."""
        values = {f"eval/{name}": value for name, value in metrics.items()}
        self._display.evaluation(step, self._record("eval", step, values))

    def log_completions(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        rewards: Tensor,
        advantages: Tensor,
        *,
        given: Mapping[str, Sequence[float]] | None = None,
        logprobs: Sequence[Tensor] | None = None,
    ) -> None:
        """Records and shows ``tracking.completions_rows`` of S completions, spread over the batch.

        rewards, advantages float [S]: one of each per completion. ``given``: S rewards by function; ``logprobs``: S
        tensors float [num_sampled], the log-probability of each sampled token, NaN where unknown.
        """
        num_rows = min(self._config.completions_rows, len(rollouts))
        picked = [row * len(rollouts) // num_rows for row in range(num_rows)]
        texts = [as_read(rollouts[i], self._tokenizer) for i in picked]
        rows = [
            SampledCompletion(
                prompt=rollouts[i].prompt.text,
                completion=text,
                **finite({"reward": rewards[i].item(), "advantage": advantages[i].item()}),
            )
            for i, text in zip(picked, texts, strict=True)
        ]
        for i, row in zip(picked, rows, strict=True):
            parts = finite({f"rewards/{name}": values[i] for name, values in (given or {}).items()})
            more = beyond_text(rollouts[i], None if logprobs is None else logprobs[i], self._tokenizer)
            self._file("completions").append({"step": step, **asdict(row), **parts, **more})
        self._display.completions(step, rows)

    def note(self, message: str) -> None:
        """Prints one line for the user, with or without the progress display, and keeps it in notes.jsonl."""
        self._display.note(message)
        self.remember(message)

    def remember(self, message: str) -> None:
        """Keeps one line in notes.jsonl that the user has been told already. Any thread may call it."""
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._newest_notes.append({"at": now, "note": message})
        with self._noting:
            self._notes.append((time.perf_counter(), message))
            if self._files:
                self._write_notes()

    def progress(self) -> dict[str, Any]:
        """How the run goes at this moment, as plain values for `rlhf status`. From any thread, and without waiting.

        ``step`` counts finished steps; ``phase`` is None between two phases; the seconds of a step and until the end,
        ``step_s`` and ``left_s``, are None until two steps have ended.
        """
        return {
            "directory": str(self.run_dir),
            "step": max(self._step, 0),
            "num_steps": self._num_steps,
            "phase": self._phase,
            "phase_s": time.perf_counter() - self._phase_started_s if self._phase else 0.0,
            "step_s": self._display.step_seconds(),
            "left_s": self._display.seconds_left(),
            "wall_s": self.wall_s,
            "metrics": self._last.get("metrics", {}),
            "evaluation": self._last.get("eval", {}),
            "notes": list(self._newest_notes),
        }

    def stopping(self, message: str) -> bool:
        """Whether the display shows that the run is going to stop; else nobody has been told. For signal handlers."""
        return self._display.stopping(message)

    def close(self) -> None:
        """Closes every file and writer and releases the terminal; safe to call more than once."""
        with self._noting:
            files, self._files = self._files, {}
        with ExitStack() as stack:  # closes each of them, even if one fails
            for resource in (*files.values(), *self._writers, self._display):
                stack.callback(resource.close)
        self._writers = []

    def state_dict(self) -> dict[str, Any]:
        """Clocks and counters, as JSON."""
        return {"step": self._step, "num_tokens": self.num_tokens, "wall_s": self.wall_s, "phases": dict(self.phases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from ``state_dict``, adding what this process has measured so far (its start-up)."""
        assert not self._files, "the files are already open; load before the first record"
        self._step, self.num_tokens = state["step"], state["num_tokens"]
        self._started_s -= state["wall_s"]
        so_far, self.phases = self.phases, dict(state["phases"])
        for name, seconds in so_far.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._display.resumed(self._step)

    def _record(
        self, file: str, step: int, values: Mapping[str, float], names: Mapping[str, str] | None = None
    ) -> dict[str, float | None]:
        """Passes the values to the file and every writer, and ``names``, which writers cannot plot, to the file only.

        Returns the values, with None for those that are not finite.
        """
        recorded = finite(values)
        for name in (name for name, value in recorded.items() if value is None and name not in self._warned):
            self._warned.add(name)
            warnings.warn(f"{name} is {values[name]} at step {step}; it is null in {file}.jsonl", stacklevel=3)
        self._last[file] = {"step": step, "wall_s": self.wall_s, **recorded, **(names or {})}
        self._file(file).append(self._last[file])
        for writer in self._writers:
            writer.write(step, values)
        return recorded

    def _file(self, name: str) -> JsonLines:
        if not self._files:
            self._open()
        return self._files[name]

    def _open(self) -> None:
        files: dict[str, JsonLines] = {}
        for name in ("metrics", "eval", "completions"):
            path = self.run_dir / f"{name}.jsonl"
            files[name] = JsonLines(path, keep_to_step=self._step)
            if dropped := files[name].num_dropped:
                self.note(f"{path.name}: dropped {dropped} line(s) of steps that this run does again")
        # what happened in steps that are done again has happened all the same
        keep_to_step = math.inf if self._step >= 0 else self._step
        files["notes"] = JsonLines(self.run_dir / "notes.jsonl", keep_to_step=keep_to_step)
        with self._noting:
            self._files = files
            self._write_notes()
        if self._config.tensorboard:
            self._writers.append(TensorBoard(self.run_dir / "tensorboard", keep_to_step=self._step))

    def _write_notes(self) -> None:
        for at_s, message in self._notes:
            note = {"step": max(0, self._step), "wall_s": at_s - self._started_s, "note": message}
            self._files["notes"].append(note)
        self._notes = []


def beyond_text(rollout: Rollout, logprobs: Tensor | None, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What is known of a completion besides its text: why it ``ended``; ``messages``, who said what in an episode, from
    the prompt on; and ``tokens``, the first MAX_SHOWN_TOKENS that were sampled, [text, log-probability] each, if that
    of every one is known.

    logprobs float [num_sampled], NaN where unknown.
    """
    episode = rollout.episode
    record: dict[str, Any] = {"ended": rollout.finish_reason if episode is None else episode.status}
    if episode is not None:
        asked = [{"role": said["role"], "text": said["content"]} for said in rollout.prompt.messages or ()]
        record["messages"] = [*asked, *said_in(episode)]
    if logprobs is None or not logprobs.isfinite().all():
        return record
    texts = tokenizer.batch_decode([[token] for token in rollout.sampled_ids[:MAX_SHOWN_TOKENS]])
    values = [round(value, 3) for value in logprobs[:MAX_SHOWN_TOKENS].tolist()]
    return record | {"tokens": [list(pair) for pair in zip(texts, values, strict=True)]}


def said_in(episode: Episode) -> list[dict[str, Any]]:
    """``role`` and ``text`` of every message after the prompt; of the model's own also ``calls``, its calls of tools as
    JSON, and ``reward``, where there are any."""
    rewards, said = iter(episode.turn_rewards), []
    for message in episode.messages:
        line: dict[str, Any] = {"role": message["role"], "text": str(message.get("content") or "").rstrip()}
        if calls := [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]:
            line["calls"] = calls
        if message["role"] == "assistant" and (reward := next(rewards, 0.0)):
            line["reward"] = reward
        said.append(line)
    return said


def conversation(episode: Episode) -> str:
    """``role: what was said``, a paragraph for each message; after the model's own, what its environment gave."""
    paragraphs = []
    for said in said_in(episode):
        lines = [f"{said['role']}: {said['text']}".rstrip(), *said.get("calls", ())]
        lines += [f"(reward {said['reward']:g})"] if "reward" in said else []
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def as_read(rollout: Rollout, tokenizer: "PreTrainedTokenizerBase") -> str:
    """A completion as people read it; of an episode, who said what, with the rewards of turns."""
    if rollout.episode is None:
        return tokenizer.batch_decode([rollout.token_ids], skip_special_tokens=True)[0]
    return conversation(rollout.episode)
