"""Publishing weights from a learner to a vLLM worker: seconds by part, GB/s, and what it costs in memory.

python -m benchmarks.bench_sync MODEL_DIR --mode nccl      # two GPUs; --mode ipc: one, shared
python -m benchmarks.bench_sync --tiny MODEL_DIR           # seconds on a CPU, through the object store

The learner holds bfloat16 weights as the ZeRO stage keeps them, and no optimiser: AdamW's state for 7B is 91 GB, does
not fit next to a worker, and is not involved. The worker starts from random weights; at the end every byte of its live
parameters is read back and compared with what the learner sent.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import actors.weights.sender
from actors.cluster import Cluster
from actors.connect import connect
from actors.group import Call, Deadline
from actors.learner import LearnerActor
from actors.weights.publish import PublishResult, publish
from actors.weights.sender import WeightSender
from actors.weights.transports import Transport, make_transport
from benchmarks.common import ROOT, Row, show, write_json
from rlhf.config import Config
from rlhf.models.lora import add_adapters
from rlhf.recipes import load_config
from rlhf.training.device import resolve_dtype
from rlhf.training.setup import deepspeed_config

WARM_UP = 2  # the first publish of a session joins it, the second is the first to copy as all later ones do
MODES = {  # placement.mode, and the route
    "ipc": ("colocate", "share"),
    "nccl": ("separate", "broadcast"),
    "object-store": ("separate", "object_store"),
}


class WeightsActor(LearnerActor):
    """A learner rank that has only its weights."""

    def check_memory(self) -> None:
        """Skipped: the memory plan counts an optimiser, which this learner lacks."""

    def start(self, address: str, port: int) -> None:
        device = self._device = self._meet(address, port)
        dtype = resolve_dtype(self._config.model.dtype, device)
        if self._config.learner.zero_stage == 3:
            self._partition = HfDeepSpeedConfig(deepspeed_config(self._config.learner, dtype))
            self._model = self._load(dtype)
        else:
            self._model = self._load(dtype).to(device)
        if self._config.learner.lora:
            add_adapters(self._model, self._config.learner.lora, key="learner.lora")

    def use_buckets(self, bucket_bytes: int, checksums: bool) -> None:
        """From now on the weights are sent in buckets of this size."""
        if not checksums:
            from benchmarks.unchecked import no_checksum

            actors.weights.sender.checksum = no_checksum
        apart = self._config.learner.adapter_apart is not None
        self._sender = WeightSender(self._model, self._device, bucket_bytes, adapters_apart=apart)

    def held_gpu_bytes(self) -> int:
        """The most held since the last call, which emptied torch's cache."""
        peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return peak


class SyncCluster(Cluster):
    """A run's cluster whose learner is a WeightsActor."""

    def _create(
        self, role: str, actor: type, make_args: Callable[[int, int], tuple[Any, ...]], **options: Any
    ) -> Call[Any]:
        return super()._create(role, WeightsActor if role == "learner" else actor, make_args, **options)


class Bench:
    """Publishes from the learner to the one worker of a cluster."""

    def __init__(self, config: Config, cluster: SyncCluster, mode: str) -> None:
        self._mode = mode
        self._deadline = Deadline(config.timeouts.publish_s, "timeouts.publish_s")
        self._versions = iter(range(1, 1 << 30))
        (self._worker,) = cluster.group("rollout").members
        self._learner = cluster.group("learner")
        if cluster.device == "gpu" and mode == "ipc":  # workers that share a GPU sleep until the first publish
            ray.get(self._worker.handle.wake_weights.remote(), timeout=self._deadline.seconds)

    def measure(self, bucket_bytes: int, repeats: int, *, checksums: bool) -> Row:
        """Medians of ``repeats`` publishes, after a warm-up."""
        worker_before = self._worker_bytes()
        self._ask_learner("held_gpu_bytes")
        learner_before = self._ask_learner("held_gpu_bytes")
        self._ask_learner("use_buckets", bucket_bytes, checksums)
        transport = make_transport(self._learner, MODES[self._mode][1])
        first, *_, warm = (self._publish(transport) for _ in range(WARM_UP))
        self._ask_learner("held_gpu_bytes")
        results, seconds = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            results.append(self._publish(transport))
            seconds.append(time.perf_counter() - started)
        publish_s = statistics.median(seconds)
        return {
            "publish_s": publish_s,
            **{f"{part}_s": statistics.median(r.seconds[part] for r in results) for part in warm.seconds},
            "slowest_s": max(seconds),
            "first_gb": first.num_bytes / 1e9,  # with an adapter: also the weights that never change
            "gb": warm.num_bytes / 1e9,
            "gb_per_s": warm.num_bytes / 1e9 / publish_s,
            "learner_gib": (self._ask_learner("held_gpu_bytes") - learner_before) / 2**30,
            "worker_gib": (self._worker_bytes() - worker_before) / 2**30,
            "loaded": self._verify(first) if checksums else "unchecked",
        }

    def _publish(self, transport: Transport) -> PublishResult:
        result = publish(next(self._versions), transport, [self._worker], self._deadline)
        for error in result.failed.values():
            raise error
        return result

    def _verify(self, result: PublishResult) -> str:
        """How the worker loads. Raises RuntimeError if its live parameters differ from the learner's."""
        if not self._ask_engine("loads_weights_in_place"):
            return "layer by layer"
        held = self._ask_engine("read_back_weights")  # not of an adapter
        if held != result.checksums[: len(held)]:
            raise RuntimeError("the worker's parameters differ from the learner's after a publish")
        return "in place"

    def _worker_bytes(self) -> int:
        return self._ask_engine("reserved_gpu_memory_bytes")

    def _ask_engine(self, method: str) -> Any:
        """The answer of the worker's engine process to a method of the worker extension."""
        ref = self._worker.handle.__ray_call__.remote(
            lambda actor: actor._loop.call(lambda engine: engine.llm.collective_rpc(method))
        )
        return ray.get(ref, timeout=self._deadline.seconds)[0]

    def _ask_learner(self, method: str, *args: Any) -> Any:
        return self._learner.call(method, *args, deadline=self._deadline, doing=method).result()[0]


def make_config(args: argparse.Namespace, zero_stage: int) -> Config:
    overrides = [
        f"model.path={args.model}",
        f"name=bench_sync_{os.getpid()}_{zero_stage}",
        f"placement.mode={MODES[args.mode][0]}",
        f"placement.device={'cpu' if args.tiny else 'gpu'}",
        f"learner.zero_stage={zero_stage}",
        "learner.num_ranks=1",
        "learner.compile=false",
        "rollout.num_workers=1",
        "rollout.enforce_eager=true",
        "rollout.max_num_seqs=32",
        f"rollout.gpu_memory_fraction={args.gpu_memory_fraction}",
        "rollout.engine_args.load_format=dummy",
    ]
    if args.lora:
        overrides.append(f"learner.lora={{r: {args.lora}, alpha: {2 * args.lora}}}")
    if not args.checksums:
        overrides.append("rollout.engine_args.worker_extension_cls=benchmarks.unchecked.UncheckedExtension")
    return load_config(ROOT / "conf" / ("grpo_tiny.yaml" if args.tiny else "grpo_0.5b_1gpu.yaml"), overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on CPU, with small buckets")
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--zero", type=int, nargs="*", default=[3, 1], choices=[0, 1, 2, 3])
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--lora", type=int, metavar="RANK", help="publish adapters of this rank; takes one bucket size")
    parser.add_argument("--no-checksums", dest="checksums", action="store_false", help="to see what they cost")
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.4, help="share of the worker's GPU for vLLM")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.mode = args.mode or ("object-store" if args.tiny else "nccl")
    if args.tiny:
        args.bucket_mib, args.repeats = [1], min(args.repeats, 3)
    if args.lora:
        args.zero, args.bucket_mib = [1], args.bucket_mib[:1]
    rows: list[Row] = []
    for zero_stage in args.zero:
        config = make_config(args, zero_stage)
        with connect(config), SyncCluster(config) as cluster:
            bench = Bench(config, cluster, args.mode)
            for bucket_mib in args.bucket_mib:
                row = bench.measure(bucket_mib << 20, args.repeats, checksums=args.checksums)
                rows.append({"mode": args.mode, "zero": zero_stage, "bucket_mib": bucket_mib, **row})
                print(rows[-1], flush=True)
    show(f"Weight publish, {args.model.name}", rows)
    write_json(args.out, rows, checksums=args.checksums)


if __name__ == "__main__":
    main()
