"""Where the processes of a deadline's error are stuck: their Python stacks, in a file of the run directory."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.process_env import PROJECT_ROOT
from rlhf.errors import one_line
from rlhf.stacks import answer_signals, stacks_of

ARRIVE_S = 15.0  # for the stacks of all nodes: each starts a process for them
UNKNOWN = "?"  # the node of an actor that has not said where it is

_directory = Path(tempfile.gettempdir())


class Located(Protocol):
    """An actor, and what errors call it."""

    @property
    def handle(self) -> Any: ...

    @property
    def node(self) -> str: ...


def keep_in(run_dir: str) -> None:
    """Where this process's next files go."""
    global _directory
    _directory = Path(run_dir).resolve()


def answer_as_actor() -> None:
    """Makes this process, if it is an actor's, one whose stacks can be had."""
    if ray.is_initialized() and (actor_id := ray.get_runtime_context().get_actor_id()):
        answer_signals(actor_id)


def kept(members: Iterable[Located]) -> str:
    """Writes the members' stacks to a file; returns where it is, or why there is none, to end a message with."""
    try:
        found = collect(list(members))
        path = _directory / f"stacks-{datetime.now():%Y%m%d-%H%M%S}.txt"
        with path.open("a") as file:
            file.writelines(f"==== {member}\n{text}\n" for member, text in found.items())
    except Exception as error:  # a wait has failed, and that is what the user must see
        return f"their stacks could not be had ({type(error).__name__}: {one_line(error)[:200]})"
    return f"stacks: {path}"


def collect(members: list[Located]) -> dict[Located, str]:
    """Each member's stacks, from its node; from every node where that is not known."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for member in members:
        for address in nodes if member.node == UNKNOWN else [member.node]:
            wanted[address].append(_name(member))
    found, missing = {}, {}
    asked = {_ask(nodes[a], names): a for a, names in wanted.items() if a in nodes}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=ARRIVE_S) if asked else ([], [])
    for ref in late:
        missing[asked[ref]] = f"its node did not send them within {ARRIVE_S:g} s"
        ray.cancel(ref, force=True)
    for ref in ready:
        try:
            found |= ray.get(ref, timeout=ARRIVE_S)
        except RayError as error:
            missing[asked[ref]] = f"its node sent none ({one_line(error)[:200]})"
    absent = {address: "its node is gone" for address in wanted if address not in nodes}
    reasons = missing | absent
    nobody = "; ".join(reasons.values()) or "none of its processes can be asked: it has ended, or not begun"
    return {member: found.get(_name(member), reasons.get(member.node, nobody)) for member in members}


def _name(member: Located) -> str:
    return member.handle._actor_id.hex()


def _ask(node_id: str, names: list[str]) -> ray.ObjectRef:
    """``stacks_of`` on a node."""
    path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0)(stacks_of)
    return remote.options(scheduling_strategy=there, runtime_env={"env_vars": {"PYTHONPATH": path}}).remote(names)
