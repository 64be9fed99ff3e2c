"""Ray actors of everything under DeepSpeed: policy learner and critic. One rank each, one device each."""

import os
from typing import Any

import torch

from actors.group import RankActor
from actors.weight_sync import Layout, WeightSender
from rlhf.batch import TrainBatch
from rlhf.config import LearnerConfig
from rlhf.engine import Engine, init_distributed, local_rank_device, resolve_dtype
from rlhf.learner import PackedLearner, Part, PolicyLearner, ValueLearner
from rlhf.models import PackedModel, load_policy, load_scalar


class EngineActor(RankActor):
    """One rank of a model that learns. ``start`` joins the ranks; until then it only knows its number."""

    def __init__(self, config: Any, rank: int, num_ranks: int) -> None:
        """``config``: Config, or another that has ``seed``, ``model`` and ``timeouts``."""
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._learner: Any = None

    def start(self, address: str, port: int) -> None:
        """Joins the process group at ``address:port`` and loads the model. Collective."""
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_RANK": "0",  # Ray shows a rank exactly one GPU
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        torch.manual_seed(self._config.seed)
        device = local_rank_device()
        init_distributed(device, self._config.timeouts.update_s)
        settings = self._settings()
        dtype = resolve_dtype(self._config.model.dtype, device)
        engine = Engine(
            lambda: self._load(dtype),
            settings,
            dtype=dtype,
            device=device,
            total_steps=self._total_steps(),
        )
        self._learner = self._wrap(engine)

    def _total_steps(self) -> int:
        """Optimiser steps of the whole run, for the learning-rate schedule."""
        return self._config.num_steps * self._config.algorithm.steps_per_update

    def _settings(self) -> LearnerConfig:
        raise NotImplementedError

    def _load(self, dtype: torch.dtype) -> PackedModel:
        raise NotImplementedError

    def _wrap(self, engine: Engine) -> PackedLearner:
        raise NotImplementedError

    def score(self, batch: TrainBatch) -> Part:
        return self._learner.score(batch)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        return self._learner.update(batch)

    def save(self, directory: str) -> None:
        self._learner.engine.save(directory)

    def load(self, directory: str) -> None:
        self._learner.engine.load(directory)

    def save_model(self, directory: str) -> None:
        self._learner.engine.save_model(directory)


class LearnerActor(EngineActor):
    """One rank of the policy learner; also the sending end of weight publishes."""

    def _settings(self) -> LearnerConfig:
        return self._config.learner

    def _load(self, dtype: torch.dtype) -> PackedModel:
        return load_policy(
            self._config.model.path,
            dtype=dtype,
            temperature=self._config.rollout.temperature,
            chunk_tokens=self._config.learner.logits_chunk_tokens,
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _wrap(self, engine: Engine) -> PolicyLearner:
        self._sender = WeightSender(engine, self._config.rollout.weight_bucket_mib << 20)
        return PolicyLearner(
            engine,
            self._config.algorithm,
            seed=self._config.seed,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
        )

    def weight_layout(self) -> Layout:
        return self._sender.layout()

    def send_object_store(self) -> list[Any]:
        return self._sender.to_object_store()

    def send_ipc(self) -> Any:
        return self._sender.next_ipc()

    def join_broadcast(self, address: str, port: int, world_size: int, timeout_s: float) -> None:
        self._sender.join_broadcast(address, port, world_size, timeout_s)

    def send_broadcast(self) -> list[int]:
        return self._sender.broadcast()


class CriticActor(EngineActor):
    """One rank of PPO's value model."""

    def _settings(self) -> LearnerConfig:
        return self._config.critic

    def _load(self, dtype: torch.dtype) -> PackedModel:
        return load_scalar(
            self._config.critic.path or self._config.model.path,
            dtype=dtype,
            zero_fresh_head=True,
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _wrap(self, engine: Engine) -> ValueLearner:
        return ValueLearner(
            engine,
            self._config.algorithm,
            seed=self._config.seed,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
        )
