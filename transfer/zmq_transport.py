"""Payload over ZeroMQ: a bound ROUTER hears every sender, one DEALER per receiver reaches it.

A piece is two frames, header and payload. The routing id is the sender's incarnation. Queues are short and bounded:
a receiver that does not read makes `send` say no, which is an event for the sender and no reason to wait.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import zmq

from kvrelay.channel import bind, parse_routing_id, routing_id
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import AddressInUse, WireError
from kvrelay.logs import count_fault
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import Peer
from kvrelay.transfer.protocol.piece import HEADER_BYTES, check_piece
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

NAME = "zmq"
MAX_FRAME_BYTES = 64 * 2**20
MAX_QUEUED_PIECES = 64  # in each direction of a connection; a sender makes none larger than 1 MiB
# A connection that died in silence (a cable, a firewall) is noticed by the kernel, and sooner by the control one, which
# takes this one with it. ZeroMQ's own heartbeats will not do: while a queue is full no pong is read, and a ping at a
# connection that is lost meanwhile aborts the process (libzmq issue 4364, open in 4.3.5).
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 3}


class ZmqTransport:
    """The transport that is always there."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        host: str,
        ports: str,
        *,
        incarnation: Incarnation,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_queued: int = MAX_QUEUED_PIECES,
    ) -> None:
        """Binds at `host` to the first free port of `ports` (`0`, `7000` or `7000-7010`).

        `max_queued` bounds the pieces that wait in each direction of one connection; a peer that sends a frame over
        `max_frame_bytes` is disconnected.

        Raises:
            AddressInUse: no port could be bound.
        """
        self.counters: Counter[str] = Counter()
        self._context = context
        self._incarnation = incarnation
        self._max_frame_bytes = max_frame_bytes
        self._max_queued = max_queued
        self._dealers: dict[Incarnation, zmq.Socket[bytes]] = {}
        self._blocked: set[Incarnation] = set()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its dead connection
        try:
            self.endpoints = {NAME: bind(self._router, host, ports)}
        except AddressInUse:
            self.close()
            raise

    def sockets(self) -> tuple["zmq.Socket[bytes]", ...]:
        """The socket that payload arrives at."""
        return (self._router,)

    def blocked(self) -> tuple["zmq.Socket[bytes]", ...]:
        """Connections whose last `send` returned False; poll them for room."""
        return tuple(self._dealers[incarnation] for incarnation in self._blocked)

    def connect(self, peer: Peer) -> None:
        """Connects early; a second call does nothing.

        Raises:
            WireError: the peer has no such endpoint, or a malformed one.
        """
        self._dealer(peer)

    def ready(self, incarnation: Incarnation) -> bool:
        """At once: what is sent before the connection is up would block."""
        return incarnation in self._dealers

    def agreed(self, incarnation: Incarnation) -> str:
        """This one, for those that are connected."""
        return NAME if incarnation in self._dealers else ""

    def forget(self, incarnation: Incarnation) -> None:
        """Closes the connection to a process that is gone, dropping what was not sent."""
        self._blocked.discard(incarnation)
        dealer = self._dealers.pop(incarnation, None)
        if dealer is not None:
            dealer.close(linger=0)

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        """Queues one piece, without a copy of the payload; False if the queue is full or there is no connection yet.

        Raises:
            WireError: the peer has no such endpoint or a malformed one, or there is no payload.
        """
        if payload is None or isinstance(payload, DeviceBytes):
            raise WireError(f"A piece for {peer.name} has no payload that ZeroMQ could carry.")
        dealer = self._dealer(peer)
        try:
            dealer.send_multipart([header, payload], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.counters["payload_would_block"] += 1
            self._blocked.add(peer.incarnation)
            return False
        self._blocked.discard(peer.incarnation)
        self.counters["zmq_pieces_sent"] += 1
        self.counters["zmq_bytes_sent"] += len(payload)
        return True

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that are there now, until they exceed `max_bytes`; what is malformed is counted and dropped."""
        pieces: list[Arrived] = []
        while max_bytes > 0:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            max_bytes -= sum(len(frame) for frame in frames)  # garbage counts too: it takes time to read
            try:
                pieces.append(_parse(frames))
            except WireError as error:
                self._malformed(str(error))
        self.counters["zmq_pieces_received"] += len(pieces)
        self.counters["zmq_bytes_received"] += sum(len(piece.payload or b"") for piece in pieces)
        return pieces

    def news(self) -> Sequence[MemoryShared | PeerExited]:
        """None: nobody writes into this process by itself."""
        return ()

    def close(self) -> None:
        """Closes every socket, dropping what was not sent."""
        for incarnation in list(self._dealers):
            self.forget(incarnation)
        self._router.close(linger=0)

    def _dealer(self, peer: Peer) -> "zmq.Socket[bytes]":
        if peer.incarnation in self._dealers:
            return self._dealers[peer.incarnation]
        endpoint = peer.data_endpoints.get(NAME)
        if endpoint is None:
            raise WireError(f"{peer.name} does not take payload over ZeroMQ.")
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(self._incarnation))
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a process that is not there
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise WireError(f"{peer.name} cannot be reached at {endpoint!r}: {error.strerror}.") from error
        self._dealers[peer.incarnation] = dealer
        return dealer

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        socket.setsockopt(zmq.SNDHWM, self._max_queued)
        socket.setsockopt(zmq.RCVHWM, self._max_queued)
        for option, value in KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket

    def _malformed(self, reason: str) -> None:
        count_fault(self.counters, "payload_malformed", log, f"Dropped: {reason}")


def _parse(frames: list[zmq.Frame]) -> Arrived:
    """The payload stays where ZeroMQ has received it."""
    if len(frames) != 3:
        raise WireError(f"A piece has a header of {HEADER_BYTES} bytes and a payload, not {len(frames) - 1} frames.")
    peer = parse_routing_id(frames[0].bytes)
    header, payload = frames[1].bytes, frames[2].buffer
    check_piece(header, payload)
    return Arrived(peer, header, payload)
