"""Every model of a run is looked at before Ray starts."""

from pathlib import Path
from typing import Any

import pytest

import jobs.validate
from jobs.validate import check_families
from rlhf.recipes import load_config

RECIPE = Path(__file__).resolve().parents[2] / "conf" / "ppo_rm_tiny.yaml"
PATHS = {"model.path": "a", "reference.path": "b", "critic.path": "c", "reward.model.path": "d"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, bool]]:
    """By key, each model that was looked at, and whether its code is trusted."""
    found: dict[str, tuple[str, bool]] = {}

    def look(path: str, *, key: str, max_tokens: Any, trust_remote_code: bool) -> None:
        found[key] = path, trust_remote_code

    monkeypatch.setattr(jobs.validate, "load_model_config", look)
    return found


@pytest.mark.parametrize("trusted", [True, False])
def test_every_model_is_checked_and_trusted_as_all_are(checked: dict[str, Any], trusted: bool) -> None:
    paths = [f"{key}={path}" for key, path in PATHS.items()]
    check_families(load_config(RECIPE, [*paths, f"model.trust_remote_code={str(trusted).lower()}"]))
    assert checked == {key: (path, trusted) for key, path in PATHS.items()}


def test_what_is_not_named_is_not_checked(checked: dict[str, Any]) -> None:
    check_families(load_config(RECIPE.with_name("grpo_tiny.yaml"), ["model.path=a"]))
    assert checked == {"model.path": ("a", False)}
