"""Ray actors that score: the reference policy, the reward model, and reward functions."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from actors.group import RankActor
from rlhf.batch import Prompt, Rollout, TrainBatch
from rlhf.config import Config
from rlhf.data.columns import ARGUMENTS
from rlhf.errors import RewardError
from rlhf.models.loading import load_policy, load_scalar, load_tokenizer
from rlhf.models.scorer import FrozenScorer
from rlhf.rewards import MODEL_NAME, RewardFunctions, Scoring, load_reward_functions
from rlhf.rewards.functions import Completion
from rlhf.rewards.model import RewardModel
from rlhf.training.device import limit_memory, local_rank_device, resolve_dtype


class ReferenceActor(RankActor):
    """One replica of the frozen policy."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        """Loads the model and checks that packing gives its own numbers."""
        config, device = self._config, local_rank_device()
        limit_memory(device, config.placement.gpu_memory_gib)
        path = config.reference.path or config.model.path
        key = "reference.path" if config.reference.path else "model.path"
        model = load_policy(
            path,
            dtype=resolve_dtype(config.model.dtype, device),
            temperature=config.rollout.temperature,
            chunk_tokens=config.learner.logits_chunk_tokens,
            max_tokens=config.max_sequence_tokens,
            trust_remote_code=config.model.trust_remote_code,
            key=key,
        )
        self._on_shared_gpu = shares_gpu(config, device)
        self._scorer = FrozenScorer(
            model,
            token_budget=config.reference.micro_batch_tokens,
            device=device,
            compiled=config.learner.compile is not False,
            probe_key=f"{key}={path}" if config.checks.probe else None,
        )

    def score(self, batches: Sequence[TrainBatch]) -> list[Tensor]:
        """float32 [N] per batch: log-probabilities of its completion tokens."""
        scores = self._scorer.score(batches)
        if self._on_shared_gpu:
            torch.cuda.empty_cache()
        return scores


class RewardModelActor(RankActor):
    """One replica of the reward model."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        """Loads the model and its tokenizer, and checks that packing gives its own numbers."""
        settings, device = self._config.reward.model, local_rank_device()
        assert settings is not None
        limit_memory(device, self._config.placement.gpu_memory_gib)
        self._decoder = load_tokenizer(self._config.model)
        self._on_shared_gpu = shares_gpu(self._config, device)
        key = "reward.model.path"
        torch.manual_seed(self._config.seed)  # makes a random head the same in every replica
        model = load_scalar(
            settings.path,
            dtype=resolve_dtype(self._config.model.dtype, device),
            max_tokens=settings.max_tokens,
            fresh_head="random" if settings.random_head else "refused",
            trust_remote_code=self._config.model.trust_remote_code,
            key=key,
        )
        self._model = RewardModel(
            settings.path,
            model,
            max_tokens=settings.max_tokens,
            token_budget=settings.micro_batch_tokens,
            device=device,
            date=self._config.data.date,
            compiled=self._config.learner.compile is not False,
            probe_key=f"{key}={settings.path}" if self._config.checks.probe else None,
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[dict[str, list[float]]]:
        """Per group, the model's score of each completion."""
        scores = self._model.score(groups, [completions(self._decoder, group) for group in groups])
        if self._on_shared_gpu:
            torch.cuda.empty_cache()
        return [{MODEL_NAME: of_group} for of_group in scores]


def shares_gpu(config: Config, device: torch.device) -> bool:
    """Whether this process must empty torch's cache after each piece of work."""
    return device.type == "cuda" and config.placement.colocated


class RewardActor(RankActor):
    """Runs all reward functions on its share of the groups, sync ones in a separate process.

    Threaded: calls overlap where functions are async.
    """

    concurrent_calls = 64

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        """Loads the functions, and starts the process of the synchronous ones."""
        self._decoder = load_tokenizer(self._config.model)
        self._functions = RewardFunctions(
            load_reward_functions(self._config.reward.functions),
            timeout_s=self._config.reward.function_timeout_s,
            start_timeout_s=self._config.timeouts.start_s,
        )
        self._functions.start()

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[dict[str, list[float]]]:
        """Per group, one list of scores per function, by its name; NaN where it abstained."""
        in_flight = [self._submit(group) for group in groups]
        return [scoring.result() for scoring in in_flight]

    def _submit(self, group: Sequence[Rollout]) -> Scoring:
        said = completions(self._decoder, group) if self._functions.needs_text else None
        return self._functions.submit([noted(r) for r in group], said, [r.sampled_ids for r in group])


def completions(tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout]) -> list[Completion]:
    """Completions' text, without special tokens; of episodes, the messages after the prompt."""
    if any(r.episode for r in rollouts):
        return [r.episode.messages for r in rollouts if r.episode]
    return list(tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True))


def noted(rollout: Rollout) -> Prompt:
    """Its prompt, with what its environment noted as further columns. Raises RewardError if a note hides another."""
    prompt = rollout.prompt
    if rollout.episode is None or not rollout.episode.notes:
        return prompt
    notes = rollout.episode.notes
    if hidden := sorted(notes.keys() & {*prompt.columns, *ARGUMENTS}):
        raise RewardError(
            f"environment: chat.notes[{hidden[0]!r}] would hide what reward functions get by that name; give the note "
            "another"
        )
    return replace(prompt, columns={**prompt.columns, **notes})
