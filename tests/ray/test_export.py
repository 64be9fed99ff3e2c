"""What `rlhf export` writes loads in vLLM, which gives tokens the probabilities that transformers gives them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.rollouts.vllm_settings import worker_env
from benchmarks.common import python_module
from jobs.export import export
from jobs.train import train

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(3, 23))


@pytest.mark.long
def test_a_run_with_adapters_loads_in_vllm_merged_and_as_an_adapter(ray_session, tiny_config, tmp_path: Path) -> None:
    config = tiny_config("num_steps=3", "algorithm.beta=0", "learner.num_ranks=1", recipe="grpo_lora_tiny")
    train(config)
    export(Path(config.run_dir), tmp_path / "merged", merge=True)
    export(Path(config.run_dir), tmp_path / "adapter", merge=False)
    asked = json.dumps({"base": config.model.path, "out": str(tmp_path), "prompt": PROMPT})
    environment = os.environ | worker_env("cpu") | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = python_module("tests.vllm_loads", asked)
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for directory, kind in [
        (tmp_path / "merged", "merged"),
        (tmp_path / "merged", "adapter"),
        (config.model.path, "base"),
    ]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found[kind]), expected, rtol=0, atol=1e-4)
    assert max(abs(a - b) for a, b in zip(found["base"], found["merged"], strict=True)) > 1e-2, "it has learnt"
