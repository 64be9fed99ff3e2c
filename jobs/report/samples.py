"""Completions to read: of the first, the middle and the last recorded step, with rewards and log-probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.report.parts import Section, number
from jobs.report.records import Record, RunRecord

SHOWN_STEPS = 3
SHOWN_CHARACTERS = 20_000  # of one text; the rest is in completions.jsonl
CERTAIN, LOST = 0.0, -6.0  # nats: the ends of the colour scale; e^-6 is one in four hundred


@dataclass(frozen=True)
class Token:
    """A sampled token; ``doubt`` is 0 for a probability of 1, and 1 from e^LOST down."""

    text: str
    logprob: float

    @property
    def doubt(self) -> float:
        return min(1.0, max(0.0, (self.logprob - CERTAIN) / (LOST - CERTAIN)))

    @property
    def shown(self) -> str:
        """Its text with what is invisible made visible."""
        return self.text.replace("\n", "⏎\n").replace("\t", "⇥") or "∅"

    @property
    def probability(self) -> str:
        return f"{math.exp(self.logprob):.3g}"


@dataclass(frozen=True)
class Sample:
    """A completion as the page shows it. ``said``: (role, text, reward) of each message, if it is a conversation."""

    prompt: str
    completion: str
    figures: list[tuple[str, str]]
    said: list[tuple[str, str, str]]
    tokens: list[Token]


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one step of one run."""

    title: str
    samples: list[Sample]


def samples(runs: Sequence[RunRecord]) -> Section:
    """What the runs sampled at their first, middle and last recorded step."""
    groups = [
        SampleGroup(
            f"{run.label}, step {step:,}" if len(runs) > 1 else f"Step {step:,}",
            [sample_of(record) for record in run.completions if record["step"] == step],
        )
        for run in runs
        for step in spread([record["step"] for record in run.completions])
    ]
    with_tokens = any(sample.tokens for group in groups for sample in group.samples)
    intro = (
        "Tokens are shaded by how improbable they were when they were sampled."
        if with_tokens
        else "No log-probabilities: a step has them for every token with PPO, or with rollout.logprobs=true."
    )
    why = "completions.jsonl is empty: tracking.completions_every_steps has not come around yet, or is 0"
    return Section("Samples", samples=groups, intro=intro, absent=why)


def spread(steps: Sequence[int]) -> list[int]:
    """At most SHOWN_STEPS different ones: the first, the last, and those at equal distances between them."""
    different = sorted(set(steps))
    if len(different) <= SHOWN_STEPS:
        return different
    return [different[round(i * (len(different) - 1) / (SHOWN_STEPS - 1))] for i in range(SHOWN_STEPS)]


def sample_of(record: Record) -> Sample:
    """One line of completions.jsonl, from this version or an older one."""
    parts = {name.removeprefix("rewards/"): value for name, value in record.items() if name.startswith("rewards/")}
    figures = [("reward", number(record.get("reward"))), ("advantage", number(record.get("advantage")))]
    figures += [(name, number(value)) for name, value in parts.items()] if len(parts) > 1 else []
    figures += [("ended", str(record["ended"]))] if "ended" in record else []
    return Sample(
        cut(str(record.get("prompt", ""))),
        cut(str(record.get("completion", ""))),
        figures,
        [message_of(message) for message in record.get("messages") or ()],
        [Token(str(text), float(logprob)) for text, logprob in record.get("tokens") or ()],
    )


def message_of(message: dict[str, Any]) -> tuple[str, str, str]:
    """Role, text with the calls of tools, and the reward of the turn, if it has one."""
    text = "\n".join([str(message.get("text", "")), *map(str, message.get("calls", ()))]).strip("\n")
    return str(message.get("role", "")), cut(text), number(message["reward"]) if "reward" in message else ""


def cut(text: str) -> str:
    """The beginning and the end of a text that is too long to show."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"
