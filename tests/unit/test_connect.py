"""Which cluster a run joins, and what it says of one that is not there."""

import socket
from pathlib import Path

import pytest
import ray

from actors.connect import connect
from rlhf.errors import ClusterError
from rlhf.recipes import load_config

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have joined a cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.parametrize("key", ["ray.address", "$RAY_ADDRESS"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, key: str, scheme: str
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{scheme}127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
        monkeypatch.setenv("RAY_ADDRESS", address if key == "$RAY_ADDRESS" else "127.0.0.1:1")
        overrides = [] if key == "$RAY_ADDRESS" else [f"ray.address={address}"]
        with (
            pytest.raises(ClusterError, match=r": no Ray cluster answers there \(") as caught,
            connect(load_config(CONF / "grpo_tiny.yaml", overrides)),
        ):
            pass
    assert str(caught.value).startswith(f"{key}={address}: ")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:{port}"])
def test_a_cluster_that_answers_is_joined(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    joined: list[str] = []
    monkeypatch.setattr(ray, "init", lambda *, address, **_: joined.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: joined.append("left"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.format(port=server.getsockname()[1])
        with connect(load_config(CONF / "grpo_tiny.yaml", [f"ray.address={address}"])):
            assert joined == [address]
    assert joined == [address, "left"]
