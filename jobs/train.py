"""`rlhf train`: from a validated configuration to a finished run directory."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from actors.cluster import Cluster
from actors.connect import connect
from jobs.runs import begin, find_start, keep_trying, load_tokenizer, started, stops_at_step_end, summarise
from rlhf.algorithms import check_algorithm, make_algorithm
from rlhf.batch import Prompt
from rlhf.checkpoint import CheckpointStore
from rlhf.checks.gate import SamplingGate
from rlhf.config import Config
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import PromptSet, load_prompts
from rlhf.driver import Driver
from rlhf.errors import DataError
from rlhf.models.families import load_model_config
from rlhf.planning.shapes import ModelShape
from rlhf.recipes import validate_model
from rlhf.resume import describe_run
from rlhf.rewards import RewardFunctions, load_reward_functions
from rlhf.stream import GroupStream
from rlhf.tracking import Roofline, Tracker
from rlhf.training.engine import resolve_dtype


def train(config: Config) -> dict[str, Any]:
    """Runs training to the end (or to a clean stop) and returns what it wrote to summary.json.

    Everything that can be wrong with the model's shape, the data, the reward functions or the checkpoint that it goes
    on from is found before Ray starts, and before anything is written. A run that loses an actor which it cannot
    replace (rollout workers it can) tears everything down and goes on from its last checkpoint, at most
    ``checkpoint.max_restarts`` times.
    """
    validate_model(config)
    tokenizer = load_tokenizer(config.model)
    validate_model(config)  # again: the tokenizer of a hub model brings its config.json along
    check_families(config)
    check_algorithm(config.algorithm)
    checkpoints = CheckpointStore(config.run_dir, keep=config.checkpoint.keep)
    config, state = find_start(config, checkpoints)
    prompts = load_prompts(config.data.train, config.data, tokenizer, split="train", seed=config.seed)
    eval_prompts = load_eval_prompts(config, tokenizer)
    check_rewards(config, prompts, eval_prompts)
    this_run = describe_run(config, tokenizer, data=prompts.fingerprint(), num_steps=config.num_steps)
    run_dir = begin(config, checkpoints, state, this_run)

    def attempt(config: Config) -> dict[str, Any]:
        tracker = Tracker(config.tracking, run_dir, num_steps=config.num_steps, tokenizer=tokenizer)
        with contextlib.closing(tracker):
            tracker.note(f"{config.name}: on the Ray cluster at {ray.get_runtime_context().gcs_address}")
            tracker.note(prompts.summary())
            return run(config, tokenizer, prompts, eval_prompts, tracker, checkpoints)

    with connect(config):
        return keep_trying(config, checkpoints, attempt)


def run(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSet,
    eval_prompts: PromptSet | None,
    tracker: Tracker,
    checkpoints: CheckpointStore,
) -> dict[str, Any]:
    """One attempt: all actors up, the loop, all actors down. Raises RoleLostError if one died on the way."""
    with started(Cluster(config, tracker.note), tracker) as cluster:
        driver = make_driver(config, cluster, prompts, eval_prompts.all() if eval_prompts else [], tracker, checkpoints)
        with stops_at_step_end(driver):
            driver.run()
        final_model = save_final(config, driver, tokenizer, tracker.run_dir)
        device, memory = cluster.device, cluster.peak_memory_gib()
    return summarise(driver, config.num_steps, tracker, final_model, device, memory)


def make_driver(
    config: Config,
    cluster: Cluster,
    prompts: PromptSet,
    eval_prompts: Sequence[Prompt],
    tracker: Tracker,
    checkpoints: CheckpointStore,
) -> Driver:
    """The loop over a cluster's roles."""
    roles = cluster.roles()
    stream = PromptStream(prompts, shuffle=config.data.shuffle, seed=config.seed)
    return Driver(
        config=config,
        roles=roles,
        algorithm=make_algorithm(config.algorithm),
        stream=GroupStream(stream, roles.rollouts, roles.reward, roles.reference, config, tracker.phase),
        held_out=eval_prompts,
        gate=SamplingGate.of(
            config.checks,
            config.rollout,
            resolve_dtype(config.model.dtype, torch.device("cuda" if cluster.device == "gpu" else "cpu")),
        ),
        tracker=tracker,
        roofline=make_roofline(config, cluster.device_names()),
        checkpoints=checkpoints,
    )


def make_roofline(config: Config, devices: dict[str, str]) -> Roofline:
    """What a step of this run could at best do on these devices; ``devices``: torch's names by role."""

    def shape(path: str) -> ModelShape | None:
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
        return ModelShape.of(found.get_text_config().to_dict())

    critic = shape(config.critic.path or config.model.path) if config.uses_critic else None
    return Roofline.of(config, shape(config.model.path), critic, devices)


def check_families(config: Config) -> None:
    """Raises ConfigError where one of the run's models is of a family that is not supported."""
    paths = {
        "model.path": config.model.path,
        "reference.path": config.reference.path,
        "critic.path": config.critic.path,
    }
    if config.reward.model:
        paths["reward.model.path"] = config.reward.model.path
    for key, path in paths.items():
        if path is not None:
            trusted = config.model.trust_remote_code and key != "reward.model.path"
            load_model_config(path, key=key, max_tokens=None, trust_remote_code=trusted)


def load_eval_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSet | None:
    """The held-out prompts, if data.eval names any."""
    if config.data.eval is None:
        return None
    return load_prompts(config.data.eval, config.data, tokenizer, split="eval", seed=config.seed)


def check_rewards(config: Config, prompts: PromptSet, eval_prompts: PromptSet | None) -> None:
    """Loads the reward functions here once, so that a wrong path or a missing column is found before Ray starts.

    Raises RewardError or ConfigError for the functions, DataError for a column or a row's key that one cannot do
    without.
    """
    functions = RewardFunctions(
        load_reward_functions(config.reward.functions), timeout_s=config.reward.function_timeout_s
    )
    for split, data in {"train": prompts, "eval": eval_prompts}.items():
        for name, needed in functions.required_columns().items():
            for column in sorted(needed) if data else ():
                _check_column(column, name, data, f"data.{split}={data.source}")


def _check_column(column: str, function: str, data: PromptSet, where: str) -> None:
    needs = f'"{column}", which reward function {function} needs'
    if column not in data.columns:
        others = ", ".join(data.columns) or "none"
        raise DataError(f"{where}: has no column {needs} (its columns: {others}); rename one, or set it in kwargs")
    if (line := data.lacking.get(column)) is not None:
        raise DataError(f"{where}: line {line} has no {needs}; add it, or null where the function may abstain")


def save_final(config: Config, driver: Driver, tokenizer: PreTrainedTokenizerBase, run_dir: Path) -> Path | None:
    """The trained policy as a Hugging Face directory, once training has finished."""
    if driver.step < config.num_steps or not config.checkpoint.save_final_model:
        return None
    final = run_dir / "model"
    driver.roles.learner.save_model(str(final))
    tokenizer.save_pretrained(final)
    if driver.roles.critic:
        driver.roles.critic.save_model(str(run_dir / "critic"))
    return final
