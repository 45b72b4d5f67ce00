"""Heads of requests that never end, in bytes or in time, and what is no HTTP at all."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvrelay.gateway.http_protocol import MAX_HEAD_BYTES
from kvrelay.messages import GenerateRequest
from kvrelay.types import FinishReason, Role
from tests.gateway.fake_worker import PATIENCE_S
from tests.gateway.http.running import Gateway, running

START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = b"x" * (MAX_HEAD_BYTES + 300 * 2**10)  # beyond what the server reads at once


@contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port or 0), timeout=PATIENCE_S) as client:
        yield client


def send(client: socket.socket, content: bytes) -> None:
    """The gateway may have closed the connection already, which is what the tests are about."""
    try:
        client.sendall(content)
    except OSError:
        return


def received(client: socket.socket) -> bytes:
    """All that comes until the gateway closes the connection."""
    parts = []
    try:
        while part := client.recv(2**16):
            parts.append(part)
    except ConnectionResetError:  # it had not read all that was sent
        pass
    return b"".join(parts)


def error_of(response: bytes) -> tuple[int, Any]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("endless", [b"GET /" + LARGE, START + b"A: " + LARGE, START + b"A: b\r\n" * (len(LARGE) // 6)])
def test_an_endless_head_is_refused(shared: Gateway, endless: bytes) -> None:
    with connected(shared) as client:
        for at in range(0, len(endless), 2**14):
            send(client, endless[at : at + 2**14])
        response = received(client)
    if response:  # it is lost where the client's kernel hears first that the rest was not read
        assert error_of(response)[0] in (400, 431)  # 400: the parser's own limit for a URL


@pytest.mark.parametrize("endless", [b"1;" + LARGE, b"0\r\n" + b"A: b\r\n" * (len(LARGE) // 6), b"0\r\nA: " + LARGE])
def test_endless_extensions_and_trailers_end_the_connection(shared: Gateway, endless: bytes) -> None:
    with connected(shared) as client:
        send(client, CHUNKED + endless)
        received(client)


def test_a_large_head_says_so(shared: Gateway) -> None:
    with connected(shared) as client:
        send(client, START + b"A: " + b"x" * MAX_HEAD_BYTES)
        status, error = error_of(received(client))
    assert (status, error["code"]) == (431, "head_too_large")
    assert error["message"].endswith(".")


def test_what_is_no_http_is_an_error_object_too(shared: Gateway) -> None:
    with connected(shared) as client:
        send(client, b"hello\r\n\r\n")
        status, error = error_of(received(client))
    assert (status, error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("begin", [b"", b"POST", START])
def test_a_head_that_does_not_come_in_time_ends_the_connection(tmp_path: Path, begin: bytes) -> None:
    with running(tmp_path, client_timeout_s=0.3) as gateway, connected(gateway) as client:
        send(client, begin)
        assert received(client) == b""


def test_an_answer_is_not_cut_short_because_the_next_head_does_not_come(tmp_path: Path) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    request = START + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with running(tmp_path, client_timeout_s=0.3) as gateway:
        worker = gateway.worker(1, Role.BOTH)
        with connected(gateway) as late, connected(gateway) as client:
            send(client, request + b"POST")
            asked = worker.expect(GenerateRequest)
            send(late, b"POST")
            assert received(late) == b""  # as long as the time for a head is
            worker.send_tokens(asked, [65], finish=FinishReason.LENGTH)
            assert b'"text":"A"' in received(client)


def test_a_body_that_trickles_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with running(tmp_path, request_timeout_s=0.3) as gateway, connected(gateway) as client:
        send(client, START + b"Content-Length: 1000\r\n\r\n{")
        assert error_of(client.recv(2**16))[1]["message"] == "The client had not sent its request after 0.3 s."
