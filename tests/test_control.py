"""The control thread over real sockets: registration, loss of a gateway or peer, heartbeats, payload that waits."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
import zmq

from kvrelay.channel import Connection, Listener
from kvrelay.control import ControlThread
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.mailbox import (
    Event,
    FromGateway,
    FromPeer,
    GatewayLost,
    Mailbox,
    MemoryShared,
    PeerExited,
    PeerLost,
    PieceArrived,
    PieceWaiting,
    SendPayload,
    ToGateway,
    ToPeer,
)
from kvrelay.messages import (
    Drain,
    GatewayHello,
    KVCommit,
    KVReleased,
    LeaseId,
    Ledger,
    Peer,
    WorkerHello,
    WorkerLoad,
    WorkerStatus,
)
from kvrelay.transport import MAX_HEADERS, Arrived, Pollable
from kvrelay.types import Incarnation, KVLayout, Role

WORKER, GATEWAY, PEER = 1, 2, 3
LEDGER = Ledger(total=1, free=1, cached=0, leased=0, revoked=0)
COMMIT = KVCommit(
    source=WORKER, target=PEER, request_id="r", attempt=0, lease_id=LeaseId(PEER, 1), first_token_ids=(1,)
)
WAIT_S = 20.0


@dataclass
class Pipe:
    """A data plane whose receiver reads nothing until it is told to."""

    endpoints: dict[str, str] = field(default_factory=lambda: {"zmq": "tcp://h:2"})
    counters: Counter[str] = field(default_factory=lambda: Counter({"piece_dropped": 3}))
    reads: bool = False
    is_ready: bool = True
    fault: str = ""
    told: list[MemoryShared | PeerExited] = field(default_factory=list)
    sent: list[bytes | DeviceBytes | None] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    forgotten: list[Incarnation] = field(default_factory=list)
    source: list[Pollable] = field(default_factory=list)  # readable while there is something to receive
    arrived: list[Arrived] = field(default_factory=list)

    def sockets(self) -> list[Pollable]:
        return self.source

    def blocked(self) -> list[Pollable]:
        return []

    def connect(self, peer: Peer) -> None:
        return

    def ready(self, incarnation: Incarnation) -> bool:
        if self.fault:
            raise WireError(self.fault)
        return self.is_ready

    def agreed(self, incarnation: Incarnation) -> str:
        return "pipe"

    def forget(self, incarnation: Incarnation) -> None:
        self.forgotten.append(incarnation)

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        if self.fault:
            raise WireError(self.fault)
        if self.reads:
            self.sent.append(payload)
            self.headers.append(header)
        return self.reads

    def receive(self, max_bytes: int) -> list[Arrived]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def news(self) -> list[MemoryShared | PeerExited]:
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        return


@dataclass
class World:
    """One worker's control thread, and the gateway that it registers at."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    gateway: Listener
    mailbox: Mailbox
    pipe: Pipe
    listener: Listener
    control: ControlThread
    events: list[Event] = field(default_factory=list)

    def heard(self) -> object:
        """The next message that the gateway gets."""
        return wait_for(lambda: self.gateway.receive(limit=1))[0][1]

    def event(self, kind: type) -> object:
        """The next event of a kind; others before it are dropped."""

        def look() -> list[Event]:
            self.events += self.mailbox.take(0.01)
            while self.events and not isinstance(self.events[0], kind):
                self.events.pop(0)
            return self.events

        wait_for(look)
        return self.events.pop(0)


def wait_for(get: Callable[[], list]) -> list:  # type: ignore[type-arg]
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if got := get():
            return got
        time.sleep(0.001)
    raise TimeoutError


def hello(listener: Listener) -> WorkerHello:
    return WorkerHello(
        source=WORKER,
        name="w",
        role=Role.PREFILL,
        control_endpoint=listener.endpoint,
        data_endpoints={"zmq": "tcp://h:2"},
        model="m",
        fingerprint="f",
        max_model_len=10,
        vocab_size=10,
        max_num_seqs=1,
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32"),
        device="cpu",
        pid=1,
        host="h",
    )


@pytest.fixture
def world() -> Iterator[World]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Listener(context, "127.0.0.1", "0", incarnation=GATEWAY)
    listener = Listener(context, "127.0.0.1", "0", incarnation=WORKER)
    mailbox, pipe = Mailbox(), Pipe()
    control = ControlThread(
        context=context,
        mailbox=mailbox,
        listener=listener,
        data=pipe,
        gateways=(gateway.endpoint,),
        hello=hello(listener),
        heartbeat_s=0.05,
        death_s=1000.0,
        clock=time.monotonic,
    )
    thread = threading.Thread(target=control.run)
    thread.start()
    world = World(context, gateway, mailbox, pipe, listener, control)
    yield world
    control.stop()
    thread.join(WAIT_S)
    assert not control.failed
    if not world.gateway.socket.closed:
        world.gateway.close()
    mailbox.close()
    context.destroy(linger=0)


def register(world: World) -> None:
    assert isinstance(world.heard(), WorkerHello)
    world.gateway.send(WORKER, GatewayHello(source=GATEWAY, registered=True))
    world.gateway.send(WORKER, Drain(source=GATEWAY))
    assert world.event(FromGateway) == FromGateway(GATEWAY, Drain(source=GATEWAY))


def test_a_worker_introduces_itself_on_connection_and_when_asked(world: World) -> None:
    assert isinstance(world.heard(), WorkerHello)
    world.gateway.send(WORKER, GatewayHello(source=GATEWAY, registered=False))
    assert isinstance(world.heard(), WorkerHello)


def test_heartbeats_carry_the_newest_status_and_what_sockets_counted(world: World) -> None:
    register(world)
    world.mailbox.status = WorkerStatus(source=WORKER, ledger=LEDGER, load=WorkerLoad(num_waiting=4), counters={"a": 1})
    status = world.heard()
    assert isinstance(status, WorkerStatus)
    assert status.load.num_waiting == 4
    assert status.counters == {"a": 1, "piece_dropped": 3}


def test_a_lost_gateway_is_an_event_at_once(world: World) -> None:
    register(world)
    world.gateway.close()
    assert world.event(GatewayLost) == GatewayLost(GATEWAY)


def test_another_incarnation_at_the_same_address_means_that_the_old_one_is_gone(world: World) -> None:
    register(world)
    world.gateway.send(WORKER, GatewayHello(source=99, registered=True))
    assert world.event(GatewayLost) == GatewayLost(GATEWAY)


def test_a_silent_gateway_is_dead_after_its_time(world: World) -> None:
    register(world)
    world.control._links[0]._death_s = -1.0  # every silence is too long from here on
    assert world.event(GatewayLost) == GatewayLost(GATEWAY)


def test_answers_reach_the_gateway(world: World) -> None:
    register(world)
    world.mailbox.post([ToGateway(GATEWAY, Drain(source=WORKER))])
    assert world.heard() == Drain(source=WORKER)


def test_peers_talk_both_ways_and_their_loss_is_an_event(world: World) -> None:
    other = Listener(world.context, "127.0.0.1", "0", incarnation=PEER)
    peer = Peer(name="p", incarnation=PEER, control_endpoint=other.endpoint, data_endpoints={"zmq": "tcp://h:2"})
    world.mailbox.post([ToPeer(peer, COMMIT)])
    assert wait_for(other.receive) == [(WORKER, COMMIT)]
    other.send(WORKER, Drain(source=PEER))
    assert world.event(FromPeer) == FromPeer(PEER, Drain(source=PEER))
    other.close()
    assert world.event(PeerLost) == PeerLost(PEER)
    assert world.pipe.forgotten == [PEER]


def test_a_peer_that_connected_to_us_is_answered_and_its_loss_is_an_event(world: World) -> None:
    caller = Connection(world.context, world.listener.endpoint, incarnation=PEER, numbers=count(), queue_early=True)
    caller.send(Drain(source=PEER))
    assert world.event(FromPeer) == FromPeer(PEER, Drain(source=PEER))
    world.mailbox.post([ToPeer(PEER, Drain(source=WORKER))])
    assert wait_for(caller.receive) == [Drain(source=WORKER)]
    caller.close()
    assert world.event(PeerLost) == PeerLost(PEER)


def test_an_address_that_is_none_loses_the_peer_and_harms_nobody(world: World) -> None:
    nowhere = Peer(name="p", incarnation=PEER, control_endpoint="?", data_endpoints={"zmq": "?"})
    world.mailbox.post([ToPeer(nowhere, COMMIT)])
    assert world.event(PeerLost) == PeerLost(PEER)


def test_payload_waits_for_a_slow_receiver_and_is_dropped_with_its_lease(world: World) -> None:
    peer = Peer(name="p", incarnation=PEER, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": "tcp://h:2"})
    never = time.monotonic() + 1000
    room = world.mailbox.payload_room
    world.mailbox.post([ToPeer(peer, COMMIT)])
    world.mailbox.post([SendPayload(peer, b"", b"old", time.monotonic() - 1), SendPayload(peer, b"", b"new", never)])
    wait_for(lambda: [1] * (world.mailbox.payload_room == room - 3))
    world.pipe.reads = True
    wait_for(lambda: [1] * (world.mailbox.payload_room == room))
    assert world.pipe.sent == [b"new"]


def test_headers_of_pieces_that_are_there_already_go_together_and_without_those_whose_lease_ended(world: World) -> None:
    peer = Peer(name="p", incarnation=PEER, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": "tcp://h:2"})
    now = time.monotonic()
    deadlines = [now + 1000, now - 1, now + 1000]
    written = [SendPayload(peer, b"%d" % i, None, deadline) for i, deadline in enumerate(deadlines)]
    carried = SendPayload(peer, b"3", b"payload", now + 1000)
    world.mailbox.post([ToPeer(peer, COMMIT), *written, carried, SendPayload(peer, b"4", None, now + 1000)])
    world.pipe.reads = True
    world.mailbox.wake()
    wait_for(lambda: [1] * (len(world.pipe.sent) == 3))
    assert world.pipe.headers == [b"02", b"3", b"4"]
    assert world.pipe.sent == [None, b"payload", None]


def test_no_call_has_more_headers_than_a_transport_takes(world: World) -> None:
    peer = Peer(name="p", incarnation=PEER, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": "tcp://h:2"})
    world.pipe.reads = True
    pieces = [SendPayload(peer, b"h", None, time.monotonic() + 1000) for _ in range(3 * MAX_HEADERS)]
    world.mailbox.post([ToPeer(peer, COMMIT), *pieces])
    wait_for(lambda: [1] * (sum(map(len, world.pipe.headers)) == len(pieces)))
    assert max(map(len, world.pipe.headers)) <= MAX_HEADERS


def test_what_nobody_waits_for_opens_no_connection_and_payload_for_nobody_is_dropped(world: World) -> None:
    other = Listener(world.context, "127.0.0.1", "0", incarnation=PEER)
    peer = Peer(name="p", incarnation=PEER, control_endpoint=other.endpoint, data_endpoints={"zmq": "tcp://h:2"})
    room = world.mailbox.payload_room
    world.mailbox.post([ToPeer(peer, Drain(source=WORKER)), SendPayload(peer, b"", b"old", time.monotonic() + 1000)])
    wait_for(lambda: [1] * (world.mailbox.payload_room == room))
    world.mailbox.post([ToPeer(peer, COMMIT)])
    assert wait_for(other.receive) == [(WORKER, COMMIT)]  # and nothing before it
    other.close()


def test_a_receiver_that_lives_on_hears_that_it_has_its_blocks_back(world: World) -> None:
    other = Listener(world.context, "127.0.0.1", "0", incarnation=PEER)
    peer = Peer(name="p", incarnation=PEER, control_endpoint=other.endpoint, data_endpoints={"zmq": "tcp://h:2"})
    released = KVReleased(source=WORKER, target=PEER, lease_id=LeaseId(PEER, 1))
    world.mailbox.post([ToPeer(peer, released)])
    assert wait_for(other.receive) == [(WORKER, released)]
    other.close()


def test_a_peer_that_cannot_be_reached_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a prompt would wait for its answer until the lease ends, with other candidates at hand."""
    monkeypatch.setattr("kvrelay.control.MAX_CONNECTING_S", 0.1)
    nobody = Peer(name="p", incarnation=PEER, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": "tcp://h:2"})
    world.mailbox.post([ToPeer(nobody, COMMIT)])
    assert world.event(PeerLost) == PeerLost(PEER)
    assert world.pipe.forgotten == [PEER]


def test_nothing_is_said_to_a_peer_before_it_is_settled_how_payload_goes(world: World) -> None:
    other = Listener(world.context, "127.0.0.1", "0", incarnation=PEER)
    peer = Peer(name="p", incarnation=PEER, control_endpoint=other.endpoint, data_endpoints={"zmq": "tcp://h:2"})
    world.pipe.is_ready = False
    release = KVReleased(source=WORKER, target=PEER, lease_id=COMMIT.lease_id)
    world.mailbox.post([ToPeer(peer, COMMIT), ToPeer(peer, release)])
    wait_for(lambda: [1] * (len(world.control._unsaid.get(PEER, ())) == 2))
    assert other.receive() == []
    world.pipe.is_ready = True
    said = wait_for(other.receive)
    while len(said) < 2:
        said += wait_for(other.receive)
    assert said == [(WORKER, COMMIT), (WORKER, release)]
    other.close()


@pytest.mark.parametrize("when", ["settling", "sending"])
def test_a_peer_that_payload_cannot_reach_is_lost(world: World, when: str) -> None:
    peer = Peer(name="p", incarnation=PEER, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": "tcp://h:2"})
    room = world.mailbox.payload_room
    if when == "sending":
        world.mailbox.post([ToPeer(peer, COMMIT), SendPayload(peer, b"", b"new", time.monotonic() + 1000)])
        wait_for(lambda: [1] * (world.mailbox.payload_room == room - 3))
    world.pipe.fault = "There is no way to p."
    if when == "settling":
        world.mailbox.post([ToPeer(peer, COMMIT)])
    world.mailbox.wake()
    assert world.event(PeerLost) == PeerLost(PEER)
    assert world.mailbox.payload_room == room
    assert world.pipe.forgotten == [PEER]


def test_news_of_shared_memory_are_events(world: World) -> None:
    world.pipe.told = [MemoryShared(PEER), PeerExited(PEER)]
    world.mailbox.wake()
    assert world.event(MemoryShared) == MemoryShared(PEER)
    assert world.event(PeerExited) == PeerExited(PEER)


def test_payload_is_looked_for_when_a_socket_of_its_transport_says_so(world: World) -> None:
    world.control._next_beat = time.monotonic() + 1000  # heartbeats look for it too
    readable, writer = socket.socketpair()
    with readable, writer:
        writer.send(b"!")
        world.pipe.source = [readable.fileno()]
        world.pipe.arrived = [Arrived(PEER, b"header", None)]
        world.mailbox.wake()
        world.event(PieceWaiting)
        assert world.mailbox.next_piece() == PieceArrived(PEER, b"header", None)
        world.pipe.source = []
        world.mailbox.wake()
