"""OpenRLHF's GRPO on the work of bench_step: DeepSpeed learner and vLLM on the same GPUs. Needs OpenRLHF (0.11.2).

bench_step starts it; to run it alone: python -m benchmarks.peers.openrlhf --out result.json MODEL_DIR [-- FLAG ...]
Settings are OpenRLHF's own flags. It cannot ignore the end of sequence (a model of random weights hardly ever samples
it), and cannot give vLLM a scheduler, so that ragged lengths are refused.
"""

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.work import (
    BETA,
    GPU_SHARE,
    LEARNING_RATE,
    PROMPT_TOKENS,
    StepLog,
    parse_work,
    prompts_of,
    write_result,
)

REWARD = Path(__file__).with_name("text_reward.py")
STEP = r"Global step \d+: \{"
NUMBER = re.compile(r"'([\w/]+)': (-?[\d.]+(?:e[-+]?\d+)?)[,}]")


def write_data(args: argparse.Namespace, file: Path) -> int:
    """The prompts, exactly as many as the steps take; returns how many."""
    texts = prompts_of(args)[: args.prompts * args.steps]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return len(texts)


def command(args: argparse.Namespace, directory: Path, num_prompts: int) -> list[str]:
    """The learner's and the engines' settings are those with which bench_step runs ours, where OpenRLHF has them."""
    flags: dict[str, Any] = {
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": args.gpus,
        "actor.model_name_or_path": args.model,
        "actor.adam.lr": LEARNING_RATE,
        "ref.num_nodes": 1,
        "ref.num_gpus_per_node": args.gpus,
        "reward.remote_url": REWARD,
        "vllm.num_engines": args.gpus,
        "vllm.tensor_parallel_size": 1,
        "vllm.sync_backend": "nccl",
        "vllm.gpu_memory_utilization": GPU_SHARE,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": BETA if args.reference else 0,
        "data.prompt_dataset": directory / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.max_len": PROMPT_TOKENS + args.completion,
        "data.max_samples": num_prompts,
        "rollout.max_new_tokens": args.completion,
        "rollout.batch_size": args.prompts,
        "rollout.n_samples_per_prompt": args.group,
        "rollout.temperature": 1.0,
        "rollout.max_tokens_per_gpu": args.micro_batch_tokens,
        "train.batch_size": args.prompts * args.group,
        "train.max_epochs": 1,
        "train.num_episodes": 1,
        "train.max_tokens_per_gpu": args.micro_batch_tokens,
        "ds.zero_stage": 2 if args.gpus == 1 else 3,
        "ds.attn_implementation": "flash_attention_2",
        "ckpt.output_dir": directory / "model",
        "ckpt.path": directory / "checkpoints",
    }
    switches = ["train.colocate_all", "train.dynamic_batch_enable", "vllm.enable_sleep", "ds.packing_samples"]
    switches += ["algo.kl.use_loss"] if args.reference else []
    spelled = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    options = [f"--{name}" for name in switches]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *spelled, *options, *args.settings]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from one step's end to the next, completion tokens, and OpenRLHF's phases from the second step on."""
    with tempfile.TemporaryDirectory(prefix="openrlhf-bench-") as name:
        directory, log = Path(name), StepLog(STEP, args.out.with_suffix(".log"))
        num_prompts = write_data(args, directory / "prompts.jsonl")
        env = {**os.environ, "RAY_ADDRESS": "local", "RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "true"}
        log.run(command(args, directory, num_prompts), env=env, cwd=directory, limit_s=args.limit_s)
    steps = [said(line) for line in log.said[1:]]
    phases = {name for step in steps for name in step if name.startswith("timing/")}
    return {
        "step_s": log.step_s(),
        "completion_tokens": [round(step["response_length"] * args.prompts * args.group) for step in steps],
        "phases_s": {
            phase.removeprefix("timing/"): statistics.median(step[phase] for step in steps if phase in step)
            for phase in sorted(phases)
        },
        "version": importlib.metadata.version("openrlhf"),
    }


def said(line: str) -> dict[str, float]:
    """The numbers of the line that OpenRLHF logs for a step: a dictionary as Python prints it."""
    return {name: float(number) for name, number in NUMBER.findall(line)}


def main() -> None:
    args = parse_work(__doc__)
    if args.lengths == "ragged":
        sys.exit("--lengths=ragged: OpenRLHF gives vLLM no scheduler; use --lengths=fixed")
    write_result(args, train(args))


if __name__ == "__main__":
    main()
