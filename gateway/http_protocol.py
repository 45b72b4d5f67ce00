"""uvicorn's HTTP protocol with limits where it has none: on the size of a request's head, and on the time for it."""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrelay.errors import HeadTooLarge, InvalidRequest, RequestError
from kvrelay.gateway.answers import error_body, to_json

MAX_HEAD_BYTES = 64 * 2**10


class LimitedHttp(HttpToolsProtocol):
    """One connection. One that sends no whole head in time is closed, one that sends an endless head is refused.

    What counts is the bytes that came since the parser last had something to give: an endless chunk extension or
    trailer is of the same kind as an endless head.
    """

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        """`head_timeout_s` is the time from the connection, or a head's first byte, to the head's last."""
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_pending_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head should come."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what came."""
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes; send less."))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (the server gives one sentence for all)
        """What is not HTTP is answered with an error object too."""
        self._refuse(InvalidRequest("What came is not a valid HTTP request."))

    def on_message_begin(self) -> None:
        """A head has begun."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._num_pending_bytes = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body came."""
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._num_pending_bytes = 0
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_came()
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._on_head_timeout)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self._is_answering:  # an answer is not cut short because the next request does not come
            self._await_head()
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Answers and closes; in the middle of another answer it only closes."""
        if not self._is_answering:
            self.transport.write(_response(error))
        self.transport.close()


def _response(error: RequestError) -> bytes:
    content = to_json(error_body(error))
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content
