"""Tokens per second of the rollout engine loop without Ray, one row per variant, each in its own processes.

python -m benchmarks.bench_rollout MODEL_DIR [KEY=VALUE ...] [--variant NAME KEY=VALUE ...] ... [--out result.json]
python -m benchmarks.bench_rollout MODEL_DIR workers=1 --variant plain --variant two workers=2 \\
    --variant logprobs logprobs=true --variant sync engine_args.async_scheduling=false --variant v1 env.VLLM_FLAG=1
python -m benchmarks.bench_rollout --tiny MODEL_DIR          # under a minute on a CPU; what the test runs

The keys are the fields of ``Variant``; those before the first ``--variant`` apply to all of them.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actors.rollouts.engine import Request, WorkerSpec
from actors.rollouts.engine_loop import EngineLoop
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from benchmarks.common import Row, device_name, show, write_json
from rlhf.batch import Prompt
from rlhf.config import DataConfig, LoraConfig, RolloutConfig
from rlhf.data.prompts import load_prompts
from rlhf.models.linear_layers import linear_layers
from rlhf.planning.costs import decode_bytes, device_peaks
from rlhf.planning.shapes import read_shape
from rlhf.training.weights import ADAPTER_SIDES, Weight, bucket_size, pack_bucket, publish_layout, walk_buckets

DEADLINE_S = 600.0  # for a start, and for one generation
TINY = ["sequences=8", "group=4", "prompt_words=4", "completion=8", "repeats=1"]


@dataclass(frozen=True)
class Variant:
    """One way to sample ``sequences`` completions of ``completion`` tokens each."""

    sequences: int = 512
    group: int = 8  # completions per prompt
    prompt_words: int = 100
    completion: int = 512  # tokens
    max_num_seqs: int = 512  # of all workers together
    logprobs: bool = False
    seed_requests: bool = False
    gpu_memory_fraction: float = 0.35  # of all workers together
    workers: int = 1  # engines at once on the same GPU, the sequences divided among them
    adapter: int = 0  # rank of an adapter on every linear layer; 0: none
    idle_processes: int = 0  # others that hold a context on the GPU but do nothing, like a colocated learner
    repeats: int = 3
    engine_args: dict[str, Any] = field(default_factory=dict)  # passed to vLLM unchanged
    env: dict[str, str] = field(default_factory=dict)  # environment in which vLLM is imported


def phrases(model: str, count: int, num_words: int) -> list[Prompt]:
    """``count`` prompts of random words, tokenised: what ``task:phrases`` trains on."""
    data = DataConfig(
        train="task:phrases", task_args={"num_words": num_words, "num_rows": count}, max_prompt_tokens=10**6
    )
    prompts = load_prompts(data.train, data, AutoTokenizer.from_pretrained(model), split="train", seed=0)
    return [prompts.prompt(row, id=row) for row in range(count)]


def worker_spec(model: str, variant: Variant, prompt_tokens: int) -> WorkerSpec:
    """The spec of one of the variant's workers: its share of the sequences and of the GPU."""
    return WorkerSpec(
        config=RolloutConfig(
            max_completion_tokens=variant.completion,
            ignore_eos=True,
            seed_requests=variant.seed_requests,
            gpu_memory_fraction=variant.gpu_memory_fraction,
            max_num_seqs=math.ceil(variant.max_num_seqs / variant.workers),
            engine_args=dict(variant.engine_args),
        ),
        model_path=model,
        trust_remote_code=False,
        max_model_tokens=prompt_tokens + variant.completion,
        device="gpu" if torch.cuda.is_available() else "cpu",
        colocated=variant.workers > 1,  # they share the GPU's free memory, so their caches are sized by need
        workers_on_gpu=variant.workers,
        logprobs=variant.logprobs,
        seed=0,
        adapter=LoraConfig(r=variant.adapter, alpha=2 * variant.adapter) if variant.adapter else None,
    )


def random_adapter(model: str, rank: int) -> dict[str, Weight]:
    """Matrices on every linear layer of a model but its head."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    targets = set(linear_layers(model))
    weights: dict[str, Weight] = {}
    for name, layer in empty.named_modules():
        if name.rpartition(".")[2] in targets:
            for side, shape in zip(ADAPTER_SIDES, ((rank, layer.in_features), (layer.out_features, rank)), strict=True):
                weights[f"{name}{side}weight"] = Weight(nn.Parameter(0.01 * torch.randn(shape, dtype=torch.bfloat16)))
    return weights


@dataclass(frozen=True)
class Timing:
    """When one worker generated, in seconds of the host's monotonic clock, and how much."""

    started: float
    ended: float
    lengths: list[tuple[int, int]]  # tokens of prompt and completion, in the order they finished


class Worker:
    """One engine loop in this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._loop = EngineLoop(spec, VllmEngine)
        self._loop.start()
        if spec.adapter:
            self._give_adapter(random_adapter(spec.model_path, spec.adapter.r))
        # Returns once the engine is up. The weights it loaded are version 0: none are published here.
        self._loop.commit(0)

    def _give_adapter(self, weights: dict[str, Weight]) -> None:
        layout = publish_layout(weights, 1 << 30)
        buckets = [
            (specs, pack_bucket(specs, pieces, torch.empty(bucket_size(specs), dtype=torch.uint8)).numpy())
            for specs, pieces in walk_buckets(weights, layout)
        ]
        self._loop.begin_update()
        self._loop.call(lambda engine: engine.receive_objects(buckets))
        self._loop.call(lambda engine: engine.finish_update())

    def generate(self, requests: list[Request]) -> "Timing":
        """Samples all requests, with nothing cached."""
        self._loop.call(lambda engine: engine.llm.reset_prefix_cache())
        prompt_tokens = {request.key: len(request.token_ids) for request in requests}
        started = time.monotonic()
        self._loop.submit(requests)
        lengths: list[tuple[int, int]] = []
        while len(lengths) < len(requests):
            finished = self._loop.collect(wait_s=5.0).finished
            lengths += [(prompt_tokens[done.key], len(done.token_ids)) for done in finished]
        return Timing(started, time.monotonic(), lengths)

    def stop(self) -> None:
        """Ends vLLM's own processes; without this they outlive ours for a while and keep GPU memory."""
        self._loop.call(lambda engine: engine.llm.engine_core.shutdown())


WORKER: list[Worker] = []  # in a child process: at most one


def child_start(spec: WorkerSpec) -> None:
    WORKER.append(Worker(spec))


def child_generate(requests: list[Request]) -> Timing:
    return WORKER[0].generate(requests)


def child_stop() -> None:
    for worker in WORKER:
        worker.stop()


@contextlib.contextmanager
def child_process() -> Iterator[ProcessPoolExecutor]:
    """A separate process for one worker; it and vLLM's processes end with the context."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        try:
            yield child
        finally:
            child.submit(child_stop).result(timeout=DEADLINE_S)


def idle(ready: Any) -> None:
    """Does nothing, with torch loaded and, if there is a GPU, a context on it."""
    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    ready.set()
    time.sleep(1e6)


@contextlib.contextmanager
def environment(env: dict[str, str]) -> Iterator[None]:
    """Sets ``env`` for the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def idle_processes(count: int) -> Iterator[None]:
    """Runs ``count`` idle processes alongside the context's body."""
    spawn = multiprocessing.get_context("spawn")
    events = [spawn.Event() for _ in range(count)]
    processes: list[BaseProcess] = [spawn.Process(target=idle, args=(event,), daemon=True) for event in events]
    try:
        for process in processes:
            process.start()
        for event in events:
            assert event.wait(timeout=120), "an idle process did not start"
        yield
    finally:
        for process in processes:
            process.kill()


def measure(model: str, variant: Variant, device: str) -> Row:
    """Starts the variant's workers, generates once to warm up, then ``repeats`` times; figures for the median time.

    ``hbm`` is the least share of the device's memory bandwidth that decoding can have used (rlhf.planning.costs).
    """
    prompts = phrases(model, variant.sequences // variant.group, variant.prompt_words)
    requests = [
        Request(f"{prompt.id}/{sample}", prompt.id, prompt.token_ids, sample)
        for prompt in prompts
        for sample in range(variant.group)
    ]
    # Groups stay whole, to share their prompts.
    shares = [[r for r in requests if r.prompt_id % variant.workers == w] for w in range(variant.workers)]
    spec = worker_spec(model, variant, max(len(p.token_ids) for p in prompts))
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // variant.workers))} if device == "cpu" else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(threads | worker_env(spec.device) | variant.env))
        stack.enter_context(idle_processes(variant.idle_processes))
        children = [stack.enter_context(child_process()) for _ in shares]
        started = time.monotonic()
        for start in [child.submit(child_start, spec) for child in children]:
            start.result(timeout=DEADLINE_S)
        start_s = time.monotonic() - started
        times = []
        lengths: list[tuple[int, int]] = []
        for _ in range(1 + variant.repeats):
            calls = [child.submit(child_generate, share) for child, share in zip(children, shares, strict=True)]
            done = [call.result(timeout=DEADLINE_S) for call in calls]
            times.append(max(timing.ended for timing in done) - min(timing.started for timing in done))
            lengths = [pair for timing in done for pair in timing.lengths]
    times = times[1:]
    seconds = statistics.median(times)
    row: Row = {
        "generate_s": seconds,
        "min_s": min(times),
        "max_s": max(times),
        "tokens_per_s": sum(completion for _, completion in lengths) / seconds,
        "prompt_tokens": statistics.fmean(prompt for prompt, _ in lengths),
        "start_s": start_s,
    }
    if (peaks := device_peaks(device)) is not None and (shape := read_shape(model)) is not None:
        num_bytes = decode_bytes(
            shape,
            [completion for _, completion in lengths],
            num_workers=variant.workers,
            max_num_seqs=spec.config.max_num_seqs,
        )
        row["hbm"] = num_bytes / (seconds * peaks.bytes_per_s)
    return row


def read_variant(common: list[str], settings: list[str]) -> Variant:
    """The variant of ``key=value`` settings over the common ones."""
    merged = OmegaConf.merge(OmegaConf.structured(Variant), OmegaConf.from_dotlist([*common, *settings]))
    variant = OmegaConf.to_object(merged)
    assert isinstance(variant, Variant)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common = [*(TINY if args.tiny else []), *args.settings]
    variants = {name: read_variant(common, settings) for name, *settings in args.variant or [["default"]]}
    device = device_name()
    rows: list[Row] = []
    for name, variant in variants.items():
        rows.append({"variant": name, **measure(args.model, variant, device)})
        print(rows[-1], flush=True)  # keeps what was measured if a later variant fails
    settings = {name: OmegaConf.to_container(OmegaConf.structured(variant)) for name, variant in variants.items()}
    show(f"rollout engine on {device}", rows)
    write_json(args.out, rows, variants=settings)


if __name__ == "__main__":
    main()
