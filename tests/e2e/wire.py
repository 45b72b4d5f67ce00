"""A gateway made of nothing but a socket, and real workers that register at it, for tests that speak the protocol."""

import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq

from kvrelay.channel import Connection, Listener
from kvrelay.messages import (
    AnyMessage,
    GatewayHello,
    KVOffer,
    Message,
    Peer,
    PrefillRequest,
    StepOutput,
    WorkerHello,
    WorkerStatus,
)
from kvrelay.types import Incarnation, SamplingParams
from tests.e2e.cluster import ended, environment, wait_for

GATEWAY: Incarnation = 77
M = TypeVar("M", bound=Message)


@dataclass
class WireGateway:
    """Hears workers, keeps them alive with heartbeats, and remembers what they said."""

    listener: Listener
    context: "zmq.Context[zmq.Socket[bytes]]"
    hellos: dict[str, WorkerHello] = field(default_factory=dict)  # by name
    statuses: dict[Incarnation, WorkerStatus] = field(default_factory=dict)
    said: deque[tuple[Incarnation, AnyMessage]] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def hear(self) -> int:
        """Takes what is there, beats, and says how many workers have registered."""
        for peer, message in self.listener.receive():
            if isinstance(message, WorkerHello):
                self.hellos[message.name] = message
            elif isinstance(message, WorkerStatus):
                self.statuses[peer] = message
            elif message is not None:
                self.said.append((peer, message))
        for hello in self.hellos.values():
            self.listener.send(hello.source, GatewayHello(source=GATEWAY, target=hello.source, registered=True))
        return len(self.hellos)

    def send(self, worker: WorkerHello, message: Message) -> None:
        """Says something to a worker."""
        assert self.listener.send(worker.source, message)

    def next(self, kind: type[M], request_id: str | None = None) -> M:
        """The next message of a kind (about a request); others are dropped."""

        def look() -> list[M]:
            self.hear()
            while self.said:
                _, message = self.said.popleft()
                if isinstance(message, kind) and request_id in (None, _request_of(message)):
                    return [message]
            return []

        return wait_for(f"a {kind.__name__}", look)[0]

    def status(self, worker: WorkerHello, check: Callable[[WorkerStatus], bool]) -> WorkerStatus:
        """A heartbeat of a worker for which `check` holds."""

        def look() -> list[WorkerStatus]:
            self.hear()
            status = self.statuses.get(worker.source)
            return [status] if status and check(status) else []

        return wait_for(f"a heartbeat of {worker.name}; the last is {self.statuses.get(worker.source)}", look)[0]

    def connect(self, worker: WorkerHello, incarnation: Incarnation) -> Connection:
        """A connection to a worker as a peer would make it."""
        return Connection(
            self.context,
            worker.control_endpoint,
            incarnation=incarnation,
            numbers=self.numbers,
            queue_early=True,
        )

    def tokens(self, request_id: str, count: int) -> list[int]:
        """`count` tokens of a request, from whichever worker, in the order of their indexes."""
        found: dict[int, int] = {}
        while len(found) < count:
            step = self.next(StepOutput)
            found |= {output.index: output.token_id for output in step.outputs if output.request_id == request_id}
        return [found[index] for index in range(count)]


def _request_of(message: Message) -> str | None:
    if isinstance(message, StepOutput):
        return message.outputs[0].request_id
    return getattr(message, "request_id", None)


def as_peer(worker: WorkerHello) -> Peer:
    """A worker as a candidate for KV."""
    return Peer(
        name=worker.name,
        incarnation=worker.source,
        control_endpoint=worker.control_endpoint,
        data_endpoints=worker.data_endpoints,
    )


def prefill_request(
    worker: WorkerHello, candidates: tuple[WorkerHello, ...], request_id: str, prompt: tuple[int, ...], max_tokens: int
) -> PrefillRequest:
    """A greedy request."""
    return PrefillRequest(
        source=GATEWAY,
        target=worker.source,
        request_id=request_id,
        attempt=0,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        candidates=tuple(as_peer(candidate) for candidate in candidates),
    )


def offer(worker: WorkerHello, source: Incarnation, request_id: str, **changes: object) -> KVOffer:
    """An offer that the worker would take, but for `changes`."""
    fields = {
        "source": source,
        "target": worker.source,
        "request_id": request_id,
        "attempt": 0,
        "prompt_token_ids": (1, 2, 3),
        "params": SamplingParams(max_tokens=4, temperature=0.0),
        "gateway": GATEWAY,
        "fingerprint": worker.fingerprint,
        "layout": worker.layout,
        "lease_s": 5.0,
    }
    return KVOffer.model_validate({**fields, **changes})


@contextmanager
def wire_gateway(folder: Path, model: Path, **roles: dict[str, object]) -> Iterator[WireGateway]:
    """A wire gateway with one worker for each name; a worker's options include its `role`. All are registered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = WireGateway(Listener(context, "127.0.0.1", "0", incarnation=GATEWAY), context)
    processes = [_start(folder, model, gateway.listener.endpoint, name, options) for name, options in roles.items()]
    try:
        wait_for("all workers", lambda: gateway.hear() == len(roles), 60)
        yield gateway
    finally:
        codes = ended(processes)
        gateway.listener.close()
        context.destroy(linger=0)
    assert codes == [0] * len(codes)


def _start(folder: Path, model: Path, gateway: str, name: str, options: dict[str, object]) -> "subprocess.Popen[bytes]":
    command = "prefill" if options["role"] == "prefill" else "decode"
    given = {"model": model, "cache_dir": folder / "cache", "gateways": gateway, "name": name, **options}
    if command == "prefill":
        del given["role"]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvrelay", command, *(f"--{k.replace('_', '-')}={v}" for k, v in given.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
