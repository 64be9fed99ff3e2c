"""Ray actors of a reward-model training run."""

import torch

from actors.cluster import ActorCluster
from actors.learner import EngineActor
from actors.proxies import LearnerGroup
from rlhf.models.loading import load_scalar
from rlhf.models.packed import PackedModel
from rlhf.reward_config import RewardTrainingConfig
from rlhf.training.engine import Engine
from rlhf.training.reward_learner import RewardLearner


class RewardLearnerActor(EngineActor):
    """One rank of a reward model in training."""

    def __init__(
        self, config: RewardTrainingConfig, rank: int, num_ranks: int, total_steps: int, pad_token_id: int | None
    ) -> None:
        """``total_steps``: optimiser steps of the run; ``pad_token_id`` is written into the saved model's config."""
        super().__init__(config, rank, num_ranks)
        self._num_steps, self._pad_token_id = total_steps, pad_token_id

    def _total_steps(self) -> int:
        return self._num_steps

    def _load(self, dtype: torch.dtype) -> PackedModel:
        settings = self._config.model
        model = load_scalar(
            settings.path,
            dtype=dtype,
            max_tokens=self._config.data.max_tokens,
            fresh_head="random",
            trust_remote_code=settings.trust_remote_code,
        )
        model.lm.config.pad_token_id = self._pad_token_id
        return model

    def _wrap(self, engine: Engine) -> RewardLearner:
        return RewardLearner(engine, center_coef=self._config.center_coef)


class RewardTrainingCluster(ActorCluster):
    """The ranks of one reward-model training run; there are no other actors."""

    def __init__(self, config: RewardTrainingConfig, *, total_steps: int, pad_token_id: int | None) -> None:
        super().__init__(config)
        self._total_steps, self._pad_token_id = total_steps, pad_token_id

    def _start_all(self) -> None:
        created = self._create(
            "learner",
            RewardLearnerActor,
            lambda rank, count: (self._config, rank, count, self._total_steps, self._pad_token_id),
        )
        self._locate({"learner": created})
        self._start_roles()

    def learner(self) -> LearnerGroup:
        """The reward model in training."""
        return LearnerGroup(self._groups["learner"], self._config.timeouts)
