"""TRL's GRPO trainer on the work of bench_step: colocated vLLM with sleep mode, one GPU. Needs TRL (1.16 was used).

bench_step starts it; to run it alone: python -m benchmarks.peers.trl_grpo MODEL_DIR --out result.json
"""

import argparse
import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from benchmarks.lengths import SCHEDULER
from rlhf.data.tasks import task_rows

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


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from one step's end to the next, and completion tokens, for every step but the first."""
    import trl
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    num_sequences = args.prompts * args.group
    config = GRPOConfig(
        output_dir=str(args.out.parent / "trl"),
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=num_sequences // args.micro_batch,
        num_generations=args.group,
        max_completion_length=args.completion,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.35,
        vllm_enable_sleep_mode=True,
        vllm_max_model_length=256 + args.completion,
        generation_kwargs={"ignore_eos": True},
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=True,
        gradient_checkpointing=True,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    rows = task_rows("phrases", {"num_words": args.prompt_words}, split="train", seed=0)
    clock = Clock()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=clock.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock.callback()],
    )
    trainer.train()
    return {
        "step_s": [after - before for before, after in zip(clock.ends_s, clock.ends_s[1:], strict=False)],
        "completion_tokens": clock.tokens[1:],
        "version": trl.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lengths", choices=("fixed", "ragged"), default="fixed")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.update(ONE_RANK, MASTER_PORT=str(free_port()))
    if args.lengths == "ragged":
        impose_ragged_lengths()
    args.out.write_text(json.dumps(train(args)))


if __name__ == "__main__":
    main()
