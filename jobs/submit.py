"""`rlhf submit`: the same run as `rlhf train`, as a job on a Ray cluster that is already up.

One zip is uploaded: the validated configuration, the files of the user's functions and, unless the nodes have it
installed, the code. Ray unpacks it on every node that runs one of our actors, starts them there and puts it first on
their import path. Models, data and the run directory are not uploaded: they are on a file system that all nodes share.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from actors.connect import ray_token
from rlhf.config import Config
from rlhf.errors import ClusterError, ConfigError
from rlhf.paths import with_function_files
from rlhf.recipes import to_yaml

PROJECT_ROOT = Path(__file__).resolve().parent.parent
CONFIG_NAME = "rlhf_submit.yaml"  # in the job's working directory
FUNCTIONS_DIR = "rlhf_submit"  # beside it: the files of the user's functions that are not in the uploaded directory
INTERRUPTED = 130  # exit code of a job that was stopped, and of following one that was left running

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0  # between two bytes of an answer
STATUS_EVERY_S = 5.0
LAST_LINES_TIMEOUT_S = 10.0  # for the log of a job that has ended
LOST_CONTACT_TIMEOUT_S = 120.0  # of silence from the cluster, before we stop following

WORKING_DIR_LIMIT_MIB = 100  # before compression; code is far below it, a forgotten checkpoint far above
SKIPPED_ANYWHERE = re.compile(r"\..*|__pycache__|.*\.egg-info|node_modules")  # hidden files hold tokens and caches
SKIPPED_AT_THE_TOP = frozenset({"models", "runs", "data", "build", "dist", "wandb"})


def submit(config: Config, *, address: str, working_dir: Path | None, installed: bool, wait: bool) -> int:
    """Submits the run and, with ``wait``, follows its log to the end. Returns the exit code for the command.

    ``config`` has full paths. The code is that of `rlhf train` on the cluster; 130 if the job was stopped, or left
    running by Ctrl-C; 0 without ``wait``. Raises ConfigError for what is wrong here, ClusterError if the cluster cannot
    be reached.
    """
    check_address(address)
    root = code_directory(working_dir, installed)
    if config.ray.address is not None:
        raise ConfigError(f"ray.address={config.ray.address}: a submitted job joins the cluster at --address; unset it")
    job_id = f"{re.sub(r'[^A-Za-z0-9_-]', '-', config.name)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with TemporaryDirectory(prefix="rlhf-submit-") as scratch:
        package = Path(scratch) / "working_dir.zip"
        pack(package, root, config)
        client = connect(address)
        send(client, job_id, package, config)
    print(f"submitted {job_id} to {address}: model {config.model.path}, run directory {config.run_dir}")
    print(how_to(client, job_id), flush=True)
    if not wait:
        return 0
    try:
        details = asyncio.run(follow(client, job_id))
    except KeyboardInterrupt:
        print(f"\n{job_id} keeps running\n{how_to(client, job_id)}")
        return INTERRUPTED
    return report(details, job_id)


def check_address(address: str) -> None:
    """Raises ConfigError unless ``address`` is the URL of a dashboard."""
    try:
        url = urlsplit(address)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0  # .port raises if no number
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"--address={address}: jobs go to the head node's dashboard; give its URL, such as http://HEAD:8265"
        )


def code_directory(working_dir: Path | None, installed: bool) -> Path | None:
    """The directory to upload; None when the nodes have the package and only the configuration travels."""
    if installed:
        if working_dir is not None:
            raise ConfigError("--installed uploads no code and --working-dir does; give one of them")
        return None
    root = working_dir or PROJECT_ROOT
    if not root.is_dir():
        raise ConfigError(f"--working-dir={root}: no such directory")
    if working_dir is None and not (root / "pyproject.toml").is_file():
        raise ConfigError(
            "rlhf runs from an installed package here, so there is no checkout to upload; use --installed if the "
            "nodes have the package too, or --working-dir DIR"
        )
    return root.resolve()


def pack(package: Path, root: Path | None, config: Config) -> None:
    """Writes the zip that becomes the job's working directory. Raises ConfigError if it would be too large, or if a
    function's file is not here."""
    files = {str(file.relative_to(root)): file for file in code_files(root)} if root else {}
    sizes = {file: file.stat().st_size for file in files.values()}
    if sum(sizes.values()) > WORKING_DIR_LIMIT_MIB << 20:
        largest = sorted(sizes, key=sizes.__getitem__)[-3:]
        raise ConfigError(
            f"--working-dir={root}: {sum(sizes.values()) >> 20} MiB to upload, more than {WORKING_DIR_LIMIT_MIB} MiB; "
            f"the largest files are {', '.join(map(str, largest))}; move data to the file system that the nodes share"
        )

    def upload(key: str, path: str) -> str:
        """Where a function's file is in the zip."""
        if not (file := Path(path).resolve()).is_file():
            raise ConfigError(f"{key}: no such file {path}; it is uploaded from here: correct the path")
        names = (name for name, uploaded in files.items() if uploaded.resolve() == file)
        name = next(names, f"{FUNCTIONS_DIR}/{file.name}")
        if files.setdefault(name, file) != file:
            raise ConfigError(f"{key}: {files[name]} has the same name, and both are uploaded; rename one")
        return name

    config = with_function_files(config, upload)
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for name, file in files.items():
            archive.write(file, name)
        archive.writestr(CONFIG_NAME, to_yaml(config))


def code_files(root: Path) -> Iterator[Path]:
    """The files below ``root`` to upload: no hidden ones, virtual environments, caches, models, data or runs."""
    for directory, subdirectories, names in os.walk(root):
        here = Path(directory)
        at_the_top = here == root
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if not SKIPPED_ANYWHERE.fullmatch(name)
            and not (at_the_top and name in SKIPPED_AT_THE_TOP)
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            skipped = SKIPPED_ANYWHERE.fullmatch(name) or (at_the_top and name == CONFIG_NAME)
            if not skipped and (here / name).is_file():
                yield here / name


class Client(JobSubmissionClient):
    """Ray's client, with a deadline on every request (Ray's own would wait forever on a host that does not answer), and
    without the token until the cluster asks for it."""

    asked_for_token = False

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
        request = partial(
            super()._do_request, method, endpoint, timeout=(CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S), **kwargs
        )
        if not self.asked_for_token:
            self._headers: dict[str, str] = {}  # Ray puts the token there where RAY_AUTH_MODE says so
            try:
                return request()
            except AuthenticationError:
                if not (token := ray_token()):
                    raise
            self.asked_for_token = True
            self._headers = {"Authorization": f"Bearer {token}"}
            warn_of_listeners(self.get_address())
        return request()


def warn_of_listeners(address: str) -> None:
    """Prints a line if others may read a token that is sent there."""
    url = urlsplit(address)
    if url.scheme == "http" and not is_this_machine(url.hostname or ""):
        print(
            f"warning: --address={address}: the token is sent unencrypted, and whoever reads it can run code on the "
            f"cluster; `ssh -L 8265:localhost:{url.port or 80} {url.hostname}` and --address http://localhost:8265 "
            "avoid that",
            file=sys.stderr,
        )


def is_this_machine(host: str) -> bool:
    """Whether all addresses of the host are this machine's own."""
    try:
        for family, kind, protocol, _, at in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(at)
    except OSError:
        return False
    return True


def connect(address: str) -> Client:
    """A client of the cluster at ``address``. Raises ClusterError, within CONNECT_TIMEOUT_S if no host answers and
    REQUEST_TIMEOUT_S if one does but stays silent."""
    for module in ("ray.dashboard.modules.dashboard_sdk", JobSubmissionClient.__module__):
        logging.getLogger(module).setLevel(logging.WARNING)  # they log uploads and closed connections
    with unset("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would prefer them to the address it is given
        try:
            return Client(address)
        except AuthenticationError as error:
            raise ClusterError(
                f"--address={address}: the cluster asks for a token ({first_line(error)}); save the head node's "
                "(`ray get-auth-token` there) as ~/.ray/auth_token here, or export RAY_AUTH_TOKEN"
            ) from error
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # OSError covers those of requests
            raise ClusterError(
                f"--address={address}: no Ray dashboard answers there ({first_line(error)}); start the head node with "
                "`ray start --head --dashboard-host 0.0.0.0`, and check that this machine reaches that host and port"
            ) from error


def send(client: Client, job_id: str, package: Path, config: Config) -> None:
    """Uploads the package and starts the job. Raises ClusterError if the cluster refuses it."""
    waits = config.timeouts
    stop_s = waits.generate_s + waits.score_s + waits.update_s + waits.publish_s + 2 * waits.checkpoint_s
    # by default `ray job stop` sends SIGTERM and kills 3 s later: a step takes longer, and so do the
    # checkpoint that is being written and its own
    runtime_env = {"working_dir": str(package), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(int(stop_s))}}
    # exec: no shell in between that signals would end
    entrypoint = f"exec python -m jobs.cli train --submitted -c {CONFIG_NAME}"
    try:
        client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"{client.get_address()} did not accept job {job_id}: {first_line(error)}") from error


def how_to(client: Client, job_id: str) -> str:
    """The commands that follow and stop a job."""
    auth = "RAY_AUTH_MODE=token " if client.asked_for_token else ""
    where = f"--address {client.get_address()}"
    return (
        f"  follow: {auth}ray job logs {where} --follow {job_id}\n"
        f"  stop after the current step, with a checkpoint: {auth}ray job stop {where} {job_id}"
    )


async def follow(client: Client, job_id: str) -> JobDetails:
    """Prints the job's log until the job has ended. Raises ClusterError after LOST_CONTACT_TIMEOUT_S of silence.

    The stream is reopened when it breaks. The job's status, not the stream, says whether it has ended: a broken
    connection can look like an idle one forever.
    """
    log = LogStream()
    heard_at = time.monotonic()
    stream = asyncio.create_task(log.print_new(client, job_id))
    while True:
        await asyncio.wait({stream}, timeout=STATUS_EVERY_S)
        try:
            details = await asyncio.to_thread(client.get_job_info, job_id)
            heard_at = time.monotonic()
        except (OSError, RuntimeError, AuthenticationError) as error:
            if time.monotonic() - heard_at > LOST_CONTACT_TIMEOUT_S:
                raise ClusterError(
                    f"{client.get_address()}: no news of job {job_id} for {LOST_CONTACT_TIMEOUT_S:g} s "
                    f"({type(error).__name__}); it may still be running. When the cluster answers:\n"
                    f"{how_to(client, job_id)}"
                ) from error
            await asyncio.sleep(1)
            continue
        if details.status.is_terminal():
            await asyncio.wait({stream}, timeout=LAST_LINES_TIMEOUT_S)
            stream.cancel()
            return details
        if stream.done():
            await asyncio.sleep(1)
            stream = asyncio.create_task(log.print_new(client, job_id))


class LogStream:
    """Prints a job's log, each character once, however often the stream breaks and starts over."""

    def __init__(self) -> None:
        self._printed = 0  # characters
        self._trouble = ""

    async def print_new(self, client: Client, job_id: str) -> None:
        """Follows the log from its beginning, skipping what was printed, until the stream ends or breaks."""
        position = 0
        try:
            async with contextlib.aclosing(client.tail_job_logs(job_id)) as chunks:
                async for chunk in chunks:
                    print(chunk[max(0, self._printed - position) :], end="", flush=True)
                    position += len(chunk)
                    self._printed = max(self._printed, position)
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            if first_line(error) != self._trouble:  # said once: the status still shows when the job ends
                self._trouble = first_line(error)
                print(f"\nthe log of {job_id} cannot be followed right now ({self._trouble}); trying again", flush=True)


def report(details: JobDetails, job_id: str) -> int:
    """Prints one line on how the job ended, and returns the exit code."""
    if details.status is JobStatus.SUCCEEDED:
        print(f"{job_id} succeeded")
        return 0
    if details.status is JobStatus.STOPPED:
        print(f"{job_id} was stopped; submit it again to resume from its newest checkpoint")
        return INTERRUPTED
    code = details.driver_exit_code
    if code is None:  # it never ran, so there is no log
        print(f"{job_id} did not start: {details.message}")
        return 1
    print(f"{job_id} failed with exit code {code}")
    return code if code > 0 else 1  # negative: killed by that signal


@contextlib.contextmanager
def unset(*names: str) -> Iterator[None]:
    """Hides environment variables for a while."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
