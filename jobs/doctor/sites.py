"""Where the doctor looks: this machine, or every node of a Ray cluster. Both run a function on each node they have."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.connect import join
from actors.process_env import PROJECT_ROOT
from rlhf.errors import one_line


class Site(Protocol):
    """Some nodes, by what a person calls them."""

    @property
    def nodes(self) -> Sequence[str]: ...

    def address(self, node: str) -> str:
        """The IP address at which the others reach a node."""
        ...

    def token_auth(self) -> bool:
        """Whether Ray asks for a token there."""
        ...

    def call(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """``function(*arguments[node])`` on each of these nodes at the same time: the results, and what failed."""
        ...


class Here:
    """This machine, without Ray."""

    @property
    def nodes(self) -> Sequence[str]:
        return ["this machine"]

    def address(self, node: str) -> str:
        return "127.0.0.1"

    def token_auth(self) -> bool:
        return os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"  # a run starts its own Ray, with a token

    def call(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        try:
            return {node: function(*given) for node, given in arguments.items()}, {}
        except OSError as error:
            return {}, dict.fromkeys(arguments, one_line(error))


@dataclass(frozen=True)
class RayCluster:
    """The nodes of a Ray cluster that this process has joined."""

    ids: Mapping[str, str]  # Ray's, by name
    addresses: Mapping[str, str]

    @property
    def nodes(self) -> Sequence[str]:
        return list(self.ids)

    def address(self, node: str) -> str:
        return self.addresses[node]

    def token_auth(self) -> bool:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return is_token_auth_enabled()  # who has joined has the cluster's mode

    def call(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        task = ray.remote(num_cpus=0, max_retries=0)(function)
        calls = {
            node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(self.ids[node], soft=False)).remote(
                *given
            )
            for node, given in arguments.items()
        }
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
        results: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for node, call in calls.items():
            try:
                results[node] = ray.get(call, timeout=1.0)
            except GetTimeoutError:
                ray.cancel(call, force=True)
                failed[node] = f"no answer after {timeout_s:g} s"
            except RayError as error:
                failed[node] = one_line(getattr(error, "cause", None) or error)[:300]
        return results, failed


@contextlib.contextmanager
def joined(address: str) -> Iterator[RayCluster]:
    """The cluster at an address. Raises ClusterError if none answers."""
    packages = [str(PROJECT_ROOT / package) for package in ("rlhf", "actors", "jobs")]
    join("--address", address, "give the address HEAD:6379 that its nodes were started with", packages)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        names = [node_name(node, alive) for node in alive]
        yield RayCluster(
            {name: node["NodeID"] for name, node in zip(names, alive, strict=True)},
            {name: node["NodeManagerAddress"] for name, node in zip(names, alive, strict=True)},
        )
    finally:
        ray.shutdown()


def node_name(node: Mapping[str, Any], nodes: list[Any]) -> str:
    """Its IP address, with some of Ray's id where several nodes have the same."""
    address = node["NodeManagerAddress"]
    alone = [other["NodeManagerAddress"] for other in nodes].count(address) == 1
    return address if alone else f"{address} ({node['NodeID'][:6]})"
