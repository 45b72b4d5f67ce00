"""A stand-in for a worker: speaks the real messages, computes nothing, so that a gateway can be measured alone.

Each token id tells when the token was made, in microseconds of the monotonic clock modulo `WINDOW_US`, from which
whoever receives it on the same machine can see for how long it was under way.
"""

import argparse
import os
import socket
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import zmq

from kvrelay.channel import Connection
from kvrelay.checkpoint import resolve
from kvrelay.messages import (
    Abort,
    AnyMessage,
    GatewayHello,
    GenerateRequest,
    Ledger,
    StepOutput,
    TokenOutput,
    WorkerHello,
    WorkerLoad,
    WorkerStatus,
)
from kvrelay.process import new_incarnation
from kvrelay.types import FinishReason, KVLayout, RequestKey, Role

FIRST_ID = 1000  # the lowest ids of many vocabularies have a meaning
WINDOW_US = 40_000
VOCAB_SIZE = FIRST_ID + WINDOW_US
STAND_IN = "stand-in"
MAX_NUM_SEQS = 512
_BEAT_S = 0.5


def token_made_at(now_s: float) -> int:
    """The token id that tells this time."""
    return FIRST_ID + int(1e6 * now_s) % WINDOW_US


def age_us(token_id: int, now_s: float) -> int:
    """Microseconds since the token was made, if it was less than `WINDOW_US` ago."""
    return (int(1e6 * now_s) - (token_id - FIRST_ID)) % WINDOW_US


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    num_generated: int = 0


class StandIn:
    """A worker of role `both`: one token for every request in each step."""

    def __init__(self, connection: Connection, hello: WorkerHello) -> None:
        """Introduces itself."""
        self._connection = connection
        self._hello = hello
        self._gateway = 0
        self._running: dict[RequestKey, _Running] = {}
        connection.send(hello)

    def step(self) -> None:
        """Takes messages, then makes a token for every request."""
        for message in self._connection.receive():
            self._take(message)
        outputs = tuple(self._next(running) for running in list(self._running.values()))
        if outputs:
            self._connection.send(StepOutput(source=self._hello.source, target=self._gateway, outputs=outputs))

    def beat(self) -> None:
        """The heartbeat."""
        ledger = Ledger(total=1, free=1, cached=0, leased=0, revoked=0)
        status = WorkerStatus(source=self._hello.source, ledger=ledger, load=WorkerLoad(), counters={})
        self._connection.send(status)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case GatewayHello(registered=False):
                self._connection.send(self._hello)
            case GenerateRequest():
                self._gateway = message.source
                self._running[message.key] = _Running(message)
            case Abort():
                self._running.pop(message.key, None)
            case _:
                return

    def _next(self, running: _Running) -> TokenOutput:
        request, index = running.request, running.num_generated
        running.num_generated += 1
        last = running.num_generated == request.params.max_tokens
        if last:
            del self._running[request.key]
        return TokenOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            sample=0,
            index=index,
            token_id=token_made_at(time.monotonic()),
            finish_reason=FinishReason.LENGTH if last else None,
        )


def main() -> None:
    """Serves a gateway until it is killed."""
    options = _arguments()
    incarnation = new_incarnation()
    connection = Connection(zmq.Context(), options.gateway, incarnation=incarnation, numbers=count(), queue_early=True)
    standin = StandIn(connection, _hello(incarnation, options.model, options.cache_dir))
    next_step, next_beat = time.monotonic(), 0.0
    while True:
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + _BEAT_S
            standin.beat()
        standin.step()
        next_step = max(next_step + options.step_s, time.monotonic())
        time.sleep(max(0.0, next_step - time.monotonic()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", required=True, help="address at which workers register")
    parser.add_argument("--model", required=True, help="that it says it runs")
    parser.add_argument("--cache-dir", type=Path, required=True, help="fetched models")
    parser.add_argument("--step-s", type=float, required=True, help="seconds between two tokens of a request")
    return parser.parse_args()


def _hello(incarnation: int, model: str, cache_dir: Path) -> WorkerHello:
    checkpoint = resolve(model, cache_dir)
    return WorkerHello(
        source=incarnation,
        name=STAND_IN,
        role=Role.BOTH,
        control_endpoint="tcp://127.0.0.1:1",
        data_endpoints={"zmq": "tcp://127.0.0.1:2"},
        model=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        max_model_len=8192,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32"),
        device="cpu",
        pid=os.getpid(),
        host=socket.gethostname(),
    )


if __name__ == "__main__":
    main()
