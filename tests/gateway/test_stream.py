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
