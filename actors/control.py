"""How other processes reach a run: a named actor that takes scaling requests and shows the pool's state."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.errors import ConfigError

NAMESPACE = "rlhf"
EXCHANGE_EVERY_S = 0.5


def control_name(run: str) -> str:
    return f"control-{run}"


class ControlActor:
    """A mailbox: `rlhf scale` leaves requests; the run's pool collects them and leaves its state."""

    def __init__(self, wanted: dict[str, int]) -> None:
        self._wanted, self._changed = dict(wanted), False
        self._status: list[dict[str, Any]] = []

    def scale(self, kind: str, num_workers: int) -> None:
        """Raises ConfigError for a kind that the run does not have."""
        if kind not in self._wanted:
            raise ConfigError(f"--kind={kind}: this run has {', '.join(self._wanted)}")
        self._wanted[kind], self._changed = num_workers, True

    def exchange(self, status: list[dict[str, Any]], wanted: dict[str, int]) -> dict[str, int]:
        """The pool's side: leaves its state and its own targets; returns what was requested since the last call."""
        self._status = status
        asked, self._changed = (dict(self._wanted) if self._changed else {}), False
        self._wanted = wanted | asked
        return asked

    def look(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """(state of each worker, wanted workers by kind)."""
        return self._status, dict(self._wanted)


class RunControl:
    """The run's end of the mailbox. Raises ConfigError if a run of this name is already on the cluster."""

    def __init__(self, run: str, wanted: dict[str, int]) -> None:
        # on the driver's node, so that they live and die together: other nodes may leave
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"name": control_name(run), "namespace": NAMESPACE, "num_cpus": 0}
        try:
            self._actor = ray.remote(ControlActor).options(**options, scheduling_strategy=here).remote(wanted)
        except ValueError as error:
            raise ConfigError(f"name={run}: a run of that name is already on this cluster; choose another") from error
        self._exchange: ray.ObjectRef | None = None
        self._exchanged_s = 0.0

    def poll(self, status: Callable[[], list[dict[str, Any]]], wanted: dict[str, int]) -> dict[str, int]:
        """Requested workers by kind, if any. Never waits; contacts the actor every EXCHANGE_EVERY_S."""
        asked: dict[str, int] = {}
        if self._exchange is not None and ray.wait([self._exchange], timeout=0)[0]:
            asked, self._exchange = ray.get(self._exchange), None
        elif self._exchange is None and time.monotonic() - self._exchanged_s > EXCHANGE_EVERY_S:
            self._exchange = self._actor.exchange.remote(status(), wanted)
            self._exchanged_s = time.monotonic()
        return asked

    def close(self) -> None:
        ray.kill(self._actor)


def find_run(run: str) -> Any:
    """The control actor of a run on the cluster that this process is connected to. Raises ConfigError."""
    try:
        return ray.get_actor(control_name(run), namespace=NAMESPACE)
    except ValueError as error:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [a["name"].removeprefix("control-") for a in actors if a["namespace"] == NAMESPACE]
        running = ", ".join(names) or "none"
        raise ConfigError(
            f"--run={run}: no such run on this cluster; running now: {running}. Each run prints the address of its "
            "cluster, for --address"
        ) from error
