"""A pool without a learner samples from the model as it is on disk."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.cluster import SamplingCluster
from rlhf.batch import Prompt
from rlhf.evaluation import evaluate

pytestmark = pytest.mark.ray


def test_greedy_completions_without_a_learner_are_those_of_transformers(
    ray_session: None, tiny_config, tiny_model_dir: Path
) -> None:
    config = tiny_config("rollout.eval_temperature=0", "rollout.max_completion_tokens=8")
    prompts = [Prompt(i, [1, 20 + i, 30 + i, 40 + i], "", columns={}) for i in range(6)]
    with SamplingCluster(config) as cluster:
        done = evaluate(prompts, *cluster.sampler(), num_samples=1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    for prompt, rollout in zip(prompts, done.rollouts, strict=True):
        settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        expected = model.generate(torch.tensor([prompt.token_ids]), **settings)[0, 4:].tolist()
        assert rollout.token_ids == expected and set(rollout.versions.tolist()) == {0}
    evens = [sum(token % 2 == 0 for token in rollout.token_ids) / 8 for rollout in done.rollouts]
    assert done.scores.rewards.tolist() == pytest.approx(evens)
