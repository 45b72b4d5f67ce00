"""Parses bodies where they keep nobody waiting."""

import asyncio
from typing import TypeVar

from kvrelay.gateway.openai_api import Parsed, RequestBody, parse

LONG_BYTES = 32 * 2**10

B = TypeVar("B", bound=RequestBody)


class BodyParser:
    """Parses long bodies in a thread, so that heartbeats and streams go on: 4 MB of small objects take seconds.

    One at a time: several such threads would leave the event loop a small share of the interpreter.
    """

    def __init__(self) -> None:
        """Nothing is parsed yet."""
        self._turn = asyncio.Lock()

    async def parse(self, kind: type[B], raw: bytes) -> Parsed[B]:
        """Reads and checks a body. Raises InvalidRequest, see `openai_api.parse`."""
        if len(raw) <= LONG_BYTES:
            return parse(kind, raw)
        async with self._turn:
            return await asyncio.to_thread(parse, kind, raw)
