"""The sending end of UCX: one TCP connection to one receiver, and the UCX endpoint that it led to.

 connect            welcome            probe taken
─────────▶ STRANGE ─────────▶ PROBING ─────────────▶ READY
              │ refused, silent  │                     │ closed by the receiver, or by us, or UCX failed
              └──────────────────┴──▶ OVER ◀───────────┘
"""

import socket
import time
from collections import deque
from typing import Any

from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.transfer.ucx_frames import MAX_NUMBER, PROBE, TAKEN, Stream, pack_hello, tag
from kvrelay.transfer.ucx_worker import Transfer, UcxWorker
from kvrelay.types import Incarnation

ANSWER_S = 3.0
_MAX_WELCOME_BYTES = 2**16


class UcxConnection:
    """Belongs to the control thread. `blocked` says that the last `send` found no room.

    `takes_device` says that the receiver takes payload of a device on its device.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        sender: Incarnation,
        receiver: Incarnation,
        name: str,
        worker: UcxWorker,
        max_pieces: int,
        max_bytes: int,
    ) -> None:
        """Begins to connect to `name`. What was not taken there yet is bounded by `max_pieces` and `max_bytes`.

        Raises:
            WireError: there is no way to this address.
        """
        self.blocked = False
        self.takes_device = False
        self._incarnations = sender, receiver
        self._name = name
        self._worker = worker
        self._max_pieces, self._max_bytes = max_pieces, max_bytes
        self._until = time.monotonic() + ANSWER_S
        self._fault = ""
        self._endpoint: Any = None
        self._number = 0  # this connection's, at the receiver
        self._ready = False
        self._next = 0
        self._untaken: deque[Transfer] = deque()
        self._stream = Stream(_begin_to_connect(address, name))

    @property
    def descriptors(self) -> list[int]:
        """What to poll for answers."""
        return [] if self._fault else [self._stream.fileno()]

    @property
    def has_room(self) -> bool:
        """Whether one more piece may be under way, however large: a large one goes alone."""
        num_bytes = sum(len(each.buffer) for each in self._untaken)
        return len(self._untaken) < self._max_pieces and num_bytes < self._max_bytes

    def ready(self) -> bool:
        """True when a first message got through.

        Raises:
            WireError: none did, or the connection is over.
        """
        if self._fault:
            raise WireError(self._fault)
        if not self._ready and time.monotonic() > self._until:
            raise WireError(self._end(f"{self._name} did not answer over UCX within {ANSWER_S:g} s."))
        return self._ready

    def hear(self) -> None:
        """Takes answers, and notices the end of the connection."""
        if self._fault:
            return
        self._stream.hear(_MAX_WELCOME_BYTES)
        try:
            if self._endpoint is None:
                self._meet()
            if self._endpoint is not None:
                self._count_taken()
        except WireError as error:
            self._lost(error)
        if self._stream.ended and not self._fault:
            self._end(f"{self._name} takes nothing over UCX any more.")

    def send(self, header: bytes, payload: bytes | DeviceBytes) -> bool:
        """Begins to send one piece. False: it would block. `payload` is read until the receiver has it.

        Raises:
            WireError: the connection is over.
        """
        if not self.has_room:
            self.hear()
        if not self.ready() or not self.has_room:
            self.blocked = True
            return False
        try:
            self._stream.send(header)
            self._push(payload)
        except WireError as error:
            raise WireError(self._lost(error)) from error
        self.blocked = False
        return True

    def close(self) -> None:
        """What was not sent is dropped."""
        self._end(f"The connection to {self._name} is closed.")

    def _meet(self) -> None:
        welcome = self._stream.take_welcome()
        if welcome is None:
            return
        if welcome.receiver != self._incarnations[1]:
            raise WireError("Another process answers at its address.")
        self._number, self.takes_device = welcome.connection, welcome.on_device
        self._endpoint = self._worker.connect(welcome.address)
        self._stream.send(pack_hello(*self._incarnations))
        self._push(PROBE)

    def _push(self, payload: bytes | DeviceBytes) -> None:
        if self._next > MAX_NUMBER:
            raise WireError("All numbers of this connection are used up.")
        name = tag(self._number, self._next, on_device=isinstance(payload, DeviceBytes))
        self._untaken.append(self._worker.send(self._endpoint, name, payload))
        self._next += 1

    def _count_taken(self) -> None:
        if not self._endpoint.alive:
            raise WireError("UCX lost the connection.")
        for answer in self._stream.take_all():
            if answer != TAKEN[0] or not self._untaken:
                raise WireError("It said something unexpected.")
            transfer = self._untaken.popleft()
            transfer.check()
            self._worker.abandon(transfer)
            self._ready = True

    def _lost(self, error: WireError) -> str:
        return self._end(f"Nothing goes to {self._name} over UCX any more: {error}")

    def _end(self, fault: str) -> str:
        """The first fault is the one that is told."""
        self._fault, self.blocked = self._fault or fault, False
        self._stream.close()
        if self._endpoint is not None:
            self._worker.disconnect(self._endpoint)
            self._endpoint = None
        while self._untaken:
            self._worker.abandon(self._untaken.popleft())
        return self._fault


def _begin_to_connect(address: tuple[str, int], name: str) -> socket.socket:
    connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connecting.connect(address)
    except BlockingIOError:
        return connecting  # the receiver speaks first, so that it is heard when the connection is up
    except (OSError, UnicodeError, OverflowError) as error:
        connecting.close()
        raise WireError(f"{name} cannot be reached at {address[0]}:{address[1]}: {error}.") from error
    return connecting
