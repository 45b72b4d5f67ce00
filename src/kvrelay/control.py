"""A worker's control thread: it owns sockets, heartbeats and timers, so that compute never makes a peer wait.

gateways ◀──▶ GatewayLink ─┐
peers ──────▶ Listener ────┤                    ┌─▶ take() ─▶ compute thread
peers ◀─────▶ Connection ──┼─ ControlThread ─ Mailbox
payload ◀───▶ Transport ───┘                    └─◀ post() ◀─ compute thread
"""

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice, takewhile

import zmq

from kvrelay.channel import Connection, Listener
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.mailbox import (
    FromGateway,
    FromPeer,
    GatewayLost,
    Mailbox,
    PeerLost,
    PieceArrived,
    SendPayload,
    Stop,
    ToGateway,
    ToPeer,
)
from kvrelay.messages import (
    AnyMessage,
    GatewayHello,
    KVCommit,
    KVOffer,
    KVReleased,
    Message,
    PairStatus,
    Peer,
    WorkerHello,
)
from kvrelay.transport import MAX_HEADERS, Pollable, Transport
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

MAX_READ_BYTES = 32 * 2**20
MAX_CONNECTING_S = 5.0
MAX_UNUSED_S = 600.0  # much longer than any lease, so nothing hangs on a connection that is closed for being unused
RETRY_S = 0.002

# Blocks of a receiver wait for a KVReleased, and it may live although its connection was lost.
Awaited = KVOffer | KVCommit | KVReleased


class GatewayLink:
    """The connection to one gateway address, and which incarnation answers there."""

    def __init__(self, connection: Connection, hello: WorkerHello, death_s: float) -> None:
        """Says `hello` each time the connection comes up, or when the gateway asks."""
        self.connection = connection
        self.gateway: Incarnation | None = None
        self._hello = hello
        self._death_s = death_s
        self._last_heard = 0.0
        self._up = False

    def hear(self, now: float) -> list[FromGateway | GatewayLost]:
        """What the gateway said, and whether it was lost or replaced."""
        events: list[FromGateway | GatewayLost] = []
        for message in self.connection.receive():
            events += self._replaced(message.source)
            self._last_heard = now
            events += self._said(message)
        for up in self.connection.changes():
            self._up = up
            events += self._greet() if up else self._lose()
        return events

    def watch(self, now: float) -> list[FromGateway | GatewayLost]:
        """Whether the gateway is dead, having said nothing for too long."""
        return self._lose() if now - self._last_heard > self._death_s else []

    def send(self, message: Message) -> bool:
        """False: the gateway does not read, or is gone."""
        return self._up and self.connection.send(message)

    def _greet(self) -> list[FromGateway | GatewayLost]:
        self.connection.send(self._hello)
        return []

    def _said(self, message: AnyMessage) -> list[FromGateway | GatewayLost]:
        if not isinstance(message, GatewayHello):
            return [FromGateway(message.source, message)]
        return [] if message.registered else self._greet()

    def _replaced(self, source: Incarnation) -> list[FromGateway | GatewayLost]:
        lost = self._lose() if source != self.gateway else []
        self.gateway = source
        return lost

    def _lose(self) -> list[FromGateway | GatewayLost]:
        gateway, self.gateway = self.gateway, None
        return [] if gateway is None else [GatewayLost(gateway)]


class ControlThread:
    """The loop that moves messages and payload between sockets and the mailbox. Run it in a thread of its own."""

    def __init__(
        self,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        mailbox: Mailbox,
        listener: Listener,
        data: Transport,
        gateways: tuple[str, ...],
        hello: WorkerHello,
        heartbeat_s: float,
        death_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Starts to connect to every gateway address.

        Raises:
            WireError: a gateway address is malformed.
        """
        self._context = context
        self._mailbox = mailbox
        self._listener = listener
        self._data = data
        self._incarnation = hello.source
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._numbers = itertools.count()
        self._peers: dict[Incarnation, Connection] = {}
        self._used_at: dict[Incarnation, float] = {}
        self._connecting: dict[Incarnation, float] = {}  # since when
        self._transport_of: dict[Incarnation, str] = {}
        self._unsaid: dict[Incarnation, list[Message]] = {}
        self._unsent: dict[Incarnation, deque[SendPayload]] = {}
        self._stopping = False
        self.failed = False
        self._next_beat = clock()
        self._links = [GatewayLink(self._connect(address, early=False), hello, death_s) for address in gateways]

    def run(self) -> None:
        """Until `stop`; then every socket is closed. A fault of ours ends the process, loudly: see `failed`."""
        self.failed = True
        try:
            while not self._stopping:
                self._hear(*self._wait())
                self._obey()
                self._send_payload()
                self._beat()
            self.failed = False
        finally:
            self._close()
            self._mailbox.deliver(Stop())

    def stop(self) -> None:
        """Asks the loop to end; from any thread."""
        self._stopping = True
        self._mailbox.wake()

    def _connect(self, address: str, *, early: bool) -> Connection:
        return Connection(
            self._context, address, incarnation=self._incarnation, numbers=self._numbers, queue_early=early
        )

    def _wait(self) -> tuple[set[Pollable], bool]:
        """What there is to read once there is something to do, and whether it is the transport's too."""
        poller = zmq.Poller()
        data_sockets: list[Pollable] = []
        poller.register(self._mailbox.wake_socket, zmq.POLLIN)
        if self._mailbox.has_room:
            for channel in (self._listener, *self._peers.values(), *(link.connection for link in self._links)):
                poller.register(channel.socket, zmq.POLLIN)
                poller.register(channel.monitor, zmq.POLLIN)
            data_sockets += self._data.sockets()
            for data_socket in data_sockets:
                poller.register(data_socket, zmq.POLLIN)
        for data_socket in self._data.blocked():
            poller.register(data_socket, zmq.POLLOUT)
        found = dict(poller.poll(self._patience_ms() if self._mailbox.fall_asleep() else 0))
        self._mailbox.get_up()
        if self._mailbox.wake_socket.fileno() in found:
            self._mailbox.wake_socket.recv(4096)
        ready = {socket for socket, events in found.items() if events & ~zmq.POLLOUT}
        return ready, not ready.isdisjoint(data_sockets)

    def _patience_ms(self) -> int:
        until_beat = max(0.0, self._next_beat - self._clock())
        patience_s = until_beat if self._mailbox.has_room else min(until_beat, RETRY_S)
        return math.ceil(1000 * patience_s)

    def _hear(self, ready: set[Pollable], data_ready: bool) -> None:
        """Looks only where something is: a look at every socket costs more than most of what comes."""
        if not self._mailbox.has_room:
            return
        now = self._clock()
        for link in self._links:
            for event in (link.hear(now) if _has_news(link.connection, ready) else []) + link.watch(now):
                self._mailbox.deliver(event)
        listener_has_news = _has_news(self._listener, ready)
        for peer, message in self._listener.receive() if listener_has_news else ():
            self._mailbox.deliver(PeerLost(peer) if message is None else FromPeer(peer, message))
        for incarnation, connection in list(self._peers.items()):
            if _has_news(connection, ready):
                self._hear_peer(incarnation, connection)
        if data_ready or now >= self._next_beat:
            self._hear_payload()
        for incarnation in self._listener.lost() if listener_has_news else ():
            self._mailbox.deliver(PeerLost(incarnation))

    def _hear_payload(self) -> None:
        for peer, header, payload in self._data.receive(MAX_READ_BYTES):
            self._mailbox.deliver_piece(PieceArrived(peer, header, payload))
        for news in self._data.news():  # before whatever a peer says once it has our memory
            self._mailbox.deliver(news)

    def _hear_peer(self, incarnation: Incarnation, connection: Connection) -> None:
        for message in connection.receive():
            self._mailbox.deliver(FromPeer(incarnation, message))
        changes = connection.changes()
        if changes:
            self._connecting.pop(incarnation, None)
        if False in changes:
            self._lose(incarnation)

    def _lose(self, incarnation: Incarnation) -> None:
        self._forget(incarnation)
        self._mailbox.deliver(PeerLost(incarnation))

    def _forget(self, incarnation: Incarnation) -> None:
        self._peers.pop(incarnation).close()
        del self._used_at[incarnation]
        self._connecting.pop(incarnation, None)
        self._data.forget(incarnation)
        self._unsaid.pop(incarnation, None)
        self._mailbox.payload_done(self._unsent.pop(incarnation, ()))

    def _obey(self) -> None:
        for order in self._mailbox.orders():
            match order:
                case ToGateway(gateway, message):
                    self._tell_gateway(gateway, message)
                case ToPeer(int() as peer, message):
                    self._listener.send(peer, message)
                case ToPeer(Peer() as peer, message):
                    self._tell_peer(peer, message)
                case SendPayload():
                    self._queue_payload(order)
        for incarnation in list(self._unsaid):
            self._say(incarnation)

    def _tell_gateway(self, gateway: Incarnation, message: Message) -> None:
        """A gateway that does not read loses its requests, and never stalls a step."""
        for link in self._links:
            if link.gateway == gateway and not link.send(message):
                log.warning("Gateway %016x does not read; its requests end here.", gateway)
                link.gateway = None
                self._mailbox.deliver(GatewayLost(gateway))

    def _tell_peer(self, peer: Peer, message: Message) -> None:
        """Only what somebody waits for opens a connection; anything else is of no use to a process that is gone."""
        if peer.incarnation not in self._peers and not (isinstance(message, Awaited) and self._meet(peer)):
            return
        self._used_at[peer.incarnation] = self._clock()
        self._unsaid.setdefault(peer.incarnation, []).append(message)

    def _say(self, incarnation: Incarnation) -> None:
        """Nothing is said before it is settled how payload goes: what a receiver grants depends on it."""
        try:
            ready = self._data.ready(incarnation)
        except WireError as error:
            log.warning("%s", error)
            self._lose(incarnation)
            return
        for message in self._unsaid.pop(incarnation) if ready else ():
            self._peers[incarnation].send(message)

    def _meet(self, peer: Peer) -> bool:
        try:
            self._data.connect(peer)
            self._peers[peer.incarnation] = self._connect(peer.control_endpoint, early=True)
            self._connecting[peer.incarnation] = self._clock()
        except WireError as error:
            log.warning("%s", error)
            self._data.forget(peer.incarnation)
            self._mailbox.deliver(PeerLost(peer.incarnation))
            return False
        return True

    def _queue_payload(self, order: SendPayload) -> None:
        if order.peer.incarnation in self._peers:
            self._unsent.setdefault(order.peer.incarnation, deque()).append(order)
        else:
            self._mailbox.payload_done([order])

    def _send_payload(self) -> None:
        for incarnation, orders in list(self._unsent.items()):
            try:
                self._send_some(orders)
            except WireError as error:
                log.warning("%s", error)
                self._lose(incarnation)
            if not orders:
                self._unsent.pop(incarnation, None)

    def _send_some(self, orders: deque[SendPayload]) -> None:
        now = self._clock()
        while orders:
            group = _first_group(orders)
            unexpired = [order for order in group if order.deadline >= now]
            if unexpired and not self._data.send(*_parts(unexpired)):
                return
            for _ in group:
                orders.popleft()
            self._mailbox.payload_done(group)

    def _beat(self) -> None:
        now = self._clock()
        if now < self._next_beat:
            return
        self._next_beat = now + self._heartbeat_s
        self._tidy(now)
        if (status := self._mailbox.status) is not None:
            counters = Counter(status.counters) + self._listener.counters + self._data.counters
            for link in self._links:
                link.send(status.model_copy(update={"counters": dict(counters), "pairs": self._named(status.pairs)}))

    def _named(self, pairs: tuple[PairStatus, ...]) -> tuple[PairStatus, ...]:
        """With the transports that were agreed on, also where the connection is closed by now."""
        self._transport_of |= {peer: self._data.agreed(peer) for peer in self._peers if peer not in self._unsaid}
        named = {pair.receiver: self._transport_of.get(pair.receiver, "") for pair in pairs}
        self._transport_of = named
        return tuple(pair.model_copy(update={"transport": named[pair.receiver]}) for pair in pairs)

    def _tidy(self, now: float) -> None:
        """Closes connections that nobody used for long, or that never came up."""
        for incarnation in [peer for peer, used_at in self._used_at.items() if now - used_at > MAX_UNUSED_S]:
            self._forget(incarnation)
        for incarnation in [peer for peer, since in self._connecting.items() if now - since > MAX_CONNECTING_S]:
            log.warning("Worker %016x cannot be reached at the address it tells others.", incarnation)
            self._lose(incarnation)

    def _close(self) -> None:
        for connection in (*self._peers.values(), *(link.connection for link in self._links)):
            connection.close()
        self._listener.close()
        self._data.close()


def _has_news(channel: Connection | Listener, ready: set[Pollable]) -> bool:
    return channel.socket in ready or channel.monitor in ready


def _first_group(orders: deque[SendPayload]) -> list[SendPayload]:
    """What goes in one call: a piece with its payload, or the headers of several that are where they belong."""
    if orders[0].payload is not None:
        return [orders[0]]
    return list(takewhile(lambda order: order.payload is None, islice(orders, MAX_HEADERS)))


def _parts(group: list[SendPayload]) -> tuple[Peer, bytes, bytes | DeviceBytes | None]:
    return group[0].peer, b"".join(order.header for order in group), group[0].payload
