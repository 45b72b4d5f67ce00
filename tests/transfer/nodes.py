"""Both ends of hand-overs as workers have them, sockets and threads and all, but without a model.

Each node's compute loop is driven by the test, step by step.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.blocks import BlockManager
from kvrelay.channel import Listener
from kvrelay.config import PrefillSettings
from kvrelay.control import ControlThread
from kvrelay.mailbox import (
    Event,
    FromPeer,
    Mailbox,
    MemoryShared,
    PeerExited,
    PeerLost,
    PieceArrived,
    SendPayload,
    ToPeer,
)
from kvrelay.messages import (
    Abort,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    KVRepair,
    Peer,
    WorkerHello,
)
from kvrelay.process import new_incarnation
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.protocol.actions import Action, Adopt, Dropped, Failed, HandedOver, Send, SendPiece
from kvrelay.transfer.protocol.piece import unpack
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import Incarnation, KVLayout, RequestKey, Role, SamplingParams, Sequence

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")  # 4 KiB a block
NUM_BLOCKS = 128
LEASE_S = 1.5
GATEWAY = 77
MARK = b"This is a block."  # every block of a sender begins like this
FINGERPRINT = "none"


@dataclass(frozen=True)
class Content:
    """What a hand-over brings: tokens with the first generated one, and the bytes of each layer."""

    token_ids: tuple[int, ...]
    layers: tuple[bytes, ...]


class Node:
    """What both ends have."""

    def __init__(self, transport: str) -> None:
        """`transport` as in `--transport`."""
        self.incarnation = new_incarnation()
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.memory = BlockMemory.create(Geometry(LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.block_bytes))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = Mailbox()
        listener = Listener(self._context, "127.0.0.1", "0", incarnation=self.incarnation)
        settings = PrefillSettings.model_validate({"transport": transport})
        self._data = open_data_plane(settings, self._context, self.incarnation, self.memory, LAYOUT, self.memory)
        self.peer = Peer(
            name="node",
            incarnation=self.incarnation,
            control_endpoint=listener.endpoint,
            data_endpoints=dict(self._data.transport.endpoints),
        )
        self._control = ControlThread(
            context=self._context,
            mailbox=self._mailbox,
            listener=listener,
            data=self._data.transport,
            gateways=(),
            hello=_hello(self.incarnation, self.peer),
            heartbeat_s=0.1,
            death_s=1.0,
            clock=time.monotonic,
        )
        self._thread = threading.Thread(target=self._control.run, daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        """True when every block is home."""
        ledger = self.blocks.ledger
        return ledger.conserved and ledger.leased == ledger.revoked == 0

    def close(self) -> None:
        """Ends its thread and closes its sockets."""
        self._control.stop()
        self._thread.join()
        self._mailbox.close()
        self._context.term()

    def content(self, token_ids: Iterable[int], block_ids: list[int]) -> Content:
        """What lies in some blocks."""
        layers = (b"".join(self.memory.views(layer, block_ids)) for layer in range(LAYOUT.num_layers))
        return Content(tuple(token_ids), tuple(layers))


def _hello(incarnation: Incarnation, peer: Peer) -> WorkerHello:
    """There is no gateway to hear it."""
    return WorkerHello(
        source=incarnation,
        name=peer.name,
        role=Role.BOTH,
        control_endpoint=peer.control_endpoint,
        data_endpoints=peer.data_endpoints,
        model="none",
        fingerprint=FINGERPRINT,
        max_model_len=1,
        vocab_size=1,
        max_num_seqs=1,
        layout=LAYOUT,
        device="cpu",
        pid=1,
        host="here",
    )


class SendingNode(Node):
    """Hands prompts over that are computed already. `expected` is what each brings, `ends` how those ended that did."""

    def __init__(self, transport: str, draw: random.Random) -> None:
        super().__init__(transport)
        self.expected: dict[RequestKey, Content] = {}
        self.ends: dict[RequestKey, type[Action]] = {}
        self._draw = draw
        self._tables: dict[RequestKey, list[int]] = {}
        self._sender = KVSender(
            incarnation=self.incarnation,
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            lease_s=LEASE_S,
            margin_s=0.3,
            resend_s=0.1,
            max_piece_bytes=4 * LAYOUT.block_bytes,
        )

    def hand_over(self, peer: Peer, num_blocks: int) -> RequestKey:
        """Begins one with random bytes."""
        key = RequestKey(f"r{len(self.expected)}", 0)
        table = self._tables[key] = self.blocks.allocate(num_blocks)
        for layer in range(LAYOUT.num_layers):
            size = LAYOUT.block_bytes - len(MARK)
            self.memory.write(layer, table, b"".join(MARK + self._draw.randbytes(size) for _ in table))
        prompt = [self._draw.randrange(2**31) for _ in range(num_blocks * LAYOUT.block_size)]
        first_token = self._draw.randrange(2**31)
        self.expected[key] = self.content([*prompt, first_token], table)
        sequence = Sequence(key, 0, GATEWAY, SamplingParams(max_tokens=9), prompt, len(prompt), list(table))
        now = time.monotonic()
        self._do(self._sender.offer(sequence, (peer,), 1, now) + self._sender.commit(key, (first_token,), now))
        return key

    def step(self, patience_s: float) -> None:
        """Once round the loop."""
        for event in self._mailbox.take(patience_s):
            self._do(self._hear(event))
        now = time.monotonic()
        self._do(self._sender.tick(now))
        if self._sender.has_pending and (room := self._mailbox.payload_room):
            self._do(self._sender.next_pieces(room, now))

    def _hear(self, event: Event) -> list[Action]:
        match event:
            case FromPeer(peer, KVGrant() | KVRefusal() | KVRepair() | KVAck() | KVReject() as message):
                return self._sender.on_message(peer, message, time.monotonic())
            case PeerLost(peer):
                return self._sender.on_peer_lost(peer, time.monotonic())
        return []

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self._mailbox.post([ToPeer(peer, message)])
                case SendPiece(peer):
                    header, payload = self._data.outlet.take(action)
                    self._mailbox.post([SendPayload(peer, header, payload, time.monotonic() + LEASE_S)])
                case HandedOver(key) | Dropped(key) | Failed(key):
                    assert key not in self.ends
                    self.ends[key] = type(action)
                    self.blocks.release(self._tables.pop(key))


class ReceivingNode(Node):
    """Takes prompts, notes what they brought in `adopted`, and gives their blocks back at once."""

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        self.adopted: dict[RequestKey, Content] = {}
        self._receiver = KVReceiver(
            incarnation=self.incarnation,
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            blocks=self.blocks,
            max_model_len=NUM_BLOCKS * LAYOUT.block_size,
            max_queue=16,
            max_lease_s=LEASE_S,
        )

    @property
    def counters(self) -> Counter[str]:
        """What was dropped or repeated, and how often."""
        return self._receiver.counters

    def step(self, patience_s: float) -> None:
        """Once round the loop."""
        for event in self._mailbox.take(patience_s):
            self._do(self._hear(event))
        while piece := self._mailbox.next_piece():
            self._do(self._land(piece))
        now = time.monotonic()
        self._do(self._receiver.tick(now))
        self._do(self._receiver.grant(self.blocks.num_free, 16, now))

    def _hear(self, event: Event) -> list[Action]:
        now = time.monotonic()
        match event:
            case FromPeer(peer, KVOffer() | KVCommit() | KVReleased() | Abort() as message):
                return self._receiver.on_message(peer, message, now)
            case MemoryShared(peer):
                self._receiver.on_memory_shared(peer)
            case PeerLost(peer):
                return self._receiver.on_peer_lost(peer, now)
            case PeerExited(peer):
                return self._receiver.on_peer_exited(peer, now)
        return []

    def _land(self, piece: PieceArrived) -> list[Action]:
        header, now = unpack(piece.header), time.monotonic()
        place = self._receiver.accept(piece.peer, header)
        if place is None:
            return []
        if self._data.inlet.land(header, place, piece.payload):
            return self._receiver.landed(header, now)
        return self._receiver.corrupt(header, now)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self._mailbox.post([ToPeer(peer, message)])
                case Adopt(sequence):
                    assert sequence.key not in self.adopted
                    self.adopted[sequence.key] = self.content(sequence.token_ids, sequence.block_table)
                    self.blocks.release(sequence.block_table)
