"""How payload moves between workers: one small Protocol, which every transport implements.

A transport belongs to one thread, the worker's control thread. It never blocks and never dies of what a peer sends.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import zmq

from kvrelay.errors import WireError
from kvrelay.messages import Peer
from kvrelay.transfer.protocol.piece import Payload, unpack
from kvrelay.types import Incarnation


class Transport(Protocol):
    """Moves packed pieces. `endpoint` is where peers reach this end; `counters` say what was dropped, and how often."""

    endpoint: str
    counters: Counter[str]

    def sockets(self) -> Iterable["zmq.Socket[bytes]"]:
        """What to poll for incoming payload. The set may change with each call of another method."""
        ...

    def blocked(self) -> Iterable["zmq.Socket[bytes]"]:
        """What to poll for room to send: the connections whose last `send` returned False."""
        ...

    def connect(self, peer: Peer) -> None:
        """Opens the connection early, so that the first piece need not wait for it. A second call does nothing.

        Raises:
            WireError: the peer's data endpoint is malformed.
        """
        ...

    def forget(self, incarnation: Incarnation) -> None:
        """Closes the connection to a process that is gone; what was not sent is dropped. Unknown ones are fine."""
        ...

    def send(self, peer: Peer, header: bytes, payload: bytes) -> bool:
        """Takes one piece, connecting if need be. False: it would block, nothing was taken, try again later.

        When it returns, neither buffer is read any more.
        """
        ...

    def receive(self, max_bytes: int) -> list[tuple[Incarnation, bytes, bytes]]:
        """Pieces that are there now, as (sender, packed header, payload), until they exceed `max_bytes` of payload.

        Headers are well-formed and fit their payload's size; digests and leases are the receiver's to check.
        """
        ...

    def close(self) -> None:
        """Closes everything; what was not sent is dropped."""
        ...


def check_piece(header: Payload, payload: Payload) -> None:
    """Makes sure that a header is one and that its payload is complete.

    Raises:
        WireError: malformed, truncated or too long.
    """
    expected, found = unpack(header).payload_bytes, memoryview(payload).nbytes
    if expected != found:
        raise WireError(f"A piece announces {expected} bytes of payload and brings {found}.")
