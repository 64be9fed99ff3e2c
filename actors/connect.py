"""Joins a Ray cluster or starts a local one, and finds out which devices there are."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from rlhf.config import Config
from rlhf.errors import ClusterError, one_line
from rlhf.planning.topology import Device, plan_topology
from rlhf.reward_config import RewardTrainingConfig

ANSWER_S = 10.0  # for a cluster's head node to take a connection
SPARE_CPUS = 16  # extra logical CPUs of a local cluster, for rollout workers added during a run


@contextlib.contextmanager
def connect(config: Config | RewardTrainingConfig) -> Iterator[None]:
    """Joins the cluster at ``ray.address`` or $RAY_ADDRESS, or starts a local one that ends with the run."""
    key = "$RAY_ADDRESS" if config.ray.address is None else "ray.address"
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield  # the caller's cluster: the caller shuts it down
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address:
        check_answers(key, address)
        ray.init(address=address, **quiet)
    else:
        device: Device = "gpu" if has_local_gpu() and config.placement.device != "cpu" else "cpu"
        needed = plan_topology(config, device).totals()
        with deaf_to_sigterm():
            ray.init(
                address="local",  # a new one, even if another cluster runs on this machine
                # logical CPUs: roles take turns on the real ones
                num_cpus=max(os.cpu_count() or 1, int(needed["CPU"]) + 1 + SPARE_CPUS),
                include_dashboard=False,
                object_store_memory=config.ray.object_store_mib << 20,
                **quiet,
            )
    try:
        yield
    finally:
        ray.shutdown()


def check_answers(key: str, address: str) -> None:
    """Raises ClusterError if nothing listens at HOST:PORT, where Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # auto, say
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ClusterError(
            f"{key}={address}: no Ray cluster answers there ({one_line(error)}); correct it, or unset it to train on a "
            "local cluster that is started for the run"
        ) from error


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
