"""Placement groups as Ray is asked for them: what, in which order, until when, and what is given back."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from actors import placement as module
from actors.placement import Placement, cluster_nodes
from rlhf.errors import PlacementError
from rlhf.planning.topology import Bundle, GroupSpec, Slot, Topology
from tests.fake_ray import Clock

LEARNER = GroupSpec("learner", ({"CPU": 2.0, "GPU": 1.0},) * 2, "PACK")
ENGINE = GroupSpec("rollout-0", ({"CPU": 1.0, "GPU": 2.0, "h100": 1.0},), "STRICT_PACK")
ADDED = GroupSpec("rollout-1", ({"CPU": 1.0},), "STRICT_PACK")


@dataclass(eq=False)
class Group:
    bundles: list[Bundle]
    strategy: str
    cluster: "Cluster"

    def wait(self, timeout_s: float) -> bool:
        self.cluster.waits.append((len(self.cluster.groups), timeout_s))
        self.cluster.clock.now_s += min(timeout_s, self.cluster.takes_s)
        return timeout_s >= self.cluster.takes_s

    def ready(self) -> "Group":
        self.cluster.asked.append(self)
        return self


@dataclass
class Cluster:
    """Grants a placement group some time after it is waited for."""

    clock: Clock
    takes_s: float = 0.0
    groups: list[Group] = field(default_factory=list)
    asked: list[Group] = field(default_factory=list)  # whether they are ready, without waiting
    waits: list[tuple[int, float]] = field(default_factory=list)  # groups requested by then, and the longest wait

    def make(self, bundles: list[Bundle], strategy: str) -> Group:
        self.groups.append(Group(bundles, strategy, self))
        return self.groups[-1]

    def ready(self, groups: list[Group], *, timeout: float) -> tuple[list[Group], list[Group]]:
        assert timeout == 0, "nobody has time to wait"
        return (groups, []) if self.takes_s == 0 else ([], groups)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(Clock(monkeypatch))
    node = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0}
    nodes = [{"Alive": True, "Resources": node}, {"Alive": False, "Resources": node}]
    nodes.append({"Alive": True, "Resources": {"CPU": 4.0}})
    monkeypatch.setattr(module, "placement_group", cluster.make)
    monkeypatch.setattr(module, "remove_placement_group", cluster.groups.remove)
    monkeypatch.setattr(ray, "wait", cluster.ready)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 5.0, "GPU": 1.0, "memory": 1e9})
    return cluster


def topology(*groups: GroupSpec) -> Topology:
    return Topology("gpu", groups, {})


def requested(cluster: Cluster) -> list[tuple[tuple[Bundle, ...], str]]:
    return [(tuple(group.bundles), group.strategy) for group in cluster.groups]


def test_every_group_is_requested_before_any_is_waited_for_and_all_have_one_deadline(cluster: Cluster) -> None:
    cluster.takes_s = 3.0
    with Placement(topology(LEARNER, ENGINE), timeout_s=10) as placement:
        assert requested(cluster) == [(LEARNER.bundles, "PACK"), (ENGINE.bundles, "STRICT_PACK")]
        assert cluster.waits == [(2, 10.0), (2, 7.0)]
        placement.add(ADDED)
        assert len(cluster.waits) == 2, "a group that is added later is not waited for"
        assert not placement.granted("rollout-1")
        cluster.takes_s = 0.0
        assert placement.granted("rollout-1")
        assert cluster.asked == [cluster.groups[2]], "asked once: an answer that comes late counts"
        assert len(cluster.waits) == 2, "Ray's wait(0) says no to a group that was granted long ago"
        placement.release("rollout-0")
        assert requested(cluster) == [(LEARNER.bundles, "PACK"), (ADDED.bundles, "STRICT_PACK")]
    assert cluster.groups == []


def test_what_is_not_granted_in_time_is_given_back_with_all_else(cluster: Cluster) -> None:
    cluster.takes_s = 6.0
    with pytest.raises(PlacementError) as caught:
        Placement(topology(LEARNER, ENGINE), timeout_s=10)
    assert cluster.waits == [(2, 10.0), (2, 4.0)]
    assert cluster.groups == []
    assert str(caught.value) == (
        "placement: 1 bundle(s) of [1 CPU, 2 GPU, 1 h100] for rollout-0 (STRICT_PACK) were not granted within "
        "placement.timeout_s=10; the run asks for [5 CPU, 4 GPU, 1 h100] in total, the cluster's nodes have [8 CPU, 2 "
        "GPU; 4 CPU], of which [5 CPU, 1 GPU] is free; lower num_ranks, num_workers or tensor_parallel_size, use "
        "placement.mode=colocate, or add nodes"
    )


def test_an_interrupt_gives_back_what_was_requested(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(group: Group, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Group, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Placement(topology(LEARNER, ENGINE), timeout_s=10)
    assert cluster.groups == []


def test_an_actor_gets_its_bundle_and_reserves_its_share(cluster: Cluster) -> None:
    with Placement(topology(LEARNER, ENGINE), timeout_s=10) as placement:

        def options(slot: Slot) -> tuple[dict[str, Any], Any]:
            found = placement.options(slot, {"A": "1"})
            return found, found.pop("scheduling_strategy")

        found, strategy = options(Slot("learner", 1, 2.0, 0.4))
        assert found == {
            "num_cpus": 2.0,
            "num_gpus": 0.4,
            "resources": None,
            "runtime_env": {"env_vars": {"A": "1"}},
        }
        assert strategy.placement_group is cluster.groups[0]
        assert strategy.placement_group_bundle_index == 1
        assert strategy.placement_group_capture_child_tasks
        found, strategy = options(Slot("rollout-0", 0, 1.0, 2.0, (), {"h100": 1.0}))
        assert (found["resources"], strategy.placement_group) == ({"h100": 1.0}, cluster.groups[1])


def test_only_live_nodes_count(cluster: Cluster) -> None:
    assert cluster_nodes() == [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0}]
