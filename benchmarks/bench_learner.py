"""The policy learner alone: tokens/s, MFU and peak memory of one update over ragged sequences, for several settings.

python -m benchmarks.bench_learner MODEL_DIR [--sequences 512] [--ranks 2] [--variants compile ...] [--out result.json]
python -m benchmarks.bench_learner --tiny MODEL_DIR          # seconds on a CPU; what the test runs
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlhf.batch import TrainBatch
from rlhf.config import AlgorithmConfig, LearnerConfig, LoraConfig
from rlhf.models.loading import load_policy
from rlhf.packing import batch_spans
from rlhf.planning.costs import device_peaks, update_flops
from rlhf.planning.shapes import ModelShape
from rlhf.training.device import local_rank_device, resolve_dtype
from rlhf.training.engine import Engine
from rlhf.training.learner import PolicyLearner
from rlhf.training.setup import init_distributed

VARIANTS: dict[str, dict[str, Any]] = {  # ZeRO-3, compiled and without checkpointing, but for what is named
    "zero3": {},
    "zero3-checkpointed": {"checkpointed_layers": 10**6},
    "zero3-eager": {"compile": False},
    "zero2": {"zero_stage": 2},
    "zero2-checkpointed": {"zero_stage": 2, "checkpointed_layers": 10**6},
    "zero1": {"zero_stage": 1},
    "zero1-eager": {"zero_stage": 1, "compile": False},
    "zero1-checkpointed": {"zero_stage": 1, "checkpointed_layers": 10**6},
    "zero1-float32": {"zero_stage": 1, "float32_gradients": True},
    "zero1-32k": {"zero_stage": 1, "micro_batch_tokens": 32768},
    "zero1-chunk4k": {"zero_stage": 1, "logits_chunk_tokens": 4096},
    "lora": {"zero_stage": 1, "lora": LoraConfig(r=32, alpha=64)},
    "qlora": {"zero_stage": 1, "lora": LoraConfig(r=32, alpha=64, load_in_4bit=True)},
    "lora-checkpointed": {"zero_stage": 1, "lora": LoraConfig(r=32, alpha=64), "checkpointed_layers": 10**6},
}
GROUP = 8  # completions per prompt


def ragged_batch(num_sequences: int, prompt_tokens: int, median: int, longest: int, vocab: int) -> TrainBatch:
    """Groups of GROUP completions. Lengths lognormal around ``median``, at most ``longest``; median = longest gives
    equal lengths."""
    generator = torch.Generator().manual_seed(0)
    spread = 0.0 if median == longest else 0.7
    drawn = torch.exp(math.log(median) + spread * torch.randn(num_sequences, generator=generator))
    completions = drawn.round().long().clamp(1, longest)
    prompts = torch.full_like(completions, prompt_tokens)
    num_tokens = int(completions.sum())
    tails = torch.randint(3, vocab, (num_tokens,), generator=generator).split(completions.tolist())
    heads = torch.randint(3, vocab, (-(-num_sequences // GROUP), prompt_tokens), generator=generator)
    return TrainBatch(
        tokens=torch.cat([part for i, tail in enumerate(tails) for part in (heads[i // GROUP], tail)]),
        prompt_lengths=prompts,
        completion_lengths=completions,
        truncated=torch.zeros(num_sequences, dtype=torch.bool),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        advantages=torch.randn(num_tokens, generator=generator),
    )


def measure(
    rank: int,
    num_ranks: int,
    port: int,
    model: str,
    batch: TrainBatch,
    variant: dict[str, Any],
    repeats: int,
    longest: int,
) -> dict[str, float]:
    """Seconds per update after one warm-up, and figures derived from them, of one rank. Call it in a fresh process:
    DeepSpeed's engines outlive their use, and their memory would count towards the next variant's."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = local_rank_device()
    init_distributed(device, 600)
    defaults = {"micro_batch_tokens": 16384, "zero_stage": 3, "num_ranks": num_ranks, "compile": device.type == "cuda"}
    config = LearnerConfig(**{**defaults, **variant})
    dtype = resolve_dtype("auto", device)

    def load() -> Any:
        return load_policy(model, dtype=dtype, temperature=1.0, chunk_tokens=config.logits_chunk_tokens)

    engine = Engine(load, config, dtype=dtype, device=device, total_steps=10)
    algorithm = AlgorithmConfig(prompts_per_step=batch.num_sequences // GROUP, group_size=GROUP)
    learner = PolicyLearner(engine, algorithm, seed=0, max_completion_tokens=longest)
    started = time.perf_counter()
    metrics = learner.update(learner.planner.plan_update(batch, 0).share(rank))
    first = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(1, repeats + 1):
        started = time.perf_counter()
        metrics = learner.update(learner.planner.plan_update(batch, step).share(rank))
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[len(times) // 2]
    num_tokens = len(batch.tokens)
    shape = ModelShape.of(engine.model.lm.config.to_dict())
    spans = batch_spans(batch)
    flops = update_flops(shape, spans, batch.num_completion_tokens) if shape is not None else math.nan
    peaks = device_peaks(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "first_s": first,
        "grad_norm": metrics["grad_norm"],
        "update_s": seconds,
        "tokens_per_s": num_tokens / seconds,
        "tflops": flops / num_ranks / seconds / 1e12,
        "mfu": flops / num_ranks / seconds / peaks.flops if peaks else math.nan,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan,
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, help="one GPU each")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--median", type=int, default=330)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), help="all, unless named")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.sequences, args.prompt, args.median, args.longest = 16, 8, 12, 24
        args.variants, args.repeats = args.variants or ["zero3", "zero1"], 1
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    batch = ragged_batch(args.sequences, args.prompt, args.median, args.longest, vocab)
    table = Table("variant", "update s", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "first s")
    results = {}
    for name in args.variants:
        with ProcessPoolExecutor(args.ranks, mp_context=multiprocessing.get_context("spawn")) as ranks:
            task = args.ranks, free_port(), args.model, batch, VARIANTS[name], args.repeats, args.longest
            measured = [ranks.submit(measure, rank, *task) for rank in range(args.ranks)]
            results[name] = r = measured[0].result()
        table.add_row(
            name,
            f"{r['update_s']:.2f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['tflops']:.0f}",
            f"{r['mfu']:.1%}",
            f"{r['peak_gib']:.1f}",
            f"{r['first_s']:.1f}",
        )
        print(name, r, flush=True)
    Console().print(table)
    if args.out:
        args.out.write_text(
            json.dumps({"tokens": len(batch.tokens), "ranks": args.ranks, "variants": results}, indent=1)
        )


if __name__ == "__main__":
    main()
