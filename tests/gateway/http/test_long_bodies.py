"""A body that takes long to parse keeps nobody else waiting: workers would take the gateway for dead."""

import threading
from collections.abc import Iterator

import pytest

from kvrelay.gateway import parsing
from kvrelay.gateway.openai_api import Parsed, RequestBody, parse
from kvrelay.messages import GenerateRequest
from kvrelay.types import FinishReason, Role
from tests.gateway.fake_worker import PATIENCE_S
from tests.gateway.http.running import Gateway

COMPLETIONS = "/v1/completions"


class SlowParsing:
    """Parsing that takes as long as a test likes."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def __call__(self, kind: type[RequestBody], raw: bytes) -> Parsed[RequestBody]:
        self.begun.release()
        if len(raw) > parsing.LONG_BYTES:
            assert self.go_on.wait(PATIENCE_S)
        return parse(kind, raw)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowParsing]:
    slow = SlowParsing()
    monkeypatch.setattr(parsing, "parse", slow)
    yield slow
    slow.go_on.set()


def test_others_are_served_meanwhile_and_one_is_parsed_at_a_time(gateway: Gateway, slow: SlowParsing) -> None:
    worker = gateway.worker(1, Role.BOTH)
    long = [gateway.client().post(COMPLETIONS, {"prompt": "x" * parsing.LONG_BYTES}) for _ in range(3)]
    assert slow.begun.acquire(timeout=PATIENCE_S)
    short = gateway.client().post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    worker.send_tokens(worker.expect(GenerateRequest), [65], finish=FinishReason.LENGTH)
    assert short.json()["choices"][0]["text"] == "A"
    assert slow.begun.acquire(timeout=PATIENCE_S)  # that of the short one
    assert not slow.begun.acquire(blocking=False)
    slow.go_on.set()
    assert [client.json()["error"]["code"] for client in long] == ["context_length_exceeded"] * 3
