"""Workers that die, fail, or are not there, and a gateway that is full or leaving."""

from pathlib import Path

import pytest

from kvrelay.gateway.generation import AnswerText, Piece, Token
from kvrelay.messages import GatewayHello, StepOutput
from kvrelay.types import FinishReason, RequestKey, Role
from tests.gateway.http.running import Gateway, running
from tests.gateway.nouns import token

COMPLETIONS = "/v1/completions"
LENGTH = FinishReason.LENGTH


@pytest.mark.parametrize("role", [None, Role.PREFILL, Role.DECODE])
def test_no_pair_of_workers_is_503_before_any_header(gateway: Gateway, role: Role | None) -> None:
    if role is not None:
        gateway.worker(1, role)
    for path in (COMPLETIONS, "/v1/chat/completions"):
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
        client = gateway.client().post(path, body)
        assert client.response.status == 503
        assert client.response.headers["retry-after"] == "1"
        assert client.json()["error"]["code"] == "no_workers"
    ready = gateway.client().get("/ready")
    assert ready.response.status == 503
    assert ready.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("stream", [False, True])
def test_the_prefill_worker_dies_before_the_first_token(gateway: Gateway, stream: bool) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": stream})
    request = prefill.expect_prompt()
    prefill.die()
    assert client.response.status == 503
    assert client.json()["error"]["code"] == "worker_lost"
    decode.expect_abort(request.key)
    snapshot = gateway.cluster()
    assert not snapshot["ready"]
    assert snapshot["num_requests"] == 0
    assert [loss["name"] for loss in snapshot["lost"]] == ["prefill-1"]
    assert gateway.client().get("/ready").response.status == 503


def test_the_decode_worker_dies_after_the_first_byte(gateway: Gateway) -> None:
    """Elsewhere the stream just stopped then. It must say why, and end as HTTP ends."""
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    prefill.send_tokens(request, [65])
    decode.start_decode(request)
    decode.send_tokens(request, [66], start=1)
    assert [client.event()["choices"][0]["text"] for _ in range(2)] == ["A", "B"]
    decode.die()
    (last,) = client.events()
    assert last["error"]["code"] == "worker_lost"
    assert last["error"]["type"] == "server_error"
    prefill.expect_abort(request.key)
    assert gateway.metric('kvrelay_requests_total{outcome="worker_lost"}') == 1


def test_the_decode_worker_dies_and_a_whole_answer_fails(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    request = prefill.expect_prompt()
    prefill.send_tokens(request, [65])
    decode.start_decode(request)
    decode.die()
    assert client.response.status == 503
    prefill.expect_abort(request.key)


def test_new_requests_go_elsewhere_after_a_death(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    other = gateway.worker(3, Role.DECODE)
    decode.die()
    client = gateway.client()
    while len(gateway.cluster()["workers"]) == 3:
        prefill.listen(0.01)
    client.post(COMPLETIONS, {"prompt": "x"})
    request = prefill.expect_prompt()
    assert [peer.incarnation for peer in request.candidates] == [3]  # type: ignore[union-attr]
    prefill.send_tokens(request, [65])
    other.send_tokens(request, [66], start=1, finish=LENGTH)
    assert client.json()["choices"][0]["text"] == "AB"


@pytest.mark.parametrize(("code", "status"), [("internal_error", 500), ("draining", 503), ("overloaded", 429)])
def test_the_prefill_leg_fails(gateway: Gateway, code: str, status: int) -> None:
    """Its error keeps its own status, and the decode leg is not left waiting."""
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    prefill.fail(request, code, "It did not work.")
    assert client.response.status == status
    assert (client.response.headers["retry-after"] is not None) == (status in (429, 503))
    error = client.json()["error"]
    assert (error["code"], error["message"]) == (code, "It did not work.")
    decode.expect_abort(request.key)


def test_a_failed_hand_over_is_tried_again_and_the_client_sees_one_answer(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    other = gateway.worker(3, Role.DECODE)
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    failed = prefill.expect_prompt()
    prefill.send_tokens(failed, [65])
    assert client.event()["choices"][0]["text"] == "A"
    first, second = (decode, other) if failed.candidates[0].incarnation == 2 else (other, decode)  # type: ignore[union-attr]
    first.fail(failed, "hand_over_failed", "It arrived damaged twice.")
    second.expect_abort(failed.key)
    again = prefill.expect_prompt()
    assert (again.request_id, again.attempt) == (failed.request_id, 1)
    assert again.candidates[-1].incarnation == first.incarnation  # type: ignore[union-attr]
    prefill.send_tokens(again, [65])
    second.start_decode(again)
    second.send_tokens(again, [66], start=1, finish=LENGTH)
    *texts, done = client.events()
    assert ("".join(event["choices"][0]["text"] for event in texts), done) == ("B", "[DONE]")
    assert gateway.cluster()["counters"]["retries"] == 1


def test_a_hand_over_that_fails_again_is_told(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    decode.fail(prefill.expect_prompt(), "hand_over_failed", "It arrived damaged twice.")
    decode.fail(prefill.expect_prompt(), "hand_over_failed", "It arrived damaged twice, again.")
    assert client.response.status == 500
    assert client.json()["error"]["message"] == "It arrived damaged twice, again."


def test_an_error_after_the_first_byte_is_an_event(gateway: Gateway) -> None:
    worker = gateway.worker(1, Role.BOTH)
    client = gateway.client().post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    request = worker.expect_prompt()
    worker.send_tokens(request, [65])
    assert client.event()["choices"][0]["delta"]["content"] == "A"
    worker.fail(request, "internal_error", "It broke.")
    assert client.events() == [
        {"error": {"message": "It broke.", "type": "server_error", "param": None, "code": "internal_error"}}
    ]


def test_a_fault_of_the_gateway_itself_is_told_and_logged(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = gateway.worker(1, Role.BOTH)
    monkeypatch.setattr(AnswerText, "push", _break_at_b)
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = worker.expect_prompt()
    worker.send_tokens(request, [65])
    client.event()
    worker.send_tokens(request, [66], start=1)
    (last,) = client.events()
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in last["error"]["message"]
    worker.expect_abort(request.key)
    whole = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    worker.send_tokens(worker.expect_prompt(), [66])
    assert whole.response.status == 500
    assert whole.json()["error"]["code"] == "internal_error"
    assert "secret detail" in caplog.text
    assert gateway.metric('kvrelay_requests_total{outcome="internal_error"}') == 2


def _break_at_b(_text: AnswerText, some: Token) -> Piece:
    if some.token_id == 66:
        raise RuntimeError("a secret detail")
    return Piece("A", some.token_id, None)


def test_the_deadline_of_a_request(tmp_path: Path) -> None:
    with running(tmp_path, request_timeout_s=0.3) as gateway:
        worker = gateway.worker(1, Role.BOTH)
        client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
        request = worker.expect_prompt()
        assert client.response.status == 504
        assert client.json()["error"]["code"] == "deadline_exceeded"
        worker.expect_abort(request.key)


def test_a_full_gateway_says_when_to_try_again(tmp_path: Path) -> None:
    with running(tmp_path, max_requests=2) as gateway:
        worker = gateway.worker(1, Role.BOTH)
        first, second = (gateway.client().post(COMPLETIONS, {"prompt": "x"}) for _ in range(2))
        requests = [worker.expect_prompt() for _ in range(2)]
        full = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
        assert full.response.status == 429
        assert full.response.headers["retry-after"] == "1"
        assert full.json()["error"]["type"] == "rate_limit_error"
        for request in requests:
            worker.send_tokens(request, [65], finish=LENGTH)
        assert first.response.status == second.response.status == 200
        first.response.read()
        while gateway.metric("kvrelay_requests_in_flight"):
            worker.listen(0.01)
        third = gateway.client().post(COMPLETIONS, {"prompt": "x"})
        worker.send_tokens(worker.expect_prompt(), [65], finish=LENGTH)
        assert third.response.status == 200


def test_a_refused_request_takes_no_place(tmp_path: Path) -> None:
    with running(tmp_path, max_requests=1) as gateway:
        for _ in range(3):
            assert gateway.client().post(COMPLETIONS, {"prompt": "x"}).response.status == 503
        worker = gateway.worker(1, Role.BOTH)
        client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
        worker.send_tokens(worker.expect_prompt(), [65], finish=LENGTH)
        assert client.response.status == 200


def test_an_open_stream_gets_its_error_when_the_gateway_stops(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    prefill.send_tokens(request, [65])
    client.event()
    waiting = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    prefill.expect_prompt()
    gateway.stop()
    (last,) = client.events()
    assert last["error"]["code"] == "draining"
    assert waiting.response.status == 503
    decode.expect_abort(request.key)


# workers that come, go and misbehave


def test_a_worker_hears_heartbeats(gateway: Gateway) -> None:
    worker = gateway.worker(1, Role.BOTH)
    for _ in range(3):
        assert worker.expect(GatewayHello).registered


def test_a_worker_that_the_gateway_does_not_know_is_asked_who_it_is(gateway: Gateway) -> None:
    worker = gateway.stranger(5, Role.BOTH)
    worker.say(worker.status())
    assert not worker.expect(GatewayHello).registered
    assert gateway.cluster()["workers"] == []
    worker.say(worker.hello)
    assert worker.expect(GatewayHello).registered


def test_a_silent_worker_is_dead_and_comes_back_when_it_speaks(tmp_path: Path) -> None:
    with running(tmp_path, death_s=0.4, heartbeat_s=0.1) as gateway:
        client, worker = gateway.client(), gateway.worker(1, Role.BOTH)
        worker.say(worker.status())  # nothing that takes time lies between its last sign of life and the request
        client.post(COMPLETIONS, {"prompt": "x"})
        request = worker.expect_prompt()
        assert client.response.status == 503
        assert client.json()["error"]["code"] == "worker_lost"
        worker.send_tokens(request, [65])
        worker.expect_abort(request.key)
        worker.say(worker.status())
        worker.expect(GatewayHello, lambda heard: not heard.registered)
        worker.say(worker.hello)
        worker.expect(GatewayHello, lambda heard: heard.registered)


def test_a_worker_with_another_model_is_shown_and_not_used(gateway: Gateway) -> None:
    gateway.worker(1, Role.BOTH, fingerprint="0" * 64)
    (shown,) = gateway.cluster()["workers"]
    assert not shown["usable"]
    assert "start both with the same --model" in shown["reason"]
    assert gateway.client().get("/ready").response.status == 503


def test_tokens_of_a_request_that_nobody_made_are_answered_with_abort(gateway: Gateway) -> None:
    worker = gateway.worker(1, Role.BOTH)
    worker.say(StepOutput(source=1, outputs=(token(0, request_id="ghost", attempt=3),)))
    worker.expect_abort(RequestKey("ghost", 3))


def test_lost_and_repeated_tokens_do_not_reach_the_client(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x", "stream": True})
    request = prefill.expect_prompt()
    prefill.send_tokens(request, [65])
    decode.send_tokens(request, [66, 67], start=1)
    decode.send_tokens(request, [67, 68], start=2)
    decode.send_tokens(request, [69], start=4, finish=LENGTH)
    assert "".join(event["choices"][0]["text"] for event in client.events()[:-1]) == "ABCDE"


def test_two_workers_with_one_name_are_told_apart_in_metrics(gateway: Gateway) -> None:
    for incarnation in (1, 2):
        worker = gateway.stranger(incarnation, Role.BOTH)
        worker.hello = worker.hello.model_copy(update={"name": "worker-1"})
        worker.register()
    while any(shown["ledger"] is None for shown in gateway.cluster()["workers"]):
        worker.listen(0.01)
    for incarnation in (1, 2):
        name = f'kvrelay_kv_blocks{{role="both",state="free",worker="worker-1@{incarnation:016x}"}}'
        assert gateway.metric(name) == 7
