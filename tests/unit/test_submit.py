"""What `rlhf submit` decides before it reaches a cluster, and how it follows a log. No Ray is started."""

import asyncio
import json
import os
import signal
import socket
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.config import Config
from rlhf.errors import ClusterError, ConfigError
from rlhf.recipes import load_config

ROOT = Path(__file__).resolve().parents[2]
submit = pytest.importorskip("jobs.submit")  # Ray's job client is an extra of Ray
JobStatus = submit.JobStatus


def config(*overrides: str, recipe: str = "grpo_tiny") -> Config:
    return load_config(ROOT / "conf" / f"{recipe}.yaml", overrides)


@pytest.mark.parametrize(
    "address", ["head:8265", "ray://head:10001", "auto", "http://", "http://head:port", "http://[::1"]
)
def test_address_must_be_a_url(address: str) -> None:
    with pytest.raises(ConfigError, match="http://HEAD:8265"):
        submit.check_address(address)


def test_ray_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ray\.address=auto"):
        submitted(monkeypatch, FakeClient(), "ray.address=auto")


def test_package_holds_code_and_the_exact_configuration(tmp_path: Path) -> None:
    root = tmp_path / "code"
    kept = ["jobs/cli.py", "rlhf/models/__init__.py", "mine/rewards.py", "conf/base.yaml"]
    dropped = [
        ".env",
        ".git/config",
        "models/a.bin",
        "runs/x",
        "data/t.jsonl",
        "rlhf/__pycache__/c.pyc",
        "env/bin/python",
    ]
    for name in [*kept, *dropped, "env/pyvenv.cfg", submit.CONFIG_NAME]:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    sent = config("num_steps=7", recipe="grpo_7b_2x8a100")
    submit.pack(tmp_path / "p.zip", root, sent)
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert sorted(archive.namelist()) == sorted([*kept, submit.CONFIG_NAME])
        archive.extract(submit.CONFIG_NAME, tmp_path)
    assert load_config(tmp_path / submit.CONFIG_NAME) == sent


def test_files_of_functions_are_uploaded_and_found_where_the_job_starts(tmp_path: Path) -> None:
    root = tmp_path / "code"
    for name in ("code/mine/loss.py", "code/data/hidden.py", "elsewhere/rewards.py", "third/rewards.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def sent(*functions: str, root: Path | None = root) -> tuple[list[str], Config]:
        listed = ", ".join(f"{{path: {function}}}" for function in functions)
        loss = f"algorithm.loss={root or tmp_path / 'code'}/mine/loss.py:soft"
        submit.pack(tmp_path / "p.zip", root, config(f"reward.functions=[{listed}]", loss))
        with zipfile.ZipFile(tmp_path / "p.zip") as archive:
            archive.extract(submit.CONFIG_NAME, tmp_path)
            files = sorted(set(archive.namelist()) - {submit.CONFIG_NAME})
            assert [archive.read(file).decode().rpartition("/")[2] for file in files] == [Path(f).name for f in files]
        return files, load_config(tmp_path / submit.CONFIG_NAME)

    skipped, outside = f"{root}/data/hidden.py", f"{tmp_path}/elsewhere/rewards.py"
    files, found = sent(f"{outside}:a", "exact_match", f"{skipped}:b", f"{outside}:c", "package.module.d")
    assert files == ["mine/loss.py", "rlhf_submit/hidden.py", "rlhf_submit/rewards.py"]
    assert [function.path for function in found.reward.functions] == [
        *("rlhf_submit/rewards.py:a", "exact_match", "rlhf_submit/hidden.py:b", "rlhf_submit/rewards.py:c"),
        "package.module.d",
    ]
    assert found.algorithm.loss == "mine/loss.py:soft", "in its place in the upload"

    files, found = sent(f"{outside}:a", root=None)
    assert files == ["rlhf_submit/loss.py", "rlhf_submit/rewards.py"], "even where the code is installed"

    with pytest.raises(
        ConfigError, match=rf"^reward\.functions\[1\]\.path={tmp_path}/third/rewards\.py:b: {outside} has "
    ):
        sent(f"{outside}:a", f"{tmp_path}/third/rewards.py:b")
    with pytest.raises(
        ConfigError, match=r"^reward\.functions\[0\]\.path=/no/r\.py:a: no such file /no/r\.py; it is up"
    ):
        sent("/no/r.py:a")


def test_checkout_is_the_default_and_fits(tmp_path: Path) -> None:
    root = submit.code_directory(None, installed=False)
    assert root == ROOT
    submit.pack(tmp_path / "p.zip", root, config())
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        names = set(archive.namelist())
    assert {"jobs/cli.py", "actors/cluster.py", "rlhf/config.py", submit.CONFIG_NAME} <= names
    assert not [name for name in names if name.startswith((".", "models/", "runs/"))]


def test_installed_sends_the_configuration_alone(tmp_path: Path) -> None:
    assert submit.code_directory(None, installed=True) is None
    submit.pack(tmp_path / "p.zip", None, config())
    assert zipfile.ZipFile(tmp_path / "p.zip").namelist() == [submit.CONFIG_NAME]
    with pytest.raises(ConfigError, match="--installed"):
        submit.code_directory(tmp_path, installed=True)


def test_large_upload_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "checkpoint.bin").open("wb") as file:
        file.truncate((submit.WORKING_DIR_LIMIT_MIB + 1) << 20)
    with pytest.raises(ConfigError, match=r"101 MiB.*checkpoint\.bin"):
        submit.pack(tmp_path / "p.zip", tmp_path, config())


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:1")  # Ray's client would follow this one
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"127.0.0.1:{port}: no Ray dashboard answers"):
        submit.connect(f"http://127.0.0.1:{port}")


@pytest.mark.timeout(20)
def test_a_silent_listener_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "REQUEST_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ClusterError, match="timed out"):
        submit.connect(f"http://127.0.0.1:{silent.getsockname()[1]}")


class Dashboard(BaseHTTPRequestHandler):
    """A dashboard that wants a token ('': none) and notes what it is sent."""

    token = ""
    sent: list[str]

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        self.sent.append(given)
        right = not self.token or given == f"Bearer {self.token}"
        self.send_response(200 if right else 403 if given else 401)
        self.end_headers()
        answer = {"ray_version": "2.60.0"} if self.path == "/api/version" else []
        self.wfile.write(json.dumps(answer).encode() if right else b"Unauthorized")

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, type[Dashboard]]]:
    """Its address, and what it does. The token here is 'secret', and RAY_AUTH_MODE tells Ray to send it."""
    from ray.dashboard.modules import dashboard_sdk

    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("secret\n")
    bearer = {"Authorization": "Bearer secret"}
    monkeypatch.setattr(dashboard_sdk, "get_auth_headers_if_auth_enabled", lambda _: dict(bearer))
    handler = type("Handler", (Dashboard,), {"sent": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def test_a_cluster_that_does_not_ask_for_the_token_never_sees_it(dashboard: tuple[str, type[Dashboard]]) -> None:
    address, handler = dashboard
    client = submit.connect(address)
    assert client.list_jobs() == []
    assert len(handler.sent) > 1 and set(handler.sent) == {""}
    assert "RAY_AUTH_MODE" not in submit.how_to(client, "job")


@pytest.mark.parametrize(("here", "warnings"), [(True, 0), (False, 1)])
def test_a_cluster_that_asks_for_the_token_gets_it_and_over_a_network_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dashboard: tuple[str, type[Dashboard]],
    here: bool,
    warnings: int,
) -> None:
    monkeypatch.setattr(submit, "is_this_machine", lambda _: here)
    address, handler = dashboard
    handler.token = "secret"
    client = submit.connect(address)
    assert client.list_jobs() == []
    assert handler.sent[0] == "" and set(handler.sent[1:]) == {"Bearer secret"}
    assert "RAY_AUTH_MODE=token ray job logs" in submit.how_to(client, "job")
    said = capsys.readouterr().err
    assert said.count("\n") == warnings and said.count(f"warning: --address={address}: the token is sent") == warnings


@pytest.mark.parametrize(("token", "sent"), [("", [""]), ("old", ["", "Bearer old"])])
def test_without_the_right_token_it_is_one_line(
    dashboard: tuple[str, type[Dashboard]], tmp_path: Path, token: str, sent: list[str]
) -> None:
    (tmp_path / "token").write_text(token)
    address, handler = dashboard
    handler.token = "secret"
    with pytest.raises(ClusterError, match=rf"^--address={address}: the cluster asks for a token \(.*; save .*$"):
        submit.connect(address)
    assert handler.sent == sent


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("http://203.0.113.77:8265", True),  # an address for documentation: nobody's
        ("https://203.0.113.77:8265", False),
        ("http://localhost:8265", False),
        ("http://127.0.0.1:8265", False),
    ],
)
def test_only_an_unencrypted_connection_that_leaves_this_machine_is_warned_of(
    capsys: pytest.CaptureFixture[str], address: str, warns: bool
) -> None:
    submit.warn_of_listeners(address)
    assert (f"warning: --address={address}: " in capsys.readouterr().err) == warns


class FakeClient:
    """A job whose log stream breaks once, after its first chunk."""

    asked_for_token = False

    def __init__(self, *statuses: Any) -> None:
        self.statuses = list(statuses)
        self.streams = [["one\n", OSError("broken")], ["one\n", "two\n"]]
        self.submitted: list[dict[str, Any]] = []
        self.asked = 0  # how often, for its status
        self.refuses: Exception | None = None

    def submit_job(self, **job: Any) -> None:
        if self.refuses:
            raise self.refuses
        self.submitted.append(job)

    def get_address(self) -> str:
        return "http://head:8265"

    def get_job_info(self, job_id: str) -> SimpleNamespace:
        self.asked += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, Exception):
            raise status
        if status == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
            status = JobStatus.RUNNING
        return SimpleNamespace(status=status, driver_exit_code=0, message="")

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for chunk in self.streams.pop(0) if self.streams else []:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


def test_a_broken_log_stream_goes_on_where_it_broke_and_silence_counts_from_the_last_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(JobStatus.RUNNING, JobStatus.RUNNING, OSError("blip"), JobStatus.SUCCEEDED)
    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=lambda: 100 * client.asked))  # 120 s are allowed
    details = asyncio.run(submit.follow(client, "job"))
    assert details.status is JobStatus.SUCCEEDED
    printed = capsys.readouterr().out
    assert (printed.count("one"), printed.count("two"), printed.count("broken")) == (1, 1, 1)


def test_a_lost_cluster_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LOST_CONTACT_TIMEOUT_S", 0.5)
    with pytest.raises(ClusterError, match="may still be running"):
        asyncio.run(submit.follow(FakeClient(OSError("gone")), "job"))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("STOPPED", None, 130), ("FAILED", 2, 2), ("FAILED", -9, 1), ("FAILED", None, 1)],
)
def test_exit_codes(status: str, code: int | None, expected: int) -> None:
    details = SimpleNamespace(status=JobStatus(status), driver_exit_code=code, message="why")
    assert submit.report(details, "job") == expected


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Ctrl-C as a terminal's commands have it: those that a script starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def submitted(monkeypatch: pytest.MonkeyPatch, client: FakeClient, *overrides: str, wait: bool = True) -> int:
    monkeypatch.setattr(submit, "connect", lambda address: client)
    sent = config("name=my run", *overrides)
    return submit.submit(sent, address="http://head:8265", working_dir=None, installed=True, wait=wait)


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize(
    ("status", "wait", "code", "said"),
    [
        ("SUCCEEDED", True, 0, " succeeded"),
        ("STOPPED", True, 130, " was stopped; submit it again to resume"),
        ("FAILED", True, 1, " failed with exit code 0"),
        ("Ctrl-C", True, 130, " keeps running\n  follow: "),
        ("Ctrl-C", False, 0, "submitted my-run-"),
    ],
)
def test_a_submitted_run_ends_the_command_with_its_own_code_and_ctrl_c_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, wait: bool, code: int, said: str
) -> None:
    client = FakeClient(status if status == "Ctrl-C" else JobStatus(status))
    assert submitted(monkeypatch, client, wait=wait) == code
    assert said in capsys.readouterr().out
    assert len(client.submitted) == 1


def test_a_job_runs_what_was_sent_and_has_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(JobStatus.SUCCEEDED)
    phases = ["generate_s=1", "score_s=2", "update_s=4", "publish_s=8", "checkpoint_s=16", "start_s=64"]
    submitted(monkeypatch, client, *(f"timeouts.{phase}" for phase in phases))
    (job,) = client.submitted
    assert job["entrypoint"] == "exec python -m jobs.cli train --submitted -c rlhf_submit.yaml"
    assert job["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "47"}
    client.refuses = RuntimeError("no room\nfor it")
    with pytest.raises(ClusterError, match=r"^http://head:8265 did not accept job my-run-.*: no room$"):
        submitted(monkeypatch, client)
