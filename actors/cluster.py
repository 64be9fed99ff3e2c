"""From a configuration to live roles: connects to Ray, places every actor, starts them side by side, and ends them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import ray

from actors.control import RunControl
from actors.group import ActorGroup, Call, Deadline, RankActor
from actors.learner import CriticActor, LearnerActor
from actors.placement import Placement
from actors.proxies import LearnerGroup, Replicas, RewardGroup
from actors.rollouts.engine import WorkerSpec
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.pool import RolloutPool
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from actors.scorers import ReferenceActor, RewardActor, RewardModelActor
from actors.weights.publish import ObjectStoreTransport, SessionTransport, Transport
from rlhf.config import Config, RewardTrainingConfig
from rlhf.driver import Roles
from rlhf.errors import PlacementError
from rlhf.planning.topology import Device, Slot, Topology, plan_topology
from rlhf.rewards import MODEL_NAME, load_reward_functions

PROJECT_ROOT = Path(__file__).resolve().parent.parent
SPARE_CPUS = 16  # of a local cluster, for rollout workers that are added while a run is under way
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_LOG_LEVEL": "error",
    "PYTHONWARNINGS": "ignore",
}


@contextlib.contextmanager
def connect(config: Config | RewardTrainingConfig) -> Iterator[None]:
    """Joins the cluster at ``ray.address`` or $RAY_ADDRESS, or starts a local one that ends with the run."""
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield  # the caller's cluster, the caller's to end
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        ray.init(address=address, **quiet)
    else:
        device: Device = "gpu" if has_local_gpu() and config.placement.device != "cpu" else "cpu"
        needed = plan_topology(config, device).totals()
        ray.init(
            address="local",  # whatever else runs on this machine
            # logical: roles take turns on the real ones; some to spare, for `rlhf scale`
            num_cpus=max(os.cpu_count() or 1, int(needed["CPU"]) + 1 + SPARE_CPUS),
            include_dashboard=False,
            object_store_memory=config.ray.object_store_mib << 20,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def has_local_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing torch."""
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()


def resolve_device(config: Config | RewardTrainingConfig) -> Device:
    """placement.device, or what the cluster has."""
    if config.placement.device != "auto":
        return config.placement.device
    return "gpu" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def gpu_env(role: str, num_cpus: float) -> dict[str, str]:
    """What an actor on a GPU needs in its environment before torch is imported."""
    # torch.compile's default is a pool of worker processes as wide as the machine; vLLM needs those cores.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, int(num_cpus)))}
    if role != "rollout":
        # Fewer holes between blocks of ragged sizes. Not for engines: vLLM's memory pool for sleeping does not bear it.
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env


class ActorCluster:
    """All actors of one run. Use as a context manager: leaving it kills them and gives their bundles back.

    Subclasses say which actors there are.
    """

    def __init__(self, config: Any) -> None:
        """``config``: Config or RewardTrainingConfig."""
        self._config = config
        self.device = resolve_device(config)
        config.model.require_device(self.device)
        self.topology: Topology = plan_topology(config, self.device)
        self._deadline = Deadline(config.timeouts.start_s, "timeouts.start_s")
        self._groups: dict[str, ActorGroup] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        timeout_s = self._config.placement.timeout_s
        try:
            self._placement = self._stack.enter_context(Placement(self.topology, timeout_s=timeout_s))
            self._stack.callback(self._kill_all)
            self._start_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start_all(self) -> None:
        """Fills ``_groups`` with started actors."""
        raise NotImplementedError

    def _kill_all(self) -> None:
        for group in self._groups.values():
            group.kill()

    def group(self, role: str) -> ActorGroup:
        """The actors of a role."""
        return self._groups[role]

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        """For each role the most that one of its actors has held, on the host and on its GPU."""
        peaks: dict[str, dict[str, float]] = {}
        for role, group in self._groups.items():
            members = group.call("peak_memory_gib", deadline=self._deadline, doing="measuring memory").result()
            peaks[role] = {kind: max(member[kind] for member in members) for kind in members[0]}
        return peaks

    def _create(
        self, role: str, actor: type[RankActor], make_args: Callable[[int, int], tuple[Any, ...]]
    ) -> Call[ActorGroup]:
        """Creates a role's actors in their slots, without waiting for their processes."""
        slots, remote = self.topology.slots[role], ray.remote(actor)
        handles = []
        for index, slot in enumerate(slots):
            options = self._placement.options(slot, self._env(role, slot))
            placed = remote.options(**options, max_concurrency=actor.concurrent_calls)
            handles.append(placed.remote(*make_args(index, len(slots))))
        return ActorGroup.locate(role, handles, self._deadline)

    def _env(self, role: str, slot: Slot) -> dict[str, str]:
        """Environment of an actor: quiet libraries, its share of CPU threads, and on CPU no device at all."""
        path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = QUIET | {
            "RLHF_RUN": self._config.name,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(max(1, int(slot.num_cpus))),
        }
        if self.device == "cpu":
            return env | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return env | gpu_env(role, slot.num_cpus)

    def _start(self, role: str) -> Call[Any]:
        group = self._groups[role]
        args: tuple[Any, ...] = ()
        if role in ("learner", "critic"):
            root = group.members[0]
            args = (root.node, ray.get(root.handle.free_port.remote(), timeout=self._deadline.seconds))
        return group.call("start", *args, deadline=self._deadline, doing="starting")


class Cluster(ActorCluster):
    """The actors of reinforcement learning: policy and critic, the models that score, rewards, and the rollout pool."""

    def __init__(self, config: Config, note: Callable[[str], None] = print) -> None:
        """``note`` tells the user what happens to rollout workers."""
        super().__init__(config)
        self._note = note
        self._devices: dict[tuple[str, tuple[int, ...]], str] = {}  # by group and bundles, of engines that span GPUs

    def _env(self, role: str, slot: Slot) -> dict[str, str]:
        env = super()._env(role, slot)
        if role == "rollout":
            env |= worker_env(self.device)
            if slot.spans and self.device == "gpu":
                env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": self._devices_of(slot)}
        return env

    def _start_all(self) -> None:
        """Creates every process, then starts all roles at once: start-up is imports and loading, and overlaps."""
        config, roles = self._config, self.topology.slots
        learners = {"learner": LearnerActor, "critic": CriticActor}
        scorers = {"reference": ReferenceActor, "reward_model": RewardModelActor, "reward": RewardActor}
        located = {r: self._create(r, a, lambda i, n: (config, i, n)) for r, a in learners.items() if r in roles}
        located |= {r: self._create(r, a, lambda i, n: (config,)) for r, a in scorers.items() if r in roles}
        if self._shares_gpus:  # workers that span GPUs use those that Ray gave to learner ranks: these must be known
            self._groups |= {role: located.pop(role).result() for role in ("learner", "critic") if role in located}
            self._check_memory()
        self._pool = self._make_pool()
        self._pool.launch()
        self._groups |= {role: call.result() for role, call in located.items()}
        if self._shares_gpus:
            # vLLM sizes its KV cache from the memory it finds free: it goes first, and sleeps before others load.
            self._pool.await_started()
            self._pool.sleep()
        elif self.device == "gpu":
            self._check_memory()
        calls = [self._start(role) for role in self._groups]
        for call in calls:
            call.result()
        if not self._shares_gpus:
            self._pool.await_started()
        self._pool.connect(self._transport())

    def _check_memory(self) -> None:
        """Tells what the learners decide from their GPU's memory. Raises ConfigError where the run will not fit it."""
        for role in ("learner", "critic"):
            if role in self._groups:
                checked = self._groups[role].call("check_memory", deadline=self._deadline, doing="planning memory")
                if line := checked.result()[0]:
                    self._note(line)

    def _make_pool(self) -> RolloutPool:
        config = self._config
        control = RunControl(config.name, {kind: s.num_workers for kind, (s, _) in config.rollout.kinds().items()})
        self._stack.callback(control.close)
        factory = WorkerFactory(
            config, self.topology, self._placement, lambda s: self._env("rollout", s), self._worker_spec, VllmEngine
        )
        pool = RolloutPool(config, factory, control, shares_gpus=self._shares_gpus, note=self._note)
        self._stack.callback(pool.close)
        return pool

    def group(self, role: str) -> ActorGroup:
        """The actors of a role; of rollout workers those that are up now."""
        return ActorGroup(self._pool.members()) if role == "rollout" else super().group(role)

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        """As of any actors; a rollout worker that fails to answer is left out."""
        peaks = super().peak_memory_gib()
        if members := self._pool.ask("peak_memory_gib", "measuring memory"):
            peaks["rollout"] = {kind: max(member[kind] for member in members) for kind in members[0]}
        return peaks

    def device_names(self) -> dict[str, str]:
        """torch's name of what the first learner rank and the first rollout worker run on: a GPU's, or 'cpu'."""
        firsts = {role: ActorGroup(self.group(role).members[:1]) for role in ("learner", "rollout")}
        calls = {
            role: first.call("device_name", deadline=self._deadline, doing="naming its device")
            for role, first in firsts.items()
        }
        return {role: next(iter(call.result()), "unknown") for role, call in calls.items()}

    @property
    def _shares_gpus(self) -> bool:
        return self.device == "gpu" and self._config.placement.colocated

    def _devices_of(self, slot: Slot) -> str:
        """The GPUs of the learner ranks that a tensor-parallel worker shares, as their node counts them."""
        if (slot.group, slot.spans) not in self._devices:  # asked once: a worker is replaced while learners are busy
            places = zip(self._groups["learner"].members, self.topology.slots["learner"], strict=True)
            at = {(place.group, place.bundle): member for member, place in places}
            members = [at[slot.group, bundle] for bundle in slot.spans]
            if len({member.node for member in members}) > 1:
                raise PlacementError(
                    f"rollout.tensor_parallel_size={len(members)}: an engine would span "
                    f"{', '.join(map(str, members))}; its GPUs must be on one node, so use a smaller one"
                )
            ranks = ActorGroup(members).call("visible_devices", deadline=self._deadline, doing="naming its GPU")
            self._devices[slot.group, slot.spans] = ",".join(ranks.result())
        return self._devices[slot.group, slot.spans]

    def _worker_spec(self, kind: str) -> WorkerSpec:
        config = self._config
        return WorkerSpec(
            config=config.rollout.kinds()[kind][0],
            model_path=config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            max_model_tokens=config.max_sequence_tokens,
            device=self.device,
            colocated=config.placement.colocated,
            workers_on_gpu=config.rollout_workers_per_gpu,
            logprobs=config.needs_rollout_logprobs,
            seed=config.seed,
            dtype=config.model.dtype,
        )

    def roles(self) -> Roles:
        """What the driver loop talks to."""
        timeouts = self._config.timeouts
        groups = self._groups
        return Roles(
            learner=LearnerGroup(groups["learner"], timeouts),
            rollouts=self._pool,
            reward=RewardGroup(
                groups.get("reward"), groups.get("reward_model"), reward_weights(self._config), timeouts
            ),
            reference=Replicas(groups["reference"], timeouts, "scoring groups") if "reference" in groups else None,
            critic=LearnerGroup(groups["critic"], timeouts) if "critic" in groups else None,
        )

    def _transport(self) -> Transport:
        learner = self._groups["learner"]
        if self.device == "cpu":
            return ObjectStoreTransport(learner)
        return SessionTransport(learner, "share" if self._config.placement.colocated else "broadcast")


def reward_weights(config: Config) -> dict[str, float]:
    """The weight of every reward in the sum, by metric name."""
    weights = {function.name: function.weight for function in load_reward_functions(config.reward.functions)}
    return weights | ({MODEL_NAME: config.reward.model.weight} if config.reward.model else {})
