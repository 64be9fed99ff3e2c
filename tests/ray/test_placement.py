"""Every role sits where the configuration says, and sees that device only."""

import time

import pytest
import ray

from actors.group import RankActor
from actors.placement import Placement
from rlhf.config import Config
from rlhf.errors import PlacementError
from rlhf.planning.topology import Topology, plan_topology

pytestmark = pytest.mark.ray


def visible(topology: Topology) -> dict[str, list[str]]:
    """CUDA_VISIBLE_DEVICES of a bare actor in every slot, as Ray sets it."""
    with Placement(topology, timeout_s=30) as placement:
        handles = {
            role: [ray.remote(RankActor).options(**placement.options(slot, {})).remote() for slot in slots]
            for role, slots in topology.slots.items()
        }
        seen = {role: ray.get([h.visible_devices.remote() for h in hs], timeout=60) for role, hs in handles.items()}
        for members in handles.values():
            for handle in members:
                ray.kill(handle)
    return seen


def test_cpu_actors_see_no_device(live) -> None:
    _, cluster, _ = live
    for role in ("learner", "reference", "reward", "rollout"):
        handles = [member.handle for member in cluster.group(role).members]
        assert ray.get([h.visible_devices.remote() for h in handles], timeout=60) == [""] * len(handles)


def test_separate_learner_ranks_see_one_gpu_each_and_never_a_rollout_workers(ray_session, tiny_config) -> None:
    config = tiny_config(
        "learner.num_ranks=2", "algorithm.beta=0", "rollout.num_workers=1", "rollout.tensor_parallel_size=2"
    )
    seen = visible(plan_topology(config, "gpu"))
    learner = [devices.split(",") for devices in seen["learner"]]
    assert all(len(devices) == 1 for devices in learner)
    rollout = seen["rollout"][0].split(",")
    assert len(rollout) == 2
    assert len({*learner[0], *learner[1], *rollout}) == 4


def test_colocated_roles_share_their_learner_ranks_gpu(ray_session, tiny_config) -> None:
    config = tiny_config(
        "placement.mode=colocate", "learner.num_ranks=2", "reference.num_ranks=2", "rollout.num_workers=2"
    )
    seen = visible(plan_topology(config, "gpu"))
    assert len(set(seen["learner"])) == 2
    assert seen["reference"] == seen["learner"]
    assert seen["rollout"] == seen["learner"]


def test_what_cannot_be_placed_says_what_was_asked_and_what_there_is(ray_session, tiny_config) -> None:
    config: Config = tiny_config("learner.num_ranks=64", "placement.timeout_s=2")
    with pytest.raises(PlacementError) as error:
        Placement(plan_topology(config, "gpu"), timeout_s=2)
    message = str(error.value)
    assert "\n" not in message
    for part in ("64 bundle(s) of [1 CPU, 1 GPU] for learner", "placement.timeout_s=2", "24 CPU, 4 GPU"):
        assert part in message
    ends = time.monotonic() + 30
    while ray.available_resources().get("GPU") != 4:  # Ray's own view follows within seconds
        assert time.monotonic() < ends, "a failed placement must give back what it was granted"
        time.sleep(0.2)
