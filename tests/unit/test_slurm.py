"""jobs/slurm/rlhf.sbatch with stand-ins for Slurm, Ray and rlhf: who is started where, and what becomes of signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "slurm" / "rlhf.sbatch"
STAND_INS = {
    # runs the command that follows its options here
    "srun": 'echo "srun $*" >>$LOG; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then tr , "\\n" <<<"$3"; else echo "scontrol $*" >>$LOG; fi',
    "ray": """
        if [ "$1" = health-check ]; then [ -e "$UP" ]; exit; fi
        echo "ray $* token ${#RAY_AUTH_TOKEN}" >>$LOG
        [ -z "${FAILS:-}" ] || exit 1
        [ "$2" != --head ] || touch "$UP"
        exec sleep 1000
    """,
    "rlhf": """
        until [ "$(grep -c '^ray start' $LOG)" -ge "${RAYS:-1}" ]; do sleep 0.05; done
        echo "rlhf $* at $RAY_ADDRESS" >>$LOG
        [ -z "${CODE:-}" ] || exit "$CODE"
        trap 'exit 143' TERM
        echo ready
        while :; do sleep 0.05; done
    """,
}
Start = subprocess.Popen[str]


class Slurm:
    """Starts the script as Slurm's first node would."""

    def __init__(self, directory: Path) -> None:
        self._log, self._directory, self._started = directory / "log", directory, list[Start]()
        for name, body in STAND_INS.items():
            stand_in = directory / name
            stand_in.write_text(f"#!/bin/bash\n{body}\n")
            stand_in.chmod(0o755)
        (directory / "python").symlink_to(sys.executable)

    def start(self, *arguments: str, nodes: str = "localhost", **environment: str) -> Start:
        env = {
            "PATH": f"{self._directory}:/usr/bin:/bin",
            "LOG": str(self._log),
            "UP": str(self._directory / "up"),
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_CPUS_ON_NODE": "7",
        }
        command = ["bash", str(SCRIPT), *arguments]
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            command, env=env | environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._started.append(started)
        return started

    def run(self, *arguments: str, nodes: str = "localhost", **environment: str) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        started = self.start(*arguments, nodes=nodes, **environment)
        _, errors = started.communicate(timeout=60)
        return started.returncode, errors

    @property
    def log(self) -> list[str]:
        return self._log.read_text().splitlines()

    def left(self) -> list[int]:
        """Processes of what was started that go on; a stand-in that was ended may have started one that soon ends."""
        ends_s = time.monotonic() + 10
        while (alive := self._alive()) and time.monotonic() < ends_s:
            time.sleep(0.01)
        return alive

    def _alive(self) -> list[int]:
        groups = {started.pid for started in self._started}
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) in groups:
                        alive.append(int(entry.name))
                except ProcessLookupError:
                    continue
        return alive

    def close(self) -> None:
        for started in self._started:
            for process in self._alive():
                os.kill(process, signal.SIGKILL)
            started.communicate(timeout=60)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path)
    yield made
    made.close()


def test_ray_starts_on_the_first_node_then_on_the_others_and_the_run_beside_the_first(slurm: Slurm) -> None:
    code, _ = slurm.run("-c", "recipe.yaml", "num_steps=3", nodes="localhost,b,c", CODE="0", RAYS="2")
    assert code == 0
    srun = [line for line in slurm.log if line.startswith("srun")]
    assert len(srun) == 2
    assert "--nodes=1 --ntasks=1" in srun[0] and "--nodelist=localhost" in srun[0] and "ray start --head" in srun[0]
    assert "--nodes=2 --ntasks=2" in srun[1] and "--nodelist=b,c" in srun[1]
    assert "ray start --address 127.0.0.1:22345" in srun[1]
    assert all("--num-cpus 7" in line and "--block" in line for line in srun)
    assert all(line.endswith("token 64") for line in slurm.log if line.startswith("ray "))
    (run,) = [line for line in slurm.log if line.startswith("rlhf")]
    assert run == "rlhf train -c recipe.yaml num_steps=3 at 127.0.0.1:22345"
    assert slurm.left() == []


def test_a_run_that_fails_gives_the_job_its_exit_code_and_is_not_queued_again(slurm: Slurm) -> None:
    code, _ = slurm.run(CODE="2")
    assert code == 2 and not any(line.startswith("scontrol") for line in slurm.log) and slurm.left() == []


def test_before_the_time_limit_the_run_saves_and_the_job_is_queued_again(slurm: Slurm) -> None:
    job = slurm.start()
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)  # --signal=B: the batch script alone
    job.send_signal(signal.SIGTERM)
    _, _ = job.communicate(timeout=60)
    assert job.returncode == 143 and slurm.log[-1] == "scontrol requeue 12345" and slurm.left() == []


def test_a_ray_that_ends_or_does_not_answer_ends_the_job(slurm: Slurm) -> None:
    code, errors = slurm.run(FAILS="1")
    assert code == 1 and "Ray ended on localhost" in errors
    code, errors = slurm.run(UP="/nowhere/up", RLHF_UP_S="1")
    assert code == 1 and "Ray does not answer at 127.0.0.1:22345 after 1 s" in errors and slurm.left() == []
