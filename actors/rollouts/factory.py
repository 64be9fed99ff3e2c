"""Creates and ends rollout workers: a place in the cluster, and a process in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from actors.placement import Placement
from actors.rollouts.actor import RolloutActor
from actors.rollouts.engine import MakeEngine, WorkerSpec
from rlhf.config import Config
from rlhf.planning.topology import Slot, Topology, rollout_worker_group


@dataclass(frozen=True)
class Launch:
    """A worker that is starting: its handle, and the call that returns its node's address when its engine is up."""

    handle: Any
    started: ray.ObjectRef


class WorkerFactory:
    """Launches and ends rollout workers by their number in the pool.

    The first workers take the places that the run's topology planned. Later ones get placement groups of their own, on
    any node with room; if GPUs are shared, they take a place that has become free.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        placement: Placement,
        env: Callable[[Slot], Mapping[str, str]],
        spec: Callable[[str], WorkerSpec],
        make_engine: MakeEngine,
    ) -> None:
        """``env``: an actor's environment in a slot; ``spec``: what a worker of a kind needs to know.

        ``make_engine`` travels to the workers, so it must be picklable.
        """
        self._config, self._topology, self._placement = config, topology, placement
        self._env, self._spec, self._make_engine = env, spec, make_engine
        self._slots: dict[int, Slot] = {}
        self._handles: dict[int, Any] = {}
        self._free = list(topology.slots["rollout"])  # planned places without a worker

    def launch(self, worker: int, kind: str) -> Launch:
        """Requests a place and creates the process there; waits for neither."""
        slot = self._slots[worker] = self._place(worker, kind)
        options = self._placement.options(slot, self._env(slot))
        remote = ray.remote(RolloutActor).options(**options, max_concurrency=RolloutActor.concurrent_calls)
        handle = remote.remote(self._spec(kind), self._make_engine)
        self._handles[worker] = handle
        return Launch(handle, handle.start.remote())

    def has_place(self, worker: int) -> bool:
        """Whether the cluster has granted its place; until then it waits for room."""
        return self._placement.granted(self._slots[worker].group)

    def end(self, worker: int) -> None:
        """Kills its process, if it still runs, and releases its place."""
        ray.kill(self._handles.pop(worker))
        slot = self._slots.pop(worker)
        if self._shares_gpus:
            self._free.append(slot)
        else:
            self._placement.release(slot.group)

    @property
    def num_places(self) -> int | None:
        """How many workers there can be at once; None: as many as the cluster makes room for."""
        return len(self._topology.slots["rollout"]) if self._shares_gpus else None

    @property
    def _shares_gpus(self) -> bool:
        return self._config.placement.colocated

    def _place(self, worker: int, kind: str) -> Slot:
        if self._free:
            return self._free.pop(0)
        assert not self._shares_gpus, "a shared GPU has no room for another worker"
        group, slot = rollout_worker_group(self._config, self._topology.device, worker, kind)
        self._placement.add(group)
        return slot
