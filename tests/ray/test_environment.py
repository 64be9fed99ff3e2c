"""A user's own environment in a whole run: episodes of several turns, with workers and environments that fail."""

import json
from pathlib import Path

import pytest

from jobs.train import train
from rlhf.errors import DataError

pytestmark = pytest.mark.ray

ENVIRONMENT = """
import os
from pathlib import Path

MARKS = Path(__file__).parent

def once(name):
    try:
        (MARKS / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

async def echo(chat, secret):
    said, message = chat.notes.setdefault("said", []), None
    for turn in range(2):
        reply = await chat(message)
        said.append(reply.text)
        if turn == 0 and once("died"):
            os._exit(1)
        if turn == 1 and once("raised"):
            raise ValueError("once")
        chat.reward(0.25 * turn)
        message = f"You said {len(reply.text)} letters; the number is {secret}."
    return 0.5

def agrees(completions, said, secret):
    for messages, texts in zip(completions, said):
        assert [m["content"] for m in messages if m["role"] == "assistant"] == texts
        assert len(messages) - 2 * len(texts) in (-1, 0), "the last one may have had no room for an answer"
    return [float(number) for number in secret]
"""


def test_episodes_are_learnt_from_whatever_dies_or_raises(ray_session, tiny_config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    config = tiny_config(
        *(
            "num_steps=2",
            "data.train=task:guess",
            "data.eval=task:guess",
            "data.eval_size=4",
            "data.max_prompt_tokens=96",
        ),
        *("algorithm.name=rloo", "algorithm.credit=turn", "algorithm.beta=0", "algorithm.prompts_per_step=4"),
        *(
            "algorithm.group_size=4",
            "learner.num_ranks=1",
            "rollout.ignore_eos=false",
            "rollout.max_completion_tokens=200",
        ),
        *("rollout.engine_args={max_logprobs: 5}", "checks.logprob_groups=4", "tracking.completions_every_steps=1"),
        f"environment={{path: {tmp_path}/mine.py:echo, num_workers: 2, max_context_tokens: 600}}",
        f"reward.functions=[{{path: {tmp_path}/mine.py:agrees, weight: 0.5}}]",
    )
    train(config)
    run_dir = Path(config.run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / "died").exists() and (tmp_path / "raised").exists()
    assert steps[-1]["environments/replaced_workers"] == 1
    assert steps[-1]["environments/retried_episodes"] >= 2
    for step in steps:
        assert 1 <= step["episodes/turns/mean"] <= step["episodes/turns/max"] == 2
        assert step["episodes/observed_tokens/mean"] > 0
        assert step["episodes/status/done"] + step["episodes/status/length"] == 1
        assert 0 < step["rewards/environment/mean"] <= 0.75, "0.5 at the end, 0.25 for a second turn, 0 if it was cut"
        assert step["grad_norm"] > 0
    assert steps[0]["sampling/logprob_difference_mean"] < 1e-4, "what was observed shifts nothing"
    rows = [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]
    assert any("letters; the number is" in row["completion"] and "(reward 0.25)" in row["completion"] for row in rows)


def test_data_without_what_an_environment_needs_is_refused_before_anything_starts(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    config = tiny_config(
        *("data.train=task:arithmetic", "data.eval=null", "rollout.ignore_eos=false", "data.max_prompt_tokens=96"),
        f"environment={{path: {tmp_path}/mine.py:echo, max_context_tokens: 600}}",
    )
    with pytest.raises(
        DataError, match=r'data\.train=task:arithmetic: has no column "secret", which .*mine\.py:echo needs'
    ):
        train(config)
