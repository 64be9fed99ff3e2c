"""Ray actors for the models under DeepSpeed: policy learner and critic. Each is one rank with one device."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from actors.group import RankActor
from actors.weights.channel import Rendezvous, host_store
from actors.weights.object_store import StoredBucket
from actors.weights.sender import WeightSender
from rlhf.checkpoint import Written
from rlhf.config import OFFLOADS, Config, LearnerConfig
from rlhf.errors import ConfigError, GpuMemoryError, one_line
from rlhf.models.loading import load_policy, load_scalar, lodge_scalar
from rlhf.models.packed import PackedModel
from rlhf.planning.fit import plan_memory, safe_stage
from rlhf.planning.memory import ALL_LAYERS, GIB
from rlhf.planning.memory_plan import MemoryPlan
from rlhf.run_lock import sees_token
from rlhf.shares import Planner, Share
from rlhf.training.device import device_bytes, limit_memory, local_rank_device, resolve_dtype
from rlhf.training.engine import Engine
from rlhf.training.learner import PackedLearner, PolicyLearner, ValueLearner
from rlhf.training.setup import init_distributed
from rlhf.training.weights import Layout


class EngineActor(RankActor):
    """One rank of a model in training. ``start`` connects the ranks; until then it knows only its number."""

    ROLE = "learner"  # its section of the configuration

    def __init__(self, config: Any, rank: int, num_ranks: int) -> None:
        """``config``: Config or RewardTrainingConfig."""
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._learner: Any = None

    def host_store(self) -> int:
        """Opens the store in which the ranks meet; returns its port (rank 0)."""
        self._store = host_store(self.node(), self._config.timeouts.update_s)
        return self._store.port

    def _meet(self, address: str, port: int) -> torch.device:
        """Joins the ranks that meet in the store at ``address:port``; returns this rank's device. Collective."""
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_RANK": "0",  # Ray shows a rank exactly one GPU
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch opens none: it would listen on all interfaces
        }
        device = local_rank_device()
        init_distributed(device, self._config.timeouts.update_s)
        return device

    def start(self, address: str, port: int) -> None:
        """Joins the ranks that meet at ``address:port`` and loads the model. Collective."""
        self._begin(self._meet(address, port))

    def _begin(self, device: torch.device) -> None:
        """Loads the model. Collective."""
        torch.manual_seed(self._config.seed)
        limit_memory(device, self._config.placement.gpu_memory_gib)
        self._on_gpu = device.type == "cuda"
        self._decided = self._decide(device)
        dtype = resolve_dtype(self._config.model.dtype, device)
        engine = Engine(
            lambda: self._load(dtype),
            self._decided,
            dtype=dtype,
            device=device,
            total_steps=self._total_steps(),
        )
        if self._config.checks.probe and engine.model.owns_base:
            engine.probe(key=self._path_key())
        self._learner = self._wrap(engine)
        self._rest()

    def check_run_dir(self, run_dir: str, token: str) -> None:
        """Raises ConfigError unless this rank sees the lock that the driver created in the run directory."""
        if not sees_token(run_dir, token):
            raise ConfigError(
                f"run_dir={run_dir}: {self.ROLE}[{self._rank}] on node {self.node()} does not see this run's files "
                "there, so its part of a checkpoint would be lost; choose a directory that all nodes share, at the "
                "same path"
            )

    def check_memory(self) -> str | None:
        """One line on what this rank's GPU memory decides; None if nothing can be predicted.

        Raises ConfigError if the run will not fit. Loads nothing.
        """
        plan = self._plan(device_bytes(local_rank_device()))
        if plan is None:
            return None
        plan.check(self.ROLE)
        return plan.describe(self.ROLE)

    def predicted_gib(self) -> dict[str, float]:
        """The predicted peak of every role on a GPU like this rank's; empty if nothing can be predicted."""
        plan = self._plan(device_bytes(local_rank_device()))
        return {} if plan is None else {role: peak / GIB for role, peak in plan.process_peaks().items()}

    def _plan(self, num_bytes: float) -> MemoryPlan | None:
        if not num_bytes:
            return None
        model = self._config.model
        # fetches a hub model's config.json
        AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return plan_memory(self._config, num_bytes)

    def _decide(self, device: torch.device) -> LearnerConfig:
        """The settings with open choices made, identically on all ranks, for the smallest GPU among them.

        Raises ConfigError if the run will not fit it.
        """
        smallest = torch.tensor(device_bytes(device), dtype=torch.float64, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        settings = getattr(self._config, self.ROLE)
        if (plan := self._plan(float(smallest))) is not None:
            plan.check(self.ROLE)
            settings = plan.settings(self.ROLE)
        else:  # CPU, or a GPU and a model of unknown shape: be safe
            layers, float32 = settings.checkpointed_layers, settings.float32_gradients
            settings = replace(
                settings,
                zero_stage=safe_stage(settings),
                checkpointed_layers=(ALL_LAYERS if self._on_gpu else 0) if layers is None else layers,
                compile=self._on_gpu if settings.compile is None else settings.compile,
                float32_gradients=not self._on_gpu and settings.can_sum_in_float32 if float32 is None else float32,
            )
        # some nodes may not know a hub model's shape: the choice that takes less memory wins
        frugal = (
            settings.zero_stage,
            settings.checkpointed_layers,
            OFFLOADS.index(settings.offload or "none"),
            not settings.float32_gradients,
        )
        choices = torch.tensor(frugal, device=device).int()
        dist.all_reduce(choices, dist.ReduceOp.MAX)
        stage, layers, offload, low_precision = choices.tolist()
        return replace(
            settings,
            zero_stage=stage,
            checkpointed_layers=layers,
            offload=OFFLOADS[offload],
            float32_gradients=not low_precision,
        )

    def _rest(self) -> None:
        """Frees memory for others on the GPU: parks the optimiser state if required and empties torch's cache."""
        if self._on_gpu and self._decided.offload == "idle":
            self._learner.engine.park_optimizer()
        if self._on_gpu and self._config.placement.colocated:
            torch.cuda.empty_cache()

    def _total_steps(self) -> int:
        """Optimiser steps of the whole run, for the learning-rate schedule."""
        return self._config.num_steps * self._config.algorithm.steps_per_update

    def _path_key(self) -> str:
        """What errors call the model."""
        path = getattr(getattr(self._config, self.ROLE), "path", None)
        return f"{self.ROLE}.path={path}" if path else f"model.path={self._config.model.path}"

    def _load(self, dtype: torch.dtype) -> PackedModel:
        raise NotImplementedError

    def _wrap(self, engine: Engine) -> PackedLearner:
        raise NotImplementedError

    def planner(self) -> Planner:
        """How batches are spread over the ranks; the same on every rank."""
        return self._learner.planner

    def score(self, share: Share) -> Tensor:
        """The scores of the share's completion tokens. Collective. Raises GpuMemoryError."""
        with self._naming_what_takes_memory("scoring"):
            return self._learner.score(share)

    def update(self, share: Share) -> dict[str, float]:
        """Learns from this rank's share of a batch; the metrics are the same on every rank. Collective.

        Raises GpuMemoryError, on which all ranks must be given up: the others wait for this one.
        """
        with self._naming_what_takes_memory("updating"):
            self._learner.engine.unpark_optimizer()
            metrics = self._learner.update(share)
        self._rest()
        return metrics

    @contextlib.contextmanager
    def _naming_what_takes_memory(self, doing: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            role, budget = self.ROLE, self._decided.micro_batch_tokens
            raise GpuMemoryError(
                f"{role}[{self._rank}] on {self.node()}: out of GPU memory while {doing} with "
                f"{role}.micro_batch_tokens={budget} ({one_line(error)[:200]}); lower that or "
                f"{role}.logits_chunk_tokens, or raise {role}.checkpointed_layers or {role}.num_ranks"
            ) from None

    def save(self, directory: str) -> None:
        """Begins to write a resumable checkpoint. Collective."""
        self._learner.engine.save(directory)

    def finish_save(self, wait: bool) -> Written | None:
        """What this rank has written of it; None if it is not done, for which ``wait`` waits."""
        return self._learner.engine.finish_save(wait=wait)

    def load(self, directory: str) -> None:
        """Reads what ``save`` wrote. Collective."""
        self._learner.engine.unpark_optimizer()
        self._learner.engine.load(directory)
        self._rest()

    def save_model(self, directory: str) -> None:
        """Writes a Hugging Face directory. Collective."""
        self._learner.engine.save_model(directory)


class LearnerActor(EngineActor):
    """One rank of the policy learner; also the sending end of weight publishes, and the house of a critic on its
    frozen weights."""

    def __init__(self, config: Config, rank: int, num_ranks: int) -> None:
        super().__init__(config, rank, num_ranks)
        self._critic = LodgingCritic(config, rank, num_ranks) if config.critic_on_base else None

    def _begin(self, device: torch.device) -> None:
        super()._begin(device)
        if self._critic is not None:
            self._critic.move_in(self._learner.engine.model, device)

    def critic(self, method: str, *args: Any) -> Any:
        """``method(*args)`` of the critic on its frozen weights."""
        assert self._critic is not None, "it has one"
        return getattr(self._critic, method)(*args)

    def _total_steps(self) -> int:
        config = self._config
        waiting = config.critic.warmup_steps if config.uses_critic else 0  # only the critic learns in these steps
        return (config.num_steps - waiting) * config.algorithm.steps_per_update

    def _load(self, dtype: torch.dtype) -> PackedModel:
        return load_policy(
            self._config.model.path,
            dtype=dtype,
            temperature=self._config.rollout.temperature,
            chunk_tokens=self._config.learner.logits_chunk_tokens,
            max_tokens=self._config.max_sequence_tokens,
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _wrap(self, engine: Engine) -> PolicyLearner:
        self._sender = WeightSender(
            engine.model,
            engine.device,
            self._config.rollout.weight_bucket_mib << 20,
            adapters_apart=self._config.learner.adapter_apart is not None,
        )
        return PolicyLearner(
            engine,
            self._config.algorithm,
            seed=self._config.seed,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
        )

    def score_reference(self, share: Share) -> Tensor:
        """Log-probabilities without the adapters of the share's completion tokens. Collective. Raises
        GpuMemoryError."""
        with self._naming_what_takes_memory("scoring"):
            return self._learner.score_reference(share)

    def score_with_entropy(self, share: Share) -> Tensor:
        """Log-probabilities and entropies of the share's completion tokens. Collective. Raises GpuMemoryError."""
        with self._naming_what_takes_memory("scoring"):
            return self._learner.score_with_entropy(share)

    def weight_layout(self) -> Layout:
        """What lies where in each bucket."""
        return self._sender.layout

    def host_rendezvous(self, timeout_s: float) -> int:
        """Opens the store on this node; see WeightSender.host_rendezvous."""
        return self._sender.host_rendezvous(self.node(), timeout_s)

    def join_weights(self, route: str, rendezvous: Rendezvous, timeout_s: float) -> dict[str, bytes]:
        """Same as WeightSender.join."""
        return self._sender.join(route, rendezvous, timeout_s)

    def send_weights(self, timeout_s: float, frozen: bool) -> list[int]:
        """Same as WeightSender.send."""
        return self._sender.send(timeout_s, frozen=frozen)

    def store_weights(self, frozen: bool) -> list[tuple[StoredBucket, int]]:
        """Same as WeightSender.store."""
        return self._sender.store(frozen=frozen)


class CriticActor(EngineActor):
    """One rank of PPO's value model."""

    ROLE = "critic"

    def _load(self, dtype: torch.dtype) -> PackedModel:
        return load_scalar(
            self._config.critic.path or self._config.model.path,
            dtype=dtype,
            max_tokens=self._config.max_sequence_tokens,
            fresh_head="zero",
            trust_remote_code=self._config.model.trust_remote_code,
            key="critic.path" if self._config.critic.path else "model.path",
        )

    def _wrap(self, engine: Engine) -> ValueLearner:
        return ValueLearner(
            engine,
            self._config.algorithm,
            seed=self._config.seed,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
        )


class LodgingCritic(CriticActor):
    """PPO's value model on the policy's frozen weights, in the learner's process: adapters and a head of its own.

    The two take turns, as calls of one actor do. What they compute is what they would compute apart.
    """

    def move_in(self, owner: PackedModel, device: torch.device) -> None:
        """Adds its adapters to the layers of ``owner``. Collective."""
        self._owner = owner
        self._begin(device)

    def _load(self, dtype: torch.dtype) -> PackedModel:
        return lodge_scalar(
            self._owner,
            self._config.model.path,
            dtype=dtype,
            max_tokens=self._config.max_sequence_tokens,
            trust_remote_code=self._config.model.trust_remote_code,
        )
