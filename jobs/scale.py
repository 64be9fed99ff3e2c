"""`rlhf scale`: changes the rollout pool of a run in progress, from another process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from rich.console import Console
from rich.table import Table

from actors.connect import join
from actors.control import find_run
from rlhf.errors import ClusterError, DeadlineError, PlacementError, RlhfError

ANSWER_S = 30.0
LOOK_EVERY_S = 0.5

Status = list[dict[str, Any]]


def scale(run: str, *, kind: str, num_workers: int | None, address: str, timeout_s: float) -> None:
    """Asks the run for ``num_workers`` of a kind and waits until that many serve; None only shows them.

    Raises ConfigError if there is no such run, kind or room, PlacementError if the run gives them up, DeadlineError if
    they do not serve in time.
    """
    with joined(address):
        control = find_run(run)
        if num_workers is not None:
            ask(control.scale.remote(kind, num_workers))
            wait_until_live(control, run, kind, num_workers, timeout_s)
        status, wanted = ask(control.look.remote())
    show(run, status, wanted)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connects to a cluster that is already up."""
    join("--address", address, "give the address that the run prints")
    try:
        yield
    finally:
        ray.shutdown()


def ask(call: ray.ObjectRef) -> Any:
    """The control actor's answer. Raises DeadlineError if there is none in time."""
    try:
        return ray.get(call, timeout=ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, RlhfError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise ClusterError(
            "the run has ended, or the actor that takes its requests has died and is being replaced; try again"
        ) from error
    except GetTimeoutError as error:
        raise DeadlineError(f"the run did not answer within {ANSWER_S:g} s; check its node, and try again") from error


def wait_until_live(control: Any, run: str, kind: str, num_workers: int, timeout_s: float) -> None:
    """Returns when exactly ``num_workers`` of the kind exist and all serve."""
    ends = time.monotonic() + timeout_s
    while timeout_s > 0:
        status, wanted = ask(control.look.remote())
        if wanted[kind] != num_workers:
            raise PlacementError(
                f"run {run}: it now wants {wanted[kind]} {kind} worker(s), not {num_workers}; what it prints says why"
            )
        states = [worker["state"] for worker in status if worker["kind"] == kind]
        if states == ["live"] * num_workers:
            return
        if time.monotonic() > ends:
            raise DeadlineError(
                f"run {run}: {states.count('live')} of {num_workers} {kind} worker(s) serve after {timeout_s:g} s (the "
                "others are starting, or waiting for a node with room); check with rlhf scale, or raise --timeout-s"
            )
        time.sleep(LOOK_EVERY_S)


def show(run: str, status: Status, wanted: dict[str, int]) -> None:
    """Prints the pool as a table."""
    counts = ", ".join(f"{count} {kind}" for kind, count in wanted.items())
    table = worker_table(status)
    table.title = f"{run}: wants {counts}"
    Console().print(table)


def worker_table(status: Status) -> Table:
    """The rollout workers, one in a row."""
    table = Table("worker", "kind", "state", "node", "weights", "samples")
    for worker in status:
        table.add_row(*(str(worker[key]) for key in ("worker", "kind", "state", "node", "version", "samples")))
    return table
