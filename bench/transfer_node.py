"""One worker without a model: the real state machines, transports and control thread around memory of random bytes."""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection as Pipe

import zmq

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.blocks import BlockManager
from kvrelay.channel import Listener
from kvrelay.config import PrefillSettings
from kvrelay.control import ControlThread
from kvrelay.mailbox import Event, FromPeer, Mailbox, MemoryShared, PieceArrived, SendPayload, ToPeer
from kvrelay.messages import (
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    Peer,
    WorkerHello,
)
from kvrelay.process import new_incarnation
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.ports import MAX_TAKEN_BYTES
from kvrelay.transfer.protocol.actions import Action, Adopt, HandedOver, Send, SendPiece
from kvrelay.transfer.protocol.piece import unpack
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import KVLayout, RequestKey, Role, SamplingParams, Sequence

LEASE_S = 120.0
MAX_WAIT_S = 0.5


def random_memory(layout: KVLayout, num_blocks: int) -> BlockMemory:
    """Every page is touched, and no two blocks are alike."""
    memory = BlockMemory.create(Geometry(layout.num_layers, num_blocks, layout.block_bytes))
    pattern = os.urandom(layout.block_bytes + 1)
    for begin in range(0, memory.buffer.nbytes, len(pattern)):
        part = memory.buffer[begin : begin + len(pattern)]
        part[:] = pattern[: part.nbytes]
    return memory


class Node:
    """What both ends have."""

    def __init__(self, transport: str, layout: KVLayout, num_blocks: int) -> None:
        self.memory = random_memory(layout, num_blocks)
        self.layout = layout
        self.incarnation = new_incarnation()
        self.mailbox = Mailbox()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listener = Listener(context, "127.0.0.1", "0", incarnation=self.incarnation)
        settings = PrefillSettings.model_validate({"transport": transport})
        self.data = open_data_plane(settings, context, self.incarnation, self.memory, layout, self.memory)
        self.peer = Peer(
            name=transport,
            incarnation=self.incarnation,
            control_endpoint=listener.endpoint,
            data_endpoints=dict(self.data.transport.endpoints),
        )
        control = ControlThread(
            context=context,
            mailbox=self.mailbox,
            listener=listener,
            data=self.data.transport,
            gateways=(),
            hello=self._hello(),
            heartbeat_s=settings.heartbeat_s,
            death_s=settings.death_s,
            clock=time.monotonic,
        )
        threading.Thread(target=control.run, name="control", daemon=True).start()

    def post(self, actions: Iterable[Action]) -> None:
        """Messages and pieces go where they should; the rest is the caller's."""
        self.mailbox.post(self._orders(actions))

    def _orders(self, actions: Iterable[Action]) -> Iterator[ToPeer | SendPayload]:
        for action in actions:
            if isinstance(action, Send):
                yield ToPeer(action.peer, action.message)
            elif isinstance(action, SendPiece):
                header, payload = self.data.outlet.take(action)
                yield SendPayload(action.peer, header, payload, time.monotonic() + LEASE_S)

    def _hello(self) -> WorkerHello:
        return WorkerHello(
            source=self.incarnation,
            name=self.peer.name,
            role=Role.BOTH,
            control_endpoint=self.peer.control_endpoint,
            data_endpoints=self.peer.data_endpoints,
            model="none",
            fingerprint="none",
            max_model_len=1,
            vocab_size=1,
            max_num_seqs=1,
            layout=self.layout,
            device="cpu",
            pid=os.getpid(),
            host=socket.gethostname(),
        )


class SendingNode(Node):
    """Hands prompts over, one at a time."""

    def __init__(self, transport: str, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(transport, layout, num_blocks)
        self._sender = KVSender(incarnation=self.incarnation, layout=layout, fingerprint="none", lease_s=LEASE_S)
        self._block_ids = list(range(num_blocks))
        self._next = 0

    def hand_over(self, peer: Peer, num_tokens: int) -> float:
        """Seconds from the offer to the acknowledgement; the whole prompt is computed already.

        Raises:
            RuntimeError: it was not taken.
        """
        self._next += 1
        key = RequestKey(f"r{self._next}", 0)
        sequence = Sequence(
            key, 0, 1, SamplingParams(max_tokens=1), list(range(num_tokens)), num_tokens, list(self._block_ids)
        )
        begin = time.monotonic()
        actions = self._sender.offer(sequence, (peer,), 1, begin)
        self.post(actions + self._sender.commit(key, (1,), begin))
        while not self._step():
            continue
        return time.monotonic() - begin

    def _step(self) -> bool:
        done = False
        patience_s = 0.0 if self._sender.has_pending and self.mailbox.payload_room else MAX_WAIT_S
        for event in self.mailbox.take(patience_s):
            done = self._hear(event) or done
        if self._sender.has_pending and (room := self.mailbox.payload_room):
            self.post(self._sender.next_pieces(min(room, MAX_TAKEN_BYTES), time.monotonic()))
        return done

    def _hear(self, event: Event) -> bool:
        if not isinstance(event, FromPeer) or not isinstance(event.message, KVGrant | KVRefusal | KVAck | KVReject):
            return False
        if isinstance(event.message, KVRefusal | KVReject):
            raise RuntimeError(f"The receiver said no: {event.message}")
        actions = self._sender.on_message(event.peer, event.message, time.monotonic())
        self.post(actions)
        return any(isinstance(action, HandedOver) for action in actions)


class ReceivingNode(Node):
    """Takes prompts and gives their blocks back at once."""

    def __init__(self, transport: str, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(transport, layout, num_blocks)
        self._blocks = BlockManager(num_blocks, layout.block_size)
        self._receiver = KVReceiver(
            incarnation=self.incarnation,
            layout=layout,
            fingerprint="none",
            blocks=self._blocks,
            max_model_len=num_blocks * layout.block_size,
            max_queue=1,
            max_lease_s=LEASE_S,
        )

    def run(self) -> None:
        """Until the process is ended."""
        while True:
            for event in self.mailbox.take(MAX_WAIT_S):
                self._do(self._hear(event))
            while piece := self.mailbox.next_piece():
                self._do(self._land(piece))
            self._do(self._receiver.grant(self._blocks.num_free, 1, time.monotonic()))

    def _hear(self, event: Event) -> list[Action]:
        now = time.monotonic()
        match event:
            case FromPeer(peer, KVOffer() | KVCommit() | KVReleased() as message):
                return self._receiver.on_message(peer, message, now)
            case MemoryShared(peer):
                self._receiver.on_memory_shared(peer)
        return []

    def _land(self, piece: PieceArrived) -> list[Action]:
        header = unpack(piece.header)
        place = self._receiver.accept(piece.peer, header)
        if place is None or not self.data.inlet.land(header, place, piece.payload):
            return []
        return self._receiver.landed(header, time.monotonic())

    def _do(self, actions: list[Action]) -> None:
        self.post(actions)
        for action in actions:
            if isinstance(action, Adopt):
                self._blocks.release(action.sequence.block_table)


def receive(pipe: Pipe, transport: str, layout: KVLayout, num_blocks: int) -> None:
    """A receiving process: says where it is, and receives until it is ended."""
    node = ReceivingNode(transport, layout, num_blocks)
    pipe.send(node.peer)
    node.run()
