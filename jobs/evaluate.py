"""`rlhf eval`: mean rewards and pass@k of a model on held-out prompts, sampled by the rollout pool; nothing learns."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from actors.cluster import SamplingCluster
from actors.connect import connect
from jobs.validate import check_environment, check_rewards, load_held_out
from rlhf.config import Config, eval_key, require
from rlhf.evaluation import Evaluation, evaluate
from rlhf.models.loading import load_tokenizer
from rlhf.recipes import validate_model
from rlhf.roles import Metrics
from rlhf.tracking.tracker import as_read
from rlhf.tracking.writers import finite, write_atomically

MAIN = "eval"  # what data.eval, the held-out source without a name, is called


def evaluate_model(config: Config, *, by: str | None, json_file: Path | None, completions: Path | None) -> None:
    """Evaluates ``config.model`` on every held-out source, shows a table and writes the files that are asked for.

    ``by``: a column of the data; also gives the figures of the prompts with each of its values. Mistakes in the model,
    the data and the reward functions are found before Ray starts.
    """
    require(bool(config.data.eval_sources()), "data.eval: no value given, so there is nothing to evaluate on; set it")
    for option, file in {"--json": json_file, "--completions": completions}.items():
        require(file is None or file.parent.is_dir(), f"{option} {file}: no such directory: {file and file.parent}")
    config = for_sampling(config)
    validate_model(config)
    tokenizer = load_tokenizer(config.model)
    validate_model(config)  # again: loading a hub model's tokenizer fetches its config.json
    sets = load_held_out(config, tokenizer)
    data = {eval_key(name): prompts for name, prompts in sets.items()}
    check_rewards(config, data)
    check_environment(config, tokenizer, data)
    for name, prompts in sets.items():
        require(
            by is None or by in prompts.columns,
            f"--by {by}: {eval_key(name)}={prompts.source} has no such column (its columns: "
            f"{', '.join(prompts.columns) or 'none'})",
        )
    with connect(config), SamplingCluster(config) as cluster:
        pool, reward = cluster.sampler()
        done = {
            name or MAIN: evaluate(prompts.all(), pool, reward, num_samples=config.data.eval_samples)
            for name, prompts in sets.items()
        }
    results = {name: Result.of(evaluation, by, config.data.eval_pass_reward) for name, evaluation in done.items()}
    Console().print(make_table(config.model.path, by, results))
    if json_file is not None:
        write_atomically(json_file, json.dumps(as_json(config, results), indent=2) + "\n")
    if completions is not None:
        lines = [line for name, evaluation in done.items() for line in rows(name, evaluation, tokenizer)]
        write_atomically(completions, "".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Result:
    """The figures of one source, or of the part of it with one value of a column."""

    num_prompts: int
    functions: list[str]  # the names of what gave rewards
    metrics: Metrics
    parts: "dict[str, Result]"

    @classmethod
    def of(cls, evaluation: Evaluation, by: str | None, pass_reward: float | None) -> Self:
        parts = {} if by is None else evaluation.by(by)
        return cls(
            len(evaluation.rollouts) // evaluation.num_samples,
            list(evaluation.scores.given),
            evaluation.metrics(pass_reward),
            {value: cls.of(part, None, pass_reward) for value, part in parts.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """null where a figure is not finite."""
        parts = {value: part.as_json() for value, part in self.parts.items()}
        return {"num_prompts": self.num_prompts, "metrics": finite(self.metrics), **({"by": parts} if parts else {})}


def for_sampling(config: Config) -> Config:
    """The configuration of the same pool without a learner: with GPUs of its own, of a fixed size, and under a name of
    its own, so that a run in progress is not in its way."""
    rollout, most = config.rollout, config.rollout.num_workers
    if config.placement.colocated:
        most = max(1, config.num_shared_bundles // rollout.tensor_parallel_size)
    return replace(
        config,
        name=f"{config.name}-eval",
        rollout=replace(rollout, autoscale=None, num_workers=min(rollout.num_workers, most)),
        placement=replace(config.placement, mode="separate"),
    )


def make_table(model: str, by: str | None, results: Mapping[str, Result]) -> Table:
    """One line per source or part of one; rewards with half of their 95 % confidence interval."""
    first = next(iter(results.values()))
    rates = [name for name in first.metrics if name.startswith("pass@")]
    table = Table(
        *("data", "prompts", "reward", *rates, *first.functions, "tokens", "truncated"), title=f"evaluation of {model}"
    )
    for name, result in results.items():
        parts = {f"  {by}={value}": part for value, part in result.parts.items()}
        for label, line in ({name: result} | parts).items():
            metrics = line.metrics
            half = f" ± {metrics['reward/ci95']:.4f}" if "reward/ci95" in metrics else ""
            table.add_row(
                Text(label),
                str(line.num_prompts),
                f"{metrics['reward']:.4f}{half}",
                *(f"{metrics[rate]:.4f}" if rate in metrics else "" for rate in rates),
                *(f"{metrics[f'rewards/{function}/mean']:.4f}" for function in first.functions),
                f"{metrics['completions/mean_length']:.0f}",
                f"{metrics['completions/clipped_ratio']:.0%}",
            )
    return table


def as_json(config: Config, results: Mapping[str, Result]) -> dict[str, Any]:
    """What ``--json`` writes."""
    sources = {name or MAIN: source for name, source in config.data.eval_sources().items()}
    return {
        "model": config.model.path,
        "num_samples": config.data.eval_samples,
        "pass_reward": config.data.eval_pass_reward,
        "data": {name: {"source": sources[name], **result.as_json()} for name, result in results.items()},
    }


def rows(name: str, evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Every completion with its rewards, as in a run's completions.jsonl."""
    rewards, given = evaluation.scores.rewards.tolist(), evaluation.scores.given
    return [
        {
            "data": name,
            "prompt_id": rollout.prompt.id,
            "sample": rollout.sample_index,
            "prompt": rollout.prompt.text,
            "completion": as_read(rollout, tokenizer),
            "truncated": rollout.truncated,
            **finite({"reward": rewards[i], **{f"rewards/{function}": given[function][i] for function in given}}),
        }
        for i, rollout in enumerate(evaluation.rollouts)
    ]
