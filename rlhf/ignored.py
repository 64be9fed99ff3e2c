"""Settings that a run does not read because of its algorithm: allowed, as recipes are shared, but worth a warning."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from rlhf.config import AlgorithmConfig, Config, CriticConfig, ReferenceConfig

DEFAULTS = {"algorithm": AlgorithmConfig(), "critic": CriticConfig(), "reference": ReferenceConfig()}

# The deciding key, whether its dependents are read, and these: keys, or whole sections. The first matching row counts.
RULES: tuple[tuple[str, Callable[[Config], bool], tuple[str, ...]], ...] = (
    (
        "algorithm.name",
        lambda config: config.uses_critic,
        (
            "algorithm.gamma",
            "algorithm.lam",
            "algorithm.kl_horizon",
            "algorithm.whiten_advantages",
            "algorithm.value_clip",
            "algorithm.missing_eos_penalty",
            "critic",
        ),
    ),
    ("algorithm.name", lambda config: config.algorithm.facts.scales_rewards, ("algorithm.scale_rewards",)),
    ("algorithm.advantage", lambda config: config.algorithm.advantage is None, ("algorithm.scale_rewards",)),
    ("algorithm.advantage", lambda config: config.algorithm.advantage is not None, ("algorithm.advantage_kwargs",)),
    (
        "algorithm.loss",
        lambda config: config.algorithm.loss is None,
        ("algorithm.epsilon_low", "algorithm.epsilon_high", "algorithm.delta", "algorithm.dual_clip"),
    ),
    ("algorithm.loss", lambda config: config.algorithm.loss is not None, ("algorithm.loss_kwargs",)),
    (
        "algorithm.beta",
        lambda config: config.algorithm.beta > 0,
        ("algorithm.kl_estimator", "algorithm.kl_bias_correction", "reference"),
    ),
    ("learner.lora.r", lambda config: not config.base_is_reference, ("reference",)),
    ("algorithm.name", lambda config: config.algorithm.facts.kl == "reward", ("algorithm.kl_estimator",)),
    ("algorithm.name", lambda config: config.algorithm.facts.kl == "loss", ("algorithm.kl_bias_correction",)),
    ("algorithm.kl_target", lambda config: config.algorithm.kl_target is not None, ("algorithm.kl_horizon",)),
    (
        "algorithm.loss_type",
        lambda config: config.algorithm.loss_type != "cispo",
        ("algorithm.epsilon_low", "algorithm.delta", "algorithm.dual_clip"),
    ),
    (
        "algorithm.rollout_correction",
        lambda config: config.algorithm.rollout_correction != "none",
        ("algorithm.rollout_correction_cap", "algorithm.rollout_correction_floor"),
    ),
)


def ignored_settings(config: Config) -> list[str]:
    """One message per deciding key, such as ``algorithm.name=grpo ignores algorithm.lam=0.9, critic.num_ranks=2``.

    It lists the keys that differ from their defaults but that the algorithm or its loss never reads.
    """
    found: dict[str, str] = {}  # what is ignored -> why
    for decisive, is_read, keys in RULES:
        if is_read(config):
            continue
        for key in keys:
            for setting in _changed(key, _get(config, key), _get(DEFAULTS[key.split(".")[0]], key.partition(".")[2])):
                found.setdefault(setting, _shown(decisive, _get(config, decisive)))
    reasons = dict.fromkeys(found.values())
    return [
        f"{reason} ignores {', '.join(setting for setting in found if found[setting] == reason)}" for reason in reasons
    ]


def _get(section: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), section) if key else section


def _changed(key: str, value: Any, default: Any) -> Iterator[str]:
    """key=value of what differs from the default."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _changed(f"{key}.{field.name}", getattr(value, field.name), getattr(default, field.name))
    elif value != default:
        yield _shown(key, value)


def _shown(key: str, value: Any) -> str:
    """As written on the command line."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
