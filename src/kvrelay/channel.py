"""The one place that touches ZeroMQ control sockets: typed messages in and out, lost connections as events.

A `Listener` (ROUTER) is bound and hears many peers; a `Connection` (DEALER) reaches one. Peers are named by their
incarnation, so a restarted process is another peer; the ZeroMQ routing id is that and a number which grows with each
connection a process makes, so that words of a lost connection are never taken for those of the next one. Nothing here
blocks: what cannot be sent now is reported, what cannot be understood is counted.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.encoding import decode, encode
from kvrelay.errors import AddressInUse, WireError
from kvrelay.logs import count_fault
from kvrelay.messages import (
    AnyMessage,
    KVCommit,
    KVOffer,
    Message,
)
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_QUEUED_MESSAGES = 10_000
PING_MS = 1000  # ZeroMQ's own, below our heartbeats: they find connections that are open and lead nowhere
PING_TIMEOUT_MS = 5000

Heard = tuple[Incarnation, AnyMessage | None]


def routing_id(incarnation: Incarnation) -> bytes:
    """ZeroMQ routing id of a process: its incarnation in hex (never starts with the zero byte ZeroMQ reserves)."""
    return b"%016x" % incarnation


def parse_routing_id(identity: bytes) -> Incarnation:
    """Back from `routing_id`.

    Raises:
        WireError: it is not one of ours.
    """
    if len(identity) != 16:
        raise WireError(f"A peer with the routing id {identity[:16]!r} is not a KVRelay process.")
    try:
        return int(identity, 16)
    except ValueError as error:
        raise WireError(f"A peer with the routing id {identity!r} is not a KVRelay process.") from error


class Route(NamedTuple):
    """One connection of a peer; `number` grows with each that the peer makes."""

    peer: Incarnation
    number: int

    def __bytes__(self) -> bytes:
        """The ZeroMQ routing id."""
        return routing_id(self.peer) + b"%016x" % self.number

    @classmethod
    def parse(cls, identity: bytes) -> "Route":
        """Back from `bytes(route)`.

        Raises:
            WireError: it is not one of ours.
        """
        return cls(parse_routing_id(identity[:16]), parse_routing_id(identity[16:]))


def port_range(ports: str) -> range:
    """Ports to try, from `0` (any free one), `7000` or `7000-7010`.

    Raises:
        ValueError: not of that form, or beyond 65535.
    """
    first, _, last = ports.partition("-")
    result = range(int(first), int(last or first) + 1)
    if not result or result[-1] > 65535:
        raise ValueError(f"{ports!r} is not a port or a range of ports; write 0, 7000 or 7000-7010.")
    return result


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host and port of `tcp://host:port`.

    Raises:
        AddressInUse: not of that form.
    """
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit():
        raise AddressInUse(f"{endpoint!r} is not an address; write it like tcp://127.0.0.1:5700.")
    return host, port


def bind(socket: "zmq.Socket[bytes]", host: str, ports: str) -> str:
    """Binds to the first free port of a range and returns the endpoint.

    Raises:
        AddressInUse: none could be bound; the sentence says why the last one failed.
    """
    reason = ""
    for port in port_range(ports):
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            reason = error.strerror or str(error)
        else:
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    raise AddressInUse(f"Cannot listen at {host}, port {ports}: {reason}. Choose another address or port.")


class _Channel:
    """What both ends have: a socket, its monitor, and counters of what went wrong."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self._context = context
        self._open(kind)

    def _open(self, kind: int) -> None:
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        """Closes both sockets; unsent messages are dropped."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _events(self) -> list[tuple[int, int]]:
        events = []
        while int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor)
            events.append((int(event["event"]), int(event["value"])))
        return events

    def _decode(self, frame: bytes) -> AnyMessage | None:
        """A message for us, or None. An offer or commit for another incarnation passes: it has an answer."""
        try:
            message = decode(frame)
        except WireError as error:
            self._malformed(str(error))
            return None
        if message.target in (0, self.incarnation) or isinstance(message, KVOffer | KVCommit):
            return message
        self.counters["stale_message"] += 1
        return None

    def _malformed(self, reason: str) -> None:
        count_fault(self.counters, "malformed_message", log, f"Dropped: {reason}")

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.counters["would_block"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["unknown_peer"] += 1
            return False
        return True


class Listener(_Channel):
    """A bound ROUTER: many peers, each named by its incarnation.

    A peer may come again before the loss of its last connection is noticed, or before it happened: then the loss is
    told between the words of the two, so that it does not hit what the new one brings.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, ports: str, *, incarnation: Incarnation
    ) -> None:
        """Binds.

        Raises:
            AddressInUse: no port of the range can be bound.
        """
        super().__init__(context, zmq.ROUTER, incarnation)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who reconnects is heard, even before the old loss is seen
        self._route_of_fd: dict[int, Route] = {}
        self._newest: dict[Incarnation, Route] = {}
        self._closed: set[int] = set()  # descriptors of connections that are gone; their last words may not be read yet
        self._lost: list[Incarnation] = []
        try:
            self.endpoint = bind(self.socket, host, ports)
        except AddressInUse:
            self.close()
            raise

    def receive(self, limit: int = 256) -> list[Heard]:
        """Up to `limit` messages that are there now, with the peer each came from.

        None stands for the loss of a connection, where the peer's next message comes over another one.
        """
        received: list[Heard] = []
        silent: set[int] = set()  # closed, and nothing of them is left to read
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._watch()
                if self._closed <= silent:
                    break
                silent |= self._closed
            else:
                received += self._parse(frames)
        for fd in silent & self._closed:
            self._end(fd)
        return received

    def lost(self) -> list[Incarnation]:
        """Peers that `receive` found to be lost, after their last words, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def send(self, peer: Incarnation, message: Message) -> bool:
        """Sends; False when the peer is not connected or does not read."""
        if peer not in self._newest:
            self.counters["unknown_peer"] += 1
            return False
        return self._send([bytes(self._newest[peer]), encode(message)])

    def _parse(self, frames: list[zmq.Frame]) -> list[Heard]:
        if len(frames) != 2:
            self._malformed(f"A message of {len(frames) - 1} frames came where one was expected.")
            return []
        try:
            route = Route.parse(frames[0].bytes)
        except WireError as error:
            self._malformed(str(error))
            return []
        lost = self._remember(frames[1].get(zmq.SRCFD), route)
        message = self._decode(frames[1].bytes)
        if message is None:
            return lost
        if self._newest[route.peer] != route:
            self.counters["stale_message"] += 1
            return lost
        if message.source != route.peer:
            self._malformed("A message names another sender than the process it came from.")
            return lost
        return [*lost, (route.peer, message)]

    def _remember(self, fd: int, route: Route) -> list[Heard]:
        """Ties a file descriptor to the connection behind it; gives the loss of the one that this one replaces."""
        self._watch()
        if self._route_of_fd.get(fd) != route:
            for other in [known for known, owner in self._route_of_fd.items() if owner == route or known == fd]:
                self._end(other)
            self._route_of_fd[fd] = route
        newest = self._newest.get(route.peer)
        if newest is not None and newest.number >= route.number:
            return []
        self._newest[route.peer] = route
        if newest is None and route.peer not in self._lost:
            return []
        self._lost = [peer for peer in self._lost if peer != route.peer]
        return [(route.peer, None)]

    def _watch(self) -> None:
        """Descriptors are numbers that are used again: a new connection ends the one that had its number."""
        for event, fd in self._events():
            if event == zmq.EVENT_DISCONNECTED:
                self._closed.add(fd)
            else:
                self._end(fd)

    def _end(self, fd: int) -> None:
        self._closed.discard(fd)
        route = self._route_of_fd.pop(fd, None)
        if route is not None and self._newest.get(route.peer) == route:
            del self._newest[route.peer]
            self._lost.append(route.peer)


class Connection(_Channel):
    """A DEALER to one bound peer. It connects again by itself; each loss and each new connection is an event.

    A connection that leads nowhere is lost too, after `PING_TIMEOUT_MS`: one that a router on the way has forgotten, or
    one whose routing id another process took over, which the bound socket never reads again.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        incarnation: Incarnation,
        numbers: Iterator[int],
        queue_early: bool,
    ) -> None:
        """Starts to connect. With `queue_early`, messages wait for the connection; else sending fails until it is up.

        `numbers` grow, and are shared by all connections of the process.

        Raises:
            WireError: `endpoint` is not an address.
        """
        self.endpoint = endpoint
        self._numbers = numbers
        self._queue_early = queue_early
        super().__init__(context, zmq.DEALER, incarnation)

    def _open(self, kind: int) -> None:
        super()._open(kind)
        self.socket.setsockopt(zmq.ROUTING_ID, bytes(Route(self.incarnation, next(self._numbers))))
        self.socket.setsockopt(zmq.IMMEDIATE, 0 if self._queue_early else 1)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise WireError(
                f"{self.endpoint!r} is not an address to connect to; write it like tcp://host:port."
            ) from error

    def receive(self, limit: int = 256) -> list[AnyMessage]:
        """Up to `limit` messages that are there now."""
        received = []
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 1:
                self._malformed(f"A message of {len(frames)} frames came where one was expected.")
            elif (message := self._decode(frames[0])) is not None:
                received.append(message)
        return received

    def changes(self) -> list[bool]:
        """What became of the connection since the last call: True when it came up, False when it was lost.

        A lost one is not used again, even where ZeroMQ has made another under the same routing id: a socket with a
        new one takes its place.
        """
        ups = [event == zmq.EVENT_HANDSHAKE_SUCCEEDED for event, _ in self._events()]
        if False not in ups:
            return ups
        self.close()
        self._open(zmq.DEALER)
        return ups[: ups.index(False) + 1]

    def send(self, message: Message) -> bool:
        """Sends; False when the peer is not connected (unless `queue_early`) or does not read."""
        return self._send([encode(message)])
