"""A whole colocated GRPO step, first ours, then those of peers, on the same GPUs with the same work, and their ratios.

python -m benchmarks.bench_step MODEL_DIR [KEY=VALUE ...] [--peer verl] [--lengths ragged] [--out result.json]
python -m benchmarks.bench_step --tiny MODEL_DIR             # about a minute on a CPU; what the test runs

MODEL_DIR: rlhf prepare random DIR --size 0.5b. KEY=VALUE pairs go to our side's ``rlhf train``, --peer-setting to the
peer (so give one peer then). A peer that cannot be installed beside us is looked for in --peer-path first.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import PHASES, ROOT, TINY_SETTINGS, PeakMemory, Row, rollout_share, run, show, train, write_json
from benchmarks.lengths import SCHEDULER
from benchmarks.peers.work import BETA, add_work

CONFIG = "grpo_0.5b_1gpu.yaml"
PEERS = ("trl", "verl", "openrlhf")
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
        *(
            [f"learner.num_ranks={args.gpus}", f"rollout.num_workers={args.gpus}", "learner.zero_stage=3"]
            * (args.gpus > 1)
        ),
        *([f"algorithm.beta={BETA}"] if args.reference else []),
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


def peer(args: argparse.Namespace, name: str) -> Row:
    """A peer's step, in a separate process."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-bench-") as directory:
        out = Path(directory) / "result.json"
        work = ("prompts", "group", "completion", "prompt_words", "steps", "lengths", "gpus")
        options = [f"--{option.replace('_', '-')}={getattr(args, option)}" for option in work]
        options += ["--reference"] if args.reference else []
        path = os.pathsep.join([*args.peer_path, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        module = ["-m", f"benchmarks.peers.{name}", *options, f"--out={out}", args.model, "--", *args.peer_setting]
        with PeakMemory() as peak:
            run([sys.executable, *module], env={"PYTHONPATH": path})
        found: dict[str, Any] = json.loads(out.read_text())
    phases = {f"{phase}_s": seconds for phase, seconds in found.pop("phases_s", {}).items()}
    return {"side": name, **found, "step_s": statistics.median(found["step_s"]), **phases, "peak_gpu_gib": peak.gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    add_work(parser)
    parser.add_argument("--peer", choices=PEERS, action="append", default=[])
    parser.add_argument("--peer-setting", action="append", default=[], help="as the peer spells it")
    parser.add_argument("--peer-path", action="append", default=[], help="in front of the peer's PYTHONPATH")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.completion = args.completion or (512 if args.lengths == "fixed" else 1024)
    if args.tiny:
        vars(args).update(TINY, settings=[*TINY_SETTINGS, *args.settings])
    rows = [ours(args)]
    for name in args.peer:
        print(rows[-1], flush=True)  # keeps what was measured if the next one fails
        rows.append(peer(args, name))
    # What was sampled per step: if it differs, the work was not the same.
    tokens = {row["side"]: row.pop("completion_tokens") for row in rows}
    facts = {
        name: getattr(args, name) for name in ("prompts", "group", "completion", "prompt_words", "lengths", "gpus")
    }
    facts |= {"settings": args.settings, "peer_settings": args.peer_setting}
    facts["ratios"] = {row["side"]: row["step_s"] / rows[0]["step_s"] for row in rows[1:]}
    show(
        f"one step, {args.lengths} lengths"
        + "".join(f"; {name}: {r:.2f} x ours" for name, r in facts["ratios"].items()),
        rows,
    )
    write_json(args.out, rows, completion_tokens=tokens, **facts)


if __name__ == "__main__":
    main()
