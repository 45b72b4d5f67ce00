"""A TCP proxy between a sender and a receiver that delays, cuts or garbles what passes, where it is told to."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from kvrelay.channel import split_endpoint

CHUNK_BYTES = 2**14


class Kind(StrEnum):
    """What happens to the bytes from the place of the fault on."""

    DELAY = "delay"  # they come later
    CUT = "cut"  # the connection ends in front of them
    GARBLE = "garble"  # some are others


@dataclass(frozen=True)
class Fault:
    """Strikes once, `skip` bytes after it was set, counted over all connections in one direction.

    With `mark`, only bytes behind the next place where these bytes pass are counted.
    """

    kind: Kind
    to_server: bool
    skip: int
    mark: bytes = b""
    noise: bytes = b"\xff"  # is added (exclusive or) to what is garbled; no zeros
    delay_s: float = 0.0


class Noise:
    """Garbles, in one stream, the byte `skip` bytes behind every place where `mark` passes."""

    def __init__(self, mark: bytes, skip: int) -> None:
        """Nothing has passed yet."""
        self._mark = mark
        self._skip = skip
        self._tail = b""  # of what has passed, shorter than a mark
        self._places: list[int] = []  # in what comes next

    def passed(self, chunk: bytes) -> bytes:
        """What becomes of the next bytes of the stream; a mark may lie in two of them."""
        seen, garbled = self._tail + chunk, bytearray(chunk)
        begin = -1
        while (begin := seen.find(self._mark, begin + 1)) >= 0:
            self._places.append(begin + len(self._mark) + self._skip - len(self._tail))
        for place in self._places:
            if place < len(chunk):
                garbled[place] ^= 0xFF
        self._places = [place - len(chunk) for place in self._places if place >= len(chunk)]
        self._tail = seen[-(len(self._mark) - 1) :]
        return bytes(garbled)


class Proxy:
    """Listens at `endpoint` and brings what comes to `target`, in threads of its own."""

    def __init__(
        self, target: str, listen: str = "tcp://127.0.0.1:0", noise: Callable[[], Noise] | None = None
    ) -> None:
        """Endpoints are like `tcp://127.0.0.1:1234`. `noise` makes what garbles a connection to the target."""
        host, port = split_endpoint(target)
        self._target = host, int(port)
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._noise = noise
        address, port = split_endpoint(listen)
        self._listener = socket.create_server((address, int(port)))
        self.endpoint = f"tcp://{address}:{self._listener.getsockname()[1]}"
        self.num_struck = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, fault: Fault | None) -> None:
        """In place of the last one, whether that has struck or not."""
        with self._lock:
            self._fault = fault

    def cut(self) -> None:
        """Every connection ends."""
        with self._lock:
            ends = list(self._open)
        _shut(*ends)

    def close(self) -> None:
        """For good."""
        self._closed.set()
        _shut(self._listener)
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._connect(client)
        self._listener.close()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:  # nobody there: the client learns it as it would without a proxy
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        threading.Thread(target=self._pump, args=(client, server, True, back), daemon=True).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, to_server: bool, back: threading.Thread | None = None
    ) -> None:
        """Until either end closes. Descriptors are given back when nobody can use them any more, which is at the end
        of the pump that started the other one: somebody else of this process may get the same numbers."""
        if back is not None:
            back.start()
        noise = self._noise() if self._noise is not None and to_server else None
        with suppress(OSError):  # either end closed
            while chunk := source.recv(CHUNK_BYTES):
                chunk = chunk if noise is None else noise.passed(chunk)
                target.sendall(self._passed(chunk, to_server, source, target))
        _shut(source, target)
        if back is not None:
            back.join()
            with self._lock:
                self._open -= {source, target}
            source.close()
            target.close()

    def _passed(self, chunk: bytes, to_server: bool, source: socket.socket, target: socket.socket) -> bytes:
        """What is left of a chunk."""
        if (fault := self._due(chunk, to_server)) is None:
            return chunk
        before, after = chunk[: fault.skip], chunk[fault.skip :]
        match fault.kind:
            case Kind.DELAY:
                target.sendall(before)
                self._closed.wait(fault.delay_s)
                return after
            case Kind.CUT:
                target.sendall(before)
                _shut(source, target)
                return b""
            case Kind.GARBLE:
                noise = fault.noise[: len(after)]
                return before + bytes(a ^ b for a, b in zip(after, noise, strict=False)) + after[len(noise) :]

    def _due(self, chunk: bytes, to_server: bool) -> Fault | None:
        """The fault if it strikes in this chunk, with the place in it as `skip`."""
        with self._lock:
            fault = self._fault
            if fault is None or fault.to_server is not to_server or fault.mark not in chunk:
                return None
            place = chunk.find(fault.mark) + len(fault.mark) + fault.skip
            if place >= len(chunk):  # further on, or behind the next mark
                self._fault = fault if fault.mark else replace(fault, skip=place - len(chunk))
                return None
            self._fault = None
            self.num_struck += 1
            return replace(fault, skip=place)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):  # the peer was faster
            end.shutdown(socket.SHUT_RDWR)
