"""A sender that writes by itself, in a process of its own, is stopped, cut off and killed: nothing it writes later may
land in blocks that were given to somebody else, and its end gives back what it could still have written to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvrelay.blocks import BlockManager
from kvrelay.encoding import decode, encode
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import (
    Abort,
    AnyMessage,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVReject,
    KVReleased,
    Peer,
)
from kvrelay.transfer.ports import Inlet
from kvrelay.transfer.protocol.actions import Action, Adopt
from kvrelay.transfer.protocol.piece import unpack
from kvrelay.transfer.shm_transport import ShmTransport
from tests.transfer.nouns import LAYOUT, LEASE_S, NUM_BLOCKS, messages, new_receiver, of
from tests.transfer.sender_process import BLOCK_IDS, SENDER, new_memory

RECEIVER = 50
ROOT = Path(__file__).parents[2]
WAITS = 600


class Receiver:
    """A receiver with real memory, and the process that sends to it. Time is what the test says."""

    def __init__(self) -> None:
        self.memory = new_memory(0)
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.receiver = new_receiver(RECEIVER, self.blocks)
        self.transport = ShmTransport(self.memory, incarnation=RECEIVER)
        self.inlet = Inlet(self.memory, LAYOUT)
        self.now = 0.0
        self.num_pieces = 0
        self.refused = 0
        endpoints = dict(self.transport.endpoints)
        peer = Peer(name="d", incarnation=RECEIVER, control_endpoint="tcp://h:1", data_endpoints=endpoints)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.sender_process", peer.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            text=True,
        )
        self.hear_until(MemoryShared)
        assert self.answers() == []

    # the sender

    def ask(self, step: str) -> None:
        """Tells it to do a step, without waiting until it did."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def answers(self) -> list[AnyMessage]:
        """What it said in the step before."""
        assert self.process.stdout is not None
        said = []
        while (line := self.process.stdout.readline().strip()) != "done":
            word, _, message = line.partition(" ")
            assert word == "say", line
            said.append(decode(message.encode()))
        return said

    def do(self, step: str) -> list[Action]:
        """A step of the sender, and what the receiver makes of what it said."""
        self.ask(step)
        return self.hear(self.answers())

    def hear(self, said: list[AnyMessage]) -> list[Action]:
        """What the receiver does with messages."""
        actions: list[Action] = []
        for message in said:
            assert isinstance(message, KVOffer | KVCommit | KVReleased | Abort)
            actions += self.receiver.on_message(SENDER, message, self.now)
        return actions

    # the receiver

    def lease(self) -> KVGrant:
        """Offered and granted; the sender has not heard of the grant yet."""
        self.do("offer")
        return self.grant()

    def grant(self) -> KVGrant:
        """The next grant."""
        return messages(self.receiver.grant(NUM_BLOCKS, 10, self.now), KVGrant)[0]

    def tell(self, message: KVGrant | KVReject | KVAck) -> list[Action]:
        """Says something to the sender."""
        return self.do(f"hear {encode(message).decode()}")

    def land(self, count: int) -> list[Action]:
        """Takes so many pieces from the transport."""
        actions: list[Action] = []
        for _ in range(WAITS):
            for piece in self.transport.receive(2**20):
                self.num_pieces += 1
                header = unpack(piece.header)
                place = self.receiver.accept(piece.peer, header)
                if place is None:
                    self.refused += 1
                    continue
                assert self.inlet.land(header, place, piece.payload)
                actions += self.receiver.landed(header, self.now)
            if self.num_pieces >= count:
                return actions
            self.poll()
        raise AssertionError(f"only {self.num_pieces} pieces came")

    def hear_until(self, kind: type[MemoryShared] | type[PeerExited]) -> list[Action]:
        """Waits for news of the sender."""
        for _ in range(WAITS):
            self.transport.receive(2**20)
            for news in self.transport.news():
                assert isinstance(news, kind), news
                if isinstance(news, PeerExited):
                    return self.receiver.on_peer_exited(news.peer, self.now)
                self.receiver.on_memory_shared(news.peer)
                return []
            self.poll()
        raise AssertionError(f"no {kind.__name__}")

    def poll(self) -> None:
        zmq.zmq_poll([(each, zmq.POLLIN) for each in self.transport.sockets()], 50)

    def content(self, block_ids: tuple[int, ...]) -> list[bytes]:
        """What lies in these blocks, layer by layer."""
        return [b"".join(self.memory.views(layer, block_ids)) for layer in range(LAYOUT.num_layers)]

    @property
    def state(self) -> tuple[int, int, int]:
        """Free, leased and revoked blocks."""
        ledger = self.blocks.ledger
        assert ledger.conserved
        return ledger.free, ledger.leased, ledger.revoked

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.transport.close()


@pytest.fixture
def world() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def theirs() -> list[bytes]:
    """What the sender's blocks hold."""
    memory = new_memory(100)
    return [b"".join(memory.views(layer, BLOCK_IDS)) for layer in range(LAYOUT.num_layers)]


def test_a_hand_over_lands_in_the_blocks_that_were_granted(world: Receiver) -> None:
    grant = world.lease()
    assert grant.one_sided
    world.tell(grant)
    world.do("commit")
    assert not of(world.do("push"), Adopt)  # the commit is here, the pieces are not verified yet
    actions = world.land(1)
    assert of(actions, Adopt)
    assert world.content(grant.block_ids) == theirs()
    world.tell(messages(actions, KVAck)[0])
    assert world.state == (NUM_BLOCKS - 3, 3, 0)


def test_a_stopped_sender_that_goes_on_after_its_lease_expired_hits_nobody(world: Receiver) -> None:
    grant = world.lease()
    world.tell(grant)
    os.kill(world.process.pid, signal.SIGSTOP)
    world.ask("push")  # it will do so as soon as it goes on: it does not know what happened in between
    world.now = LEASE_S
    rejects = messages(world.receiver.tick(world.now), KVReject)
    assert world.state == (NUM_BLOCKS - 3, 0, 3)
    others = give_all_to_others(world)
    assert set(others).isdisjoint(grant.block_ids)
    before = world.content(others)
    os.kill(world.process.pid, signal.SIGCONT)
    assert world.answers() == []
    world.land(1)
    assert world.refused == 1  # written, but nobody takes it for KV
    assert world.content(others) == before
    assert world.content(grant.block_ids) == theirs()
    assert world.state == (0, NUM_BLOCKS - 3, 3)
    world.tell(rejects[0])  # now it hears of it, and says that it writes no more
    assert world.state == (3, NUM_BLOCKS - 3, 0)
    world.do("push")
    assert world.transport.receive(2**20) == []
    assert world.content(others) == before


def give_all_to_others(world: Receiver) -> tuple[int, ...]:
    """Whatever is free gets a new owner."""
    return tuple(world.blocks.allocate(world.blocks.num_free))


def test_a_commit_says_that_no_write_follows(world: Receiver) -> None:
    grant = world.lease()
    world.tell(grant)
    world.do("commit")
    world.do("push")
    world.now = LEASE_S
    world.receiver.tick(world.now)  # committed, but never verified: the lease ends, and its blocks are free at once
    assert world.state == (NUM_BLOCKS, 0, 0)
    before = world.content(tuple(range(NUM_BLOCKS)))
    world.do("push")
    assert world.content(tuple(range(NUM_BLOCKS))) == before


def test_a_killed_sender_gives_revoked_blocks_back(world: Receiver) -> None:
    grant = world.lease()
    world.tell(grant)
    world.now = LEASE_S
    world.receiver.tick(world.now)
    assert world.state == (NUM_BLOCKS - 3, 0, 3)
    os.kill(world.process.pid, signal.SIGKILL)
    world.hear_until(PeerExited)
    assert world.state == (NUM_BLOCKS, 0, 0)


def test_a_killed_sender_gives_leased_blocks_back(world: Receiver) -> None:
    world.tell(world.lease())
    os.kill(world.process.pid, signal.SIGKILL)
    world.receiver.on_peer_lost(SENDER, world.now)
    assert world.state == (NUM_BLOCKS - 3, 0, 3)  # a lost connection is no proof
    world.hear_until(PeerExited)
    assert world.state == (NUM_BLOCKS, 0, 0)


def test_a_sender_that_only_hangs_up_may_still_write(world: Receiver) -> None:
    world.tell(world.lease())
    world.do("close")
    for _ in range(3):
        world.poll()
        assert world.transport.receive(2**20) == []
        assert world.transport.news() == []
    world.receiver.on_peer_lost(SENDER, world.now)
    assert world.state == (NUM_BLOCKS - 3, 0, 3)
    os.kill(world.process.pid, signal.SIGKILL)
    world.hear_until(PeerExited)
    assert world.state == (NUM_BLOCKS, 0, 0)


def test_nothing_is_left_of_a_process_that_is_killed(world: Receiver) -> None:
    names = [path for folder in ("/dev/shm", "/tmp") for path in os.listdir(folder) if "kvrelay" in path]
    sockets = Path("/proc/net/unix")
    there = {line.split("@")[-1] for line in sockets.read_text().splitlines() if "@kvrelay-" in line}
    os.kill(world.process.pid, signal.SIGKILL)
    world.process.wait(30)
    left = {line.split("@")[-1] for line in sockets.read_text().splitlines() if "@kvrelay-" in line}
    assert len(there - left) >= 1  # the socket it listened at
    after = [path for folder in ("/dev/shm", "/tmp") for path in os.listdir(folder) if "kvrelay" in path]
    assert set(after) <= set(names)
