"""`rlhf train-reward`: from preference pairs to a reward model's directory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.connect import connect
from actors.metrics import RayMetrics
from actors.reward_training import RewardTrainingCluster
from jobs.restarts import keep_trying
from jobs.runs import (
    begin,
    ends_on_sigterm,
    find_start,
    keeps_best,
    leave_report,
    save_final,
    started,
    stops_at_step_end,
    summarise,
)
from rlhf.checkpoint import CheckpointStore
from rlhf.config import require
from rlhf.data.preferences import Pair, PreferenceSet, load_preferences
from rlhf.models.loading import load_tokenizer
from rlhf.resume import describe_run
from rlhf.reward_config import RewardTrainingConfig
from rlhf.reward_driver import RewardTraining, count_steps
from rlhf.run_lock import RunLock
from rlhf.tracking import Tracker


def train_reward(config: RewardTrainingConfig) -> dict[str, Any]:
    """Trains to the end (or to a clean stop) and returns what ``summarise`` does; the model is in run_dir/model.

    Mistakes in the data or the checkpoint to resume are found before Ray starts. Other runs in the same directory, and
    a lost rank, are handled as in ``train``.
    """
    with RunLock(config.run_dir) as lock:
        return train_holding(lock, config)


def train_holding(lock: RunLock, config: RewardTrainingConfig) -> dict[str, Any]:
    """The run, in a directory that nobody else uses."""
    tokenizer = load_tokenizer(config.model)
    checkpoints = CheckpointStore(config.run_dir, keep=config.checkpoint.keep, lock=lock)
    config, state = find_start(config, checkpoints)
    load = partial(load_preferences, config=config.data, tokenizer=tokenizer, seed=config.seed)
    train = load(config.data.train, split="train")
    held_out = [] if config.data.eval is None else load(config.data.eval, split="eval").pairs
    num_steps = count_steps(config, train.pairs)
    check_warmup(config, num_steps)
    this_run = describe_run(config, tokenizer, data=train.fingerprint(), num_steps=num_steps)
    run_dir = begin(config, checkpoints, state, this_run)
    writers = [RayMetrics(config.name)]
    new_tracker = partial(Tracker, config.tracking, run_dir, num_steps=num_steps, tokenizer=tokenizer, writers=writers)
    once = partial(attempt, tokenizer=tokenizer, train=train, held_out=held_out, checkpoints=checkpoints)
    with connect(config), ends_on_sigterm():
        summary = keep_trying(config, checkpoints, new_tracker, once)
    leave_report(run_dir)
    return summary


def check_warmup(config: RewardTrainingConfig, num_steps: int) -> None:
    """Raises ConfigError if the run of ``num_steps`` ends before its learning rate has warmed up."""
    warmup = config.learner.optimizer.warmup_steps
    require(
        warmup <= num_steps,
        f"learner.optimizer.warmup_steps={warmup} exceeds the run's {num_steps} optimiser steps; lower it",
    )


def attempt(
    config: RewardTrainingConfig,
    tracker: Tracker,
    *,
    tokenizer: PreTrainedTokenizerBase,
    train: PreferenceSet,
    held_out: Sequence[Pair],
    checkpoints: CheckpointStore,
) -> dict[str, Any]:
    """Starts all ranks, runs the loop, ends them; returns the summary. Raises RoleLostError if a rank dies."""
    tracker.note(train.summary())
    num_steps = count_steps(config, train.pairs)
    pad = pad_token_id(tokenizer, [*train.pairs, *held_out])
    with started(RewardTrainingCluster(config, total_steps=num_steps, pad_token_id=pad), tracker) as cluster:
        loop = RewardTraining(
            config=config,
            learner=cluster.learner(),
            pairs=train.pairs,
            held_out={"": held_out} if held_out else {},
            tracker=tracker,
            checkpoints=checkpoints,
            memory=cluster.memory_metrics,
        )
        loop.best = keeps_best(loop, tokenizer)
        with stops_at_step_end(loop), loop.completing_saves():
            loop.run()
        final_model = save_final(loop, num_steps, loop.learner, tokenizer)
        memory = cluster.peak_memory_gib()
    return summarise(loop, num_steps, final_model, cluster.device, memory)


def pad_token_id(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> int | None:
    """The padding token to name in the model's config; None if some text ends in it.

    transformers reads a score at the last token that is not padding, so such a token must not end a text.
    """
    pad = tokenizer.pad_token_id
    return None if any(pad in (pair.chosen[-1], pair.rejected[-1]) for pair in pairs) else pad
