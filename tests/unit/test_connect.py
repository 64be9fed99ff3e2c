"""Which cluster a run joins or starts, what it says of one that is not there, and who gets the token. Ray is fake."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray._private import services, worker

from actors import connect as module
from actors.connect import connect, join
from rlhf.errors import ClusterError
from rlhf.recipes import load_config

CONF = Path(__file__).resolve().parents[2] / "conf"


class Head(grpc.GenericRpcHandler):
    """A head node's port, which wants a token ('': none) and notes what it is sent."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.sent: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(1), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, handler_call_details: Any) -> Any:
        assert handler_call_details.method in (module.PING, module.PING_CLIENT)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: Any) -> bytes:
        sent = dict(context.invocation_metadata()).get("authorization", "")
        self.sent.append(sent)
        if self.token and sent != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def head() -> Iterator[Callable[[str], Head]]:
    started: list[Head] = []

    def start(token: str) -> Head:
        started.append(Head(token))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is asked of Ray. Other tests of this process may have joined a cluster; and this user may have a token."""
    asked: list[str] = []

    def init(*, address: str, **_: Any) -> None:
        address = address.removeprefix("ray://")
        where = services.canonicalize_bootstrap_address(address) or services.get_node_ip_address()
        asked.append(f"{where}, {os.environ.get('RAY_AUTH_MODE')}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(worker, "_global_node", None)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(services, "find_node_ids", lambda: {"this machine's"})
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("left"))
    monkeypatch.setattr(module, "RayConfig", SimpleNamespace(initialize=lambda _: asked.append("reads anew")))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    return asked


@pytest.mark.parametrize("key", ["ray.address", "$RAY_ADDRESS"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, joined: list[str], key: str, scheme: str
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{scheme}127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address if key == "$RAY_ADDRESS" else "127.0.0.1:1")
        overrides = [] if key == "$RAY_ADDRESS" else [f"ray.address={address}"]
        with (
            pytest.raises(ClusterError, match=r": no Ray cluster answers there \(") as caught,
            connect(load_config(CONF / "grpo_tiny.yaml", overrides)),
        ):
            pass
    assert str(caught.value).startswith(f"{key}={address}: ")
    assert joined == [], "Ray would try for minutes"


def test_a_cluster_that_answers_is_joined_at_that_address_without_a_token(
    head: Callable[[str], Head], joined: list[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    asked = head("")
    with connect(load_config(CONF / "grpo_tiny.yaml", [f"ray.address={asked.address}"])):
        assert joined == [f"{asked.address}, None"], "not at the machine's address in the network"
    assert joined[1:] == ["left"]
    assert asked.sent == [""]


def test_auto_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, joined: list[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # stands for what Ray finds
    join("--address", "auto", "")
    assert joined == ["10.0.0.1:6379, None"]


def test_a_machine_that_is_no_node_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, head: Callable[[str], Head], joined: list[str]
) -> None:
    monkeypatch.setattr(services, "find_node_ids", set)
    with pytest.raises(ClusterError, match=r"^--address=.*: no Ray node runs on this machine; "):
        join("--address", head("").address, "")
    assert joined == []


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("kept_in", ["the file", "RAY_AUTH_TOKEN"])
def test_a_cluster_that_asks_for_a_token_gets_it(
    monkeypatch: pytest.MonkeyPatch,
    head: Callable[[str], Head],
    joined: list[str],
    tmp_path: Path,
    kept_in: str,
    scheme: str,
) -> None:
    (tmp_path / "token").write_text("secret\n" if kept_in == "the file" else "old")
    if kept_in == "RAY_AUTH_TOKEN":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    asking = head("secret")
    join("--address", scheme + asking.address, "")
    assert asking.sent == ["", "Bearer secret"]
    assert joined == ["reads anew", f"{asking.address}, token"]


def test_where_ray_is_told_how_to_authenticate_it_does_so_by_itself(
    monkeypatch: pytest.MonkeyPatch, head: Callable[[str], Head], joined: list[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    asking = head("a token that only Ray finds")
    join("--address", asking.address, "")
    assert (asking.sent, joined) == ([], [f"{asking.address}, token"])


@pytest.mark.parametrize(("token", "said"), [("", "there is none here"), ("other", "the token here is another one")])
def test_without_the_right_token_it_is_one_line_at_once(
    head: Callable[[str], Head], joined: list[str], tmp_path: Path, token: str, said: str
) -> None:
    (tmp_path / "token").write_text(token)
    asking = head("secret")
    with pytest.raises(ClusterError, match=rf"^--address={asking.address}: the cluster asks for a token, and {said}; "):
        join("--address", asking.address, "")
    assert joined == []


def test_a_local_cluster_listens_on_the_loopback_interface(joined: list[str]) -> None:
    usual = services.get_node_ip_address()
    with connect(load_config(CONF / "grpo_tiny.yaml", [])):
        assert joined == ["127.0.0.1, None"]
    assert services.get_node_ip_address() == usual
