"""Whether a run may resume from a checkpoint: the run as it is now, compared key by key with what it was then.

A checkpoint holds the configuration of its run, and fingerprints of what the configuration only points to: the
tokenizer, the shapes of the models that learn, the data, and the files of the user's own functions. ``RULES`` says for
every key whether it may differ.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.checkpoint import read_state
from rlhf.config import ALGORITHMS, Config
from rlhf.errors import CheckpointError, ConfigError
from rlhf.reward_config import RewardTrainingConfig
from rlhf.rewards.built_in import BUILT_IN
from rlhf.user_code import source_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rule:
    """What to do about keys that differ: ``tell`` lists them, ``refuse`` ends the run, ``ignore`` does neither.

    ``section.*`` covers every key of a section that has no rule of its own. Rules for ``learner`` also apply to
    ``critic``.
    """

    action: Literal["tell", "refuse", "ignore"]
    reason: str
    keys: str  # separated by spaces


RULES = (
    Rule("ignore", "says where to start from, not what the run is", "checkpoint.resume"),
    Rule(
        "tell",
        "the run's length and name, and what it records",
        """
        name run_dir num_steps num_epochs eval_every_steps checkpoint.* checks.* tracking.*
        data.eval data.extra_eval data.eval_size data.eval_samples data.eval_pass_reward
        """,
    ),
    Rule(
        "tell",
        "where and how fast things are computed, not what",
        """
        placement.* ray.* timeouts.* model.trust_remote_code
        learner.num_ranks learner.zero_stage learner.cpus_per_rank
        learner.micro_batch_tokens learner.logits_chunk_tokens learner.compile
        learner.checkpointed_layers learner.offload learner.float32_gradients
        reference.num_ranks reference.micro_batch_tokens reference.cpus_per_rank
        reward.num_workers reward.function_timeout_s environment.num_workers environment.episodes_per_worker
        reward.model.num_ranks reward.model.micro_batch_tokens reward.model.cpus_per_rank
        rollout.num_workers rollout.extra_kinds rollout.autoscale.* rollout.max_failures rollout.tensor_parallel_size
        rollout.gpu_memory_fraction rollout.cpu_kv_cache_mib rollout.max_num_seqs rollout.enforce_eager
        rollout.weight_bucket_mib rollout.engine_args rollout.cpus_per_worker rollout.logprobs
        """,
    ),
    Rule(
        "tell",
        "Engine.load resets them",
        """
        learner.optimizer.learning_rate learner.optimizer.schedule learner.optimizer.warmup_steps
        learner.optimizer.weight_decay learner.optimizer.max_grad_norm
        """,
    ),
    Rule(
        "tell",
        "changes what is learnt from here on, not what the checkpoint means",
        """
        algorithm.beta algorithm.kl_horizon algorithm.gamma algorithm.lam algorithm.value_clip algorithm.reward_clip
        algorithm.epsilon_low algorithm.epsilon_high algorithm.delta algorithm.dual_clip algorithm.entropy_coef
        algorithm.mask_truncated_completions algorithm.missing_eos_penalty algorithm.top_entropy_quantile
        algorithm.rollout_correction algorithm.rollout_correction_cap algorithm.rollout_correction_floor
        algorithm.dynamic_sampling_max_tries algorithm.advantage_kwargs algorithm.loss_kwargs critic.warmup_steps
        center_coef
        reference.path reward.functions reward.max_abstained
        reward.model.path reward.model.weight reward.model.random_head reward.model.max_tokens
        """,
    ),
    Rule(
        "tell",
        "how the policy samples from here on",
        """
        rollout.max_completion_tokens rollout.temperature rollout.top_p rollout.top_k rollout.stop rollout.ignore_eos
        rollout.eval_temperature rollout.seed_requests rollout.max_staleness learner.lora.publish
        environment.path environment.tools environment.max_turns environment.max_context_tokens
        environment.step_timeout_s environment.retries environment.on_failure
        """,
    ),
    Rule(
        "tell",
        "the contents, or the resulting tokens, are compared instead: FINGERPRINTS",
        """
        model.path critic.path data.train data.mixture data.task_args data.prompt_column data.system_prompt
        data.chat_template_kwargs data.date data.max_prompt_tokens data.overlong_prompts data.max_tokens
        """,
    ),
    Rule("refuse", "the order of the data and all samples depend on it", "seed data.shuffle data.curriculum"),
    Rule("refuse", "the checkpoint holds weights and optimizer state of that type", "model.dtype"),
    Rule("refuse", "the checkpoint holds those adapters", "learner.lora.* critic.own_base"),
    Rule(
        "refuse",
        "the optimizer's moments and the critic come from that objective",
        """
        algorithm.name algorithm.advantage algorithm.loss algorithm.loss_type algorithm.scale_rewards algorithm.credit
        algorithm.importance_sampling_level
        algorithm.kl_bias_correction algorithm.kl_estimator algorithm.whiten_advantages
        """,
    ),
    Rule(
        "refuse",
        "steps, schedule and data position are counted in batches of that size",
        """
        algorithm.prompts_per_step algorithm.group_size algorithm.num_epochs algorithm.num_minibatches batch_pairs
        """,
    ),
    Rule("refuse", "the checkpoint holds the beta of the KL controller", "algorithm.kl_target"),
    Rule(
        "refuse",
        "the optimizer's moments were computed with it, and loading them restores it",
        "learner.optimizer.betas learner.optimizer.eps",
    ),
)
_RULE_OF = {key: rule for rule in RULES for key in rule.keys.split()}
PATHS = (
    *("run_dir", "data.train", "data.eval", "model.path", "critic.path", "reference.path", "reward.model.path"),
    *("algorithm.advantage", "algorithm.loss"),
)
FINGERPRINTS = {
    "tokenizer": "vocabulary, added tokens and chat template of model.path",
    "model": "config.json of model.path",
    "critic": "config.json of critic.path",
    "data": "the prompts, or pairs, of data.train as tokens; with data.mixture also the weights",
}
UNSET = "unset"


def rule_of(key: str) -> Rule | None:
    """The rule for a key of the configuration; None if it has none."""
    section = key.rpartition(".")[0]
    rule = _RULE_OF.get(key) or _RULE_OF.get(f"{section}.*")
    return rule if rule or not key.startswith("critic.") else rule_of(key.replace("critic.", "learner.", 1))


def describe_run(
    config: Config | RewardTrainingConfig, tokenizer: "PreTrainedTokenizerBase", *, data: str, num_steps: int
) -> dict[str, Any]:
    """What a checkpoint records about its run, as plain JSON. ``data``: the fingerprint of the training data.

    Raises ConfigError if a model has no readable config.json.
    """
    fingerprints = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "model": model_fingerprint(config.model.path, "model.path"),
        "data": data,
    }
    if isinstance(config, Config) and config.uses_critic:
        fingerprints["critic"] = model_fingerprint(config.critic.path or config.model.path, "critic.path")
    plain = json.loads(json.dumps(asdict(config), default=str))
    sources = _source_digests(config) if isinstance(config, Config) else {}
    return {"config": plain, "fingerprints": fingerprints, "sources": sources, "num_steps": num_steps}


def _source_digests(config: Config) -> dict[str, str | None]:
    """Hex digest of the file that defines each of the user's functions, by the key that names it."""
    paths = {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
    paths |= {f"reward.functions[{i}]": function.path for i, function in enumerate(config.reward.functions)}
    return {key: source_digest(path) for key, path in paths.items() if path and path not in BUILT_IN}


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hex digest of everything that determines how texts and chats are tokenised."""
    added = {id: repr(token) for id, token in tokenizer.added_tokens_decoder.items()}
    return _digest([tokenizer.get_vocab(), added, tokenizer.special_tokens_map, tokenizer.chat_template])


def model_fingerprint(path: str, key: str) -> str:
    """Hex digest of a model's config.json, on disk or on the hub, without its provenance."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: has no readable config.json ({str(error).splitlines()[0]})") from error
    provenance = ("_name_or_path", "_commit_hash", "transformers_version")
    return _digest({name: value for name, value in config.items() if name not in provenance})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_run(directory: Path) -> dict[str, Any]:
    """A checkpoint's state. Raises CheckpointError if it does not describe its run."""
    state = read_state(directory)
    if "config" not in state:
        raise CheckpointError(
            f"{_shown(directory)}: lacks the configuration of its run (an older version wrote it), so nothing can be "
            "compared; resume it with that version, or set checkpoint.resume=none"
        )
    return state


def check_resume(directory: Path, state: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """One line on what ``run`` resumes from, and what has changed since.

    ``state``: of the checkpoint in ``directory``; ``run``: from ``describe_run``. Raises CheckpointError naming every
    difference that changes what the checkpoint means.
    """
    told, refused = [], []
    adapted = "beta" in state.get("algorithm", {})  # by the KL controller; the configured beta is only its start
    for key, old, new in _differences(state["config"], run["config"]):
        rule = rule_of("algorithm.kl_target" if adapted and key == "algorithm.beta" else key)
        change = f"{key} {_value(old)} -> {_value(new)}"
        if rule is None:
            refused.append(f"{change} (a key without a rule in rlhf/resume.py)")
        elif rule.action == "refuse" and not _has_moved(key, old, new, state, run):
            refused.append(f"{change} ({rule.reason})")
        elif rule.action != "ignore":
            told.append(change)
    was, now = state.get("sources", {}), run["sources"]
    told += [f"the source of {key}" for key in now if key in was and was[key] != now[key]]
    was, now = state["fingerprints"], run["fingerprints"]
    for name, meaning in FINGERPRINTS.items():
        if was.get(name) != now.get(name):
            refused.append(f"{name} {was.get(name, UNSET)} -> {now.get(name, UNSET)} ({meaning})")
    if refused:
        also = f"; also changed: {', '.join(told)}" if told else ""
        raise CheckpointError(
            f"{_shown(directory)} belongs to another run: {', '.join(refused)}{also}; restore the old values, or start "
            "over with checkpoint.resume=none and another name or run_dir"
        )
    changes = f"; changed: {', '.join(told)}" if told else ""
    return f"resuming from {_shown(directory)} (of {state['num_steps']}){changes}"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key in the whole configuration that differs."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for key in {**before, **after}:
        was, now = before.get(key, UNSET), after.get(key, UNSET)
        if was == now or (key in PATHS and _same_path(was, now)):
            continue
        if was == UNSET and (now is None or now is False or now == {}):
            continue  # an unused key that the checkpoint's version did not have
        if key.startswith("critic.") and not ALGORITHMS[after["algorithm.name"]].critic:
            continue  # there is no critic
        yield key, was, now


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every full key with its value. An absent section (null) has no keys."""
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and key not in _RULE_OF:
            yield from _leaves(value, f"{key}.")
        elif value is not None or not any(known.startswith(f"{key}.") for known in _RULE_OF):
            yield key, value


def _same_path(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and Path(one).resolve() == Path(other).resolve()


def _has_moved(key: str, old: Any, new: Any, state: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether the user's function at ``key`` is the same one, in a file that is somewhere else."""
    was, now = state.get("sources", {}).get(key), run["sources"].get(key)
    return was is not None and was == now and re.split("[.:]", old)[-1] == re.split("[.:]", new)[-1]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(directory: Path) -> str:
    """Relative to the current directory if inside it."""
    here = Path.cwd()
    return str(directory.relative_to(here) if directory.is_relative_to(here) else directory)
