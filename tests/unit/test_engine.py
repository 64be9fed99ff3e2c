"""The schedule of the learning rate, by hand."""

import pytest

from rlhf.config import OptimizerConfig
from rlhf.engine import lr_factor


def factors(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    return [round(lr_factor(step, config, total), 4) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"schedule": "cosine"}, [1, 0.8536, 0.5, 0.1464]),
    ],
)
def test_lr_factor(settings: dict[str, object], expected: list[float]) -> None:
    assert factors(4, **settings) == expected
