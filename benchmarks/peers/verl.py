"""verl's GRPO trainer on the work of bench_step: FSDP learner and vLLM on the same GPUs. Needs verl (0.9.1 was used).

bench_step starts it; to run it alone: python -m benchmarks.peers.verl --out result.json MODEL_DIR [SETTING ...]
Settings are verl's own, as Hydra overrides. One that helps and that it has no setting for: its trainer looks for
finished samples every two seconds, so that it waits up to two seconds in each step.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lengths import SCHEDULER
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

TEMPLATE = "'{% for m in messages %}{{ m[\"content\"] }}{% endfor %}'"  # a chat of one message is its text
REWARD = Path(__file__).with_name("text_reward.py")


def write_data(args: argparse.Namespace, file: Path) -> None:
    """The prompts as the Parquet table that verl reads."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, text in enumerate(prompts_of(args))
    ]
    Dataset.from_list(rows).to_parquet(str(file))


def command(args: argparse.Namespace, directory: Path) -> list[str]:
    """The learner's and the engines' settings are those with which bench_step runs ours, where verl has them."""
    sequences = args.prompts * args.group
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    data = directory / "train.parquet"
    settings = {
        "hydra.run.dir": directory / "hydra",
        "hydra.output_subdir": "null",
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": data,
        "data.val_files": data,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": args.completion,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.custom_chat_template": TEMPLATE,
        "+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.ppo_mini_batch_size": args.prompts,
        f"{actor}.ppo_epochs": 1,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": args.micro_batch_tokens,
        f"{actor}.use_kl_loss": args.reference,
        f"{actor}.kl_loss_coef": BETA,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.optim.lr": LEARNING_RATE,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": args.group,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.gpu_memory_utilization": GPU_SHARE,
        f"{rollout}.max_num_seqs": -(-sequences // args.gpus),
        f"{rollout}.max_model_len": PROMPT_TOKENS + args.completion,
        f"{rollout}.free_cache_engine": True,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": args.micro_batch_tokens,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": args.micro_batch_tokens,
        "reward.custom_reward_function.path": REWARD,
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": args.gpus,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.default_local_dir": directory / "checkpoints",
    }
    if args.lengths == "ragged":
        settings[f"+{rollout}.engine_kwargs.vllm.scheduler_cls"] = SCHEDULER
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *args.settings]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from one step's end to the next, completion tokens, and verl's own phases from the second step on."""
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as name:
        directory, log = Path(name), StepLog(r"\bstep:\d+ - ", args.out.with_suffix(".log"))
        write_data(args, directory / "train.parquet")
        metrics = directory / "metrics.jsonl"
        given = {
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "VLLM_DISABLE_COMPILE_CACHE": "0",  # verl switches vLLM's cache off unless told otherwise
            "RAY_ADDRESS": "local",
            "RAY_DEDUP_LOGS": "0",
            "TOKENIZERS_PARALLELISM": "true",
        }
        env = {**os.environ, **given}
        log.run(command(args, directory), env=env, cwd=directory, limit_s=args.limit_s)
        steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    phases = {name for step in steps for name in step if name.startswith("timing_s/")}
    return {
        "step_s": log.step_s(),
        "completion_tokens": [round(s["response_length/mean"] * args.prompts * args.group) for s in steps[1:]],
        "phases_s": {
            phase.removeprefix("timing_s/"): statistics.median(s[phase] for s in steps[1:] if phase in s)
            for phase in sorted(phases)
            if any(phase in s for s in steps[1:])
        },
        "version": importlib.metadata.version("verl"),
    }


def main() -> None:
    args = parse_work(__doc__)
    write_result(args, train(args))


if __name__ == "__main__":
    main()
