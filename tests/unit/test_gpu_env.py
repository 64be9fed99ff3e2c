"""Which processes may grow their memory segments: not those that hand out IPC handles, and not vLLM's."""

import pytest

from actors.cluster import gpu_env


@pytest.mark.parametrize(
    ("role", "colocated", "expandable"),
    [
        ("learner", False, True),
        ("learner", True, False),
        ("critic", True, True),
        ("reference", True, True),
        ("reward_model", False, True),
        ("rollout", True, False),
        ("rollout", False, False),
    ],
)
def test_expandable_segments(role: str, colocated: bool, expandable: bool) -> None:
    env = gpu_env(role, 4.0, colocated=colocated)
    assert ("PYTORCH_ALLOC_CONF" in env) == expandable
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "4"


def test_a_share_of_a_core_is_one_compile_worker() -> None:
    assert gpu_env("learner", 0.5, colocated=True)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
