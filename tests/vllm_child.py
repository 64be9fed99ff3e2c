"""A process with vLLM engines, one after the other: each starts from a model's directory, receives other weights as a
publish brings them, and samples. A process of its own, because vLLM changes transformers' classes in the one it is in.

Reads pickled ``Job``s from the file named first and writes their rollouts, or what went wrong, to the second.
"""

import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

from actors.rollouts.engine_loop import EngineLoop, Request, WorkerSpec, engine_args, worker_env
from rlhf.batch import Prompt, Rollout
from rlhf.training.weights import Layout, to_plain


@dataclasses.dataclass(frozen=True)
class Job:
    """One engine's work: ``buckets`` are the bytes of ``layout``, from another model of the same shape."""

    spec: WorkerSpec
    layout: Layout
    buckets: list[Any]
    prompts: list[Prompt]
    group_size: int


def run(job: Job) -> list[Rollout]:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    import actors.weights.vllm_receiver  # noqa: F401

    engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(job.spec)))
    try:
        engine.collective_rpc("begin_weight_update")
        engine.collective_rpc("receive_objects", args=(to_plain(job.layout), job.buckets))
        engine.collective_rpc("finish_weight_update")
        assert engine.collective_rpc("unwritten_modules") == [[]]
        loop = EngineLoop(job.spec)  # its thread is not needed
        loop.version = 0
        for prompt in job.prompts:
            for sample in range(job.group_size):
                loop.add(engine, Request(f"{prompt.id}.{sample}", prompt, sample))
        while engine.has_unfinished_requests():
            loop._step(engine)
        finished = [loop.finished.get_nowait()[1] for _ in range(len(job.prompts) * job.group_size)]
        return sorted(finished, key=lambda rollout: (rollout.prompt.id, rollout.sample_index))
    finally:
        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def main(jobs_file: Path, results_file: Path) -> None:
    results: dict[str, list[Rollout] | str] = {}
    for name, job in pickle.loads(jobs_file.read_bytes()).items():
        try:
            results[name] = run(job)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    results_file.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    import os

    os.environ |= worker_env("cpu")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
