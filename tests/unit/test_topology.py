"""Who sits where, as arithmetic: each row is a configuration and what it must ask of a cluster."""

from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import ConfigError
from rlhf.planning.topology import GroupSpec, Slot, plan_sampling, plan_topology
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig

ROOT = Path(__file__).resolve().parents[2]


def config(*overrides: str) -> Config:
    return load_config(ROOT / "conf" / "grpo_tiny.yaml", ["model.path=x", "learner.num_ranks=1", *overrides])


@pytest.mark.parametrize(
    ("overrides", "cpus", "gpus", "num_groups"),
    [
        ([], 4, 3, 4),  # learner, reference, rollout-0, and the reward function's CPU
        (["algorithm.beta=0"], 3, 2, 3),
        (["learner.num_ranks=4"], 7, 6, 4),
        (["rollout.num_workers=3"], 6, 5, 6),
        (["rollout.tensor_parallel_size=4"], 4, 6, 4),
        (["reference.num_ranks=2", "reward.num_workers=5"], 9, 4, 4),
        (["placement.mode=colocate"], 4, 1, 2),
        (["placement.mode=colocate", "learner.num_ranks=4", "rollout.num_workers=2"], 8, 4, 2),
        (["placement.mode=colocate", "learner.num_ranks=4", "rollout.tensor_parallel_size=2"], 7, 4, 3),
        (["placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=6"], 10, 2, 2),
        (["rollout.extra_kinds.big={num_workers: 2, tensor_parallel_size: 4, cpus_per_worker: 3}"], 10, 11, 6),
    ],
)
def test_what_is_asked_for(overrides: list[str], cpus: int, gpus: int, num_groups: int) -> None:
    topology = plan_topology(config(*overrides), "gpu")
    assert topology.totals() == {"CPU": cpus, "GPU": gpus}
    assert len(topology.groups) == num_groups
    on_cpu = plan_topology(config(*overrides), "cpu")
    assert (topology.device, on_cpu.device) == ("gpu", "cpu")
    assert on_cpu.totals() == {"CPU": cpus}, "on CPU the same keys place the same CPU bundles and nothing else"


@pytest.mark.parametrize("mode", ["separate", "colocate"])
def test_no_bundle_is_overbooked(mode: str) -> None:
    many = config(f"placement.mode={mode}", "learner.num_ranks=3", "reference.num_ranks=2", "rollout.num_workers=3")
    topology = plan_topology(many, "gpu")
    bundles = {(g.name, i): bundle for g in topology.groups for i, bundle in enumerate(g.bundles)}
    for place, bundle in bundles.items():
        booked = [s for slots in topology.slots.values() for s in slots if (s.group, s.bundle) == place]
        assert sum(s.num_cpus for s in booked) == bundle["CPU"]
        assert sum(s.num_gpus for s in booked) <= bundle.get("GPU", 0) + 1e-9


def test_a_tensor_parallel_worker_spans_the_learners_gpus() -> None:
    topology = plan_topology(
        config(
            "placement.mode=colocate",
            "learner.num_ranks=4",
            "rollout.num_workers=2",
            "rollout.tensor_parallel_size=2",
        ),
        "gpu",
    )
    assert topology.slots["rollout"] == (Slot("shared-0", 0, 1, 0, (0, 1)), Slot("shared-1", 0, 1, 0, (0, 1)))
    learner = [(slot.group, slot.bundle) for slot in topology.slots["learner"]]
    assert learner == [("shared-0", 0), ("shared-0", 1), ("shared-1", 0), ("shared-1", 1)]
    shared = [group for group in topology.groups if group.name.startswith("shared")]
    assert {(group.strategy, len(group.bundles)) for group in shared} == {("STRICT_PACK", 2)}, "an engine has one node"


def test_rollout_workers_have_groups_of_their_own() -> None:
    topology = plan_topology(config("rollout.num_workers=3", "rollout.tensor_parallel_size=2"), "gpu")
    rollout = [g for g in topology.groups if g.name.startswith("rollout-")]
    assert [g.bundles for g in rollout] == [({"CPU": 1.0, "GPU": 2.0},)] * 3
    assert {g.strategy for g in rollout} == {"STRICT_PACK"}, "a worker's GPUs are on one node"


def test_a_kind_asks_for_its_own_resources() -> None:
    kinds = config("rollout.extra_kinds.big={num_workers: 1, tensor_parallel_size: 2, resources: {h100: 1}}")
    topology = plan_topology(kinds, "gpu")
    assert topology.groups[-2].bundles == ({"CPU": 1.0, "GPU": 2.0, "h100": 1.0},)
    assert topology.slots["rollout"][1] == Slot("rollout-1", 0, 1.0, 2.0, (), {"h100": 1.0})


def test_ranks_sit_in_their_order_and_share_a_gpu_in_fixed_parts() -> None:
    """PPO with all roles on two GPUs: rank r of each role with rank r of the learner."""
    settings = ["placement.mode=colocate", "learner.num_ranks=2", "critic.num_ranks=2", "reference.num_ranks=2"]
    settings += ["algorithm.name=ppo", "reward.model.path=r", "reward.num_workers=2", "rollout.num_workers=2"]
    cpus = ["learner.cpus_per_rank=2", "critic.cpus_per_rank=3", "reference.cpus_per_rank=4"]
    topology = plan_topology(
        config(*settings, *cpus, "reward.model.cpus_per_rank=5", "rollout.cpus_per_worker=6"), "gpu"
    )
    assert topology.slots == {
        "learner": (Slot("shared", 0, 2, 0.4), Slot("shared", 1, 2, 0.4)),
        "critic": (Slot("shared", 0, 3, 0.2), Slot("shared", 1, 3, 0.2)),
        "reference": (Slot("shared", 0, 4, 0.1), Slot("shared", 1, 4, 0.1)),
        "reward_model": (Slot("shared", 0, 5, 0.1),),
        "rollout": (Slot("shared", 0, 6, 0.2), Slot("shared", 1, 6, 0.2)),
        "reward": (Slot("reward", 0, 1, 0), Slot("reward", 1, 1, 0)),
    }
    assert topology.groups == (
        GroupSpec("shared", ({"CPU": 20, "GPU": 1}, {"CPU": 15, "GPU": 1}), "PACK"),
        GroupSpec("reward", ({"CPU": 1}, {"CPU": 1}), "PACK"),
    )


def test_roles_with_their_own_gpus_sit_in_their_order() -> None:
    topology = plan_topology(config("learner.num_ranks=2", "learner.cpus_per_rank=3", "rollout.num_workers=2"), "gpu")
    assert topology.slots["learner"] == (Slot("learner", 0, 3, 1), Slot("learner", 1, 3, 1))
    assert topology.slots["rollout"] == (Slot("rollout-0", 0, 1, 1), Slot("rollout-1", 0, 1, 1))
    assert topology.groups == (
        GroupSpec("learner", ({"CPU": 3, "GPU": 1},) * 2, "PACK"),
        GroupSpec("reference", ({"CPU": 1, "GPU": 1},), "PACK"),
        GroupSpec("rollout-0", ({"CPU": 1, "GPU": 1},), "STRICT_PACK"),
        GroupSpec("rollout-1", ({"CPU": 1, "GPU": 1},), "STRICT_PACK"),
        GroupSpec("reward", ({"CPU": 1},), "PACK"),
    )


def test_a_reward_models_training_has_its_learner_alone() -> None:
    schema = RewardTrainingConfig
    settings = ["model.path=x", "learner.num_ranks=2", "learner.cpus_per_rank=3"]
    topology = plan_topology(load_config(ROOT / "conf" / "reward_tiny.yaml", settings, schema), "gpu")
    assert topology.device == "gpu"
    assert topology.groups == (GroupSpec("learner", ({"CPU": 3, "GPU": 1},) * 2, "PACK"),)
    assert topology.slots == {"learner": (Slot("learner", 0, 3, 1), Slot("learner", 1, 3, 1))}


def test_several_engines_share_each_gpu_evenly() -> None:
    shared = config("placement.mode=colocate", "learner.num_ranks=2", "rollout.num_workers=6")
    slots = plan_topology(shared, "gpu").slots["rollout"]
    assert [slot.bundle for slot in slots] == [0, 1, 0, 1, 0, 1]
    assert {slot.num_gpus for slot in slots} == {0.2 / 3}


@pytest.mark.parametrize("role", ["critic", "reference", "reward.model"])
def test_a_shared_gpu_has_room_for_one_of_each_role(role: str) -> None:
    recipe, shared = ROOT / "conf" / "ppo_rm_tiny.yaml", ["learner.num_ranks=2", "placement.mode=colocate"]
    given = ["model.path=x", "reward.model.path=y", "rollout.num_workers=2", *shared]
    topology = plan_topology(load_config(recipe, [*given, f"{role}.num_ranks=2"]), "gpu")
    booked: dict[tuple[str, int], float] = {}
    for slots in topology.slots.values():
        for slot in slots:
            booked[slot.group, slot.bundle] = booked.get((slot.group, slot.bundle), 0.0) + slot.num_gpus
    assert max(booked.values()) <= 1.0
    with pytest.raises(
        ConfigError, match=rf"^{role}\.num_ranks=3: with placement\.mode=colocate a GPU has room for one"
    ):
        load_config(recipe, [*given, f"{role}.num_ranks=3"])
    load_config(recipe, [*given, f"{role}.num_ranks=3", "placement.mode=separate"])


def test_environments_have_a_cpu_for_each_of_their_workers() -> None:
    episodes = "environment={path: 'e.py:e', num_workers: 3, max_context_tokens: 512}"
    topology = plan_topology(config(episodes, "rollout.ignore_eos=false", "reward.num_workers=2"), "gpu")
    assert topology.slots["environment"] == tuple(Slot("environment", i, 1, 0) for i in range(3))
    assert topology.slots["reward"] == tuple(Slot("reward", i, 1, 0) for i in range(2))
    assert topology.groups[-2:] == (
        GroupSpec("reward", ({"CPU": 1},) * 2, "PACK"),
        GroupSpec("environment", ({"CPU": 1},) * 3, "PACK"),
    )


def test_sampling_alone_has_the_places_of_what_samples_and_scores() -> None:
    recipe = ROOT / "conf" / "ppo_rm_tiny.yaml"
    whole = load_config(recipe, ["model.path=x", "reward.model.path=y", "rollout.num_workers=2", "algorithm.beta=0.1"])
    for device, place in (("gpu", {"CPU": 1, "GPU": 1}), ("cpu", {"CPU": 1})):
        topology = plan_sampling(whole, device)
        assert topology.device == device
        assert topology.slots.keys() == {"rollout", "reward_model", "reward"}
        assert topology.groups == (
            GroupSpec("reward_model", (place,), "PACK"),
            GroupSpec("rollout-0", (place,), "STRICT_PACK"),
            GroupSpec("rollout-1", (place,), "STRICT_PACK"),
            GroupSpec("reward", ({"CPU": 1},), "PACK"),
        )
