"""A worker that speaks the real messages over a real socket, and generates what a script tells it to."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import zmq

from kvrelay.channel import Connection
from kvrelay.messages import (
    Abort,
    AboutPrompt,
    AnyMessage,
    DecodeStarted,
    GatewayHello,
    GenerateRequest,
    Ledger,
    Message,
    PrefillRequest,
    RequestFailed,
    StepOutput,
    TokenOutput,
    WorkerHello,
    WorkerLoad,
    WorkerStatus,
)
from kvrelay.types import FinishReason, RequestKey, Role, TokenLogprobs
from tests.gateway.nouns import hello

PATIENCE_S = 20.0  # keeps a failing test from hanging; no test depends on it

M = TypeVar("M", bound=Message)


class FakeWorker:
    """Connects to a gateway and does what the test says, one call at a time."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        incarnation: int,
        role: Role,
        **changes: Any,
    ) -> None:
        """Starts to connect; `changes` are those of its introduction."""
        self.hello: WorkerHello = hello(incarnation, role, **changes)
        self.incarnation = incarnation
        self.role = role
        self.heard: list[AnyMessage] = []
        self._connection = Connection(context, endpoint, incarnation=incarnation, numbers=count(), queue_early=True)
        self._gateway = 0

    def register(self) -> None:
        """Introduces itself and waits until the gateway knows it."""
        self.say(self.hello)
        self.expect(GatewayHello)
        self.say(self.status())

    def status(self) -> WorkerStatus:
        """A heartbeat."""
        ledger = Ledger(total=8, free=7, cached=0, leased=1, revoked=0)
        return WorkerStatus(source=self.incarnation, ledger=ledger, load=WorkerLoad(), counters={"stale_message": 2})

    def say(self, message: Message) -> None:
        """Sends."""
        self._connection.send(message)

    def expect(self, kind: type[M], where: Callable[[M], bool] = lambda message: True) -> M:
        """Waits for a message of a kind, and takes it out of what was heard."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.listen(0.02)
            for index, message in enumerate(self.heard):
                if isinstance(message, kind) and where(message):
                    del self.heard[index]
                    return message
        raise AssertionError(f"{self.hello.name} heard no {kind.__name__}.")

    def listen(self, seconds: float) -> None:
        """Takes what comes within that time."""
        if self._connection.socket.poll(int(1000 * seconds)):
            for message in self._connection.receive():
                self._gateway = message.source
                self.heard.append(message)

    def expect_prompt(self) -> PrefillRequest | GenerateRequest:
        """Waits for a request."""
        return self.expect(GenerateRequest) if self.role is Role.BOTH else self.expect(PrefillRequest)

    def expect_abort(self, key: RequestKey) -> Abort:
        """Waits until it is told to drop a request."""
        return self.expect(Abort, lambda abort: abort.key == key)

    def send_tokens(
        self,
        request: AboutPrompt,
        token_ids: list[int],
        *,
        start: int = 0,
        finish: FinishReason | None = None,
        cached_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Says some tokens in one message, with `logprobs` if any; with `finish`, the last one ends the sample."""
        outputs = tuple(
            TokenOutput(
                request_id=request.request_id,
                attempt=request.attempt,
                sample=0,
                index=start + index,
                token_id=token_id,
                finish_reason=finish if index == len(token_ids) - 1 else None,
                cached_tokens=0 if start + index else cached_tokens,
                logprobs=logprobs[index] if logprobs else None,
            )
            for index, token_id in enumerate(token_ids)
        )
        self.say(StepOutput(source=self.incarnation, target=self._gateway, outputs=outputs))

    def start_decode(self, request: AboutPrompt) -> None:
        """Says that it has the KV."""
        self.say(DecodeStarted(source=self.incarnation, request_id=request.request_id, attempt=request.attempt))

    def fail(self, request: AboutPrompt, code: str, message: str) -> None:
        """Gives a request up."""
        about: dict[str, Any] = {"request_id": request.request_id, "attempt": request.attempt}
        self.say(RequestFailed(source=self.incarnation, **about, code=code, message=message))

    def die(self) -> None:
        """Closes its socket, as the kernel does for a process that was killed."""
        if not self._connection.socket.closed:
            self._connection.close()
