"""A storm as it fits into a test run; `make storm` makes a longer one, of every kind of failure."""

from pathlib import Path

import pytest

from tests.storm.__main__ import show, storm

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
