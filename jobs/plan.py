"""`rlhf plan`: where each actor would run, and the memory that each role would need."""

from rich.console import Console
from rich.table import Column, Table

from rlhf.config import Config
from rlhf.planning.fit import MemoryPlan, plan_memory
from rlhf.planning.memory import GIB
from rlhf.planning.topology import Bundle, Device, Topology, plan_topology


def show_placement(config: Config, device: Device) -> None:
    """Prints the placement groups as a table, and what they ask for in total."""
    topology, console = plan_topology(config, device), Console()
    table = Table("placement group", "bundles", "strategy", "actors", title=f"{config.name} on {device}")
    for group in topology.groups:
        bundles = f"{len(group.bundles)} x [{amounts(group.bundles[0])}]"
        table.add_row(group.name, bundles, group.strategy, ", ".join(members(topology, group.name)))
    console.print(table)
    console.print(f"asks for {amounts(topology.totals())}")


def amounts(bundle: Bundle) -> str:
    """For example ``1 CPU, 1 GPU``."""
    return ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())


def members(topology: Topology, group: str) -> list[str]:
    """The actors in a placement group, for example ``learner[0]``."""
    return [
        f"{role}[{rank}]"
        for role, slots in topology.slots.items()
        for rank, slot in enumerate(slots)
        if slot.group == group
    ]


def show_memory(config: Config, gpu_memory_gib: float) -> None:
    """Prints the predicted memory of every role and GPU. Raises ConfigError if something does not fit."""
    console, plan = Console(), plan_memory(config, gpu_memory_gib * GIB)
    if plan is None:
        path = config.model.path
        console.print(f"memory not predicted: no config.json of a Llama-shaped model at model.path={path}")
        return
    console.print(memory_table(plan, f"predicted GiB of each role on one {gpu_memory_gib:g} GiB GPU"))
    for gpu, phases in plan.gpus.items():
        needs = ", ".join(f"{needed / GIB:.1f} GiB to {phase}" for phase, needed in phases.items())
        console.print(f"GPU of {gpu}: {needs}", soft_wrap=True)
    for role in plan.checkpointing:
        console.print(plan.describe(role), soft_wrap=True)
    for kind in config.rollout.kinds():
        console.print(plan.describe_rollout(kind), soft_wrap=True)
    plan.check()


def memory_table(plan: MemoryPlan, title: str) -> Table:
    """A row per role: the parts of its memory, in GiB, and its peak."""
    columns = ("weights", "grads", "optim.", "working", "KV", "other", "peak")
    table = Table(Column("role", overflow="fold"), *columns, title=title)
    for role, memory in plan.roles.items():
        held = (memory.weights, memory.gradients, memory.optimizer, max(memory.training, memory.scoring))
        parts = (*held, memory.kv_cache, memory.other, memory.peak)
        table.add_row(role, *(f"{part / GIB:5.1f}" if part else "" for part in parts))
    return table
