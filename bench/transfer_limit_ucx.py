"""The limit of a hand-over by UCX: a digest and a place on a socket, the payload as one message, and a copy."""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection as Pipe

import xxhash

from kvrelay.block_memory import BlockMemory
from kvrelay.transfer.ucx_worker import Message, Transfer, UcxWorker

HOST = "127.0.0.1"
MAX_WAIT_S = 1.0
_HEADER = struct.Struct("<QQQ")  # begin, bytes, digest
Piece = tuple[int, int]


def receive(pipe: Pipe, memory: BlockMemory, pieces: Iterable[Piece]) -> None:
    """Says where it is, and receives all of the pieces again and again."""
    worker = _Waiting()
    with socket.create_server((HOST, 0)) as listener:
        pipe.send((listener.getsockname(), worker.ucx.address))
        connection, _ = listener.accept()
    headers = connection.makefile("rb")
    expected = list(pieces)
    while True:
        for _ in expected:
            begin, size, digest = _HEADER.unpack(headers.read(_HEADER.size))
            payload = memoryview(worker.next_payload())
            if xxhash.xxh3_64_intdigest(payload) != digest:
                raise RuntimeError("A piece arrived damaged.")
            memory.buffer[begin : begin + size] = payload
        connection.send(b"all")


class PlainUcxSender:
    """Sends everything, as often as it is asked to."""

    def __init__(self, address: tuple[tuple[str, int], bytes], memory: BlockMemory, pieces: Iterable[Piece]) -> None:
        self._memory = memory
        self._pieces = list(pieces)
        self._socket = socket.create_connection(address[0])
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._worker = _Waiting()
        self._endpoint = self._worker.ucx.connect(address[1])

    def hand_over(self) -> float:
        """Seconds from the first piece to the answer."""
        begin_s = time.monotonic()
        for begin, size in self._pieces:
            payload = self._memory.buffer[begin : begin + size]
            self._socket.send(_HEADER.pack(begin, size, xxhash.xxh3_64_intdigest(payload)))
            self._worker.finish(self._worker.ucx.send(self._endpoint, 0, payload))
        self._socket.recv(16)
        return time.monotonic() - begin_s

    def close(self) -> None:
        """Closes everything."""
        self._worker.ucx.disconnect(self._endpoint)
        self._worker.ucx.close()
        self._socket.close()


class _Waiting:
    """A UCX worker that waits for what is asked of it."""

    def __init__(self) -> None:
        self.ucx = UcxWorker(HOST, range(1))
        self._messages: deque[Message] = deque()

    def next_payload(self) -> memoryview:
        """Of the next message that comes."""
        while not self._messages:
            self._messages += self.ucx.arrived()
            if not self._messages:
                self._wait()
        transfer = self.ucx.take(self._messages.popleft())
        self.finish(transfer)
        return memoryview(transfer.buffer)

    def finish(self, transfer: Transfer) -> None:
        """Waits until UCX is done with it."""
        while not transfer.done:
            self._wait()

    def _wait(self) -> None:
        if self.ucx.is_quiet():
            select.select([self.ucx.descriptor], [], [], MAX_WAIT_S)
        self.ucx.progress()
