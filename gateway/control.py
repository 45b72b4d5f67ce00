"""Moves messages between the workers' socket and the service, inside the event loop that also serves HTTP."""

import asyncio
from contextlib import suppress

import zmq

from kvrelay.channel import Listener
from kvrelay.gateway.service import Service
from kvrelay.messages import Message
from kvrelay.types import Incarnation

TICK_S = 0.1


class ControlLoop:
    """Reads when there is something to read, and keeps time.

    ZeroMQ tells of news by an edge on a file descriptor, and any call on the socket may take the edge away: so
    everything is read until nothing is left, also after each time something was sent.
    """

    def __init__(self, listener: Listener, *, heartbeat_s: float) -> None:
        """Does nothing before `run`."""
        self._listener = listener
        self._heartbeat_s = heartbeat_s
        self._news = asyncio.Event()
        self._stopping = False

    def send(self, worker: Incarnation, message: Message) -> bool:
        """Sends to a worker. False: it is not connected, or does not read."""
        self._news.set()
        return self._listener.send(worker, message)

    def stop(self) -> None:
        """Ends `run` soon."""
        self._stopping = True
        self._news.set()

    async def run(self, service: Service) -> None:
        """Until `stop`."""
        loop = asyncio.get_running_loop()
        descriptors = [int(each.getsockopt(zmq.FD)) for each in (self._listener.socket, self._listener.monitor)]
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._news.set)
        try:
            await self._run(service, loop)
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    async def _run(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        next_tick = next_beat = loop.time()
        while not self._stopping:
            self._news.clear()
            if self._hear(service):
                self._news.set()
            if loop.time() >= next_tick:
                next_tick = loop.time() + TICK_S
                service.tick()
            if loop.time() >= next_beat:
                next_beat = loop.time() + self._heartbeat_s
                service.beat()
            await self._rest(next_tick - loop.time())

    def _hear(self, service: Service) -> bool:
        """Takes what is there. True: there may be more."""
        messages = self._listener.receive()
        for peer, message in messages:
            if message is None:
                service.on_lost([peer])
            else:
                service.on_message(peer, message)
        service.on_lost(self._listener.lost())
        return bool(messages)

    async def _rest(self, seconds: float) -> None:
        """Lets HTTP go on, at least once round the loop, and at most until there is news or a tick is due."""
        if self._news.is_set():
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._news.wait()
