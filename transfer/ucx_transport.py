"""Payload over UCX, which finds the fastest way between two hosts by itself.

A sender connects by TCP to the receiver's endpoint, learns there where UCX finds the receiver, and says on that
connection which payload comes; UCX brings it as a message with a tag of its own. The TCP connection also tells, at
once, when the other process has ended. Received payload lies in memory of its own until the compute thread has
verified it, never in KV blocks: when a lease ends there is nothing to revoke. Where both have their KV on a device that
UCX reaches, payload is read from one device and written to the other.
"""

import os
from collections import Counter
from collections.abc import Sequence

from kvrelay.channel import port_range, split_endpoint
from kvrelay.device_memory import DeviceBytes, DeviceRoom
from kvrelay.errors import AddressInUse, WireError
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import Peer
from kvrelay.transfer.ucx_connection import UcxConnection
from kvrelay.transfer.ucx_listener import UcxListener
from kvrelay.transfer.ucx_worker import EVERY_ADDRESS, UcxWorker
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

NAME = "ucx"
MAX_FRAME_BYTES = 64 * 2**20
MAX_QUEUED_PIECES = 32
_FULL = 2**64 - 2  # of an eventfd: it can be read and not written


class UcxTransport:
    """For workers that have ucxx. Belongs to the control thread, but for `takes_device`."""

    def __init__(
        self,
        host: str,
        ports: str,
        *,
        incarnation: Incarnation,
        room: DeviceRoom | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_queued: int = MAX_QUEUED_PIECES,
    ) -> None:
        """Binds at `host`, to the first free port of `ports`; UCX takes another one of them.

        `max_queued` bounds the pieces, `max_frame_bytes` the bytes that a connection takes before the receiver has
        them; a peer that sends more at once is disconnected. `room` is on the device that has the KV, if one has; where
        UCX reaches it (`on_device`), payload comes from there and goes there when the peer is like this one.

        Raises:
            OSError: UCX is not installed or cannot be used here; `strerror` says why.
        """
        self.counters: Counter[str] = Counter()
        self._incarnation = incarnation
        self._max_frame_bytes = max_frame_bytes
        self._max_queued = max_queued
        self._connections: dict[Incarnation, UcxConnection] = {}
        host = EVERY_ADDRESS if host == "*" else host
        self._worker = UcxWorker(host, port_range(ports), room)
        self.on_device = self._worker.on_device
        try:
            self._listener = UcxListener(
                host,
                port_range(ports),
                incarnation=incarnation,
                worker=self._worker,
                counters=self.counters,
                max_pieces=max_queued,
                max_frame_bytes=max_frame_bytes,
            )
        except OSError:
            self._worker.close()
            raise
        self.endpoints = {NAME: self._listener.endpoint}
        self._room, self._no_room, self._work = os.eventfd(0), os.eventfd(0), os.eventfd(0)
        os.eventfd_write(self._no_room, _FULL)
        self._has_work = False  # and so `_work` can be read
        self._closed = False

    def takes_device(self, incarnation: Incarnation) -> bool:
        """Whether payload for a receiver may lie on our device. The compute thread asks before it packs a piece."""
        connection = self._connections.get(incarnation)
        return self.on_device and connection is not None and connection.takes_device

    def sockets(self) -> list[int]:
        """UCX's descriptor and each connection's. UCX must be asked before each wait, so call this right before."""
        connections = [each for connection in self._connections.values() for each in connection.descriptors]
        if not self._worker.is_quiet():
            self._call_for_work()
        return [self._work, self._worker.descriptor, *self._listener.descriptors(), *connections]

    def blocked(self) -> list[int]:
        """One descriptor for each connection whose last `send` returned False; it can be written if there is room now.

        That news comes as any other, by what `sockets` gives.
        """
        blocked = [connection for connection in self._connections.values() if connection.blocked]
        return [self._room if connection.has_room else self._no_room for connection in blocked]

    def connect(self, peer: Peer) -> None:
        """Begins to connect; a second call does nothing.

        Raises:
            WireError: the peer has no such endpoint, or a malformed one.
        """
        if peer.incarnation in self._connections:
            return
        if NAME not in peer.data_endpoints:
            raise WireError(f"{peer.name} does not take payload over UCX.")
        self._connections[peer.incarnation] = UcxConnection(
            _address(peer),
            sender=self._incarnation,
            receiver=peer.incarnation,
            name=peer.name,
            worker=self._worker,
            max_pieces=self._max_queued,
            max_bytes=self._max_frame_bytes,
        )

    def ready(self, incarnation: Incarnation) -> bool:
        """True when a first message got through.

        Raises:
            WireError: none did, or the connection is over.
        """
        connection = self._connections.get(incarnation)
        return connection is not None and connection.ready()

    def agreed(self, incarnation: Incarnation) -> str:
        """This one, for those that are connected."""
        return NAME if incarnation in self._connections else ""

    def forget(self, incarnation: Incarnation) -> None:
        """Closes the connection to a process that is gone, dropping what was not sent."""
        if (connection := self._connections.pop(incarnation, None)) is not None:
            connection.close()

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        """Begins to send one piece; False if too much is under way. `payload` is kept and read until it was taken.

        Raises:
            WireError: there is no way to this peer, or not any more, or there is no payload.
        """
        if payload is None:
            raise WireError(f"A piece for {peer.name} has no payload that UCX could carry.")
        self.connect(peer)
        if not self._connections[peer.incarnation].send(header, payload):
            self.counters["payload_would_block"] += 1
            return False
        self.counters["ucx_pieces_sent"] += 1
        self.counters["ucx_bytes_sent"] += len(payload)
        return True

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that are there now, until they exceed `max_bytes`; also hears what senders and receivers say."""
        if self._has_work:
            os.eventfd_read(self._work)
            self._has_work = False
        self._worker.progress()
        for connection in self._connections.values():
            connection.hear()
        pieces = self._listener.receive(max_bytes)
        num_bytes = sum(len(piece.payload or b"") for piece in pieces)
        if num_bytes >= max_bytes:  # there may be more
            self._call_for_work()
        self.counters["ucx_pieces_received"] += len(pieces)
        self.counters["ucx_bytes_received"] += num_bytes
        return pieces

    def news(self) -> Sequence[MemoryShared | PeerExited]:
        """None: nobody writes into this process by itself."""
        return ()

    def close(self) -> None:
        """Closes everything, dropping what was not sent; a second time is fine."""
        if self._closed:
            return
        self._closed = True
        for incarnation in list(self._connections):
            self.forget(incarnation)
        self._listener.close()
        self._worker.close()
        for descriptor in (self._room, self._no_room, self._work):
            os.close(descriptor)

    def _call_for_work(self) -> None:
        if not self._has_work:
            os.eventfd_write(self._work, 1)
            self._has_work = True


def _address(peer: Peer) -> tuple[str, int]:
    try:
        host, port = split_endpoint(peer.data_endpoints[NAME])
    except AddressInUse as error:
        raise WireError(f"{peer.name} cannot be reached over UCX: {error}") from error
    return host, int(port)
