"""From a configuration to live roles: places all actors, starts them in parallel and shuts them down."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import ray

from actors import stacks
from actors.connect import resolve_device
from actors.control import RunControl
from actors.environments.actor import EnvironmentActor
from actors.environments.crew import Crew
from actors.group import ActorGroup, Call, Deadline, Lodgers, Member, RankActor
from actors.learner import CriticActor, LearnerActor
from actors.memory import memory_metrics
from actors.placement import Placement
from actors.process_env import LOOPBACK, ON_LOOPBACK, actor_env
from actors.proxies import LearnerGroup, Replicas, RewardGroup
from actors.rollouts.engine import WorkerSpec
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.pool import RolloutPool
from actors.rollouts.vllm_engine import VllmEngine
from actors.rollouts.vllm_settings import worker_env
from actors.scorers import ReferenceActor, RewardActor, RewardModelActor
from actors.weights.routes import choose_route
from actors.weights.transports import make_transport
from rlhf.config import Config
from rlhf.errors import DeadlineError, PlacementError, RoleLostError
from rlhf.planning.topology import Device, Slot, Topology, plan_sampling, plan_topology
from rlhf.rewards import ENVIRONMENT_NAME, MODEL_NAME, load_reward_functions
from rlhf.roles import Metrics, Roles
from rlhf.run_lock import read_holder

SCORING = {"reward": "computing rewards", "reward_model": "computing rewards", "reference": "scoring groups"}
SCORERS = {"reference": ReferenceActor, "reward_model": RewardModelActor, "reward": RewardActor}  # without a state


class ActorCluster:
    """All actors of one run. Use as a context manager: leaving it kills them and releases their bundles.

    Subclasses decide which actors there are.
    """

    def __init__(self, config: Any) -> None:
        """``config``: Config or RewardTrainingConfig."""
        self._config = config
        stacks.keep_in(config.run_dir)
        self.device: Device = resolve_device(config)
        config.model.require_device(self.device)
        self.topology: Topology = self._plan()
        self._deadline = Deadline(config.timeouts.start_s, "timeouts.start_s")
        self._groups: dict[str, ActorGroup] = {}
        self._stack = contextlib.ExitStack()

    def _plan(self) -> Topology:
        """Which actors there are, and where."""
        return plan_topology(self._config, self.device)

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

    def memory_metrics(self) -> Metrics:
        """What the actors hold; see ``actors.memory``."""
        return memory_metrics(self._groups.values())

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        """By role, the highest peak among its actors, on the host and on the GPU; and what was predicted of the GPU."""
        peaks: dict[str, dict[str, float]] = {}
        for role, group in self._groups.items():
            members = group.call("peak_memory_gib", deadline=self._deadline, doing="measuring memory").result()
            peaks[role] = {kind: max(member[kind] for member in members) for kind in members[0]}
        for role, gib in self._predicted_gib().items():
            peaks.setdefault(role, {})["predicted"] = gib
        return peaks

    def _predicted_gib(self) -> dict[str, float]:
        first = self._groups["learner"].first()
        (predicted,) = first.call("predicted_gib", deadline=self._deadline, doing="planning memory").result()
        return predicted

    def _create(
        self, role: str, actor: type[RankActor], make_args: Callable[[int, int], tuple[Any, ...]]
    ) -> Call[ActorGroup]:
        """Creates a role's actors in their slots, without waiting for their processes."""
        count = len(self.topology.slots[role])
        handles = [self._launch(role, index, actor, make_args(index, count)) for index in range(count)]
        return ActorGroup.locate(role, handles, self._deadline)

    def _launch(self, role: str, index: int, actor: type[RankActor], args: tuple[Any, ...]) -> Any:
        """Creates one actor in its slot."""
        slot = self.topology.slots[role][index]
        options = self._placement.options(slot, self._env(role, slot))
        return ray.remote(actor).options(**options, max_concurrency=actor.concurrent_calls).remote(*args)

    def _env(self, role: str, slot: Slot) -> dict[str, str]:
        """Environment of an actor in a slot."""
        env = actor_env(self._config.name, role, self.device, slot.num_cpus)
        if ray.util.get_node_ip_address() == LOOPBACK:
            env |= ON_LOOPBACK
        sees_gpu = slot.num_gpus > 0 or slot.spans  # Ray hides none from an actor that asks for none
        return env if sees_gpu else env | {"CUDA_VISIBLE_DEVICES": ""}

    def _locate(self, created: Mapping[str, Call[ActorGroup]]) -> None:
        """Waits for the roles' processes."""
        self._groups |= {role: call.result() for role, call in created.items()}
        self._check_run_dir()

    def _check_run_dir(self) -> None:
        """Raises ConfigError unless all ranks that write checkpoints share the run directory with this process."""
        run_dir = Path(self._config.run_dir).resolve()
        holder = read_holder(run_dir)
        if holder is None:
            return  # not a run of ours, but a benchmark's or a test's, which saves nothing or only here
        groups = [self._groups[role] for role in ("learner", "critic") if role in self._groups]
        arguments = (str(run_dir), holder.token)
        doing = "looking for the run directory"
        calls = [g.call("check_run_dir", *arguments, deadline=self._deadline, doing=doing) for g in groups]
        for call in calls:
            call.result()

    def _start_roles(self) -> None:
        """Starts all roles in parallel: start-up time is imports and loading."""
        calls = [self._start(role) for role in self._groups]
        for call in calls:
            call.result()

    def _start(self, role: str) -> Call[Any]:
        group = self._groups[role]
        args: tuple[Any, ...] = ()
        if role in ("learner", "critic"):
            root = group.first()
            (port,) = root.call("host_store", deadline=self._deadline, doing="opening a store").result()
            args = (root.members[0].node, port)
        return group.call("start", *args, deadline=self._deadline, doing="starting")


class Cluster(ActorCluster):
    """The actors of reinforcement learning: policy and critic, the models that score, rewards, and the rollout pool."""

    def __init__(
        self,
        config: Config,
        note: Callable[[str], None] = print,
        progress: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """``note`` reports to the user what happens to rollout workers; ``progress``: see ``RunControl``."""
        super().__init__(config)
        self._note, self._progress = note, progress
        self._devices: dict[tuple[str, tuple[int, ...]], str] = {}  # of engines that span GPUs, by group and bundles

    def _env(self, role: str, slot: Slot) -> dict[str, str]:
        env = super()._env(role, slot)
        if role == "rollout":
            env |= worker_env(self.device)
            if slot.spans and self.device == "gpu":
                env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": self._devices_of(slot)}
        return env

    def _start_all(self) -> None:
        created = self._create_all()
        self._pool = self._make_pool()
        if self._shares_gpus:
            self._start_shared(created)
        else:
            self._start_separate(created)
        route = choose_route(self.device, colocated=self._config.placement.colocated)
        self._pool.connect(make_transport(self._groups["learner"], route), self._make_crew())

    def _create_all(self) -> dict[str, Call[ActorGroup]]:
        """Creates the processes of every role but the pool, without waiting for them."""
        config, roles = self._config, self.topology.slots
        learners = {"learner": LearnerActor, "critic": CriticActor}
        created = {r: self._create(r, a, lambda i, n: (config, i, n)) for r, a in learners.items() if r in roles}
        others = {**SCORERS, "environment": EnvironmentActor}
        return created | {r: self._create(r, a, lambda i, n: (config,)) for r, a in others.items() if r in roles}

    def _start_shared(self, created: Mapping[str, Call[ActorGroup]]) -> None:
        """vLLM sizes its KV cache from free memory, so it starts first and sleeps before the others load."""
        self._locate(created)  # a worker that spans GPUs uses those that Ray gave to learner ranks
        self._check_memory()
        self._pool.launch()
        self._pool.await_started()
        self._pool.sleep()
        self._start_roles()

    def _start_separate(self, created: Mapping[str, Call[ActorGroup]]) -> None:
        """Starts everything at once."""
        self._pool.launch()
        self._locate(created)
        if self.device == "gpu":
            self._check_memory()
        self._start_roles()
        self._pool.await_started()

    def _check_memory(self) -> None:
        """Reports what the learners decide from their GPU's memory. Raises ConfigError if the run will not fit."""
        for group in self._learners().values():
            checked = group.call("check_memory", deadline=self._deadline, doing="planning memory")
            if line := checked.result()[0]:
                self._note(line)

    def _learners(self) -> dict[str, ActorGroup]:
        """Everything that learns, whether on actors of its own or not."""
        groups = {role: self._groups[role] for role in ("learner", "critic") if role in self._groups}
        return groups | ({"critic": Lodgers("critic", groups["learner"])} if self._config.critic_on_base else {})

    def _make_pool(self) -> RolloutPool:
        config = self._config
        factory = WorkerFactory(
            config, self.topology, self._placement, lambda s: self._env("rollout", s), self._worker_spec, VllmEngine
        )
        wanted = {kind: settings.num_workers for kind, (settings, _) in config.rollout.kinds().items()}
        control = RunControl(config.name, wanted, most=factory.num_places, note=self._note, progress=self._progress)
        self._stack.callback(control.close)
        pool = RolloutPool(config, factory, control, shares_gpus=self._shares_gpus, note=self._note)
        self._stack.callback(pool.close)
        return pool

    def _make_crew(self) -> Crew | None:
        """The environment workers, which have started."""
        config = self._config
        if config.environment is None:
            return None
        launch = functools.partial(self._launch, "environment", actor=EnvironmentActor, args=(config,))
        return Crew(config, self._groups["environment"], launch, self._note)

    def group(self, role: str) -> ActorGroup:
        """The actors of a role; for rollouts, the workers running now."""
        return ActorGroup(self._pool.members()) if role == "rollout" else super().group(role)

    def memory_metrics(self) -> Metrics:
        """Same as the base class, plus rollout workers."""
        return memory_metrics([*self._groups.values(), self.group("rollout")])

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        """Same as the base class, plus rollout workers; one that fails to answer is left out."""
        peaks = super().peak_memory_gib()
        if members := self._pool.ask("peak_memory_gib", "measuring memory"):
            peaks.setdefault("rollout", {}).update(
                {kind: max(member[kind] for member in members) for kind in members[0]}
            )
        return peaks

    def device_names(self) -> dict[str, str]:
        """The device of the first learner rank and of the first rollout worker: torch's name for a GPU, or 'cpu'."""
        firsts = {role: self.group(role).first() for role in ("learner", "rollout")}
        calls = {
            role: first.call("device_name", deadline=self._deadline, doing="naming its device")
            for role, first in firsts.items()
        }
        return {role: next(iter(call.result()), "unknown") for role, call in calls.items()}

    @property
    def _shares_gpus(self) -> bool:
        return self.device == "gpu" and self._config.placement.colocated

    def _devices_of(self, slot: Slot) -> str:
        """The GPUs of the learner ranks that a tensor-parallel worker shares, as their node numbers them."""
        if (slot.group, slot.spans) not in self._devices:  # cached: learners may be busy when a worker is replaced
            places = zip(self._groups["learner"].members, self.topology.slots["learner"], strict=True)
            at = {(place.group, place.bundle): member for member, place in places}
            members = [at[slot.group, bundle] for bundle in slot.spans]
            if len({member.node for member in members}) > 1:
                raise PlacementError(
                    f"rollout.tensor_parallel_size={len(members)}: an engine would span "
                    f"{', '.join(map(str, members))}; its GPUs must be on one node, so use a smaller value"
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
            gpu_memory_gib=config.placement.gpu_memory_gib,
            adapter=config.learner.adapter_apart,
        )

    def roles(self) -> Roles:
        """What the driver loop talks to."""
        timeouts, learners = self._config.timeouts, self._learners()
        return Roles(
            learner=LearnerGroup(learners["learner"], timeouts),
            rollouts=self._pool,
            reward=self._reward(),
            reference=self._replicas("reference") if "reference" in self._groups else None,
            critic=LearnerGroup(learners["critic"], timeouts) if "critic" in learners else None,
        )

    def _reward(self) -> RewardGroup:
        scorers = [self._replicas(role) for role in ("reward", "reward_model") if role in self._groups]
        return RewardGroup(scorers, reward_weights(self._config))

    def _replicas(self, role: str) -> Replicas:
        return Replicas(self._groups[role], self._config.timeouts, SCORING[role], self._revive)

    def _revive(self, lost: Member, error: RoleLostError) -> None:
        """Puts another actor in the place of one that scored. Raises ``error`` if it does not come up in time."""
        self._note(f"{error}; starting another")
        ray.kill(lost.handle)  # its node may only be out of reach
        deadline = self._deadline.start()
        handle = self._launch(lost.role, lost.rank, SCORERS[lost.role], (self._config,))
        try:
            alone = ActorGroup([replace(lost, handle=handle, node="?")])
            (node,) = alone.call("node", deadline=deadline, doing="starting its process").result()
            alone.call("start", deadline=deadline, doing="starting").result()
        except DeadlineError as late:
            raise error from late
        self._groups[lost.role].members[lost.rank] = replace(lost, handle=handle, node=node)


class SamplingCluster(Cluster):
    """The rollout pool, serving model.path as it is, and what gives rewards: nothing learns."""

    def _plan(self) -> Topology:
        return plan_sampling(self._config, self.device)

    def _start_all(self) -> None:
        created = self._create_all()
        self._pool = self._make_pool()
        self._start_separate(created)
        self._pool.connect(None, self._make_crew())
        self._pool.publish(0)

    def _worker_spec(self, kind: str) -> WorkerSpec:
        """Same as the base class, without a learner's adapter."""
        return replace(super()._worker_spec(kind), adapter=None)

    def sampler(self) -> tuple[RolloutPool, RewardGroup]:
        """What an evaluation talks to."""
        return self._pool, self._reward()


def reward_weights(config: Config) -> dict[str, float]:
    """The weight of every reward in the sum, by metric name."""
    weights = {function.name: function.weight for function in load_reward_functions(config.reward.functions)}
    weights |= {MODEL_NAME: config.reward.model.weight} if config.reward.model else {}
    # tools alone reward nothing: a 0 for that would count where the functions abstain
    return weights | ({ENVIRONMENT_NAME: 1.0} if config.environment and config.environment.path else {})
