"""What bench_step asks of every peer, and how one that is a command is run and watched."""

import argparse
import json
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil

from rlhf.data.tasks import task_rows

PROMPT_TOKENS = 256  # room for a prompt
GPU_SHARE = 0.35  # of each GPU's memory, for vLLM
LEARNING_RATE = 1e-6
BETA = 0.001  # of the KL to the reference, if there is one
TAIL_CHARACTERS = 4000  # of a failed command's output


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options that say what a step is, the same for us and for every peer."""
    parser.add_argument("--prompts", type=int, default=64, help="per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--completion", type=int, help="tokens, at most; 512 if fixed, 1024 if ragged")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lengths", choices=("fixed", "ragged"), default="fixed")
    parser.add_argument("--gpus", type=int, default=1, help="learner ranks, and engines; everything is colocated")
    parser.add_argument("--reference", action="store_true", help=f"KL to a reference model, beta={BETA:g}")


def parse_work(description: str | None) -> argparse.Namespace:
    """The command line of a peer's module; ``settings`` go to the peer as they are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="for the peer; flags after --")
    add_work(parser)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="of the learner")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="ends the peer if it takes longer")
    parser.add_argument("--out", type=Path, required=True, help="what the peer prints goes beside it, to OUT.log")
    args = parser.parse_args()
    args.completion = args.completion or (512 if args.lengths == "fixed" else 1024)
    return args


def prompts_of(args: argparse.Namespace) -> list[str]:
    """A prompt for each place of each step, of words that every tokenizer knows; two steps' more, for readers ahead."""
    rows = task_rows("phrases", {"num_words": args.prompt_words}, split="train", seed=0)
    wanted = args.prompts * (args.steps + 2)
    texts = [row["prompt"] for row in rows]
    return Random(0).choices(texts, k=wanted) if len(texts) < wanted else texts[:wanted]


class StepLog:
    """Runs a command and notes when it prints the line that ends a step, and what that line says.

    It ends after ``limit_s``, with everything that it started: some trainers wait for ever for a process that died.
    """

    def __init__(self, pattern: str, log: Path) -> None:
        """``log``: gets all that the command prints, as it comes."""
        self._pattern, self._log = re.compile(pattern), log
        self._lines: list[str] = []
        self.ends_s: list[float] = []
        self.said: list[str] = []  # the lines

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, limit_s: float) -> None:
        """Raises RuntimeError with the end of the output if the command fails or takes too long."""
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"none after {limit_s:g} s"
        finally:
            end_tree(process.pid)
            process.wait()
        reader.join(10.0)
        if code != 0:
            raise RuntimeError(f"{command[2]}: exit code {code}:\n{''.join(self._lines)[-TAIL_CHARACTERS:]}")

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with self._log.open("w", buffering=1) as log:
            for line in process.stdout:
                log.write(line)
                self._lines.append(line)
                if self._pattern.search(line):
                    self.ends_s.append(time.monotonic())
                    self.said.append(line)

    def step_s(self) -> list[float]:
        """Seconds from one step's end to the next, for every step but the first."""
        return [after - before for before, after in zip(self.ends_s, self.ends_s[1:], strict=False)]


def end_tree(pid: int) -> None:
    """Kills a process and all that descend from it."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def write_result(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """What a peer's module leaves for bench_step: ``step_s``, ``completion_tokens`` (both per step), ``version``."""
    args.out.write_text(json.dumps(dict(result)))
