"""A real gateway in a thread, on free ports, and a client that sends first and reads later."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tokenizers
import uvloop
import zmq
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvrelay.checkpoint import Checkpoint, CheckpointFormat
from kvrelay.config import GatewaySettings
from kvrelay.gateway.server import serve
from kvrelay.gateway.vocabulary import byte_alphabet
from kvrelay.types import Role
from tests.gateway.fake_worker import PATIENCE_S, FakeWorker
from tests.gateway.nouns import FINGERPRINT, MODEL

IM_START, IM_END = 256, 257
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path) -> Checkpoint:
    """A model without weights whose token ids are bytes, which makes scripts of tokens readable."""
    tokenizer = tokenizers.Tokenizer(BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(MODEL, folder, CheckpointFormat.HF, FINGERPRINT)


class Client:
    """One HTTP connection. Sending does not wait for an answer, so that a test can play the worker in between."""

    def __init__(self, url: str, *, receive_buffer: int | None = None) -> None:
        """Connects; `receive_buffer` bytes are what the kernel takes before the client reads."""
        address = urlsplit(url)
        self.connection = HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        if receive_buffer is None:
            self.connection.connect()
        else:
            self._connect_with(receive_buffer)
        self._response: HTTPResponse | None = None

    def _connect_with(self, receive_buffer: int) -> None:
        self.connection.sock = socket.socket()
        self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.connection.sock.settimeout(PATIENCE_S)
        self.connection.sock.connect((self.connection.host, self.connection.port))

    def post(self, path: str, body: object, **headers: str) -> "Client":
        """Sends a body: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._response = None
        self.connection.request("POST", path, raw, {"Content-Type": "application/json", **headers})
        return self

    def get(self, path: str) -> "Client":
        """Sends a GET."""
        self._response = None
        self.connection.request("GET", path)
        return self

    @property
    def response(self) -> HTTPResponse:
        """Status and headers, waited for."""
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    def json(self) -> Any:
        """The whole body."""
        return json.loads(self.response.read())

    def event(self) -> Any:
        """The next event of a stream: JSON, "[DONE]", or None at its end."""
        line = self.response.readline().decode()
        if not line:
            return None
        assert line.startswith("data: "), line
        assert self.response.readline() == b"\n"
        content = line.removeprefix("data: ").rstrip("\n")
        return content if content == "[DONE]" else json.loads(content)

    def events(self) -> list[Any]:
        """All events that are left, to the end of the stream."""
        return list(iter(self.event, None))

    def close(self) -> None:
        """Leaves, whatever is still to come."""
        if self._response is not None:
            self._response.close()
        self.connection.close()


@dataclass
class Gateway:
    """A running gateway."""

    url: str
    workers_at: str
    context: "zmq.Context[zmq.Socket[bytes]]"
    stop: Callable[[], object]
    clients: list[Client] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)

    def client(self, *, receive_buffer: int | None = None) -> Client:
        """A new connection."""
        client = Client(self.url, receive_buffer=receive_buffer)
        self.clients.append(client)
        return client

    def worker(self, incarnation: int, role: Role, **changes: Any) -> FakeWorker:
        """A registered worker; `changes` are those of its introduction."""
        worker = self.stranger(incarnation, role, **changes)
        worker.register()
        return worker

    def stranger(self, incarnation: int, role: Role, **changes: Any) -> FakeWorker:
        """A worker that has not said yet who it is."""
        worker = FakeWorker(self.context, self.workers_at, incarnation, role, **changes)
        self.workers.append(worker)
        return worker

    def pair(self, **changes: Any) -> tuple[FakeWorker, FakeWorker]:
        """A prefill and a decode worker."""
        return self.worker(1, Role.PREFILL, **changes), self.worker(2, Role.DECODE, **changes)

    def cluster(self) -> Any:
        """What `/cluster` says."""
        return self.client().get("/cluster").json()

    def metric(self, name: str) -> float:
        """The value of one line of `/metrics`, 0 if it is not there."""
        lines = self.client().get("/metrics").response.read().decode().splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(f"{name} "))

    def close(self) -> None:
        """Closes everything that tests opened."""
        for client in self.clients:
            client.close()
        for worker in self.workers:
            worker.die()


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Gateway]:
    """Starts a gateway and stops it. Times are long unless a test is about them."""
    given = {"port": 0, "listen": "tcp://127.0.0.1:0", "heartbeat_s": 0.2, "death_s": 60.0, **settings}
    loop, stopping, started = uvloop.new_event_loop(), asyncio.Event(), threading.Event()
    serving_at: list[str] = []

    def on_serving(url: str, workers_at: str) -> None:
        serving_at.extend((url, workers_at))
        started.set()

    async def main() -> None:
        await serve(GatewaySettings(**given), write_checkpoint(folder), stopping, on_serving=on_serving)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    with zmq.Context() as context:
        try:
            assert started.wait(PATIENCE_S)
            url, workers_at = serving_at
            gateway = Gateway(url, workers_at, context, lambda: loop.call_soon_threadsafe(stopping.set))
            try:
                yield gateway
            finally:
                gateway.close()
        finally:
            loop.call_soon_threadsafe(stopping.set)
            thread.join(PATIENCE_S)
            context.destroy(linger=0)
    assert not thread.is_alive()
    loop.close()
