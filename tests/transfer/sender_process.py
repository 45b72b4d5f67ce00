"""A sender of KV in a process of its own, which does one step for each line it reads.

It prints what it says to the receiver (`say` and the message), and `done` after each step.
"""

import sys

import zmq

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.encoding import decode, encode
from kvrelay.messages import (
    KVAck,
    KVGrant,
    KVRefusal,
    KVReject,
    Peer,
)
from kvrelay.transfer.ports import Outlet
from kvrelay.transfer.protocol.actions import Action, Send, SendPiece
from kvrelay.transfer.shm_transport import ShmTransport
from kvrelay.types import RequestKey
from tests.transfer.nouns import LAYOUT, NUM_BLOCKS, new_sender, new_sequence

SENDER = 11
KEY = RequestKey("r", 1)
NUM_TOKENS = 6  # 3 full blocks
BLOCK_IDS = (2, 3, 7)
GEOMETRY = Geometry(LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.block_bytes)


def new_memory(first: int) -> BlockMemory:
    """Bytes that differ from block to block, and between processes."""
    memory = BlockMemory.create(GEOMETRY)
    size = LAYOUT.block_bytes
    memory.buffer[:] = bytes((first + i // size) % 256 for i in range(GEOMETRY.num_bytes))
    return memory


def meet(transport: ShmTransport, peer: Peer) -> None:
    """Waits for the receiver's memory."""
    transport.connect(peer)
    while not transport.ready(peer.incarnation):
        zmq.zmq_poll([(each, zmq.POLLIN) for each in transport.sockets()], 100)
        transport.receive(1)


class SenderProcess:
    """The real state machine over the real transport, with a clock that says that the lease never ends."""

    def __init__(self, peer: Peer) -> None:
        self._memory = new_memory(100)
        self._transport = ShmTransport(self._memory, incarnation=SENDER)
        self._outlet = Outlet(self._memory, self._transport.shared)
        self._sender = new_sender(SENDER)
        self._peer = peer
        meet(self._transport, peer)

    def step(self, line: str) -> None:
        """One of: offer, hear MESSAGE, push, commit, close."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "offer":
                sequence = new_sequence(KEY, NUM_TOKENS, BLOCK_IDS)
                self._do(self._sender.offer(sequence, (self._peer,), 1, 0.0))
                for layer in range(LAYOUT.num_layers):
                    self._sender.advance(KEY, layer, NUM_TOKENS)
            case "hear":
                message = decode(rest.encode())
                assert isinstance(message, KVGrant | KVRefusal | KVAck | KVReject)
                self._do(self._sender.on_message(self._peer.incarnation, message, 0.0))
            case "push":
                self._do(self._sender.next_pieces(2**20, 0.0))
            case "commit":
                self._do(self._sender.commit(KEY, (1,), 0.0))
            case "close":
                self._transport.forget(self._peer.incarnation)
            case _:
                raise ValueError(line)
        _say("done")

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(_, message):
                    _say(f"say {encode(message).decode()}")
                case SendPiece():
                    assert self._transport.send(action.peer, *self._outlet.take(action))
                case _:
                    continue


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Until there are no more lines."""
    process = SenderProcess(Peer.model_validate_json(sys.argv[1]))
    _say("done")
    for line in sys.stdin:
        process.step(line)


if __name__ == "__main__":
    main()
