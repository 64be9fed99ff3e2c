"""TRL's GRPO trainer on the work of bench_step: colocated vLLM with sleep mode, one GPU. Needs TRL (1.16 was used).

bench_step starts it; to run it alone: python -m benchmarks.peers.trl --out result.json MODEL_DIR [SETTING=VALUE ...]
Settings are those of its GRPOConfig, e.g. per_device_train_batch_size=32 sequences.
"""

import argparse
import functools
import os
import socket
import sys
import tempfile
import time
from typing import Any

import yaml

from benchmarks.lengths import SCHEDULER
from benchmarks.peers.work import BETA, GPU_SHARE, LEARNING_RATE, PROMPT_TOKENS, parse_work, prompts_of, write_result

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # without a launcher


def free_port() -> int:
    """A TCP port that was free a moment ago: several of these may run side by side, each on its own GPU."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def impose_ragged_lengths() -> None:
    """Every vLLM engine of this process gets the ragged scheduler: TRL has no argument for it."""
    import vllm

    vllm.LLM.__init__ = functools.partialmethod(vllm.LLM.__init__, scheduler_cls=SCHEDULER)


class Clock:
    """When each step ended, and the completion tokens it sampled."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.tokens: list[int] = []

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The share of even tokens, like our ``even_tokens``; called once per generated batch."""
        self.tokens.append(sum(map(len, completion_ids)))
        return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]

    def callback(self) -> Any:
        import torch
        from transformers import TrainerCallback

        clock = self

        class StepEnd(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                torch.cuda.synchronize()
                clock.ends_s.append(time.monotonic())

        return StepEnd()


def train(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Seconds from one step's end to the next, and completion tokens, for every step but the first."""
    import trl
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    chosen = {name: yaml.safe_load(value) for name, _, value in (setting.partition("=") for setting in args.settings)}
    micro_batch = chosen.setdefault("per_device_train_batch_size", 16)
    settings: dict[str, Any] = {
        "output_dir": directory,
        "gradient_accumulation_steps": args.prompts * args.group // micro_batch,
        "num_generations": args.group,
        "max_completion_length": args.completion,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": GPU_SHARE,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": PROMPT_TOKENS + args.completion,
        "generation_kwargs": {"ignore_eos": True},
        "model_init_kwargs": {"dtype": "bfloat16"},
        "bf16": True,
        "gradient_checkpointing": True,
        "max_steps": args.steps,
        "learning_rate": LEARNING_RATE,
        "beta": BETA if args.reference else 0.0,
        "temperature": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    clock = Clock()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=clock.reward,
        args=GRPOConfig(**{**settings, **chosen}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts_of(args)]),
        callbacks=[clock.callback()],
    )
    trainer.train()
    return {
        "step_s": [after - before for before, after in zip(clock.ends_s, clock.ends_s[1:], strict=False)],
        "completion_tokens": clock.tokens[1:],
        "version": trl.__version__,
    }


def main() -> None:
    args = parse_work(__doc__)
    if args.gpus != 1:
        sys.exit("--gpus: TRL runs here in one process, on one GPU")
    os.environ.update(ONE_RANK, MASTER_PORT=str(free_port()))
    if args.lengths == "ragged":
        impose_ragged_lengths()
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as directory:
        write_result(args, train(args, directory))


if __name__ == "__main__":
    main()
