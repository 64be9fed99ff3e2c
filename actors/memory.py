"""What the processes of a run hold in memory, as metrics of each step."""

from collections.abc import Iterable

from actors.group import ActorGroup, Deadline
from rlhf.roles import Metrics

ANSWER_S = 0.2  # a step does not wait for longer


def memory_metrics(groups: Iterable[ActorGroup]) -> Metrics:
    """GiB per role, of its actor that holds the most: ``memory/<role>/host_gib``, resident now; ``gpu_gib`` and
    ``allocated_gib``, the most reserved and allocated on the GPU since the last call (rollout workers: since they
    started).

    An actor that is busy is left out; so is one that has died, of which those learn who need it.
    """
    deadline, metrics = Deadline(ANSWER_S, ""), Metrics()
    calls = [group.call("memory_gib", deadline=deadline, doing="measuring memory") for group in groups]
    for call in calls:
        call.wait()
        for member, held in call.answers.items():
            for kind, gib in held.items():
                name = f"memory/{member.role}/{kind}_gib"
                metrics[name] = max(metrics.get(name, 0.0), gib)
    return metrics
