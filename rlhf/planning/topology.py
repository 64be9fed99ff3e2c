"""Which role runs where: pure arithmetic from a configuration to placement-group bundles.

``separate`` gives every rank and every rollout worker bundles of its own. ``colocate`` gives each learner rank one GPU
and lets the reference, the critic, the reward model and the rollout workers share those same GPUs. Rollout workers and
reward-function workers scale independently of everything else, so each rollout worker has its own placement group
unless it shares GPUs.
"""

from dataclasses import dataclass, field
from typing import Literal

from rlhf.config import Config
from rlhf.reward_config import RewardTrainingConfig

Device = Literal["cpu", "gpu"]
Bundle = dict[str, float]

# Shares of one GPU that Ray reserves for each role. They only make Ray put these roles, and nothing else, on one GPU;
# memory is divided elsewhere.
GPU_SHARES = {"learner": 0.4, "critic": 0.2, "reference": 0.1, "reward_model": 0.1, "rollout": 0.2}


@dataclass(frozen=True)
class Slot:
    """One actor's place: a bundle of a placement group, and what it reserves there.

    ``spans``: bundles of the same group whose GPUs it uses without a reservation (tensor parallelism, shared GPUs).
    """

    group: str
    bundle: int
    num_cpus: float
    num_gpus: float
    spans: tuple[int, ...] = ()
    resources: dict[str, float] = field(default_factory=dict)  # other than CPUs and GPUs


@dataclass(frozen=True)
class GroupSpec:
    """One placement group to request."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD"]


@dataclass(frozen=True)
class Topology:
    """All placement groups of a run and each role's slots in them, by rank."""

    device: Device
    groups: tuple[GroupSpec, ...]
    slots: dict[str, tuple[Slot, ...]]

    def totals(self) -> Bundle:
        """The resources that all bundles together request."""
        total: Bundle = {}
        for group in self.groups:
            for bundle in group.bundles:
                for resource, amount in bundle.items():
                    total[resource] = total.get(resource, 0.0) + amount
        return total


def model_roles(config: Config) -> dict[str, tuple[int, int]]:
    """The roles that hold a model outside the pool in processes of their own: name -> (ranks, CPUs per rank). Learner
    first."""
    roles = {"learner": (config.learner.num_ranks, config.learner.cpus_per_rank)}
    if config.uses_critic and not config.critic_on_base:
        roles["critic"] = (config.critic.num_ranks, config.critic.cpus_per_rank)
    if config.uses_reference:
        roles["reference"] = (config.reference.num_ranks, config.reference.cpus_per_rank)
    if (model := config.reward.model) is not None:
        roles["reward_model"] = (model.num_ranks, model.cpus_per_rank)
    return roles


def plan_topology(config: Config | RewardTrainingConfig, device: Device) -> Topology:
    """Bundles and slots for every role of ``config`` on a cluster of ``device``."""
    if isinstance(config, RewardTrainingConfig):
        group, own = _own_group("learner", config.learner.num_ranks, config.learner.cpus_per_rank, device)
        return Topology(device, (group,), {"learner": own})
    groups, slots = (_shared if config.placement.colocated else _separate)(config, device)
    on_cpus = {"reward": config.reward.num_workers if config.reward.functions else 0}
    on_cpus["environment"] = config.environment.num_workers if config.environment else 0
    for role, num_workers in on_cpus.items():
        if num_workers:
            groups.append(GroupSpec(role, ({"CPU": 1.0},) * num_workers, "PACK"))
            slots[role] = tuple(Slot(role, i, 1.0, 0.0) for i in range(num_workers))
    return Topology(device, tuple(groups), slots)


def plan_sampling(config: Config, device: Device) -> Topology:
    """Only what samples and gives rewards: without learner, critic and reference, whose GPUs it must not share."""
    assert not config.placement.colocated
    whole, unused = plan_topology(config, device), ("learner", "critic", "reference")
    groups = tuple(group for group in whole.groups if group.name not in unused)
    return Topology(device, groups, {role: slots for role, slots in whole.slots.items() if role not in unused})


def _own_group(role: str, ranks: int, cpus: int, device: Device) -> tuple[GroupSpec, tuple[Slot, ...]]:
    """A placement group for the ranks of one role, with one bundle each."""
    gpus = 1.0 if device == "gpu" else 0.0
    group = GroupSpec(role, (_bundle(cpus, gpus),) * ranks, "PACK")
    return group, tuple(Slot(role, rank, cpus, gpus) for rank in range(ranks))


def _bundle(num_cpus: float, num_gpus: float) -> Bundle:
    return {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})


def _separate(config: Config, device: Device) -> tuple[list[GroupSpec], dict[str, tuple[Slot, ...]]]:
    groups: list[GroupSpec] = []
    slots: dict[str, tuple[Slot, ...]] = {}
    for role, (ranks, cpus) in model_roles(config).items():
        group, slots[role] = _own_group(role, ranks, cpus, device)
        groups.append(group)
    kinds = [kind for kind, (settings, _) in config.rollout.kinds().items() for _ in range(settings.num_workers)]
    for worker, kind in enumerate(kinds):
        group, slot = rollout_worker_group(config, device, worker, kind)
        groups.append(group)
        slots["rollout"] = (*slots.get("rollout", ()), slot)
    return groups, slots


def rollout_worker_group(config: Config, device: Device, worker: int, kind: str) -> tuple[GroupSpec, Slot]:
    """The placement group of one rollout worker that shares nothing: one bundle, so its tensor-parallel ranks share a
    node. ``worker`` is its number in the pool."""
    settings, resources = config.rollout.kinds()[kind]
    gpus = float(settings.tensor_parallel_size) if device == "gpu" else 0.0
    cpus = float(settings.cpus_per_worker)
    name = f"rollout-{worker}"
    return GroupSpec(name, (_bundle(cpus, gpus) | resources,), "STRICT_PACK"), Slot(name, 0, cpus, gpus, (), resources)


def _shared(config: Config, device: Device) -> tuple[list[GroupSpec], dict[str, tuple[Slot, ...]]]:
    """One bundle per learner rank. The bundles of one tensor-parallel engine form their own group, on one node."""
    count, tp = config.num_shared_bundles, config.rollout.tensor_parallel_size
    gpus = 1.0 if device == "gpu" else 0.0
    per_group = tp if tp > 1 else count
    names = ["shared"] if per_group == count else [f"shared-{k}" for k in range(count // per_group)]
    cpus_in = [[0.0] * per_group for _ in names]

    def slot(bundle: int, cpus: float, share: float, spans: tuple[int, ...] = ()) -> Slot:
        group, index = divmod(bundle % count, per_group)
        cpus_in[group][index] += cpus
        return Slot(names[group], index, cpus, share, spans)

    slots: dict[str, tuple[Slot, ...]] = {}
    for role, (ranks, cpus) in model_roles(config).items():
        share = GPU_SHARES[role] * gpus
        slots[role] = tuple(slot(rank, cpus, share) for rank in range(ranks))
    cpus = float(config.rollout.cpus_per_worker)
    share = GPU_SHARES["rollout"] * gpus / config.rollout_workers_per_gpu if tp == 1 else 0.0
    spans = tuple(range(tp)) if tp > 1 else ()
    slots["rollout"] = tuple(slot(w * tp, cpus, share, spans) for w in range(config.rollout.num_workers))
    strategy = "STRICT_PACK" if tp > 1 else "PACK"
    groups = [
        GroupSpec(name, tuple(_bundle(c, gpus) for c in cpus), strategy)
        for name, cpus in zip(names, cpus_in, strict=True)
    ]
    return groups, slots
