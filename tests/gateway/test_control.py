"""The loop between the workers' socket and the service."""

import asyncio
from collections import deque
from typing import Any

import pytest
import zmq

from kvrelay.gateway import control
from kvrelay.gateway.control import ControlLoop
from kvrelay.messages import GatewayHello, Message
from tests.gateway.fake_worker import PATIENCE_S
from tests.gateway.nouns import GATEWAY, status


class QuietListener:
    """Like a socket whose edge was taken away by a call to send: a message is there, but nothing tells of it."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket, self.monitor = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        self.waiting: deque[tuple[int, Message]] = deque()

    def send(self, peer: int, message: Message) -> bool:
        self.waiting.append((peer, status(peer)))
        return True

    def receive(self) -> list[tuple[int, Message]]:
        return [self.waiting.popleft()] if self.waiting else []

    def lost(self) -> list[int]:
        return []


class Service:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.num_ticks = self.num_beats = 0

    def on_message(self, peer: int, message: Message) -> None:
        self.heard.set()

    def on_lost(self, workers: list[int]) -> None: ...

    def tick(self) -> None:
        self.num_ticks += 1

    def beat(self) -> None:
        self.num_beats += 1


def test_what_came_while_something_was_sent_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TICK_S", 10 * PATIENCE_S)

    async def main(listener: Any, service: Any) -> None:
        loop = ControlLoop(listener, heartbeat_s=10 * PATIENCE_S)
        running = asyncio.create_task(loop.run(service))
        await asyncio.sleep(0.05)
        loop.send(7, GatewayHello(source=GATEWAY, registered=True))
        await asyncio.wait_for(service.heard.wait(), PATIENCE_S)
        loop.stop()
        await running
        assert service.num_ticks == service.num_beats == 1

    with zmq.Context() as context:
        listener = QuietListener(context)
        with listener.socket, listener.monitor:
            asyncio.run(main(listener, Service()))
