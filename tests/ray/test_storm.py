"""A storm as it fits into a test run; `make storm` makes a longer one, of every kind of failure."""

import json
import signal
from pathlib import Path

import pytest

from rlhf.config import DataConfig
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import load_prompts
from tests.storm.__main__ import END_S, StormRun, show, storm

EVENTS = (
    *("kill-rollout", "kill-reference", "stop-rollout", "kill-reward", "second-run", "kill-learner", "kill-control"),
    *("kill-rollout", "terminate-all", "kill-reward", "damaged-checkpoint", "pause-driver", "kill-reference"),
    *("kill-driver", "kill-rollout"),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_after_failures_of_many_kinds_every_step_has_the_numbers_of_a_calm_run(tiny_model_dir: Path) -> None:
    outcomes, wrong = storm(EVENTS, tiny_model_dir, seed=1)
    show(outcomes)
    assert [outcome.event for outcome in outcomes] == list(EVENTS)
    assert wrong == []
    went_on = {"kill-rollout", "stop-rollout", "kill-reference", "kill-reward", "kill-control", "second-run"}
    assert {o.event for o in outcomes if o.how != "went on"} & went_on == set(), outcomes
    assert all(outcome.how == "restarted" for outcome in outcomes if outcome.event == "kill-learner"), outcomes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_asynchronous_run_whose_driver_is_killed_trains_on_every_prompt_once(
    tiny_model_dir: Path, tiny_tokenizer, tmp_path: Path
) -> None:
    data, num_steps, size, kills = tmp_path / "prompts.jsonl", 20, 4, (7, 13)
    data.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(num_steps * size * 2)))
    run = StormRun(
        tmp_path / "asynchronous",
        tiny_model_dir,
        *("rollout.max_staleness=2", "algorithm.rollout_correction=none"),  # the engine has no log-probabilities
        *(f"algorithm.prompts_per_step={size}", "algorithm.group_size=2"),
        *("learner.num_ranks=1", "algorithm.beta=0", f"num_steps={num_steps}", "checkpoint.every_steps=5"),
        *(f"data.train={data}", "data.eval=null"),
        *("tracking.completions_every_steps=1", f"tracking.completions_rows={2 * size}"),
    )
    try:
        for step in kills:
            run.reach(step)
            run.send(signal.SIGKILL)
            assert run.ended(END_S)
        run.reach(num_steps)
        assert run.ended(END_S)
    finally:
        assert run.close() == []
    assert run.exits == [-signal.SIGKILL] * len(kills)
    assert max(row["staleness/max"] for row in run.rows()) == 2, "groups were under way at every checkpoint"
    lines = (run.directory / "completions.jsonl").read_text().splitlines()
    trained_on = [row["prompt"] for row in map(json.loads, lines)]
    prompts = load_prompts(str(data), DataConfig(train=str(data)), tiny_tokenizer, split="train", seed=0)
    calm = [prompt.text for prompt in PromptStream(prompts, shuffle=True, seed=0).take(num_steps * size)]
    assert sorted(trained_on) == sorted(calm * 2), "both completions of each, and of no other"
