"""What the doctor finds out about one machine. Runs on that machine, in a Ray task or not; judges nothing."""

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

import psutil

MIB, GIB = 1 << 20, 1 << 30
MODULES = ("transformers:AttentionInterface", "deepspeed", "vllm:LLM")  # what a torchvision for another torch breaks
IMPORT_S = 180.0
TORCH_S = 120.0
SMI_S = 30.0
START_S = 60.0  # for a child to import torch, on a busy machine
WRITTEN = 32 * MIB
SEEN_S = 20.0  # network file systems may show a new file late


@dataclass(frozen=True)
class Gpu:
    """One that nvidia-smi shows and CUDA_VISIBLE_DEVICES does not hide."""

    index: int
    uuid: str
    name: str
    total_mib: float
    used_mib: float
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """One machine."""

    python: str
    versions: Mapping[str, str]  # installed distributions, by lower-case name
    wants_of_torch: Mapping[str, str]  # what installed distributions require of torch
    import_errors: Mapping[str, str]  # by module; empty where the import works
    disk_free: int  # bytes, where runs are written
    disk_bytes_per_s: float  # written and synced; 0 if that failed
    disk_error: str
    shm_free: int  # bytes of /dev/shm
    open_files: int  # ulimit -n
    token_auth: bool  # Ray's
    open_ports: Sequence[str] = ()  # of Ray, on other interfaces than loopback
    gpus: Sequence[Gpu] = ()
    gpu_error: str = ""  # why nvidia-smi does not say
    driver_cuda: str = ""  # the newest CUDA that the driver runs
    torch_cuda: str = ""  # what torch is built for; empty: CPU
    torch_gpus: int = 0
    arch_list: str = field(default_factory=lambda: os.environ.get("TORCH_CUDA_ARCH_LIST", ""))


def collect(run_dir: str, modules: Sequence[str], token_auth: bool) -> Facts:
    """Looks at this machine. Each wait is bounded by a deadline of its own."""
    installed = {name.lower(): found for found in distributions() if (name := found.metadata["Name"])}
    gpus, gpu_error, driver_cuda = look_at_gpus()
    errors, failed = in_child("imports", *modules, timeout_s=IMPORT_S) if modules else ({}, "")
    torch, torch_failed = in_child("torch_sees", timeout_s=TORCH_S)
    speed, disk_error = write_speed(nearest_directory(run_dir))
    return Facts(
        python=platform.python_version(),
        versions={name: found.version for name, found in installed.items()},
        wants_of_torch={
            name: want
            for name, found in installed.items()
            for want in found.requires or []
            if re.match(r"torch(?![\w-])", want)
        },
        import_errors=({"Python's libraries": failed} if failed else errors)
        | ({"torch": torch_failed} if torch_failed else {}),
        gpus=gpus,
        gpu_error=gpu_error,
        driver_cuda=driver_cuda,
        torch_cuda=(torch or {}).get("cuda") or "",
        torch_gpus=(torch or {}).get("gpus", 0),
        disk_free=shutil.disk_usage(nearest_directory(run_dir)).free,
        disk_bytes_per_s=speed,
        disk_error=disk_error,
        shm_free=shutil.disk_usage("/dev/shm").free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        token_auth=token_auth,
        open_ports=open_ports(),
    )


def look_at_gpus() -> tuple[list[Gpu], str, str]:
    """The visible GPUs; why nvidia-smi does not say; and the newest CUDA that the driver runs."""
    if shutil.which("nvidia-smi") is None:
        return [], "", ""
    try:
        devices = smi("--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits")
        apps = smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits")
        header = smi()
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return [], " ".join(str(said).split())[:300], ""
    pids = [[cell.strip() for cell in line.split(",")] for line in apps.splitlines() if "," in line]
    gpus = [
        Gpu(int(index), uuid, name, float(total), float(used), tuple(int(pid) for gpu, pid in pids if gpu == uuid))
        for index, uuid, name, total, used in (
            [cell.strip() for cell in line.split(",")] for line in devices.splitlines() if line.strip()
        )
    ]
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*([\d.]+)", header)
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")), "", cuda.group(1) if cuda else ""


def smi(*options: str) -> str:
    asked = ["nvidia-smi", *options]
    return subprocess.run(asked, capture_output=True, text=True, timeout=SMI_S, check=True).stdout


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES (indices or the beginnings of UUIDs) does not hide."""
    if setting is None:
        return list(gpus)
    named = [name.strip() for name in setting.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in named)]


def nearest_directory(path: str) -> Path:
    """The directory itself, or the one above it that exists: the doctor creates none."""
    return next(place for place in (Path(path), *Path(path).parents) if place.is_dir())


def write_speed(directory: Path) -> tuple[float, str]:
    """Bytes per second of a synced write there, and why there was none."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            begun = time.monotonic()
            file.write(os.urandom(MIB) * (WRITTEN // MIB))
            file.flush()
            os.fsync(file.fileno())
            return WRITTEN / (time.monotonic() - begun), ""
    except OSError as error:
        return 0.0, str(error)


def open_ports() -> list[str]:
    """Ports of this user's Ray processes that listen for other machines, too: a line for each kind of process."""
    found: dict[str, set[int]] = {}
    for process in psutil.process_iter():
        try:
            name = ray_name(process.cmdline())
            if not name or process.uids().real != os.getuid():
                continue
            for listener in process.net_connections(kind="tcp"):
                if listener.status == psutil.CONN_LISTEN and not listener.laddr.ip.startswith(("127.", "::1")):
                    found.setdefault(name, set()).add(listener.laddr.port)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile, or is not ours to look at
            continue
    return [f"{name}: {', '.join(map(str, sorted(ports)))}" for name, ports in sorted(found.items())]


def ray_name(command: Sequence[str]) -> str:
    """What a process of Ray's is called; empty if it is none."""
    if not command:
        return ""
    if command[0].startswith("ray::"):
        return "worker"
    parts = [part for part in command[:4] if "/ray/" in part]
    return Path(parts[0]).stem if parts else ""


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def leave_token(run_dir: str) -> str:
    """Writes a file where runs are written, and returns its path."""
    path = nearest_directory(run_dir) / f".rlhf-doctor-{uuid.uuid4().hex}"
    path.write_text(path.name)
    return str(path)


def remove_token(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def sees_token(path: str) -> bool:
    """Whether this machine sees that file; waits SEEN_S for it."""
    ends = time.monotonic() + SEEN_S
    while not (Path(path).is_file() and Path(path).read_text() == Path(path).name):
        if time.monotonic() > ends:
            return False
        time.sleep(0.5)
    return True


def in_child(*arguments: str, timeout_s: float) -> tuple:
    """The result of a task of ``jobs.doctor.child``, and why there is none."""
    [answer] = in_children([arguments], [{}], timeout_s)
    return answer


def in_children(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout_s: float
) -> list[tuple]:
    """Runs children at the same time: each one's result, and why there is none. All have ended on return."""
    path = os.pathsep.join(filter(None, sys.path))
    ends = time.monotonic() + timeout_s
    answers: list[tuple] = []
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "jobs.doctor.child", *command],
                env={**os.environ, "PYTHONPATH": path, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for command, env, output in zip(commands, environments, outputs, strict=True)
        ]
        try:
            for child, output in zip(children, outputs, strict=True):
                try:
                    code = child.wait(timeout=max(0.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    answers.append((None, f"no answer after {timeout_s:g} s"))
                    continue
                output.seek(0)
                answers.append(read_answer(output.read(), code))
        finally:
            for child in children:
                child.kill()
                child.wait()
    return answers


def read_answer(output: str, code: int) -> tuple:
    """A child's result and error, from the last line of its output."""
    last = output.strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
        return answer.get("result"), answer.get("error", "")
    except (ValueError, AttributeError):
        return None, f"ended with exit code {code}: {last[-300:]}"


def run_ranks(
    backend: str, devices: Sequence[str], first_rank: int, world: int, host: str, port: int, timeout_s: float
) -> list[tuple]:
    """This machine's ranks of an all-reduce, one per device: seconds, and why there are none."""
    commands = [
        ("all_reduce", backend, str(first_rank + i), str(world), host, str(port), str(timeout_s))
        for i in range(len(devices))
    ]
    environments = [{"CUDA_VISIBLE_DEVICES": device} for device in devices]
    return in_children(commands, environments, timeout_s + START_S)
