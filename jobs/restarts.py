"""What a run does when it loses an actor that it cannot replace: all start anew, from the last checkpoint."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from actors.connect import resolve_device
from rlhf.checkpoint import CheckpointStore
from rlhf.config import Config
from rlhf.errors import ConfigError, DeadlineError, GpuMemoryError, PlacementError, RlhfError, RoleLostError
from rlhf.reward_config import RewardTrainingConfig
from rlhf.tracking import Tracker

AnyConfig = TypeVar("AnyConfig", Config, RewardTrainingConfig)
MAX_PAUSE_S = 60.0


def keep_trying(
    config: AnyConfig,
    checkpoints: CheckpointStore,
    new_tracker: Callable[[], Tracker],
    attempt: Callable[[AnyConfig, Tracker], dict[str, Any]],
) -> dict[str, Any]:
    """Makes attempts until one ends without losing an actor, each from the last checkpoint of the one before.

    Every attempt has a tracker of its own. After ``checkpoint.max_restarts`` in a row without a new checkpoint, the
    last attempt's error is raised.
    """
    # once: a cluster that lost its GPU nodes must not make the next attempt train on CPUs
    config = replace(config, placement=replace(config.placement, device=resolve_device(config)))
    reached, restarts, told = checkpoints.current, 0, ""
    while True:
        tracker = new_tracker()
        if told:
            tracker.remember(told)
        try:
            with contextlib.closing(tracker):
                return attempt(config, tracker)
        except RlhfError as error:
            if checkpoints.current != reached:
                reached, restarts = checkpoints.current, 0
            if restarts == config.checkpoint.max_restarts or not _may_pass(error, tracker, restarts):
                raise
            config = _next_attempt(config, checkpoints, error)
            restarts += 1
            start = "the last checkpoint" if checkpoints.current else "the beginning"
            left = config.checkpoint.max_restarts - restarts
            told = f"restarting from {start} ({left} restart(s) left): {error}"
            print(told, flush=True)
            if restarts > 1:
                time.sleep(min(MAX_PAUSE_S, 2.0**restarts))


def _may_pass(error: RlhfError, tracker: Tracker, restarts: int) -> bool:
    """Whether another attempt may go better than the one that ended with this error."""
    if isinstance(error, DeadlineError):
        return tracker.has_steps  # else the deadline may be too short for this model and cluster
    if isinstance(error, PlacementError):
        return restarts > 0  # it fitted at first: a node has left, and may come back
    return isinstance(error, RoleLostError | GpuMemoryError)


def _next_attempt(config: AnyConfig, checkpoints: CheckpointStore, error: RlhfError) -> AnyConfig:
    """From the last checkpoint, whatever checkpoint.resume said at first, and with patience for nodes to come back.

    Where a GPU was too small, with half of the tokens per micro-batch. Raises ``error`` if that cannot be.
    """
    if checkpoints.current:
        config = replace(config, checkpoint=replace(config.checkpoint, resume=str(checkpoints.current)))
    timeout_s = max(config.placement.timeout_s, config.timeouts.start_s)
    config = replace(config, placement=replace(config.placement, timeout_s=timeout_s))
    return _with_smaller_micro_batches(config, error) if isinstance(error, GpuMemoryError) else config


def _with_smaller_micro_batches(config: AnyConfig, error: GpuMemoryError) -> AnyConfig:
    roles = ["learner", "critic"] if isinstance(config, Config) and config.uses_critic else ["learner"]
    halves = {role: getattr(config, role).micro_batch_tokens // 2 for role in roles}
    try:
        config = replace(
            config, **{role: replace(getattr(config, role), micro_batch_tokens=half) for role, half in halves.items()}
        )
    except ConfigError:  # too few for the longest sequence
        raise error from None
    print(f"from now on {', '.join(f'{role}.micro_batch_tokens={half}' for role, half in halves.items())}", flush=True)
    return config
