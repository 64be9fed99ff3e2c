"""`rlhf train-reward`: from preference pairs to a reward model's directory."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.cluster import connect
from actors.reward_training import RewardTrainingCluster
from actors.roles import LearnerGroup
from jobs.train import load_tokenizer
from rlhf.config import RewardTrainingConfig
from rlhf.preferences import Pair, epoch_batches, load_preferences, pair_batch
from rlhf.recipes import to_yaml
from rlhf.reward_training import evaluate_pairs
from rlhf.roles import Metrics
from rlhf.tracking import Tracker, print_summary, write_summary


def train_reward(config: RewardTrainingConfig) -> dict[str, Any]:
    """Trains to the end and returns what it wrote to summary.json; the model is in ``run_dir/model``.

    Everything that can be wrong with the data is found before Ray starts. It keeps no checkpoints: a run that was
    stopped starts anew.
    """
    tokenizer = load_tokenizer(config.model)
    train = load_preferences(config.data.train, config.data, tokenizer, split="train", seed=config.seed)
    held_out = config.data.eval and load_preferences(
        config.data.eval, config.data, tokenizer, split="eval", seed=config.seed
    )
    eval_pairs = held_out.pairs if held_out else []
    run_dir = Path(config.run_dir).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))

    num_steps = config.num_epochs * len(epoch_batches(train.pairs, config.batch_pairs, epoch=0, seed=0, shuffle=False))
    tracker = Tracker(config.tracking, run_dir, num_steps=num_steps, tokenizer=tokenizer)
    tracker.note(train.summary())
    pad = pad_token_id(tokenizer, [*train.pairs, *eval_pairs])
    with contextlib.closing(tracker), connect(config):
        with tracker.phase("start"), contextlib.ExitStack() as stack:
            cluster = stack.enter_context(RewardTrainingCluster(config, total_steps=num_steps, pad_token_id=pad))
            keep_alive = stack.pop_all()
        with keep_alive:
            evaluations = run_steps(config, cluster.learner(), train.pairs, eval_pairs, tracker)
            final = run_dir / "model"
            cluster.learner().save_model(str(final))
            tokenizer.save_pretrained(final)
            device, memory = cluster.device, cluster.peak_memory_gib()
    summary = write_summary(
        run_dir,
        eval_before=evaluations.get(0),
        eval_after=evaluations.get(num_steps),
        steps=num_steps,
        tracker=tracker,
        device=device,
        peak_memory_gib=memory,
        final_model=final,
        status="completed",
    )
    print_summary(summary)
    return summary


def run_steps(
    config: RewardTrainingConfig,
    learner: LearnerGroup,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    tracker: Tracker,
) -> dict[int, Metrics]:
    """All epochs; returns the evaluations by step."""
    evaluations: dict[int, Metrics] = {}

    def evaluate(step: int) -> None:
        if held_out:
            with tracker.phase("evaluate"):
                batch = pair_batch(held_out)
                scores = learner.score(batch).result()
            evaluations[step] = evaluate_pairs(scores, batch, center_coef=config.center_coef)
            tracker.log_eval(step, evaluations[step])

    evaluate(step := 0)
    for epoch in range(config.num_epochs):
        for pairs in epoch_batches(
            train, config.batch_pairs, epoch=epoch, seed=config.seed, shuffle=config.data.shuffle
        ):
            with tracker.phase("update"):
                metrics = learner.update(pair_batch(pairs)).result()
            step += 1
            tracker.log_step(step, metrics, num_tokens=sum(pair.num_tokens for pair in pairs))
            if config.eval_every_steps and step % config.eval_every_steps == 0:
                evaluate(step)
    if step not in evaluations:
        evaluate(step)
    return evaluations


def pad_token_id(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> int | None:
    """The padding token to name in the model's config; None where texts end in it.

    transformers reads a score at the last token that is not padding, so such a token must not end a text.
    """
    pad = tokenizer.pad_token_id
    return None if any(pad in (pair.chosen[-1], pair.rejected[-1]) for pair in pairs) else pad
