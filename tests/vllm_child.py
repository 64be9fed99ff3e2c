"""A process with vLLM engines, one after the other: each starts from a model's directory, receives other weights as a
publish brings them, and samples. A process of its own, because vLLM changes transformers' classes in the one it is in.

Reads pickled ``Job``s from the file named first and writes their rollouts, or what went wrong, to the second.
"""

import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from actors.rollouts.engine import Output, Request, WorkerSpec
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from rlhf.batch import Prompt, Rollout
from rlhf.training.weights import Layout


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

    engine = VllmEngine(job.spec)
    try:
        engine.begin_update()
        engine.receive_objects(zip(job.layout, job.buckets, strict=True))
        engine.finish_update()
        asked: dict[str, tuple[Prompt, int]] = {}
        for prompt in job.prompts:
            for sample in range(job.group_size):
                asked[key := f"{prompt.id}.{sample}"] = prompt, sample
                engine.add(Request(key, prompt.id, prompt.token_ids, sample), version=0)
        outputs: dict[str, Output] = {}
        while engine.has_unfinished():
            outputs |= {output.key: output for output in engine.step()}
        return [to_rollout(*asked[key], outputs[key]) for key in asked]
    finally:
        engine.llm.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def to_rollout(prompt: Prompt, sample: int, output: Output) -> Rollout:
    versions = np.zeros(len(output.token_ids), np.int32)
    return Rollout(prompt, sample, output.token_ids, versions, output.finish_reason, output.logprobs)


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
