"""More GPUs, more speed? Whole runs of ``rlhf train`` on 1 to --gpus GPUs of one host, one row each.

python -m benchmarks.bench_scaling MODEL_DIR [KEY=VALUE ...] --gpus 4 [--parts colocate ...] [--counts 1 4] [--out FILE]
python -m benchmarks.bench_scaling --tiny MODEL_DIR          # three minutes on two CPU cores

separate   one learner GPU and 1 to N-1 rollout GPUs, each with the same number of sequences: tokens/s of the pool, and
           its efficiency over one GPU's
colocate   learner ranks and rollout workers on the same 1, 2, 4, ... GPUs, each with the same number of sequences: the
           whole step, and a pool as large as the host; --engines per GPU
overlap    one learner GPU and 1 to N-1 rollout GPUs on the same batch, in turns and at once: an asynchronous step
           against max(generate, train) of the synchronous one
recovery   an asynchronous run with N-1 rollout GPUs, one of whose workers is killed: how long until all serve again

MODEL_DIR: rlhf prepare random DIR --size 0.5b. KEY=VALUE pairs go to every ``rlhf train``.
"""

import argparse
import os
import signal
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import (
    PHASES,
    TINY_SETTINGS,
    BackgroundTrain,
    Row,
    TrainRun,
    actor_pids,
    rollout_share,
    show,
    train,
    write_json,
)

CONFIG = "grpo_0.5b_1gpu.yaml"
PARTS = ["separate", "colocate", "overlap", "recovery"]
RECOVERY_RUN = "bench-recovery"
START_S = 600.0  # for a run to make its first steps, or a new worker to serve


class Scaling:
    """Runs with a fixed amount of work (``prompts`` x ``group`` completions), per worker or in total."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def separate(self) -> list[Row]:
        """Pools of 1 to N-1 workers."""
        return self._with_efficiency([self._weak("separate", count, 1, learner_gpus=1) for count in self._apart()])

    def colocate(self) -> list[Row]:
        """The whole step on 1, 2, 4, ... GPUs."""
        doubling = [2**k for k in range(self._args.gpus.bit_length()) if 2**k <= self._args.gpus]
        counts = self._args.counts or doubling
        engines = self._args.engines
        return self._with_efficiency([self._weak("colocate", count, engines, learner_gpus=count) for count in counts])

    def _apart(self) -> list[int]:
        """Numbers of rollout GPUs, apart from the learner's."""
        return self._args.counts or list(range(1, self._args.gpus))

    def overlap(self) -> list[Row]:
        """Synchronous and asynchronous steps over one batch, with 1 to N-1 rollout workers."""
        rows = []
        for workers in self._apart():
            # Both ask vLLM for log-probabilities, which cost time.
            settings = ["placement.mode=separate", "algorithm.rollout_correction=token_truncate"]
            in_turns = self._run(workers, self._args.prompts, settings)
            generate_s = in_turns.median("time/generate_s")
            train_s = sum(in_turns.median(f"time/{phase}_s") for phase in PHASES[1:])
            row: Row = {
                "part": "overlap",
                "rollout_gpus": workers,
                "learner_gpus": 1,
                "generate_s": generate_s,
                "train_s": train_s,
                "sync_step_s": in_turns.step_s(),
            }
            print(row, flush=True)  # keeps what was measured if a later run fails
            at_once = self._run(
                workers, self._args.prompts, [*settings, f"rollout.max_staleness={self._args.staleness}"]
            )
            row |= {
                "async_step_s": at_once.step_s(),
                "speedup": in_turns.step_s() / at_once.step_s(),
                "overlap": max(generate_s, train_s) / at_once.step_s(),  # 1: the shorter of the two is hidden
            }
            rows.append(row)
            print(row, flush=True)
        return rows

    def recovery(self) -> list[Row]:
        """Kills a worker with SIGKILL, right after a step."""
        workers = self._args.gpus - 1
        settings = ["placement.mode=separate", f"rollout.max_staleness={max(1, self._args.staleness)}"]
        settings = [*self._settings(workers, self._args.prompts, settings), "num_steps=1000000", f"name={RECOVERY_RUN}"]
        with BackgroundTrain(CONFIG, settings) as run:
            before = run.until(lambda steps: len(steps) >= self._args.steps, START_S)
            os.kill(actor_pids(RECOVERY_RUN, "RolloutActor")[0], signal.SIGKILL)
            after = run.until(lambda steps: _all_serve_again(steps[-1], workers), START_S)
        ends_s = [step["wall_s"] for step in after[len(before) - 1 :]]  # from the last step before the death
        return [
            {
                "part": "recovery",
                "rollout_gpus": workers,
                "learner_gpus": 1,
                "start_s": before[0]["time/start_s"],
                "step_s": TrainRun(before, {}).step_s(),
                "longest_step_s": max(end - start for start, end in pairwise(ends_s)),
                "recovery_s": ends_s[-1] - ends_s[0],  # until the end of the first step with all workers
            }
        ]

    def _weak(self, mode: str, gpus: int, engines: int, *, learner_gpus: int) -> Row:
        """A run whose batch grows with its rollout GPUs, ``engines`` on each of them."""
        prompts = self._args.prompts * gpus
        settings = [f"placement.mode={mode}", f"learner.num_ranks={learner_gpus}"]
        share = rollout_share(CONFIG, self._settings(gpus * engines, prompts, settings))
        done = self._run(gpus * engines, prompts, [*settings, f"rollout.max_num_seqs={share}"])
        num_sequences = prompts * self._args.group
        row = {
            "part": mode,
            "rollout_gpus": gpus,
            "engines": gpus * engines,
            "learner_gpus": learner_gpus,
            "sequences": num_sequences,
            "step_s": done.step_s(),
            "generate_s": done.median("time/generate_s"),
            "engine_s": done.median("pool/busy_s"),  # mean over the engines; generating ends with the last one
            "update_s": done.median("time/update_s"),
            "publish_s": done.median("time/publish_s"),
            "tokens_per_s": statistics.median(
                step["completions/mean_length"] * num_sequences / step["time/generate_s"] for step in done.steps[1:]
            ),
        }
        print(row, flush=True)
        return row

    def _run(self, workers: int, prompts: int, settings: list[str]) -> TrainRun:
        return train(CONFIG, [f"num_steps={self._args.steps}", *self._settings(workers, prompts, settings)])

    def _settings(self, workers: int, prompts: int, settings: list[str]) -> list[str]:
        args = self._args
        return [
            f"model.path={args.model}",
            f"algorithm.prompts_per_step={prompts}",
            f"algorithm.group_size={args.group}",
            f"rollout.num_workers={workers}",
            f"rollout.max_completion_tokens={args.completion}",
            f"rollout.max_num_seqs={args.prompts * args.group}",
            *settings,
            *args.settings,
        ]

    @staticmethod
    def _with_efficiency(rows: list[Row]) -> list[Row]:
        """Adds each pool's tokens/s per GPU, relative to the smallest pool's."""
        alone = rows[0]["tokens_per_s"] / rows[0]["rollout_gpus"]
        return [{**row, "efficiency": row["tokens_per_s"] / row["rollout_gpus"] / alone} for row in rows]


def _all_serve_again(step: dict[str, Any], workers: int) -> bool:
    return step["pool/replaced_workers"] > 0 and step["pool/live_workers"] == workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument(
        "--counts", nargs="+", type=int, help="only these numbers of GPUs (in separate and overlap: rollout GPUs)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all of them; with --tiny, all but colocate")
    parser.add_argument("--engines", type=int, default=2, help="per GPU shared by learner and engines")
    parser.add_argument("--prompts", type=int, default=64, help="per rollout GPU; in the overlap part, in total")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--completion", type=int, default=512, help="tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--staleness", type=int, default=1, help="in the asynchronous runs, in versions")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(gpus=2, prompts=2, group=4, completion=8, steps=3, staleness=0)
        args.settings = [*TINY_SETTINGS, *args.settings]
    args.parts = args.parts or [part for part in PARTS if not (args.tiny and part == "colocate")]
    args.counts = sorted(args.counts or [])
    scaling = Scaling(args)
    facts = {name: getattr(args, name) for name in ("prompts", "group", "completion", "staleness")}
    rows = [row for part in args.parts for row in getattr(scaling, part)()]
    for part in args.parts:
        show(f"scaling: {part}", [row for row in rows if row["part"] == part])
    write_json(args.out, rows, **facts)


if __name__ == "__main__":
    main()
