"""How close a training step came to its devices' peaks, and what limited it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf.batch import TrainBatch
from rlhf.config import Config
from rlhf.packing import batch_spans
from rlhf.planning.costs import Peaks, decode_bytes, device_peaks, update_flops, weight_bytes
from rlhf.planning.shapes import ModelShape
from rlhf.roles import Metrics


@dataclass(frozen=True)
class Limit:
    """What can bound a phase: ``bound`` if the share ``figure`` is at least ``reached_at``, else ``otherwise``."""

    figure: str
    label: str
    bound: str
    reached_at: float
    otherwise: str
    peak: str  # what the figure is a share of


# A phase counts as bound above about half of the best measured share (benchmarks/RESULTS.md): updates at 64 % of the
# matrix rate, NCCL's broadcast at 59 % of the link's nominal rate. Nothing has come near the memory bandwidth so far.
LIMITS = {
    "generate": Limit(
        "perf/hbm_decode", "HBM", "memory bandwidth", 0.35, "engine overhead", "memory bandwidth, generating"
    ),
    "update": Limit("perf/mfu_update", "MFU", "compute", 0.35, "overhead", "the matrix rate, updating"),
    "publish": Limit("perf/link_sync", "link", "link", 0.30, "overhead", "the link's rate, publishing"),
}


@dataclass(frozen=True)
class Bottleneck:
    """The phase that took longest, and what bounds it, if known."""

    phase: str
    bound: str | None = None
    evidence: str | None = None  # the share it was judged by, e.g. 'HBM 21 %'

    @property
    def name(self) -> str:
        """'generate: engine overhead', or the phase alone."""
        return self.phase if self.bound is None else f"{self.phase}: {self.bound}"

    def __str__(self) -> str:
        return self.name if self.evidence is None else f"{self.name} ({self.evidence})"


def find_bottleneck(phases: Mapping[str, float], figures: Mapping[str, float]) -> Bottleneck | None:
    """What limited the step: ``phases`` in seconds, ``figures`` from ``Roofline``. None if no time passed."""
    if not any(phases.values()):
        return None
    phase = max(phases, key=lambda name: phases[name])
    limit = LIMITS.get(phase)
    if limit is None or limit.figure not in figures:
        return Bottleneck(phase)
    share = figures[limit.figure]
    bound = limit.bound if share >= limit.reached_at else limit.otherwise
    return Bottleneck(phase, bound, f"{limit.label} {100 * share:.0f} %")


@dataclass(frozen=True)
class Roofline:
    """Shares of the devices' peaks that a step used. What is unknown is None; figures that need it are left out."""

    policy: ModelShape | None
    critic: ModelShape | None  # None also without a critic
    learner_peaks: Peaks | None
    rollout_peaks: Peaks | None
    num_update_gpus: int  # of policy and critic together
    num_epochs: int
    critic_warmup_steps: int  # steps in which only the critic learns
    tensor_parallel_size: int
    workers_per_gpu: int
    max_num_seqs: int  # of one rollout worker
    colocated: bool

    @classmethod
    def of(
        cls, config: Config, policy: ModelShape | None, critic: ModelShape | None, devices: Mapping[str, str]
    ) -> "Roofline":
        """``policy``, ``critic``: None where the shape is unknown; ``devices``: torch's names by role.

        The peaks are for bfloat16, so a float32 run has none; neither does a pool with several worker kinds.
        """
        known = config.model.dtype != "float32"
        colocated = config.placement.colocated
        critic_apart = config.uses_critic and not config.critic_on_base and not colocated
        return cls(
            policy=policy,
            critic=critic,
            learner_peaks=device_peaks(devices["learner"]) if known else None,
            rollout_peaks=device_peaks(devices["rollout"]) if known and not config.rollout.extra_kinds else None,
            num_update_gpus=config.learner.num_ranks + (config.critic.num_ranks if critic_apart else 0),
            num_epochs=config.algorithm.num_epochs,
            critic_warmup_steps=config.critic.warmup_steps if config.uses_critic else 0,
            tensor_parallel_size=config.rollout.tensor_parallel_size,
            workers_per_gpu=config.rollout_workers_per_gpu,
            max_num_seqs=config.rollout.max_num_seqs,
            colocated=colocated,
        )

    def figures(
        self, batch: TrainBatch, phases: Mapping[str, float], *, step: int, generate_s: float, num_workers: int
    ) -> Metrics:
        """``perf/mfu_update``, ``perf/hbm_decode`` and ``perf/link_sync`` where known, each a share of 1.

        ``phases``: wall seconds of the step's phases; ``generate_s``: how long ``num_workers`` rollout workers
        generated. ``link_sync`` assumes the learner's NVLink, or a copy within a shared GPU, whatever the actual path;
        across hosts it is small.
        """
        found: Metrics = {}
        if self.policy is None:
            return found
        learner, rollout = self.learner_peaks, self.rollout_peaks
        update_s, publish_s = phases.get("update", 0.0), phases.get("publish", 0.0)
        if learner and update_s > 0:
            flops = self.num_epochs * self._update_flops(batch, with_policy=step > self.critic_warmup_steps)
            found["perf/mfu_update"] = flops / (update_s * learner.flops * self.num_update_gpus)
        if rollout and generate_s > 0 and num_workers > 0:
            lengths = one_prefill_each(batch).tolist()
            read = decode_bytes(self.policy, lengths, num_workers=num_workers, max_num_seqs=self.max_num_seqs)
            num_gpus = num_workers * self.tensor_parallel_size / self.workers_per_gpu
            found["perf/hbm_decode"] = read / (generate_s * rollout.bytes_per_s * num_gpus)
        if learner and publish_s > 0:
            rate = learner.copy_bytes_per_s if self.colocated else learner.link_bytes_per_s
            found["perf/link_sync"] = weight_bytes(self.policy) / (publish_s * rate)
        return found

    def _update_flops(self, batch: TrainBatch, *, with_policy: bool) -> float:
        """FLOPs of one epoch. A critic's scalar head is too small to count."""
        spans, flops = batch_spans(batch), 0.0
        if self.policy and with_policy:
            flops += update_flops(self.policy, spans, batch.num_completion_tokens)
        if self.critic:
            flops += update_flops(self.critic, spans, 0)
        return flops


def one_prefill_each(batch: TrainBatch) -> Tensor:
    """int64 [S]: completion lengths as ``decode_bytes`` counts them, for which only the first token needs no decoding:
    without the first tokens of an episode's later turns, which come from a prefill, too."""
    if batch.turns is None:
        return batch.completion_lengths
    return batch.completion_lengths - batch.turns[batch.completion_lengths.cumsum(0) - 1]
