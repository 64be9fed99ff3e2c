"""`rlhf train-reward`: from preference pairs to a reward model's directory."""

import contextlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.connect import connect
from actors.reward_training import RewardTrainingCluster
from jobs.runs import begin, find_start, keep_trying, load_tokenizer, started, stops_at_step_end, summarise
from rlhf.checkpoint import CheckpointStore
from rlhf.config import require
from rlhf.data.preferences import Pair, load_preferences
from rlhf.resume import describe_run
from rlhf.reward_config import RewardTrainingConfig
from rlhf.reward_driver import RewardTraining, count_steps
from rlhf.tracking import Tracker


def train_reward(config: RewardTrainingConfig) -> dict[str, Any]:
    """Trains to the end (or to a clean stop) and returns what it wrote to summary.json; the model is in run_dir/model.

    Everything that can be wrong with the data or the checkpoint that it goes on from is found before Ray starts. A
    lost rank is dealt with as in ``train``.
    """
    tokenizer = load_tokenizer(config.model)
    checkpoints = CheckpointStore(config.run_dir, keep=config.checkpoint.keep)
    config, state = find_start(config, checkpoints)
    train = load_preferences(config.data.train, config.data, tokenizer, split="train", seed=config.seed)
    held_out: Sequence[Pair] = []
    if config.data.eval is not None:
        held_out = load_preferences(config.data.eval, config.data, tokenizer, split="eval", seed=config.seed).pairs
    num_steps = count_steps(config, train.pairs)
    warmup = config.learner.optimizer.warmup_steps
    require(
        warmup <= num_steps,
        f"learner.optimizer.warmup_steps={warmup} goes beyond the run's {num_steps} optimiser steps; lower it",
    )
    this_run = describe_run(config, tokenizer, data=train.fingerprint(), num_steps=num_steps)
    run_dir = begin(config, checkpoints, state, this_run)

    def attempt(config: RewardTrainingConfig) -> dict[str, Any]:
        tracker = Tracker(config.tracking, run_dir, num_steps=num_steps, tokenizer=tokenizer)
        with contextlib.closing(tracker):
            tracker.note(train.summary())
            return run(config, tokenizer, train.pairs, held_out, tracker, checkpoints)

    with connect(config):
        return keep_trying(config, checkpoints, attempt)


def run(
    config: RewardTrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    tracker: Tracker,
    checkpoints: CheckpointStore,
) -> dict[str, Any]:
    """One attempt: all ranks up, the loop, all ranks down. Raises RoleLostError if one died on the way."""
    num_steps = count_steps(config, train)
    pad = pad_token_id(tokenizer, [*train, *held_out])
    with started(RewardTrainingCluster(config, total_steps=num_steps, pad_token_id=pad), tracker) as cluster:
        learner = cluster.learner()
        loop = RewardTraining(
            config=config, learner=learner, pairs=train, held_out=held_out, tracker=tracker, checkpoints=checkpoints
        )
        with stops_at_step_end(loop):
            loop.run()
        final = None
        if loop.step >= num_steps and config.checkpoint.save_final_model:
            final = tracker.run_dir / "model"
            learner.save_model(str(final))
            tokenizer.save_pretrained(final)
        device, memory = cluster.device, cluster.peak_memory_gib()
    return summarise(loop, num_steps, tracker, final, device, memory)


def pad_token_id(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> int | None:
    """The padding token to name in the model's config; None where texts end in it.

    transformers reads a score at the last token that is not padding, so such a token must not end a text.
    """
    pad = tokenizer.pad_token_id
    return None if any(pad in (pair.chosen[-1], pair.rejected[-1]) for pair in pairs) else pad
