"""One sender, as the receiving end of UCX sees it: headers come over TCP, payloads over UCX, and both make pieces."""

import time
from collections import deque

from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.transfer.protocol.piece import HEADER_BYTES, check_piece, unpack
from kvrelay.transfer.ucx_frames import HELLO_BYTES, PROBE, TAKEN, Stream, unpack_hello
from kvrelay.transfer.ucx_worker import Transfer
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

HELLO_S = 3.0
LINGER_S = 2.0  # what a sender sent before it left may still come


class UcxIncoming:
    """`sender` is 0 before its hello. Each method raises WireError for what no sender may do."""

    def __init__(self, stream: Stream, receiver: Incarnation, max_pieces: int) -> None:
        """`max_pieces` bounds what was announced and not taken yet."""
        self.stream = stream
        self.sender: Incarnation = 0
        self.known = False  # it said hello, and UCX brought its probe
        self._receiver = receiver
        self._max_pieces = max_pieces
        self._until: float | None = time.monotonic() + HELLO_S
        self._headers: deque[bytes] = deque()
        self._payloads: dict[int, Transfer] = {}
        self._next = 0

    @property
    def over(self) -> bool:
        """Nothing more comes, or it never began."""
        return self._until is not None and time.monotonic() >= self._until

    def put(self, number: int, payload: Transfer) -> None:
        """UCX begins to bring a payload."""
        if not self._next <= number <= self._next + self._max_pieces or number in self._payloads:
            raise WireError("UCX brought a payload that is none of the next.")
        self._payloads[number] = payload

    def hear(self) -> None:
        """Takes the hello and headers, and notices the end."""
        self.stream.hear(HELLO_BYTES + self._max_pieces * HEADER_BYTES)
        if not self.sender and (hello := self.stream.take(HELLO_BYTES)) is not None:
            sender, receiver = unpack_hello(hello)
            if receiver != self._receiver or not sender:
                raise WireError("A hello was meant for another process.")
            self.sender = sender
        while self.sender and (header := self.stream.take(HEADER_BYTES)) is not None:
            unpack(header)
            self._headers.append(header)
        if len(self._headers) > self._max_pieces:
            raise WireError("More pieces were announced than may be under way.")
        if self.stream.ended and self._until is None:
            self.leave()

    def leave(self) -> None:
        """The sender is gone, or has come again: only what was announced is waited for."""
        self._until = time.monotonic() + (LINGER_S if self._headers else 0.0)

    def take_probe(self) -> bool:
        """Whether both hello and probe are there now; tells the sender. True once."""
        if self.known or not self.sender or (probe := self._take_payload()) is None:
            return False
        if isinstance(probe, DeviceBytes) or probe != PROBE:
            raise WireError("A connection began with something else than a probe.")
        self._until, self.known = None, True
        return True

    def take_piece(self) -> Arrived | None:
        """The next piece, once it is there whole; tells the sender."""
        if not self.known or not self._headers or (payload := self._take_payload()) is None:
            return None
        header = self._headers.popleft()
        check_piece(header, payload)
        return Arrived(self.sender, header, payload)

    def close(self) -> list[Transfer]:
        """Gives what is under way."""
        self.stream.close()
        return list(self._payloads.values())

    def _take_payload(self) -> memoryview | DeviceBytes | None:
        payload = self._payloads.get(self._next)
        if payload is None or not payload.done:
            return None
        del self._payloads[self._next]
        self._next += 1
        payload.check()
        if not self.stream.ended:  # one that left needs no answer, and its last pieces still count
            self.stream.send(TAKEN)
        taken: memoryview | DeviceBytes = payload.buffer
        return taken
