"""Failures of every kind, one after the other, over a run as a user starts it; then its numbers beside a calm run's.

python -m tests.storm [--events 200] [--seed 0] [--only kill-learner --only full-disk] [--out storm.json]
python -m tests.storm --nodes                     # on a cluster of three nodes, which are lost and replaced as well

When the command ends, the same command is given again, which is all that a user (or a cluster's scheduler) would do.
After each failure the run must make two more steps within RECOVERY_S. At the end every step must have the numbers that
it has in a run without failures, digit by digit, and no process may be left.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[2]
RECOVERY_S = 300.0
END_S = 60.0  # for the last processes to end
DISK_MIB = 64
MARK = "RLHF_STORM"  # in the environment of every process of a run
SETTINGS = (
    *("placement.device=cpu", "rollout.num_workers=2", "rollout.max_failures=1000", "num_steps=100000"),
    *("checks.logprob_groups=0", "eval_every_steps=0", "tracking.tensorboard=false", "tracking.progress=false"),
    *("checkpoint.every_steps=2", "checkpoint.save_final_model=false", "tracking.completions_every_steps=0"),
    *("timeouts.worker_silence_s=8", "timeouts.publish_s=20", "timeouts.generate_s=90", "timeouts.score_s=30"),
    *("timeouts.update_s=30", "timeouts.checkpoint_s=30", "timeouts.start_s=180"),
)
HOW = ("went on", "restarted", "given again")
# of a step, whatever it took to get there
NUMBERS = ("loss", "grad_norm", "kl", "entropy", "reward", "advantages/abs_mean", "learning_rate", "num_tokens")


class StormRun:
    """``rlhf train`` in a process of its own, given again whenever it ends."""

    def __init__(self, directory: Path, model: Path, *overrides: str, cluster: "StormCluster | None" = None) -> None:
        self.directory, self.name, self.cluster = directory, directory.name, cluster
        self.log = directory.with_suffix(".log")
        self.exits: list[int] = []
        module = [sys.executable, "-m", "tests.storm.train", "train", "-c", "conf/grpo_tiny.yaml"]
        where = [f"model.path={model}", f"run_dir={directory}", f"name={self.name}"]
        self.command = [*module, *SETTINGS, *where, *overrides]
        self._env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {MARK: self.name}
        if cluster:
            self._env["RAY_ADDRESS"] = cluster.address
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("a") as log:
            return subprocess.Popen(
                self.command, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def step(self) -> int:
        """The last one recorded; 0: none."""
        return max((int(row["step"]) for row in self.rows()), default=0)

    def rows(self) -> list[dict[str, float]]:
        """What was recorded of each step; a line that is being written does not count."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def reach(self, step: int) -> None:
        """Waits for a step, and gives the command again if it ends. Raises TimeoutError."""
        ends = time.monotonic() + RECOVERY_S
        while self.step() < step:
            if (code := self._process.poll()) is not None:
                self.exits.append(code)
                self._process = self._start()
            if time.monotonic() > ends:
                raise TimeoutError(f"no step {step} within {RECOVERY_S:g} s; the log ends:\n{self.log_tail()}")
            time.sleep(0.1)

    def ended(self, timeout_s: float) -> bool:
        """Whether the command has ended by itself within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.poll() is not None

    def send(self, number: int) -> None:
        """A signal to the driver."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def processes(self, title: str = "") -> list[int]:
        """All that descend from the command, Ray's among them; those with ``title`` in their command lines."""
        mark, found = f"{MARK}={self.name}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    titled = title.encode() in (entry / "cmdline").read_bytes()
                    if titled and mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return sorted(found)

    def close(self) -> list[int]:
        """Ends the run at the end of a step; returns what is still there after END_S, ended by force."""
        self.send(signal.SIGTERM)
        self.ended(END_S)
        if self.cluster:
            self.cluster.close()
        ends = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < ends:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


class StormCluster:
    """A Ray cluster of three nodes, all on this machine; the head is the run's own node, and stays."""

    def __init__(self, mark: str) -> None:
        os.environ[MARK] = mark  # of the actors, which are started by their nodes
        os.environ["RAY_AUTH_MODE"] = "disabled"
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 4, "object_store_memory": 256 << 20, "include_dashboard": False}
        self._nodes = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._nodes.address
        self._others = [self._add() for _ in range(2)]

    def _add(self) -> Any:
        return self._nodes.add_node(num_cpus=6, object_store_memory=80 << 20)

    def replace_node(self, random: Random) -> None:
        """A node is gone at once, with all that runs on it; another comes."""
        place = random.randrange(len(self._others))
        self._nodes.remove_node(self._others[place], allow_graceful=False)
        self._others[place] = self._add()

    def close(self) -> None:
        self._nodes.shutdown()


Event = Callable[[StormRun, Random], None]


def to_actor(actor: str, number: int) -> Event:
    """A signal to a random one of the run's actors of a class."""

    def send(run: StormRun, random: Random) -> None:
        ends = time.monotonic() + RECOVERY_S
        while not (pids := run.processes(f"ray::{actor}")):
            if time.monotonic() > ends:
                raise TimeoutError(f"no {actor} within {RECOVERY_S:g} s; the log ends:\n{run.log_tail()}")
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(pids), number)

    return send


def to_driver(*numbers: int, pause_s: float = 0.05) -> Event:
    """Signals to the driver's process, one after the other."""

    def send(run: StormRun, random: Random) -> None:
        for number in numbers:
            run.send(number)
            time.sleep(pause_s)

    return send


def to_program(name: str, number: int) -> Event:
    """A signal to one of Ray's own processes of the run."""

    def send(run: StormRun, random: Random) -> None:
        for pid in run.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    os.kill(pid, number)

    return send


def terminate_all(run: StormRun, random: Random) -> None:
    """SIGTERM to every process, as Slurm sends it."""
    for pid in run.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def second_run(run: StormRun, random: Random) -> None:
    """Somebody gives the command a second time while it runs; that must be refused."""
    done = subprocess.run(run.command, cwd=ROOT, capture_output=True, text=True, timeout=RECOVERY_S)
    assert done.returncode == 2, f"two runs in one directory: exit code {done.returncode}\n{done.stderr[-2000:]}"


def full_disk(run: StormRun, random: Random) -> None:
    """The run directory's file system fills up, until somebody makes room; meanwhile the run may end."""
    ballast = run.directory.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    run.ended(10.0)
    ballast.unlink(missing_ok=True)


def damaged_checkpoint(run: StormRun, random: Random) -> None:
    """The driver dies, and of the newest checkpoint a file has lost its end."""
    run.send(signal.SIGKILL)
    run.ended(END_S)
    newest = max((run.directory / "checkpoints").glob("step-*"), default=None)
    files = sorted(file for file in newest.rglob("*") if file.is_file()) if newest else []
    if files:
        file = random.choice(files)
        os.truncate(file, file.stat().st_size // 2)


def replace_node(run: StormRun, random: Random) -> None:
    """A node other than the driver's is lost, and another joins."""
    assert run.cluster is not None, "for --nodes"
    run.cluster.replace_node(random)


OF_NODES: dict[str, Event] = {"replace-node": replace_node}
EVENTS: dict[str, Event] = {
    **{
        f"{word}-{actor.removesuffix('Actor').lower()}": to_actor(actor, number)
        for actor in ("RolloutActor", "LearnerActor", "ReferenceActor", "RewardActor", "ControlActor")
        for word, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP))
    },
    "kill-driver": to_driver(signal.SIGKILL),
    "pause-driver": to_driver(signal.SIGSTOP, signal.SIGCONT, pause_s=10.0),
    "terminate-driver": to_driver(signal.SIGTERM),
    "terminate-storm": to_driver(*[signal.SIGTERM] * 5),
    "interrupt-twice": to_driver(signal.SIGINT, signal.SIGINT),
    "terminate-all": terminate_all,
    "kill-raylet": to_program("raylet", signal.SIGKILL),
    "kill-gcs": to_program("gcs_server", signal.SIGKILL),
    "second-run": second_run,
    "full-disk": full_disk,
    "damaged-checkpoint": damaged_checkpoint,
}
OF_LOCAL_RUNS = {"kill-raylet", "kill-gcs", "terminate-all"}  # would end the cluster, which nobody starts again


@dataclass(frozen=True)
class Outcome:
    """What the run made of a failure: it went on, started its actors anew, or ended and was given again."""

    event: str
    step: int
    recovery_s: float
    how: str
    exits: list[int]


def weather(run: StormRun, events: Sequence[str], random: Random) -> Iterator[Outcome]:
    """Lets the failures happen, each two steps after the run has recovered from the one before."""
    run.reach(2)
    for event in events:
        time.sleep(random.uniform(0.0, 1.5))
        step, exits, said = run.step(), len(run.exits), len(run.log.read_bytes())
        started_s = time.monotonic()
        (EVENTS | OF_NODES)[event](run, random)
        run.reach(step + 2)
        restarted = b"restarting from" in run.log.read_bytes()[said:]
        how = "given again" if len(run.exits) > exits else "restarted" if restarted else "went on"
        yield Outcome(event, step, time.monotonic() - started_s, how, run.exits[exits:])


def differences(rows: Sequence[dict[str, float]], calm: Sequence[dict[str, float]]) -> list[str]:
    """The steps whose numbers are not those of the calm run, and steps that are missing or there twice."""
    found = [int(row["step"]) for row in rows]
    wrong = [] if found == list(range(1, len(found) + 1)) else [f"recorded steps: {found}"]
    for row, expected in zip(rows, calm, strict=False):
        here = {name: (row[name], expected[name]) for name in NUMBERS if row[name] != expected[name]}
        wrong += [f"step {row['step']:g}: {here}"] if here else []
    return wrong


@contextlib.contextmanager
def disk() -> Iterator[Path]:
    """A directory on a small file system of its own if this user may mount one, else anywhere."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "storm", name]
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(name)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", name], check=True)


def storm(events: Sequence[str], model: Path, seed: int, *, nodes: bool = False) -> tuple[list[Outcome], list[str]]:
    """What became of each failure, and what is wrong in the end. ``nodes``: on a cluster of several."""
    outcomes: list[Outcome] = []
    name = f"storm-{os.getpid()}"
    with disk() as directory:
        if not os.path.ismount(directory):
            events = [event for event in events if event != "full-disk"]
        run = StormRun(directory / name, model, cluster=StormCluster(name) if nodes else None)
        try:
            for outcome in weather(run, events, Random(seed)):
                outcomes.append(outcome)
                print(
                    f"{outcome.event:20} at step {outcome.step:4}: {outcome.how} in {outcome.recovery_s:.0f} s",
                    flush=True,
                )
        finally:
            left = run.close()
        rows = run.rows()
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        calm = StormRun(Path(name) / f"calm-{os.getpid()}", model)
        try:
            calm.reach(len(rows))
        finally:
            left += calm.close()
        wrong = differences(rows, calm.rows())
    return outcomes, wrong + [f"process {pid} was left" for pid in left]


def show(outcomes: Sequence[Outcome]) -> None:
    """A line per kind of failure."""
    table = Table(Column("failure", no_wrap=True), "times", *HOW, "median s", "max s")
    for event in dict.fromkeys(o.event for o in outcomes):
        of_kind = [o for o in outcomes if o.event == event]
        counts = [sum(o.how == how for o in of_kind) for how in HOW]
        seconds = [o.recovery_s for o in of_kind]
        times = f"{statistics.median(seconds):.0f}", f"{max(seconds):.0f}"
        table.add_row(event, str(len(of_kind)), *(str(count or "") for count in counts), *times)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=EVENTS | OF_NODES)
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random, events = Random(args.seed), []
    of_nodes = [event for event in EVENTS | OF_NODES if event not in OF_LOCAL_RUNS]
    while len(events) < args.events:
        events += random.sample(kinds := args.only or (of_nodes if args.nodes else list(EVENTS)), len(kinds))
    outcomes, wrong = storm(events[: args.events], args.model.resolve(), args.seed, nodes=args.nodes)
    show(outcomes)
    print("\n".join(wrong) or f"{len(outcomes)} failures; every step has the numbers of a run without any")
    if args.out:
        args.out.write_text(json.dumps({"wrong": wrong, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
