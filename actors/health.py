"""Which of a run's actors live, as Ray's head node knows it: nobody asks the actors or the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import ray
from ray._private import state

from actors.control import control_name

ROLES = {
    "LearnerActor": "learner",
    "CriticActor": "critic",
    "ReferenceActor": "reference",
    "RewardModelActor": "reward model",
    "RewardActor": "rewards",
    "EnvironmentActor": "environment",
    "RolloutActor": "rollout",
}
STARTING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")
INTENDED = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")  # by the run itself, or with it


@dataclass
class RoleHealth:
    """A role's actors: how many are up or starting, how many died by themselves, and why the last of those did."""

    up: int = 0
    starting: int = 0
    died: int = 0
    reason: str = ""
    memory_gib: float = 0.0  # resident, of those on this machine, with the processes that they have started

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def role_health(run: str) -> dict[str, RoleHealth]:
    """The actors of a run on the cluster that this process is connected to, by role; none if it has none."""
    actors = list(state.actors().values())
    control = [a for a in actors if a["Name"] == control_name(run) and a["State"] != "DEAD"]
    if not control:
        return {}
    here = ray.get_runtime_context().get_node_id()
    roles: dict[str, RoleHealth] = {}
    for actor in sorted(actors, key=lambda actor: actor["EndTime"]):
        if actor["JobID"] == control[0]["JobID"] and actor["ActorClassName"] in ROLES:
            role = roles.setdefault(ROLES[actor["ActorClassName"]], RoleHealth())
            _count(role, actor, is_here=actor["Address"]["NodeID"] == here)
    return {name: roles[name] for name in ROLES.values() if name in roles}


def _count(role: RoleHealth, actor: Mapping[str, Any], *, is_here: bool) -> None:
    if actor["State"] == "ALIVE":
        role.up += 1
        role.memory_gib += resident_gib(actor["Pid"]) if is_here else 0.0
    elif actor["State"] in STARTING:
        role.starting += 1
    elif why := death(actor["DeathCause"]):
        role.died, role.reason = role.died + 1, why


def death(cause: Any) -> str:
    """Why an actor died, in a line; '' if the run itself has ended it. ``cause``: Ray's ActorDeathCause."""
    kind = cause.WhichOneof("context")
    context = getattr(cause, kind) if kind else None
    if kind == "actor_died_error_context":
        reason = type(context).Reason.Name(context.reason) if hasattr(type(context), "Reason") else ""
        if reason in INTENDED:
            return ""
    text = getattr(context, "error_message", "") or getattr(context, "formatted_exception_string", "") or str(kind)
    return " ".join(text.split())


def resident_gib(pid: int) -> float:
    """The memory of a process of this machine and of those that it has started; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family) / 2**30
    except psutil.Error:
        return 0.0
