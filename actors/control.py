"""How other processes reach a run: a named actor that takes scaling requests and shows how the run goes."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.errors import ConfigError

NAMESPACE = "rlhf"
EXCHANGE_EVERY_S = 0.5
REPLACED_PAUSE_S = 5.0  # before a new mailbox is used, so that one that keeps dying takes no time


def control_name(run: str) -> str:
    return f"control-{run}"


def no_room(num_workers: int, most: int | None) -> str | None:
    """Why there cannot be so many rollout workers; None if there can. ``most``: places for them, None: any number."""
    if most is None or num_workers <= most:
        return None
    return (
        f"this run's workers share the learner's GPUs, which have room for {most}; ask for at most {most}, or train "
        "with placement.mode=separate"
    )


class ControlActor:
    """A mailbox: `rlhf scale` leaves requests; the run's pool collects them and leaves its state, and the run's.

    Who asks how the run goes is answered from here, so however many ask, the run does not notice.
    """

    def __init__(self, wanted: dict[str, int], most: int | None, progress: dict[str, Any]) -> None:
        """``progress``: the run's, from ``Tracker.progress``."""
        self._wanted, self._changed, self._most = dict(wanted), False, most
        self._pool: dict[str, Any] = {"workers": []}
        self._progress, self._heard_s = progress, time.monotonic()

    def scale(self, kind: str, num_workers: int) -> None:
        """Raises ConfigError for a kind that the run does not have, or more workers than it has places for."""
        if kind not in self._wanted:
            raise ConfigError(f"--kind={kind}: this run has {', '.join(self._wanted)}")
        if why := no_room(num_workers, self._most):
            raise ConfigError(f"--rollout-workers={num_workers}: {why}")
        self._wanted[kind], self._changed = num_workers, True

    def exchange(self, pool: dict[str, Any], wanted: dict[str, int], progress: dict[str, Any]) -> dict[str, int]:
        """The run's side: leaves its state, the pool's, and its targets; returns what was requested since the last
        call."""
        self._pool, self._progress, self._heard_s = pool, progress, time.monotonic()
        asked, self._changed = (dict(self._wanted) if self._changed else {}), False
        self._wanted = wanted | asked
        return asked

    def look(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """(state of each worker, wanted workers by kind)."""
        return self._pool["workers"], dict(self._wanted)

    def progress(self) -> dict[str, Any]:
        """The run's progress, the ``pool``'s state, what is ``wanted``, and how old that is: ``age_s`` seconds."""
        age_s = time.monotonic() - self._heard_s
        return {**self._progress, "pool": self._pool, "wanted": dict(self._wanted), "age_s": age_s}


class RunControl:
    """The run's end of the mailbox. A mailbox that dies is replaced."""

    def __init__(
        self,
        run: str,
        wanted: dict[str, int],
        *,
        most: int | None,
        note: Callable[[str], None],
        progress: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """``most``: places for workers; None: any number; ``progress`` says how the run goes, at once and from any
        thread. Raises ConfigError if the cluster has a run of this name."""
        self._run, self._most, self._note, self._progress = run, most, note, progress
        self._exchange: ray.ObjectRef | None = None
        self._next_exchange_s = 0.0
        try:
            self._actor = self._make(wanted)
        except ValueError as error:
            raise ConfigError(f"name={run}: a run of that name is already on this cluster; choose another") from error

    def _make(self, wanted: dict[str, int]) -> Any:
        """Raises ValueError while another actor has the name."""
        # on the driver's node, so that they live and die together: other nodes may leave
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"name": control_name(self._run), "namespace": NAMESPACE, "num_cpus": 0}
        remote = ray.remote(ControlActor).options(**options, scheduling_strategy=here)
        return remote.remote(wanted, self._most, self._progress())

    def poll(self, pool: Callable[[], dict[str, Any]], wanted: dict[str, int]) -> dict[str, int]:
        """Requested workers by kind, if any. Never waits; contacts the actor every EXCHANGE_EVERY_S.

        ``pool``: its state, with a list of ``workers`` and whatever else is to be shown.
        """
        now = time.monotonic()
        if self._exchange is not None and ray.wait([self._exchange], timeout=0)[0]:
            exchange, self._exchange = self._exchange, None
            try:
                return ray.get(exchange)
            except RayActorError:
                self._replace(wanted)
        elif self._exchange is None and now >= self._next_exchange_s:
            self._exchange = self._actor.exchange.remote(pool(), wanted, self._progress())
            self._next_exchange_s = now + EXCHANGE_EVERY_S
        return {}

    def _replace(self, wanted: dict[str, int]) -> None:
        """Replaces a mailbox that has died or cannot be reached."""
        self._next_exchange_s = time.monotonic() + REPLACED_PAUSE_S
        ray.kill(self._actor)  # a dead one too: until then this process finds it by its name, and can make no other
        try:
            self._actor = self._make(wanted)
        except ValueError:  # it is only just dying: the next exchange with it fails too
            return
        self._note(
            "rlhf scale: the actor that takes its requests died and was replaced; repeat what was asked just now"
        )

    def close(self) -> None:
        ray.kill(self._actor)


def running() -> list[str]:
    """The names of the runs on the cluster that this process is connected to."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"].removeprefix("control-") for actor in actors if actor["namespace"] == NAMESPACE]


def find_run(run: str) -> Any:
    """The control actor of a run on the cluster that this process is connected to. Raises ConfigError."""
    try:
        return ray.get_actor(control_name(run), namespace=NAMESPACE)
    except ValueError as error:
        raise ConfigError(
            f"--run={run}: no such run on this cluster; running now: {', '.join(running()) or 'none'}. Each run prints "
            "the address of its cluster, for --address"
        ) from error
