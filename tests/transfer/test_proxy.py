"""Hand-overs through a network that delays, cuts and garbles: each ends in time, and no wrong byte is ever adopted."""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from kvrelay import channel
from kvrelay.transfer.protocol.actions import HandedOver
from tests.transfer.nodes import LAYOUT, MARK, ReceivingNode, SendingNode
from tests.transfer.proxy import Fault, Kind, Proxy

END_S = 30.0  # far beyond any lease
AT_ONCE = 4
MOST_BLOCKS = 12
CONTROL_BYTES = {True: 5000, False: 1200}  # of a round at least, to the receiver and back
MAX_TRIES = 3
PING_S = 0.3  # within which ZeroMQ finds connections that lead nowhere


class Path:
    """A sender and a receiver with a proxy on each of the two connections."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.sender = SendingNode("zmq", self.draw)
        self.receiver = ReceivingNode("zmq")
        peer = self.receiver.peer
        self.control = Proxy(peer.control_endpoint)
        self.data = Proxy(peer.data_endpoints["zmq"])
        self.peer = peer.model_copy(
            update={"control_endpoint": self.control.endpoint, "data_endpoints": {"zmq": self.data.endpoint}}
        )

    def close(self) -> None:
        for each in (self.control, self.data, self.sender, self.receiver):
            each.close()

    def begin(self) -> int:
        """Hand-overs of random sizes; gives their bytes of payload."""
        sizes = [self.draw.randint(1, MOST_BLOCKS) for _ in range(AT_ONCE)]
        for size in sizes:
            self.sender.hand_over(self.peer, size)
        return sum(sizes) * LAYOUT.block_bytes * LAYOUT.num_layers

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + END_S
        while not done():
            assert time.monotonic() < deadline, (
                self.sender.ends,
                self.sender.blocks.ledger,
                self.receiver.blocks.ledger,
            )
            self.sender.step(0.005)
            self.receiver.step(0.0)

    def end(self) -> None:
        """Every hand-over ends, every block comes home, and what was adopted is what was sent."""
        self.until(lambda: self.sender.ends.keys() == self.sender.expected.keys())
        self.until(lambda: self.sender.is_empty and self.receiver.is_empty)
        for key, content in self.receiver.adopted.items():
            assert content == self.sender.expected[key]
        done = {key for key, end in self.sender.ends.items() if end is HandedOver}
        assert done <= self.receiver.adopted.keys()

    def cut_garbled(self, kind: Kind) -> None:
        """ZeroMQ waits for ever for the rest of a frame whose length is another, and a routing id stays what it is."""
        if kind is Kind.GARBLE:
            self.control.cut()
            self.data.cut()

    def recover(self) -> None:
        """Without a fault a hand-over works, at the latest when the loss of a connection is known at both ends."""
        self.control.set(None)
        self.data.set(None)
        assert any(self._succeeds() for _ in range(MAX_TRIES))

    def _succeeds(self) -> bool:
        key = self.sender.hand_over(self.peer, 3)
        self.end()
        return self.sender.ends[key] is HandedOver


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Path]:
    monkeypatch.setattr(channel, "PING_MS", round(PING_S * 250))
    monkeypatch.setattr(channel, "PING_TIMEOUT_MS", round(PING_S * 1000))
    made = Path(seed)
    yield made
    made.close()


def random_fault(draw: random.Random, kind: Kind, payload_bytes: int) -> Fault:
    """Somewhere in a round that moves so much payload, or in its messages if that is 0; payload has no way back."""
    to_server = payload_bytes > 0 or draw.random() < 0.7
    return Fault(
        kind,
        to_server,
        skip=draw.randrange(payload_bytes or CONTROL_BYTES[to_server]),
        noise=bytes(1 << draw.randrange(8) for _ in range(draw.choice((1, 1, 8)))),
        delay_s=draw.uniform(0, 2 * PING_S),
    )


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", Kind)
def test_a_fault_on_the_way_of_messages(path: Path, kind: Kind) -> None:
    for _ in range(20):
        path.begin()
        path.control.set(random_fault(path.draw, kind, 0))
        path.end()
        path.cut_garbled(kind)
        path.recover()
    assert path.control.num_struck > 10


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", Kind)
def test_a_fault_on_the_way_of_payload(path: Path, kind: Kind) -> None:
    for _ in range(6):
        path.data.set(random_fault(path.draw, kind, path.begin()))
        path.end()
        path.cut_garbled(kind)
        path.recover()
    assert path.data.num_struck > 3


@pytest.mark.parametrize("seed", [1])
def test_a_wrong_byte_of_payload_is_never_adopted_and_comes_again(path: Path) -> None:
    for _ in range(20):
        path.begin()
        skip = path.draw.randrange(LAYOUT.block_bytes - len(MARK))
        path.data.set(
            Fault(Kind.GARBLE, to_server=True, skip=skip, mark=MARK, noise=path.draw.choice((b"\x01", b"\x80")))
        )
        path.end()
        assert path.data.num_struck == path.receiver.counters["piece_corrupt"]
    assert set(path.sender.ends.values()) == {HandedOver}
    assert path.data.num_struck > 10
