"""What a worker's compute thread and control thread say to each other, and the only place where they meet."""

import queue
import socket
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.device_memory import DeviceBytes
from kvrelay.messages import AnyMessage, Message, Peer, WorkerStatus
from kvrelay.types import Incarnation

MAX_EVENTS = 10_000
MAX_PAYLOAD_BYTES = 128 * 2**20
MAX_UNSEEN = 8  # orders, before the control thread is woken for them


@dataclass(frozen=True, slots=True)
class FromGateway:
    """A gateway said something."""

    gateway: Incarnation
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Another worker said something about a hand-over."""

    peer: Incarnation
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """A piece came as the sender packed it, not verified yet; `payload` None: it lies in our memory already."""

    peer: Incarnation
    header: bytes
    payload: bytes | memoryview | DeviceBytes | None


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway is gone, or another incarnation took its place: its requests end."""

    gateway: Incarnation


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection with another worker is lost."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class MemoryShared:
    """Another worker was given our KV memory: under leases granted from now on it may write there by itself."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class PeerExited:
    """A worker that could write into our KV memory has ended, as the operating system says."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class PayloadSent:
    """There is room again for payload to send."""


@dataclass(frozen=True, slots=True)
class PieceWaiting:
    """A piece arrived when none was waiting: see `next_piece`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The process should end."""


Event = FromGateway | FromPeer | PieceWaiting | GatewayLost | PeerLost | MemoryShared | PeerExited | PayloadSent | Stop


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Say something to a gateway. One that does not read is lost."""

    gateway: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Say something to another worker: a `Peer` is connected to if need be, an incarnation has asked us before."""

    peer: Peer | Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class SendPayload:
    """Send one packed piece of KV, unless `deadline` (monotonic seconds) passes first: then its lease has ended.

    `payload` None: it was written into the peer's memory already, and only the header goes.
    """

    peer: Peer
    header: bytes
    payload: bytes | DeviceBytes | None
    deadline: float


Order = ToGateway | ToPeer | SendPayload


def num_bytes(piece: PieceArrived | SendPayload) -> int:
    """Bytes of payload that wait in this process."""
    return 0 if piece.payload is None else len(piece.payload)


class Mailbox:
    """Events for the compute thread, orders for the control thread, both in order and bounded.

    Pieces have a queue of their own: verifying them takes time, and what else was said must not wait for it.

    The control thread stops reading sockets while `has_room` is False; the compute thread packs no payload beyond
    `payload_room` bytes. Neither ever waits for the other except in `take`.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pieces: deque[PieceArrived] = deque()
        self._orders: deque[Order] = deque()
        self._lock = threading.Lock()
        self._bytes_in = 0
        self._bytes_out = 0
        self._out_was_full = False
        self._asleep = False
        self.wake_socket, self._waker = socket.socketpair()
        self.wake_socket.setblocking(False)
        self._waker.setblocking(False)
        self.status: WorkerStatus | None = None  # the newest; replaced as a whole by the compute thread

    # compute thread

    def take(self, timeout_s: float) -> list[Event]:
        """All events that are there, after waiting at most `timeout_s` for a first one."""
        taken: list[Event] = []
        try:
            taken.append(self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait())
            while True:
                taken.append(self._events.get_nowait())
        except queue.Empty:
            return taken

    @property
    def has_pieces(self) -> bool:
        """True while `next_piece` has one. When that changes to True, `PieceWaiting` comes."""
        return bool(self._pieces)

    def next_piece(self) -> PieceArrived | None:
        """The piece that has waited for longest."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._count(bytes_in=-num_bytes(piece))
        return piece

    def post(self, orders: Iterable[Order]) -> None:
        """Hands orders to the control thread, each as soon as it is made.

        It is woken for every few of them: whenever it runs, this thread waits for the interpreter's lock.
        """
        unseen = 0
        for order in orders:
            if isinstance(order, SendPayload):
                self._count(bytes_out=num_bytes(order))
            self._orders.append(order)
            unseen += 1
            if unseen == MAX_UNSEEN:
                self._rouse()
                unseen = 0
        if unseen:
            self._rouse()

    @property
    def payload_room(self) -> int:
        """Bytes of payload that may be posted now; at 0, `PayloadSent` will tell when there is room again."""
        with self._lock:
            room = max(0, MAX_PAYLOAD_BYTES - self._bytes_out)
            self._out_was_full = self._out_was_full or room == 0
            return room

    # control thread

    @property
    def has_room(self) -> bool:
        """False while the compute thread has more to take than it should."""
        num_waiting = max(self._events.qsize(), len(self._pieces))
        return num_waiting < MAX_EVENTS and self._bytes_in < MAX_PAYLOAD_BYTES

    def deliver(self, event: Event) -> None:
        """Hands an event to the compute thread."""
        self._events.put(event)

    def deliver_piece(self, piece: PieceArrived) -> None:
        """Hands a piece to the compute thread."""
        self._count(bytes_in=num_bytes(piece))
        self._pieces.append(piece)
        if len(self._pieces) == 1:
            self.deliver(PieceWaiting())

    def fall_asleep(self) -> bool:
        """From here on what is posted wakes. False: there is something already, so do not wait."""
        self._asleep = True  # before the look, else what is posted in between would wake nobody
        return not self._orders

    def get_up(self) -> None:
        """From here on nobody need wake: `orders` is called before the next `fall_asleep`."""
        self._asleep = False

    def orders(self) -> list[Order]:
        """Takes all orders that are there."""
        taken = []
        while self._orders:
            taken.append(self._orders.popleft())
        return taken

    def payload_done(self, orders: Iterable[SendPayload]) -> None:
        """Payload of some orders has left (or was dropped)."""
        self._count(bytes_out=-sum(map(num_bytes, orders)))
        with self._lock:
            tell = self._out_was_full and self._bytes_out <= MAX_PAYLOAD_BYTES // 2
            self._out_was_full = self._out_was_full and not tell
        if tell:
            self.deliver(PayloadSent())

    # either

    def wake(self) -> None:
        """Ends the control thread's wait. A full pipe means that it is awake already."""
        try:
            self._waker.send(b"w")
        except BlockingIOError:
            return

    def close(self) -> None:
        """Closes the wake-up pipe; after both threads ended."""
        self.wake_socket.close()
        self._waker.close()

    def _rouse(self) -> None:
        if self._asleep:
            self._asleep = False
            self.wake()

    def _count(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        with self._lock:
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out
