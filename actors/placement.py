"""Placement groups: the only module that creates or removes them."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.errors import PlacementError
from rlhf.planning.topology import Bundle, GroupSpec, Slot, Topology


def _describe(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())


def cluster_nodes() -> list[Bundle]:
    """The CPUs and GPUs of every live node."""
    return [
        {r: node["Resources"].get(r, 0.0) for r in ("CPU", "GPU") if node["Resources"].get(r)}
        for node in ray.nodes()
        if node["Alive"]
    ]


class Placement:
    """The placement groups of one run; a context manager that releases them."""

    def __init__(self, topology: Topology, *, timeout_s: float) -> None:
        """Requests every group. Raises PlacementError at the deadline, with what was requested and what there is."""
        self.topology = topology
        self._groups: dict[str, PlacementGroup] = {}
        self._ready: dict[str, ray.ObjectRef] = {}  # of groups that were asked about
        deadline = time.monotonic() + timeout_s
        try:
            for spec in topology.groups:
                self.add(spec)
            for spec in topology.groups:
                self._await(spec, deadline, timeout_s)
        except BaseException:
            self.release_all()
            raise

    def add(self, spec: GroupSpec) -> None:
        """Requests one group without waiting."""
        self._groups[spec.name] = placement_group(list(spec.bundles), strategy=spec.strategy)

    def _await(self, spec: GroupSpec, deadline: float, timeout_s: float) -> None:
        if self._groups[spec.name].wait(max(0.0, deadline - time.monotonic())):
            return
        free = {r: v for r, v in ray.available_resources().items() if r in ("CPU", "GPU")}
        nodes = "; ".join(_describe(node) for node in cluster_nodes())
        raise PlacementError(
            f"placement: {len(spec.bundles)} bundle(s) of [{_describe(spec.bundles[0])}] for {spec.name} "
            f"({spec.strategy}) were not granted within placement.timeout_s={timeout_s:g}; the run asks for "
            f"[{_describe(self.topology.totals())}] in total, the cluster's nodes have [{nodes}], of which "
            f"[{_describe(free)}] is free; lower num_ranks, num_workers or tensor_parallel_size, use "
            "placement.mode=colocate, or add nodes"
        )

    def options(self, slot: Slot, env: Mapping[str, str]) -> dict[str, Any]:
        """Ray actor options that put an actor into its slot."""
        return {
            "num_cpus": slot.num_cpus,
            "num_gpus": slot.num_gpus,
            "resources": slot.resources or None,
            "runtime_env": {"env_vars": dict(env)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[slot.group],
                placement_group_bundle_index=slot.bundle,
                placement_group_capture_child_tasks=True,
            ),
        }

    def granted(self, name: str) -> bool:
        """Whether the cluster has made room for a group."""
        if name not in self._ready:  # kept, because PlacementGroup.wait(0) is often False for a group long granted
            self._ready[name] = self._groups[name].ready()
        return bool(ray.wait([self._ready[name]], timeout=0)[0])

    def release(self, name: str) -> None:
        """Releases one group; Ray kills the actors in it."""
        self._ready.pop(name, None)
        remove_placement_group(self._groups.pop(name))

    def release_all(self) -> None:
        for name in list(self._groups):
            self.release(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release_all()
