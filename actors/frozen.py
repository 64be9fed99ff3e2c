"""Ray actors of the models that only score: the reference policy and the reward model."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from actors.group import RankActor
from actors.reward import decode
from rlhf.batch import Rollout, TrainBatch
from rlhf.config import Config
from rlhf.engine import local_rank_device, resolve_dtype
from rlhf.frozen import FrozenScorer, RewardModel
from rlhf.models import load_policy, load_scalar
from rlhf.rewards import MODEL_NAME
from rlhf.roles import Scores


class ReferenceActor(RankActor):
    """One replica of the frozen policy."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        config, device = self._config, local_rank_device()
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
            compiled=config.learner.compile,
            probe_key=f"{key}={path}" if config.checks.probe else None,
        )

    def score(self, batches: Sequence[TrainBatch]) -> list[Tensor]:
        scores = self._scorer.score(batches)
        if self._on_shared_gpu:
            torch.cuda.empty_cache()
        return scores


class RewardModelActor(RankActor):
    """One replica of the reward model."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> None:
        settings, device = self._config.reward.model, local_rank_device()
        assert settings is not None
        self._decoder = AutoTokenizer.from_pretrained(self._config.model.path)
        self._on_shared_gpu = shares_gpu(self._config, device)
        key = "reward.model.path"
        torch.manual_seed(self._config.seed)  # a random head is the same in every replica
        model = load_scalar(
            settings.path,
            dtype=resolve_dtype(self._config.model.dtype, device),
            max_tokens=settings.max_tokens,
            fresh_head="random" if settings.random_head else "refused",
            key=key,
        )
        self._model = RewardModel(
            settings.path,
            model,
            max_tokens=settings.max_tokens,
            token_budget=settings.micro_batch_tokens,
            device=device,
            date=self._config.data.date,
            compiled=self._config.learner.compile,
            probe_key=f"{key}={settings.path}" if self._config.checks.probe else None,
        )

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[Scores]:
        scores = self._model.score(groups, [decode(self._decoder, group) for group in groups])
        if self._on_shared_gpu:
            torch.cuda.empty_cache()
        return [{MODEL_NAME: of_group} for of_group in scores]


def shares_gpu(config: Config, device: torch.device) -> bool:
    """Whether this process leaves torch's cached memory to others when it has done its work."""
    return device.type == "cuda" and config.placement.colocated
