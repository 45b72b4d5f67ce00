"""The receiving end of shared memory: hands it out, hears which pieces were written, and watches who may write.

Whoever was given the memory can write until its process ends, also after the connection is closed. So each of them is
watched through a descriptor of its process, and that it ended is told once.
"""

import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass

from kvrelay.block_memory import BlockMemory
from kvrelay.errors import WireError
from kvrelay.logs import count_fault
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.transfer.protocol.piece import split, unpack
from kvrelay.transfer.shm_frames import (
    MAX_FRAME_BYTES,
    TOKEN_BYTES,
    Address,
    boot_id,
    pack_geometry,
    unpack_hello,
)
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
HELLO_S = 2.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Process:
    """A process that may write; `descriptor` becomes readable when it ends."""

    pid: int
    descriptor: int


class ShmListener:
    """Bound to a name that only the receiver's endpoint tells; belongs to the control thread."""

    def __init__(self, memory: BlockMemory, incarnation: Incarnation, counters: Counter[str]) -> None:
        """Listens. Raises OSError where the system cannot do this."""
        self.address = Address(boot_id(), f"kvrelay-{secrets.token_hex(8)}", secrets.token_bytes(TOKEN_BYTES))
        self._memory = memory
        self._incarnation = incarnation
        self._counters = counters
        self._strangers: dict[socket.socket, float] = {}  # connected, not known yet; until when they may say hello
        self._senders: dict[Incarnation, socket.socket] = {}
        self._processes: dict[Incarnation, Process] = {}
        self._news: list[MemoryShared | PeerExited] = []
        os.close(os.pidfd_open(os.getpid()))  # rather fail now than with the first sender
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address.abstract)
        self._socket.listen(MAX_STRANGERS)

    def sockets(self) -> list[int]:
        """What to poll: connections, and processes that may end."""
        sockets = [self._socket, *self._strangers, *self._senders.values()]
        return [each.fileno() for each in sockets] + [process.descriptor for process in self._processes.values()]

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that lie in our memory, until they exceed `max_bytes`; also lets new senders in."""
        self._accept()
        for stranger, until in list(self._strangers.items()):
            self._hear_stranger(stranger, until)
        pieces: list[Arrived] = []
        for incarnation in list(self._senders):
            while max_bytes > 0 and (frame := self._hear_sender(incarnation)) is not None:
                arrived, num_bytes = self._unpack(incarnation, frame)
                pieces += arrived
                max_bytes -= num_bytes
        return pieces

    def news(self) -> list[MemoryShared | PeerExited]:
        """Who was let in, and whose process ended, since the last call. Their last pieces come first."""
        for incarnation, process in list(self._processes.items()):
            if _events(process.descriptor):
                self._forget(incarnation)
                self._news.append(PeerExited(incarnation))
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Closes everything."""
        for incarnation in list(self._processes):
            self._forget(incarnation)
        for each in (*self._strangers, *self._senders.values(), self._socket):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                stranger, _ = self._socket.accept()
            except BlockingIOError:
                return
            stranger.setblocking(False)
            self._strangers[stranger] = time.monotonic() + HELLO_S
            if len(self._strangers) > MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)), "too many connections wait to be let in")

    def _hear_stranger(self, stranger: socket.socket, until: float) -> None:
        try:
            frame = stranger.recv(MAX_FRAME_BYTES)
            self._let_in(stranger, frame)
        except BlockingIOError:
            if time.monotonic() > until:
                self._refuse(stranger, "nothing was said")
        except (WireError, OSError) as error:
            self._refuse(stranger, str(error))

    def _let_in(self, stranger: socket.socket, frame: bytes) -> None:
        hello = unpack_hello(frame)
        token_is_right = hmac.compare_digest(hello.token, self.address.token)
        if not token_is_right or hello.receiver != self._incarnation:
            raise WireError("The token is wrong, or meant for another process.")
        self._watch(hello.sender, stranger)
        socket.send_fds(stranger, [pack_geometry(self._memory.geometry)], [self._memory.descriptor])
        del self._strangers[stranger]
        if (old := self._senders.pop(hello.sender, None)) is not None:
            old.close()
        self._senders[hello.sender] = stranger
        self._news.append(MemoryShared(hello.sender))
        self._counters["shm_shared"] += 1

    def _watch(self, incarnation: Incarnation, connection: socket.socket) -> None:
        """Raises WireError or OSError if the process cannot be watched: then it must not have our memory."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        known = self._processes.get(incarnation)
        if known is not None and known.pid == pid:
            return
        if known is not None:
            raise WireError(f"Incarnation {incarnation:016x} is another process already.")
        descriptor = os.pidfd_open(pid)
        if _events(connection.fileno()) & select.POLLHUP:  # it hung up, so the number may be another process's by now
            os.close(descriptor)
            raise WireError("The process that asked for the memory is gone.")
        self._processes[incarnation] = Process(pid, descriptor)

    def _hear_sender(self, incarnation: Incarnation) -> bytes | None:
        """The next packet; None if there is none, or the connection is over."""
        connection = self._senders.get(incarnation)
        if connection is None:
            return None
        try:
            frame = connection.recv(MAX_FRAME_BYTES + 1)  # so that one that is longer is noticed
        except BlockingIOError:
            return None
        except OSError:  # reset: as over as an orderly end
            frame = b""
        if not frame:
            self._senders.pop(incarnation).close()
            return None
        return frame

    def _unpack(self, sender: Incarnation, frame: bytes) -> tuple[list[Arrived], int]:
        """The pieces of a packet, and their bytes; garbage counts as a page, since it takes time to read."""
        try:
            headers = split(frame)
            num_bytes = sum(unpack(header).payload_bytes for header in headers)
        except WireError as error:
            count_fault(self._counters, "payload_malformed", log, f"Dropped: {error}")
            return [], 4096
        self._counters["shm_pieces_received"] += len(headers)
        self._counters["shm_bytes_received"] += num_bytes
        return [Arrived(sender, header, None) for header in headers], num_bytes

    def _refuse(self, stranger: socket.socket, reason: str) -> None:
        count_fault(self._counters, "shm_refused", log, f"Shared memory was refused to a process: {reason}")
        self._strangers.pop(stranger, None)
        stranger.close()

    def _forget(self, incarnation: Incarnation) -> None:
        os.close(self._processes.pop(incarnation).descriptor)
        if (connection := self._senders.pop(incarnation, None)) is not None:
            connection.close()


def _events(descriptor: int) -> int:
    """What `select.poll` says of it now."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return sum(events for _, events in poll.poll(0))
