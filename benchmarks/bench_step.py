"""A whole colocated GRPO step, first ours, then TRL's, on the same GPU with the same work, and their ratio.

python -m benchmarks.bench_step MODEL_DIR [KEY=VALUE ...] [--lengths ragged] [--no-trl] [--out result.json]
python -m benchmarks.bench_step --tiny MODEL_DIR             # about a minute on a CPU, without TRL; what the test runs

MODEL_DIR: rlhf prepare random DIR --size 0.5b. KEY=VALUE pairs go to our side's ``rlhf train``.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import PHASES, TINY_SETTINGS, PeakMemory, Row, rollout_share, run, show, train, write_json
from benchmarks.lengths import SCHEDULER

CONFIG = "grpo_0.5b_1gpu.yaml"
TINY = {"prompts": 2, "group": 4, "completion": 8, "prompt_words": 4, "steps": 3}


def ours(args: argparse.Namespace) -> Row:
    """Our step: ``rlhf train`` from the command line, as a user runs it. Medians from the second step on."""
    ragged = [
        f"rollout.engine_args.scheduler_cls={SCHEDULER}",
        f"rollout.engine_args.additional_config={{group: {args.group}}}",
    ]
    settings = [
        f"model.path={args.model}",
        f"num_steps={args.steps}",
        f"algorithm.prompts_per_step={args.prompts}",
        f"algorithm.group_size={args.group}",
        f"rollout.max_completion_tokens={args.completion}",
        f"data.task_args.num_words={args.prompt_words}",
        *(ragged if args.lengths == "ragged" else []),
        *args.settings,
    ]
    with PeakMemory() as peak:
        done = train(CONFIG, [f"rollout.max_num_seqs={rollout_share(CONFIG, settings)}", *settings])
    mean_lengths = [step["completions/mean_length"] for step in done.steps[1:]]
    return {
        "side": "ours",
        "step_s": done.step_s(),
        **{f"{phase}_s": done.median(f"time/{phase}_s") for phase in PHASES},
        "completion_tokens": [round(mean * args.prompts * args.group) for mean in mean_lengths],
        "peak_gpu_gib": peak.gib,
        **{f"{role}_gib": memory["gpu"] for role, memory in done.summary["peak_memory_gib"].items() if "gpu" in memory},
        "version": done.summary["versions"]["rlhf"],
    }


def trl(args: argparse.Namespace) -> Row:
    """TRL's step, in a separate process."""
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as directory:
        out = Path(directory) / "result.json"
        names = ("prompts", "group", "completion", "prompt_words", "steps", "lengths")
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
        options.append(f"--micro-batch={args.trl_micro_batch}")
        with PeakMemory() as peak:
            run([sys.executable, "-m", "benchmarks.peers.trl_grpo", args.model, *options, f"--out={out}"])
        found: dict[str, Any] = json.loads(out.read_text())
    return {"side": "TRL", **found, "step_s": statistics.median(found["step_s"]), "peak_gpu_gib": peak.gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--completion", type=int, help="tokens, at most; 512 if fixed, 1024 if ragged")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lengths", choices=("fixed", "ragged"), default="fixed")
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="sequences")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.completion = args.completion or (512 if args.lengths == "fixed" else 1024)
    if args.tiny:
        vars(args).update(TINY, trl=False, settings=[*TINY_SETTINGS, *args.settings])
    rows = [ours(args)]
    print(rows[0], flush=True)  # keeps what was measured if the peer fails
    if args.trl:
        rows.append(trl(args))
    # What was sampled per step: if it differs, the work was not the same.
    tokens = {row["side"]: row.pop("completion_tokens") for row in rows}
    facts = {name: getattr(args, name) for name in ("prompts", "group", "completion", "prompt_words", "lengths")}
    if args.trl:
        facts["ratio"] = rows[1]["step_s"] / rows[0]["step_s"]
    title = f"one step, {args.lengths} lengths" + (f": TRL / ours = {facts['ratio']:.2f}" if args.trl else "")
    show(title, rows)
    write_json(args.out, rows, completion_tokens=tokens, **facts)


if __name__ == "__main__":
    main()
