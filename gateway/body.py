"""Reads request bodies within limits of size and time."""

import asyncio

from starlette.types import Message, Receive, Scope

from kvrelay.errors import BodyTooLarge, ClientGone


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float, whole_timeout_s: float
) -> bytes:
    """The whole body. One that says that it is too large is not read, one that proves to be is read no further.

    Raises:
        BodyTooLarge: more than `max_bytes` bytes.
        ClientGone: the client left, sent nothing for `timeout_s` seconds, or took longer than `whole_timeout_s`.
    """
    if _announced_bytes(scope) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(whole_timeout_s):
            return await _read(receive, max_bytes, timeout_s)
    except TimeoutError as error:
        raise ClientGone(f"The client had not sent its request after {whole_timeout_s:g} s.") from error


async def _read(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    body = bytearray()
    while True:
        message = await _next(receive, timeout_s)
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def _next(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError as error:
        raise ClientGone(f"The client sent nothing of its request for {timeout_s:g} s.") from error
    if message["type"] == "http.disconnect":
        raise ClientGone("The client left before it had sent its request.")
    return message


def _announced_bytes(scope: Scope) -> int:
    """What Content-Length says; 0 if it is missing (chunked), since the server has checked that it is a number."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() else 0


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the {max_bytes} bytes that --max-body-bytes allows; send less.")
