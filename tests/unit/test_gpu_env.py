"""Which processes may grow their memory segments: all but vLLM's."""

import pytest

from actors.environment import gpu_env


@pytest.mark.parametrize("role", ["learner", "critic", "reference", "reward_model"])
def test_expandable_segments(role: str) -> None:
    assert gpu_env(role, 4.0)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in gpu_env("rollout", 4.0)


def test_a_share_of_the_cores_for_the_compiler() -> None:
    assert gpu_env("learner", 4.0)["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    assert gpu_env("learner", 0.5)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
