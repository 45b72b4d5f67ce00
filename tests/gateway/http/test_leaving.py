"""Clients that leave, or that stop reading: the work for them stops."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvrelay.messages import OutputAck
from kvrelay.types import FinishReason
from tests.gateway.fake_worker import PATIENCE_S
from tests.gateway.http.running import Gateway, running

COMPLETIONS = "/v1/completions"


def test_a_client_leaves_while_it_waits_for_a_whole_answer(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    request = prefill.expect_prompt()
    client.close()
    assert prefill.expect_abort(request.key).reason == "the client is gone"
    decode.expect_abort(request.key)
    assert gateway.cluster()["num_requests"] == 0
    assert gateway.metric('kvrelay_requests_total{outcome="client_gone"}') == 1


def test_a_client_leaves_before_the_first_token_of_a_stream(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    client.close()
    prefill.expect_abort(request.key)
    decode.expect_abort(request.key)


def test_a_client_leaves_in_the_middle_of_a_stream(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    prefill.send_tokens(request, [65])
    client.event()
    decode.start_decode(request)
    client.close()
    prefill.expect_abort(request.key)
    decode.expect_abort(request.key)
    assert gateway.cluster()["num_requests"] == 0
    assert gateway.metric("kvrelay_requests_in_flight") == 0


def test_tokens_that_come_after_a_client_left_are_answered_with_abort(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    client.close()
    decode.expect_abort(request.key)
    decode.send_tokens(request, [66], start=1)
    assert "does not own" in decode.expect_abort(request.key).reason
    assert gateway.metric('kvrelay_gateway_events_total{event="unowned_tokens"}') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_only_its_sending_side_has_left(gateway: Gateway, stream: bool) -> None:
    """As `curl` does when it is interrupted: nobody can be told from the other kind, and work must not go on."""
    prefill, _ = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": stream})
    request = prefill.expect_prompt()
    client.connection.sock.shutdown(socket.SHUT_WR)
    prefill.expect_abort(request.key)


def test_a_client_that_reads_nothing_is_cancelled(tmp_path: Path) -> None:
    with running(tmp_path, client_timeout_s=0.5) as gateway:
        prefill, decode = gateway.pair(max_model_len=100_000)
        body = {"prompt": "x", "stream": True, "max_tokens": 50_000, "return_token_ids": True}
        gateway.client(receive_buffer=4096).post(COMPLETIONS, body)
        request = prefill.expect_prompt()
        decode.start_decode(request)
        for start in range(0, 6000, 100):
            decode.send_tokens(request, [65] * 100, start=start)
        decode.expect_abort(request.key)
        prefill.expect_abort(request.key)
        assert gateway.metric('kvrelay_requests_total{outcome="client_gone"}') == 1
        assert gateway.metric("kvrelay_requests_in_flight") == 0


def test_a_client_that_begins_to_read_late_gets_everything(gateway: Gateway) -> None:
    prefill, decode = gateway.pair(max_model_len=100_000)
    body = {"prompt": "x", "stream": True, "max_tokens": 3000}
    client = gateway.client(receive_buffer=4096).post(COMPLETIONS, body)
    request = prefill.expect_prompt()
    for start in range(0, 2900, 100):
        decode.send_tokens(request, [65] * 100, start=start)
    decode.send_tokens(request, [65] * 100, start=2900, finish=FinishReason.LENGTH)
    decode.expect(OutputAck)
    assert len(client.events()) == 3001


def test_a_client_that_never_sends_its_whole_body_is_let_go(tmp_path: Path) -> None:
    with running(tmp_path, client_timeout_s=0.3) as gateway:
        address = urlsplit(gateway.url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=PATIENCE_S) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert half.recv(4096).startswith(b"HTTP/1.1 499")
