"""`rlhf train`: from a validated configuration to a finished run directory."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from actors.cluster import Cluster
from actors.connect import connect
from actors.metrics import RayMetrics
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
from jobs.validate import check_environment, check_families, check_rewards, load_held_out, load_training
from rlhf.algorithms import check_algorithm, make_algorithm
from rlhf.batch import Prompt
from rlhf.checkpoint import CheckpointStore
from rlhf.checks.gate import SamplingGate
from rlhf.config import Config, eval_key
from rlhf.data.mixture import Mixture
from rlhf.data.prompt_stream import PromptStream
from rlhf.driver import Driver
from rlhf.models.loading import load_tokenizer
from rlhf.planning.shapes import ModelShape
from rlhf.recipes import validate_model
from rlhf.resume import describe_run
from rlhf.run_lock import RunLock
from rlhf.stream import GroupStream
from rlhf.tracking import Roofline, Tracker
from rlhf.training.device import resolve_dtype


def train(config: Config) -> dict[str, Any]:
    """Runs training to the end (or to a clean stop) and returns what ``summarise`` does.

    No other run can use the run directory meanwhile. Mistakes in the models, the data, the reward functions or the
    checkpoint to resume are found before Ray starts, and before anything is written. A run that loses an actor that it
    cannot replace shuts all of them down and resumes from its last checkpoint (``jobs.restarts``).
    """
    with RunLock(config.run_dir) as lock:
        return train_holding(lock, config)


def train_holding(lock: RunLock, config: Config) -> dict[str, Any]:
    """The run, in a directory that nobody else uses."""
    validate_model(config)
    tokenizer = load_tokenizer(config.model)
    validate_model(config)  # again: loading a hub model's tokenizer fetches its config.json
    check_families(config)
    check_algorithm(config.algorithm)
    checkpoints = CheckpointStore(config.run_dir, keep=config.checkpoint.keep, lock=lock)
    config, state = find_start(config, checkpoints)
    prompts = load_training(config, tokenizer)
    eval_sets = load_held_out(config, tokenizer)
    by_key = prompts.by_key() | {eval_key(name): held_out for name, held_out in eval_sets.items()}
    check_rewards(config, by_key)
    notes = [*prompts.summary(), *check_environment(config, tokenizer, by_key)]
    this_run = describe_run(config, tokenizer, data=prompts.fingerprint(), num_steps=config.num_steps)
    run_dir = begin(config, checkpoints, state, this_run)
    writers = [RayMetrics(config.name)]
    new_tracker = partial(
        Tracker, config.tracking, run_dir, num_steps=config.num_steps, tokenizer=tokenizer, writers=writers
    )
    held_out = {name: data.all() for name, data in eval_sets.items()}
    data = {"prompts": prompts, "held_out": held_out}
    once = partial(attempt, tokenizer=tokenizer, **data, checkpoints=checkpoints, notes=notes)
    with connect(config), ends_on_sigterm():
        summary = keep_trying(config, checkpoints, new_tracker, once)
    leave_report(run_dir)
    return summary


def attempt(
    config: Config,
    tracker: Tracker,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mixture,
    held_out: Mapping[str, Sequence[Prompt]],
    checkpoints: CheckpointStore,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Starts all actors, runs the loop, ends them; returns the summary. Raises RoleLostError if an actor dies.

    ``notes``: lines for the log, before anything starts.
    """
    tracker.note(f"{config.name}: on the Ray cluster at {ray.get_runtime_context().gcs_address}")
    for note in notes:
        tracker.note(note)
    with started(Cluster(config, tracker.note, tracker.progress), tracker) as cluster:
        driver = make_driver(
            config, cluster, prompts=prompts, held_out=held_out, tracker=tracker, checkpoints=checkpoints
        )
        driver.best = keeps_best(driver, tokenizer)
        with stops_at_step_end(driver), driver.completing_saves():
            driver.run()
        final_model = save_final(driver, config.num_steps, driver.roles.learner, tokenizer)
        if final_model and driver.roles.critic:
            driver.roles.critic.save_model(str(tracker.run_dir / "critic"))
        memory = cluster.peak_memory_gib()
    return summarise(driver, config.num_steps, final_model, cluster.device, memory)


def make_driver(
    config: Config,
    cluster: Cluster,
    *,
    prompts: Mixture,
    held_out: Mapping[str, Sequence[Prompt]],
    tracker: Tracker,
    checkpoints: CheckpointStore,
) -> Driver:
    """The loop over a cluster's roles."""
    roles = cluster.roles()
    stream = PromptStream(prompts, shuffle=config.data.shuffle, seed=config.seed)
    dtype = resolve_dtype(config.model.dtype, torch.device("cuda" if cluster.device == "gpu" else "cpu"))
    return Driver(
        config=config,
        roles=roles,
        algorithm=make_algorithm(config.algorithm),
        stream=GroupStream(stream, roles.rollouts, roles.reward, roles.reference, config, tracker.phase),
        held_out=held_out,
        gate=SamplingGate.of(config.checks, config.rollout, dtype),
        tracker=tracker,
        roofline=make_roofline(config, cluster.device_names()),
        memory=cluster.memory_metrics,
        checkpoints=checkpoints,
    )


def make_roofline(config: Config, devices: dict[str, str]) -> Roofline:
    """The best that a step of this run could do on these devices; ``devices``: torch's names by role."""

    def shape(path: str) -> ModelShape | None:
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
        return ModelShape.of(found.get_text_config().to_dict())

    critic = shape(config.critic.path or config.model.path) if config.uses_critic else None
    return Roofline.of(config, shape(config.model.path), critic, devices)
