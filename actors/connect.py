"""Joins a Ray cluster or starts a local one, and finds out which devices there are."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import ray_constants, services
from ray._raylet import Config as RayConfig
from ray.exceptions import AuthenticationError

from actors.process_env import LOOPBACK
from rlhf.config import Config
from rlhf.errors import ClusterError, one_line
from rlhf.planning.topology import Device, plan_topology
from rlhf.reward_config import RewardTrainingConfig

ANSWER_S = 10.0  # for a cluster's head node to take a connection
SPARE_CPUS = 16  # extra logical CPUs of a local cluster, for rollout workers added during a run
QUIET: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
RAY_CLIENT = "ray://"  # a head node's port for machines that are no nodes
PING = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a request to a head node, which may be empty
PING_CLIENT = "/ray.rpc.RayletDriver/ClusterInfo"


@contextlib.contextmanager
def connect(config: Config | RewardTrainingConfig) -> Iterator[None]:
    """Joins the cluster at ``ray.address`` or $RAY_ADDRESS, or starts a local one that ends with the run."""
    key = "$RAY_ADDRESS" if config.ray.address is None else "ray.address"
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield  # the caller's cluster: the caller shuts it down
        return
    if address:
        join(key, address, "correct it, or unset it to train on a local cluster that is started for the run")
    else:
        start_local(config)
    try:
        yield
    finally:
        ray.shutdown()


def start_local(config: Config | RewardTrainingConfig) -> None:
    """Starts a cluster that nobody outside of this machine can reach."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    device: Device = "gpu" if has_local_gpu() and config.placement.device != "cpu" else "cpu"
    needed = plan_topology(config, device).totals()
    with deaf_to_sigterm(), keeping_loopback():
        ray.init(
            address="local",  # a new one, even if another cluster runs on this machine
            # logical CPUs: roles take turns on the real ones
            num_cpus=max(os.cpu_count() or 1, int(needed["CPU"]) + 1 + SPARE_CPUS),
            include_dashboard=False,
            object_store_memory=config.ray.object_store_mib << 20,
            **QUIET,
        )
        assert ray.util.get_node_ip_address() == LOOPBACK, "Ray listens on the network"


def join(key: str, address: str, remedy: str, packages: Sequence[str] = ()) -> None:
    """Joins a cluster that is already up. ``packages``: directories of modules that its nodes need not have.

    Raises ClusterError, which names ``key`` as where the address is from; ``remedy``: what to do if nobody is there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = f"{key}={address}"
    host, _, port = address.removeprefix(RAY_CLIENT).rpartition(":")
    try:
        if is_given := bool(host) and port.isdigit():  # else auto, say
            # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ClusterError(f"{here}: no Ray cluster answers there ({one_line(error)}); {remedy}") from error
    if is_given and "RAY_AUTH_MODE" not in os.environ and asks_for_token(address):
        send_token(here, address)
    if is_given and not address.startswith(RAY_CLIENT) and not services.find_node_ids():  # Ray would look for a minute
        raise ClusterError(f"{here}: no Ray node runs on this machine; run this command on a node of that cluster")
    try:
        with keeping_loopback():
            ray.init(address=address, runtime_env={"py_modules": list(packages)} if packages else None, **QUIET)
    except (OSError, RuntimeError, AuthenticationError) as error:
        raise ClusterError(f"{here}: this machine cannot join ({one_line(error)}); {remedy}") from error


def asks_for_token(address: str, token: str = "") -> bool:
    """Whether the head node refuses a request with this token; '': with none."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    ping = PING_CLIENT if address.startswith(RAY_CLIENT) else PING
    with grpc.insecure_channel(address.removeprefix(RAY_CLIENT), [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(ping)(b"", timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:  # other errors are for Ray to meet and to explain
            return error.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    return False


def send_token(here: str, address: str) -> None:
    """Has Ray send its token to the cluster, which has asked for it: by itself Ray does so where RAY_AUTH_MODE says so.

    Raises ClusterError if it is another cluster's; ``here``: what that names.
    """
    token = ray_token()
    if not token or asks_for_token(address, token):
        wrong = "the token here is another one" if token else "there is none here"
        raise ClusterError(
            f"{here}: the cluster asks for a token, and {wrong}; save that of the user who started it (`ray "
            "get-auth-token` there) as ~/.ray/auth_token here, or export RAY_AUTH_TOKEN"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    RayConfig.initialize("")  # Ray has read the environment when it was imported


def ray_token() -> str:
    """The token that Ray's own tools would use; '' if there is none."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    return (os.environ.get("RAY_AUTH_TOKEN") or (file.read_text() if file.is_file() else "")).strip()


@contextlib.contextmanager
def keeping_loopback() -> Iterator[None]:
    """A Ray that is started meanwhile listens on 127.0.0.1 alone, and that address is joined as it is given.

    Otherwise Ray would take the machine's address in the network in its place. Where it does not, which is on macOS
    and Windows, it goes by this constant; ``_node_ip_address`` does not help.
    """
    usual = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = usual


@contextlib.contextmanager
def deaf_to_sigterm() -> Iterator[None]:
    """Processes started meanwhile, and all that they start, never get SIGTERM, as Ray does it with SIGINT.

    Schedulers send it to every process of a job, and Ray's would end before the run has saved. They still end with the
    driver.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def has_local_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing torch."""
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists()


def resolve_device(config: Config | RewardTrainingConfig) -> Device:
    """``placement.device``; 'auto' becomes 'gpu' if the cluster has one."""
    if config.placement.device != "auto":
        return config.placement.device
    return "gpu" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
