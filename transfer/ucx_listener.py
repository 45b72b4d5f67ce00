"""The receiving end of UCX: lets senders in, and gives each payload that UCX brings to the one that announces it."""

import logging
import socket
from collections import Counter

from kvrelay.errors import WireError
from kvrelay.logs import count_fault
from kvrelay.transfer.ucx_frames import Stream, Welcome, split_tag
from kvrelay.transfer.ucx_incoming import UcxIncoming
from kvrelay.transfer.ucx_worker import Message, UcxWorker
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

MAX_STRANGERS = 64


class UcxListener:
    """Bound at an address of its own, beside UCX's; belongs to the control thread."""

    def __init__(
        self,
        host: str,
        ports: range,
        *,
        incarnation: Incarnation,
        worker: UcxWorker,
        counters: Counter[str],
        max_pieces: int,
        max_frame_bytes: int,
    ) -> None:
        """Listens. `max_pieces` and `max_frame_bytes` bound what one sender may have under way.

        Raises:
            OSError: no port is free, or the address is not of this machine.
        """
        self._incarnation = incarnation
        self._worker = worker
        self._counters = counters
        self._max_pieces = max_pieces
        self._max_frame_bytes = max_frame_bytes
        self._incoming: dict[int, UcxIncoming] = {}  # by the number of the connection
        self._last_number = 0
        self._socket = _listen(host, ports)
        self.endpoint = "tcp://{}:{}".format(*self._socket.getsockname())

    def descriptors(self) -> list[int]:
        """What to poll for connections, and for what is said on them."""
        return [
            self._socket.fileno(),
            *(each.stream.fileno() for each in self._incoming.values() if not each.stream.ended),
        ]

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that are there whole, until they exceed `max_bytes`; also lets new senders in."""
        self._accept()
        for message in self._worker.arrived():
            self._sort(message)
        pieces: list[Arrived] = []
        for number, incoming in list(self._incoming.items()):
            try:
                max_bytes = self._hear(incoming, pieces, max_bytes)
            except WireError as error:
                self._drop(number, str(error))
            if incoming.over:
                self._close(number)
        return pieces

    def close(self) -> None:
        """Closes everything."""
        for number in list(self._incoming):
            self._close(number)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # it left already, or too many files are open: then it waits
                return
            self._welcome(Stream(connected))

    def _welcome(self, stream: Stream) -> None:
        self._last_number += 1
        number = self._last_number
        self._incoming[number] = UcxIncoming(stream, self._incarnation, self._max_pieces)
        try:
            stream.send(Welcome(self._incarnation, number, self._worker.address, self._worker.on_device).pack())
        except WireError as error:
            self._drop(number, str(error))
        strangers = [number for number, each in self._incoming.items() if not each.known]
        if len(strangers) > MAX_STRANGERS:
            self._drop(strangers[0], "Too many wait to be let in.")

    def _sort(self, message: Message) -> None:
        number, index, on_device = split_tag(message.tag)
        incoming = self._incoming.get(number)
        if message.num_bytes > self._max_frame_bytes:  # its sender waits with it in vain
            self._drop(number, f"A payload of {message.num_bytes} bytes is over the {self._max_frame_bytes} allowed.")
            return
        try:
            payload = self._worker.take(message, on_device=on_device)
        except WireError as error:  # likewise
            self._drop(number, str(error))
            return
        if incoming is None:  # it is over
            self._worker.abandon(payload)
            return
        try:
            incoming.put(index, payload)
        except WireError as error:
            self._worker.abandon(payload)
            self._drop(number, str(error))

    def _hear(self, incoming: UcxIncoming, pieces: list[Arrived], max_bytes: int) -> int:
        incoming.hear()
        if incoming.take_probe():
            self._let_in(incoming)
        while max_bytes > 0 and (piece := incoming.take_piece()) is not None:
            pieces.append(piece)
            max_bytes -= len(piece.payload or b"")
        return max_bytes

    def _let_in(self, new: UcxIncoming) -> None:
        """A sender that comes again has left its old connection."""
        for each in self._incoming.values():
            if each is not new and each.sender == new.sender:
                each.leave()

    def _drop(self, number: int, reason: str) -> None:
        """Ends a connection."""
        incoming = self._incoming.get(number)
        counter = "payload_malformed" if incoming is not None and incoming.known else "ucx_refused"
        count_fault(self._counters, counter, log, f"A connection for KV over UCX was closed: {reason}")
        self._close(number)

    def _close(self, number: int) -> None:
        if (incoming := self._incoming.pop(number, None)) is not None:
            for payload in incoming.close():
                self._worker.abandon(payload)


def _listen(host: str, ports: range) -> socket.socket:
    fault = OSError(0, "there is no port to try")
    for port in ports:
        try:
            listening = socket.create_server((host, port), backlog=MAX_STRANGERS)
        except OSError as error:
            fault = error
        else:
            listening.setblocking(False)
            return listening
    raise fault
