"""The limit that a hand-over is compared with: the same bytes over the same path by the plainest loop there is.

The sender digests each piece and copies it into shared memory, or gives it to a ZeroMQ socket; the receiver verifies
the digest, over ZeroMQ also copies the piece to where it belongs, and answers once when all are there. No leases, no
retries, no second thread.
"""

import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe

import xxhash
import zmq

from kvrelay.bench import transfer_limit_ucx
from kvrelay.bench.transfer_node import random_memory
from kvrelay.block_memory import BlockMemory
from kvrelay.types import KVLayout

PIECE_BYTES = 2**20
_HEADER = struct.Struct("<QQQ")  # begin, bytes, digest


def pieces(layout: KVLayout, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Begin and size in bytes of each piece, cut as a sender cuts them: 1 MiB at most, whole layers if they fit."""
    most = max(1, PIECE_BYTES // layout.block_bytes)
    num_layers = max(1, most // num_blocks)
    for layer in range(0, layout.num_layers, num_layers):
        num_together = min(num_layers, layout.num_layers - layer) * num_blocks
        for first in range(0, num_together, most):
            count = min(most, num_together - first)
            yield (layer * num_blocks + first) * layout.block_bytes, count * layout.block_bytes


def receive(pipe: Pipe, transport: str, layout: KVLayout, num_blocks: int) -> None:
    """The receiving process: says where it is, and receives until it is ended."""
    memory = random_memory(layout, num_blocks)
    if transport == "shm":
        _receive_shm(pipe, memory, layout, num_blocks)
    elif transport == "ucx":
        transfer_limit_ucx.receive(pipe, memory, pieces(layout, num_blocks))
    else:
        _receive_zmq(pipe, memory, layout, num_blocks)


def _receive_shm(pipe: Pipe, memory: BlockMemory, layout: KVLayout, num_blocks: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        socket.send_fds(connection, [b"memory"], [memory.descriptor])
        while True:
            for _ in pieces(layout, num_blocks):
                begin, size, digest = _HEADER.unpack(connection.recv(_HEADER.size))
                _verify(memory.buffer[begin : begin + size], digest)
            connection.send(b"all")


def _receive_zmq(pipe: Pipe, memory: BlockMemory, layout: KVLayout, num_blocks: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as connection:
        port = connection.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        while True:
            for _ in pieces(layout, num_blocks):
                header, payload = connection.recv_multipart()
                begin, size, digest = _HEADER.unpack(header)
                _verify(memoryview(payload), digest)
                memory.buffer[begin : begin + size] = payload
            connection.send(b"all")


def _verify(payload: memoryview, digest: int) -> None:
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise RuntimeError("A piece arrived damaged.")


class PlainSender:
    """Sends everything, as often as it is asked to."""

    def __init__(self, transport: str, address: str | bytes, layout: KVLayout, num_blocks: int) -> None:
        self._memory = random_memory(layout, num_blocks)
        self._pieces = list(pieces(layout, num_blocks))
        self._transport = transport
        if transport == "shm":
            self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._unix.connect(address)
            _, descriptors, _, _ = socket.recv_fds(self._unix, 16, 1)
            self._target = BlockMemory.open(self._memory.geometry, descriptors[0]).buffer
        else:
            self._zmq = zmq.Context().socket(zmq.PAIR)
            self._zmq.connect(str(address))

    def hand_over(self) -> float:
        """Seconds from the first piece to the answer."""
        begin_s = time.monotonic()
        if self._transport == "shm":
            self._write()
        else:
            self._send()
        return time.monotonic() - begin_s

    def close(self) -> None:
        """Closes the socket."""
        if self._transport == "shm":
            self._unix.close()
        else:
            self._zmq.close(linger=0)

    def _write(self) -> None:
        source, target = self._memory.buffer, self._target
        for begin, size in self._pieces:
            payload = source[begin : begin + size]
            target[begin : begin + size] = payload
            self._unix.send(_HEADER.pack(begin, size, xxhash.xxh3_64_intdigest(payload)))
        self._unix.recv(16)

    def _send(self) -> None:
        for begin, size in self._pieces:
            payload = self._memory.buffer[begin : begin + size]
            self._zmq.send_multipart([_HEADER.pack(begin, size, xxhash.xxh3_64_intdigest(payload)), payload])
        self._zmq.recv()
