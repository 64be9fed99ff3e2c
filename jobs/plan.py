"""`rlhf plan`: where each actor would run, how long a step would take, and the memory that each role would need."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table

from rlhf.config import Config, require
from rlhf.errors import ConfigError
from rlhf.planning.costs import device_peaks
from rlhf.planning.fit import MemoryPlan, plan_memory
from rlhf.planning.known_models import known_model
from rlhf.planning.memory import GIB
from rlhf.planning.seconds import predict_step
from rlhf.planning.shapes import read_model_config
from rlhf.planning.topology import Bundle, Device, Topology, plan_topology

GPUS = {  # torch's name, and the GiB that CUDA reports
    "A100-40": ("NVIDIA A100-SXM4-40GB", 39.4),
    "A100-80": ("NVIDIA A100-SXM4-80GB", 79.2),
    "H100": ("NVIDIA H100 80GB HBM3", 79.1),
    "H200": ("NVIDIA H200", 139.8),
}

NAMED = ("Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B", "Mistral-7B-v0.3", "gemma-2-9b", "SmolLM2-135M")


UNMEASURED = ("optimizer", "all")  # the CPU computes optimizer steps


def show_placement(config: Config, device: Device) -> None:
    """Prints the placement groups as a table, and what they ask for in total."""
    topology, console = plan_topology(config, device), Console()
    table = Table("placement group", "bundles", "strategy", "actors", title=f"{config.name} on {device}")
    for group in topology.groups:
        bundles = f"{len(group.bundles)} x [{amounts(group.bundles[0])}]"
        table.add_row(group.name, bundles, group.strategy, ", ".join(members(topology, group.name)))
    console.print(table)
    console.print(f"asks for {amounts(topology.totals())}")


def check_shape(config: Config) -> None:
    """Says if the model's shape is known by its name alone. Raises ConfigError if it is not known at all."""
    path = config.model.path
    if read_model_config(path) is not None:
        return
    require(
        known_model(path) is not None,
        f"model.path={path}: there is no config.json, so neither memory nor seconds can be predicted; make the model "
        "(rlhf prepare), give a directory that holds its config.json (nothing else is read), or a model known by name, "
        f"such as {', '.join(NAMED)}; or see the placement alone with --device cpu",
    )
    Console().print(f"model.path={path}: there is no config.json; the shape is that of the model of this name")


def smallest_gpu_gib() -> float:
    """Memory of the smallest GPU of this machine, as a run would find it. Raises ConfigError if there is none."""
    import torch  # slow, and needed for nothing else here

    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    require(
        bool(sizes),
        "--device=auto: this machine has no GPU that torch can use; give --device gpu with --gpu-memory-gib for one "
        "that is elsewhere, or --device cpu",
    )
    return min(sizes) / GIB


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


def show_seconds(config: Config, *, prompt_tokens: int | None, completion_tokens: int | None) -> None:
    """Prints the predicted seconds of a step and its phases on each of GPUS, if the model's shape is known.

    Prompts and completions are all as long as given, or else as they may be at most.
    """
    console, rollout = Console(), config.rollout
    prompt, completion = (
        prompt_tokens or config.data.max_prompt_tokens,
        completion_tokens or rollout.max_completion_tokens,
    )
    for option, tokens, key, limit in (
        ("--prompt-tokens", prompt, "data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("--completion-tokens", completion, "rollout.max_completion_tokens", rollout.max_completion_tokens),
    ):
        require(tokens <= limit, f"{option}={tokens} exceeds {key}={limit}: nothing would be that long")
    unmeasured = {
        "environment": config.environment is not None,
        "rollout.extra_kinds": bool(rollout.extra_kinds),
        "model.dtype=float32": config.model.dtype == "float32",
    }
    if why := next((key for key, is_set in unmeasured.items() if is_set), None):
        console.print(f"seconds not predicted: nothing like {why} was measured")
        return
    rows: dict[str, tuple[str, dict[str, float]]] = {}
    misfits = []
    for gpu, (name, gib) in GPUS.items():
        plan, peaks = plan_memory(config, gib * GIB), device_peaks(name)
        if plan is None:
            return
        assert peaks is not None, f"the peaks of {name} are known"
        needed = max(needed for phases in plan.gpus.values() for needed in phases.values()) / GIB
        seconds: dict[str, float] = {}
        try:
            plan.check()
            if on_cpu := [f"{r}.offload={m.offload}" for r, m in plan.roles.items() if m.offload in UNMEASURED]:
                misfits.append(f"{gpu}: seconds not predicted: nothing like {on_cpu[0]} was measured")
            else:
                lengths = [completion] * config.algorithm.num_sequences
                step = predict_step(config, plan, peaks, prompt_tokens=prompt, completion_lengths=lengths)
                seconds = step.phases | {"step": step.total}
        except ConfigError as error:
            misfits.append(f"{gpu} does not fit: {error}")
        rows[gpu] = f"{needed:.1f} of {gib:.1f}", seconds
    console.print(
        seconds_table(
            rows, f"predicted seconds of a step, prompts of {prompt:,} tokens and completions of {completion:,}"
        )
    )
    for misfit in misfits:
        console.print(misfit, soft_wrap=True)


def seconds_table(rows: Mapping[str, tuple[str, Mapping[str, float]]], title: str) -> Table:
    """A row per GPU: its memory, and its seconds by phase, none if the run does not fit it. Phases that no GPU has are
    left out."""
    names = {name: None for _, seconds in rows.values() for name, value in seconds.items() if value}
    table = Table("GPU", "GiB needed", *(Column(name, justify="right") for name in names), title=title)
    for gpu, (memory, seconds) in rows.items():
        table.add_row(gpu, memory, *(f"{seconds[name]:.1f}" if name in seconds else "-" for name in names))
    return table


def show_memory(config: Config, gpu_memory_gib: float) -> None:
    """Prints the predicted memory of every role and GPU. Raises ConfigError if something does not fit."""
    console, plan = Console(), plan_memory(config, gpu_memory_gib * GIB)
    if plan is None:
        console.print("memory not predicted: model.path is not Llama-shaped (a mixture of experts, say)")
        return
    console.print(memory_table(plan, f"predicted GiB of each role on one {plan.device_bytes / GIB:g} GiB GPU"))
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
