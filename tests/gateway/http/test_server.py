"""The gateway as a process: how it starts, what it cannot start with, and how it ends."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvrelay.config import GatewaySettings
from kvrelay.errors import AddressInUse
from kvrelay.gateway.server import bound, serve, uvicorn_config
from tests.gateway.fake_worker import PATIENCE_S
from tests.gateway.http.running import Client, write_checkpoint

_SERVING = re.compile(r"Serving (\S+) at (\S+)/v1; workers register at (\S+)\.")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_the_kernel_drops_clients_that_take_nothing() -> None:
    with bound("127.0.0.1", 0, 1.5) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def test_clients_give_idle_connections_up_before_the_gateway_does() -> None:
    """It would answer a request with a reset that comes while it closes the connection."""
    clients_s = httpx.Limits().keepalive_expiry
    assert clients_s is not None
    assert uvicorn_config(object(), GatewaySettings()).timeout_keep_alive > 2 * clients_s


def test_port_zero_takes_a_free_one() -> None:
    with bound("127.0.0.1", 0, 60.0) as one, bound("127.0.0.1", 0, 60.0) as other:
        assert 0 < one.getsockname()[1] != other.getsockname()[1] > 0


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    expected = "Address already in use; choose another --port"
    with taken_port() as port, pytest.raises(AddressInUse, match=expected), bound("127.0.0.1", port, 60.0):
        pass


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_one_clear_line(host: str) -> None:
    with pytest.raises(AddressInUse, match="choose another"), bound(host, 0, 60.0):
        pass


def test_the_address_for_workers_may_be_taken_too(tmp_path: Path) -> None:
    with taken_port() as port:
        settings = GatewaySettings(port=0, listen=f"tcp://127.0.0.1:{port}")
        with pytest.raises(AddressInUse, match=str(port)):
            asyncio.run(serve(settings, write_checkpoint(tmp_path), asyncio.Event()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model, as far as a gateway looks."""
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


@contextmanager
def process(model: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "kvrelay", "gateway", "--port", "0", "--listen", "tcp://127.0.0.1:0"]
    environ = {**os.environ, "KVRELAY_MODEL": str(model), "KVRELAY_CACHE_DIR": str(model / "cache")}
    started = subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, text=True)
    with started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process(model: Path, number: signal.Signals) -> None:
    with process(model) as gateway:
        assert gateway.stderr is not None
        serving = next(found for line in gateway.stderr if (found := _SERVING.search(line)))
        client = Client(serving[2]).get("/health")
        assert client.response.status == 200
        client.response.read()
        asked = time.monotonic()
        gateway.send_signal(number)
        assert gateway.wait(PATIENCE_S) == 0
        assert time.monotonic() - asked < 3.0
        client.close()
