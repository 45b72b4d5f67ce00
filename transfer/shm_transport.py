"""Shared memory between workers of one host: the sender writes into the receiver's KV, and only headers travel.

The receiver hands its memory to peers that show the token of its endpoint. That both are on one host is known by the
kernel's boot id, and by reaching the socket: the same host may still be another container. Sockets are abstract and
memory has no name, so nothing is left of a process that is killed.
"""

from collections import Counter

from kvrelay.block_memory import BlockMemory
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import Peer
from kvrelay.transfer.protocol.piece import payload_bytes, split
from kvrelay.transfer.shm_connection import ShmConnection
from kvrelay.transfer.shm_frames import parse_address
from kvrelay.transfer.shm_listener import ShmListener
from kvrelay.transport import Arrived
from kvrelay.types import Incarnation

NAME = "shm"


class ShmTransport:
    """Belongs to the control thread, but for `shared`, which the compute thread asks before it writes."""

    def __init__(self, memory: BlockMemory, *, incarnation: Incarnation) -> None:
        """Offers `memory` to peers. Raises OSError where the system cannot do this."""
        self.counters: Counter[str] = Counter()
        self._incarnation = incarnation
        self._listener = ShmListener(memory, incarnation, self.counters)
        self._connections: dict[Incarnation, ShmConnection] = {}
        self.endpoints = {NAME: str(self._listener.address)}

    def shared(self, incarnation: Incarnation) -> BlockMemory | None:
        """The memory of a receiver, while it is shared with us."""
        connection = self._connections.get(incarnation)
        return None if connection is None else connection.memory

    def sockets(self) -> list[int]:
        """Where headers, askers and answers arrive, and the processes whose end is news."""
        connections = [each for connection in self._connections.values() for each in connection.descriptors]
        return self._listener.sockets() + connections

    def blocked(self) -> list[int]:
        """Connections whose last `send` returned False for want of room."""
        blocked = [connection for connection in self._connections.values() if connection.blocked]
        return [each for connection in blocked for each in connection.descriptors]

    def connect(self, peer: Peer) -> None:
        """Asks for the peer's memory; a second call does nothing.

        Raises:
            WireError: the peer shares none, or not on this host.
        """
        if peer.incarnation in self._connections:
            return
        if NAME not in peer.data_endpoints:
            raise WireError(f"{peer.name} does not share memory.")
        address = parse_address(peer.data_endpoints[NAME])
        self._connections[peer.incarnation] = ShmConnection(address, self._incarnation, peer.incarnation, peer.name)

    def ready(self, incarnation: Incarnation) -> bool:
        """True when the peer's memory is here.

        Raises:
            WireError: it will not come, or is not shared any more.
        """
        connection = self._connections.get(incarnation)
        return connection is not None and connection.ready()

    def agreed(self, incarnation: Incarnation) -> str:
        """This one, for those that are connected."""
        return NAME if incarnation in self._connections else ""

    def forget(self, incarnation: Incarnation) -> None:
        """Lets go of a peer's memory; whether it may still write to ours is another matter."""
        if (connection := self._connections.pop(incarnation, None)) is not None:
            connection.close()

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        """Tells of pieces that were written, by their headers; False if it would block.

        Raises:
            WireError: the memory is not shared any more, or there is payload that would have to be carried.
        """
        if payload is not None:
            raise WireError(f"A piece for {peer.name} was not written to its memory.")
        self.connect(peer)
        if not self._connections[peer.incarnation].send(header):
            self.counters["payload_would_block"] += 1
            return False
        headers = split(header)
        self.counters["shm_pieces_sent"] += len(headers)
        self.counters["shm_bytes_sent"] += sum(map(payload_bytes, headers))
        return True

    def receive(self, max_bytes: int) -> list[Arrived]:
        """Pieces that were written to our memory, until they exceed `max_bytes`."""
        for connection in self._connections.values():
            connection.hear()
        return self._listener.receive(max_bytes)

    def news(self) -> list[MemoryShared | PeerExited]:
        """Who was given our memory, and who of those has ended."""
        return self._listener.news()

    def close(self) -> None:
        """Closes everything."""
        for incarnation in list(self._connections):
            self.forget(incarnation)
        self._listener.close()
