"""Every kind of bad input: the right status, OpenAI's error object, and workers that never hear of it."""

from typing import Any

import pytest

from kvrelay.messages import GenerateRequest
from kvrelay.types import FinishReason, Role
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.http.running import Gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def worker(shared: Gateway) -> FakeWorker:
    """A colocated worker with a context of 256 tokens."""
    return shared.worker(1, Role.BOTH)


def refused(shared: Gateway, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error object, after checking that it is one."""
    client = shared.client().post(path, body, **headers)
    error = client.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert client.response.headers["content-type"] == "application/json"
    assert client.response.headers["x-request-id"]
    return client.response.status, error


@pytest.fixture(autouse=True)
def unharmed(shared: Gateway, worker: FakeWorker) -> Any:
    """The worker hears of no bad request, and the next good one is served."""
    yield
    client = shared.client().post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 1})
    request = worker.expect(GenerateRequest)
    assert request.prompt_token_ids == (1, 2), "a refused request has reached the worker"
    worker.send_tokens(request, [65], finish=FinishReason.LENGTH)
    assert client.json()["choices"][0]["text"] == "A"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b"\x00\x01",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "nobody_knows": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "top_p": -Infinity}',
        b"[]",
        b'"prompt"',
        b"null",
        b"[" * 10_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_json(shared: Gateway, path: str, raw: bytes) -> None:
    status, error = refused(shared, path, raw)
    assert status == 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("user", 5),
        ("model", 5),
        ("n", 2),
        ("best_of", 3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"1": 2}),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("echo", True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_field_that_is_wrong_or_not_supported_is_named(shared: Gateway, path: str, param: str, value: object) -> None:
    status, error = refused(shared, path, {"messages": HI, "prompt": "a", param: value})
    assert status == 400
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "king", "content": "hi"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([*HI, {"role": "user", "content": [{"type": "image_url"}]}], "messages.1.content.0.type"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages.0.tool_calls"),
    ],
)
def test_messages_that_are_wrong(shared: Gateway, messages: object, param: str) -> None:
    status, error = refused(shared, CHAT, {"messages": messages})
    assert status == 400
    assert error["param"] == param


@pytest.mark.parametrize("field", ["tools", "tool_choice", "functions", "reasoning_effort", "modalities"])
def test_chat_fields_that_are_not_supported(shared: Gateway, field: str) -> None:
    status, error = refused(shared, CHAT, {"messages": HI, field: ["x"]})
    assert (status, error["param"]) == (400, field)


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [1.5], [True], 5, {"text": "a"}]
)
def test_prompts_that_are_wrong(shared: Gateway, prompt: object) -> None:
    status, error = refused(shared, COMPLETIONS, {"prompt": prompt})
    assert status == 400
    assert error["param"].startswith("prompt")


def test_several_prompts_are_said_to_be_not_supported_yet(shared: Gateway) -> None:
    _, error = refused(shared, COMPLETIONS, {"prompt": ["a", "b"]})
    assert "not supported yet" in error["message"]


@pytest.mark.parametrize("token_id", [258, 10**6, 2**31 - 1, 2**31, 2**70])
def test_token_ids_beyond_the_vocabulary(shared: Gateway, token_id: int) -> None:
    status, error = refused(shared, COMPLETIONS, {"prompt": [1, token_id]})
    assert status == 400
    assert str(token_id) in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [1] * 256}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 256}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 250}]}, "messages"),
    ],
)
def test_a_prompt_longer_than_the_context_names_both_numbers(
    shared: Gateway, path: str, body: dict[str, Any], param: str
) -> None:
    status, error = refused(shared, path, body)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "256 tokens" in error["message"] or "279 tokens" in error["message"]
    assert "context of 256 tokens" in error["message"]


def test_a_hopeless_prompt_is_refused_without_being_encoded(shared: Gateway) -> None:
    status, error = refused(shared, COMPLETIONS, {"prompt": "x" * 60_000})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "has at least" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model(shared: Gateway, path: str) -> None:
    status, error = refused(shared, path, {"model": "gpt-9", "messages": HI, "prompt": "a"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "tiny" in error["message"]


def test_a_large_body(shared: Gateway) -> None:
    status, error = refused(shared, COMPLETIONS, b'{"prompt": "' + b"x" * 10_000_000 + b'"}')
    assert (status, error["code"]) == (413, "body_too_large")
    assert "65536" in error["message"]


def test_a_body_that_is_announced_as_large_is_not_waited_for(shared: Gateway) -> None:
    client = shared.client()
    client.connection.putrequest("POST", COMPLETIONS)
    client.connection.putheader("Content-Length", "1000000000")
    client.connection.endheaders()
    assert client.response.status == 413


def test_a_large_body_of_unknown_length_is_read_no_further(shared: Gateway) -> None:
    """Not even its end is waited for: it never comes."""
    client = shared.client()
    client.connection.putrequest("POST", COMPLETIONS)
    client.connection.putheader("Transfer-Encoding", "chunked")
    client.connection.endheaders()
    for _ in range(80):
        client.connection.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
    assert client.response.status == 413


def test_a_body_at_the_limit_is_read(shared: Gateway) -> None:
    raw = b'{"prompt": "a", "temperature": 9}'
    status, error = refused(shared, COMPLETIONS, raw + b" " * (65536 - len(raw)))
    assert (status, error["param"]) == (400, "temperature")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_wrong_paths_and_methods_are_error_objects_too(shared: Gateway, method: str, path: str, status: int) -> None:
    client = shared.client()
    client.connection.request(method, path)
    error = client.json()["error"]
    assert client.response.status == status
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_fields_that_nobody_knows_are_ignored_and_counted(shared: Gateway, worker: FakeWorker) -> None:
    before = shared.metric("kvrelay_ignored_fields_total")
    body = {"messages": [{**HI[0], "mood": "good"}], "colour": "blue", "temperature": None, "n": 1, "max_tokens": 1}
    client = shared.client().post(CHAT, body)
    worker.send_tokens(worker.expect(GenerateRequest), [65], finish=FinishReason.LENGTH)
    assert client.response.status == 200
    assert shared.metric("kvrelay_ignored_fields_total") == before + 2
