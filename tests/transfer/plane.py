"""Two ends of a transport in one process, with a memory each, for tests that send real pieces."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.messages import LeaseId, Peer
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.protocol.actions import SendPiece
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import PieceHeader, unpack
from kvrelay.transfer.shm_transport import ShmTransport
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.transfer.zmq_transport import ZmqTransport
from kvrelay.transport import Arrived, Transport
from kvrelay.types import Incarnation, KVLayout

# 12 bytes an element of nothing round: 2 * 3 heads * 5 tokens * 7 = 210 elements, 420 bytes a block.
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=7, block_size=5, dtype="bfloat16")
NUM_BLOCKS = 600
GEOMETRY = Geometry(LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.block_bytes)
MAX_WAIT_S = 10.0


@dataclass
class End:
    """One worker's transport and memory."""

    incarnation: Incarnation
    memory: BlockMemory
    transport: Transport
    outlet: Outlet
    inlet: Inlet
    arrived: list[Arrived] = field(default_factory=list)  # while it did something else

    @property
    def peer(self) -> Peer:
        """This end as others know it."""
        endpoints = dict(self.transport.endpoints)
        return Peer(
            name=f"w{self.incarnation}",
            incarnation=self.incarnation,
            control_endpoint="tcp://h:1",
            data_endpoints=endpoints,
        )

    def piece(
        self, to: Peer, layer: int, block_ids: tuple[int, ...], targets: tuple[int, ...], num_layers: int = 1
    ) -> SendPiece:
        """Some of our blocks on their way."""
        header = PieceHeader(
            lease_id=LeaseId(to.incarnation, 1),
            sender=self.incarnation,
            layer=layer,
            first_block=0,
            num_blocks=len(block_ids),
            head_start=0,
            num_heads=LAYOUT.num_kv_heads,
            block_size=LAYOUT.block_size,
            dtype=LAYOUT.dtype,
            payload_bytes=num_layers * len(block_ids) * LAYOUT.block_bytes,
            num_layers=num_layers,
        )
        return SendPiece(to, header, block_ids, targets, one_sided=True)

    def land(self, piece: Arrived, block_ids: tuple[int, ...]) -> bool:
        """What a worker does with a piece that its receiver accepted into these blocks."""
        return self.inlet.land(unpack(piece.header), Place(block_ids), piece.payload)

    def content(self, layer: int, block_ids: tuple[int, ...]) -> bytes:
        """What lies in these blocks."""
        return b"".join(self.memory.views(layer, block_ids))


class Ends:
    """Makes ends of one kind, and closes them all."""

    def __init__(self, kind: str, first_incarnation: Incarnation = 1) -> None:
        self.kind = kind
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stack = ExitStack()
        self._next_incarnation = first_incarnation

    def make(self) -> End:
        """One more worker."""
        incarnation, self._next_incarnation = self._next_incarnation, self._next_incarnation + 1
        memory = BlockMemory.create(GEOMETRY)
        memory.buffer[:] = bytes((7 * incarnation + i) % 251 for i in range(251)) * (GEOMETRY.num_bytes // 251) + bytes(
            GEOMETRY.num_bytes % 251
        )
        end = self.end(incarnation, memory)
        self.stack.callback(end.transport.close)
        return end

    def end(self, incarnation: Incarnation, memory: BlockMemory) -> End:
        """A worker with this memory."""
        if self.kind == "shm":
            shm = ShmTransport(memory, incarnation=incarnation)
            return End(incarnation, memory, shm, Outlet(memory, shm.shared), Inlet(memory, LAYOUT))
        carrier: Transport
        if self.kind == "ucx":
            carrier = UcxTransport("127.0.0.1", "0", incarnation=incarnation, max_queued=4)
        else:
            carrier = ZmqTransport(self.context, "127.0.0.1", "0", incarnation=incarnation, max_queued=4)
        return End(incarnation, memory, carrier, Outlet(memory, lambda _: None), Inlet(memory, LAYOUT))

    def close(self) -> None:
        """Everything."""
        self.stack.close()
        self.context.term()


def tries() -> Iterator[None]:
    """Again and again, but not for ever."""
    until = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < until:
        yield


def meet(sender: End, receiver: End) -> Peer:
    """Connects, until it is settled how payload goes."""
    return meet_peer(sender, receiver.peer, receiver)


def meet_peer(sender: End, peer: Peer, *receivers: End) -> Peer:
    """Connects to a receiver, which may be one of another process."""
    sender.transport.connect(peer)
    for _ in tries():
        for each in (sender, *receivers):
            each.arrived += each.transport.receive(1)
        if sender.transport.ready(peer.incarnation):
            return peer
        poll(sender, *receivers)
    raise AssertionError("the two never met")


def poll(*ends: End) -> None:
    """Waits for something to read at any of them."""
    zmq.zmq_poll([(each, zmq.POLLIN) for end in ends for each in end.transport.sockets()], 50)


def send(sender: End, piece: SendPiece) -> None:
    """Takes the piece out of memory and sends it; while it would block, waits for room and news as workers do."""
    header, payload = sender.outlet.take(piece)
    for _ in tries():
        if sender.transport.send(piece.peer, header, payload):
            return
        room = [(each, zmq.POLLOUT) for each in sender.transport.blocked()]
        zmq.zmq_poll([*room, *((each, zmq.POLLIN) for each in sender.transport.sockets())], 50)
        sender.arrived += sender.transport.receive(1)
    raise AssertionError("the piece never left")


def receive(receiver: End, enough: Callable[[list[Arrived]], bool]) -> list[Arrived]:
    """Polls until enough came; gives what is there after ten seconds."""
    found, receiver.arrived = receiver.arrived, []
    for _ in tries():
        found += receiver.transport.receive(2**24)
        if enough(found):
            break
        poll(receiver)
    return found
