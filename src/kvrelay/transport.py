"""How packed pieces of KV travel between workers, as a worker's control thread sees it: one Protocol for all ways."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import zmq

from kvrelay.device_memory import DeviceBytes
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import Peer
from kvrelay.types import Incarnation

Pollable = zmq.Socket[bytes] | int

MAX_HEADERS = 64


class Arrived(NamedTuple):
    """A piece that came. `payload` is None when the sender has written it into our memory by itself."""

    peer: Incarnation
    header: bytes
    payload: bytes | memoryview | DeviceBytes | None


class Transport(Protocol):
    """Moves packed pieces between workers. It belongs to the control thread, never blocks, and never dies of a peer.

    `endpoints` are where peers reach this end, by the name of the transport; `counters` say what was sent, received
    and dropped, and how often.
    """

    @property
    def endpoints(self) -> Mapping[str, str]:
        """They do not change."""
        ...

    @property
    def counters(self) -> Counter[str]:
        """They only grow."""
        ...

    def sockets(self) -> Iterable[Pollable]:
        """What to poll for incoming payload and news. The set may change with each call of another method.

        Unless one of them is ready, `receive` and `news` are called with each heartbeat only.
        """
        ...

    def blocked(self) -> Iterable[Pollable]:
        """What to poll for room to send: the connections whose last `send` returned False."""
        ...

    def connect(self, peer: Peer) -> None:
        """Opens the connection early, so that the first piece need not wait for it. A second call does nothing.

        Raises:
            WireError: there is no way to this peer.
        """
        ...

    def ready(self, incarnation: Incarnation) -> bool:
        """True when it is settled how payload goes to a peer that was connected, which takes seconds at most.

        Raises:
            WireError: it cannot go there, or not any more.
        """
        ...

    def agreed(self, incarnation: Incarnation) -> str:
        """The name of the transport that payload goes to a peer by, once `ready`."""
        ...

    def forget(self, incarnation: Incarnation) -> None:
        """Closes the connection to a process that is gone; what was not sent is dropped. Unknown ones are fine."""
        ...

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        """Takes one piece, or with `payload` None the headers, at most `MAX_HEADERS`, of pieces that are there already.

        False: it would block, nothing was taken, try again later. What was taken may be read until the peer has it;
        nobody has to wait for that, since payload never changes.

        Raises:
            WireError: there is no way to this peer, or not any more, or none for payload like this.
        """
        ...

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that are there now, until they exceed `max_bytes` of payload.

        Headers are well-formed and fit their payload's size; digests and leases are the receiver's to check.
        """
        ...

    def news(self) -> Iterable[MemoryShared | PeerExited]:
        """Who was given our memory to write into, and who of those has ended, since the last call."""
        ...

    def close(self) -> None:
        """Closes everything; what was not sent is dropped."""
        ...
