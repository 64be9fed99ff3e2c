"""A user's own advantage estimator and loss, from files that only the test knows, in a whole run on the tiny model."""

import json
from pathlib import Path

import pytest

from jobs.train import train

pytestmark = pytest.mark.ray

ESTIMATOR = """
import torch

calls = 0

def constant(inputs, *, value):
    '''Nothing at first; from the second step on the same for every token.'''
    global calls
    calls += 1
    assert len(inputs.rewards) == 64 and inputs.group_size == 8
    return torch.full((len(inputs.versions),), value if calls > 1 else 0.0)
"""

LOSS = """
def reinforce(inputs, *, scale):
    loss = -scale * inputs.advantages * inputs.logprobs
    return loss, {"advantage": inputs.advantages, "surprisal": -inputs.old_logprobs}
"""


@pytest.mark.long
def test_a_run_learns_by_the_user_s_own_estimator_and_loss(ray_session, tiny_config, tmp_path: Path) -> None:
    (tmp_path / "my_estimator.py").write_text(ESTIMATOR)
    (tmp_path / "my_loss.py").write_text(LOSS)
    config = tiny_config(
        *("num_steps=3", "data.eval=null", "algorithm.beta=0", "checkpoint.save_final_model=false"),
        *(f"algorithm.advantage={tmp_path}/my_estimator.py:constant", "algorithm.advantage_kwargs={value: 2.0}"),
        *(f"algorithm.loss={tmp_path}/my_loss.py:reinforce", "algorithm.loss_kwargs={scale: 0.5}"),
        "learner.micro_batch_tokens=512",  # several micro-batches on each of two ranks
    )
    train(config)
    first, *others = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert first["grad_norm"] == first["loss"] == first["loss/advantage"] == 0, "advantages of 0 teach nothing"
    assert first["loss/surprisal"] > 1
    for step in others:
        assert step["advantages/abs_mean"] == step["loss/advantage"] == pytest.approx(2)
        assert step["loss"] == pytest.approx(0.5 * 2 * step["loss/surprisal"]), "the mean over all tokens of the step"
        assert step["grad_norm"] > 0
        assert "clip_ratio/region_mean" not in step, "nothing is clipped"
