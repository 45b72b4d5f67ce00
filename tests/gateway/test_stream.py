"""Sending to clients that do not read."""

import asyncio

import pytest
from starlette.types import Message

from kvrelay.errors import ClientGone
from kvrelay.gateway.stream import Sender


async def never(message: Message) -> None:
    """What the server's `send` is to a client that does not read."""
    await asyncio.Event().wait()


def test_a_client_that_does_not_read_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(ClientGone, match=r"read nothing for 0\.01 s"):
        asyncio.run(Sender(never, 0.01).body(b"x", more=True))


def test_nothing_is_not_sent() -> None:
    asyncio.run(Sender(never, 0.01).body(b"", more=True))


class Client:
    """Reads until it is told not to."""

    def __init__(self) -> None:
        self.reads = True

    async def send(self, message: Message) -> None:
        """The server's `send`."""
        if not self.reads:
            await never(message)


def test_nobody_is_late_while_there_is_nothing_to_send() -> None:
    async def answer() -> None:
        client = Client()
        sender = Sender(client.send, 0.01)
        for _ in range(3):
            await sender.body(b"x", more=True)
            await asyncio.sleep(0.02)  # longer than a part may take
        client.reads = False
        await sender.body(b"x", more=True)

    with pytest.raises(ClientGone):
        asyncio.run(answer())


def test_each_part_has_the_whole_time() -> None:
    async def answer() -> tuple[float, float]:
        loop, client = asyncio.get_running_loop(), Client()
        sender = Sender(client.send, 0.05)
        await sender.body(b"x", more=True)
        await asyncio.sleep(0.03)  # so that the timer of the first part goes off while the second waits
        client.reads = False
        begin = loop.time()
        with pytest.raises(ClientGone):
            await sender.body(b"x", more=True)
        return begin, loop.time()

    begin, end = asyncio.run(answer())
    assert end - begin >= 0.05


def test_whoever_ends_the_task_while_it_sends_ends_it() -> None:
    async def answer() -> bool:
        task = asyncio.ensure_future(Sender(never, 60).body(b"x", more=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(answer())
