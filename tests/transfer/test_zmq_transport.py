"""What only ZeroMQ does: garbage on its sockets, ports, peers that restart. The rest is in test_transports.py."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from kvrelay.channel import routing_id
from kvrelay.errors import AddressInUse, WireError
from kvrelay.messages import LeaseId, Peer
from kvrelay.transfer.protocol.piece import HEADER_BYTES, PieceHeader, pack, seal
from kvrelay.transfer.zmq_transport import ZmqTransport
from kvrelay.transport import Arrived

SENDER, RECEIVER = 1, 2
Piece = Arrived


class Sockets:
    """Makes transports and raw sockets, and closes them all."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack = ExitStack()

    def transport(self, incarnation: int, ports: str = "0", *, max_queued: int = 16) -> ZmqTransport:
        made = ZmqTransport(
            self.context, "127.0.0.1", ports, incarnation=incarnation, max_frame_bytes=2**22, max_queued=max_queued
        )
        self._stack.callback(made.close)
        return made

    def dealer(self, endpoint: str, identity: bytes = b"") -> "zmq.Socket[bytes]":
        made = self.context.socket(zmq.DEALER)
        self._stack.callback(made.close, linger=0)
        if identity:
            made.setsockopt(zmq.ROUTING_ID, identity)
        made.connect(endpoint)
        return made

    def close(self) -> None:
        self._stack.close()
        self.context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


@pytest.fixture
def receiver(sockets: Sockets) -> ZmqTransport:
    return sockets.transport(RECEIVER)


@pytest.fixture
def sender(sockets: Sockets) -> ZmqTransport:
    return sockets.transport(SENDER)


def peer_of(transport: ZmqTransport, incarnation: int = RECEIVER) -> Peer:
    endpoint = transport.endpoints["zmq"]
    return Peer(name="d", incarnation=incarnation, control_endpoint=endpoint, data_endpoints={"zmq": endpoint})


def piece(number: int, num_blocks: int = 1) -> tuple[bytes, bytes]:
    payload = number.to_bytes(4, "little") * (num_blocks * 1024)
    header = PieceHeader(LeaseId(RECEIVER, 1), SENDER, 0, number, num_blocks, 0, 4, 16, "float16", len(payload))
    return pack(seal(header, payload)), payload


def receive(transport: ZmqTransport, enough: Callable[[list[Piece]], bool]) -> list[Piece]:
    """Polls until enough came; gives what is there after ten seconds."""
    found: list[Piece] = []
    for _ in range(200):
        found += transport.receive(2**24)
        if enough(found):
            break
        zmq.zmq_poll([(item, zmq.POLLIN) for item in transport.sockets()], 50)
    return found


def send(transport: ZmqTransport, peer: Peer, header: bytes, payload: bytes) -> None:
    """Polls for room as long as the transport says that it would block."""
    for _ in range(200):
        if transport.send(peer, header, payload):
            return
        zmq.zmq_poll([(item, zmq.POLLOUT) for item in transport.blocked()], 50)
    raise AssertionError("the piece never left")


def test_nothing_queues_for_a_process_that_is_not_there(sender: ZmqTransport, sockets: Sockets) -> None:
    with socket.socket() as nobody:  # has the port and does not listen: a closed ZeroMQ socket may, for a moment
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        peer = peer_of(sockets.transport(RECEIVER)).model_copy(update={"data_endpoints": {"zmq": endpoint}})
        assert not sender.send(peer, *piece(1))
        sender.forget(RECEIVER)
        assert not sender.blocked()
        sender.forget(RECEIVER)  # a second time is fine


def test_garbage_frames_are_counted_and_the_next_piece_still_arrives(
    sender: ZmqTransport, receiver: ZmqTransport, sockets: Sockets
) -> None:
    header, payload = piece(1)
    garbage = [
        [b""],
        [header],
        [b"x" * HEADER_BYTES, payload],
        [header, payload[:-1]],
        [header, payload + b"x"],
        [header[:-1], payload],
        [header, payload, b"more"],
    ]
    raw = sockets.dealer(receiver.endpoints["zmq"], routing_id(5))
    nameless = sockets.dealer(receiver.endpoints["zmq"])
    for frames in garbage:
        raw.send_multipart(frames)
    nameless.send_multipart([header, payload])
    assert receive(receiver, lambda _: receiver.counters["payload_malformed"] == len(garbage) + 1) == []
    assert receiver.counters["payload_malformed"] == len(garbage) + 1
    send(sender, peer_of(receiver), header, payload)
    assert receive(receiver, bool) == [(SENDER, header, payload)]


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(
    sender: ZmqTransport, receiver: ZmqTransport, sockets: Sockets
) -> None:
    raw = sockets.dealer(receiver.endpoints["zmq"])
    monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    raw.send_multipart([b"x" * HEADER_BYTES, b"y" * (2**22 + 1)])
    assert monitor.poll(10_000), "the connection should have been closed"
    raw.disable_monitor()
    monitor.close(linger=0)
    send(sender, peer_of(receiver), *piece(1))
    assert len(receive(receiver, bool)) == 1


def test_a_receiver_that_restarts_at_the_same_address_is_reached_again(sender: ZmqTransport, sockets: Sockets) -> None:
    """Idle for a while, then the first request fails: here a dead connection is not kept."""
    old = sockets.transport(RECEIVER)
    send(sender, peer_of(old), *piece(1))
    assert len(receive(old, bool)) == 1
    port = old.endpoints["zmq"].rpartition(":")[2]
    old.close()
    new = _bind_again(sockets, port)
    found: list[Piece] = []
    for number in range(100):  # what the old connection swallowed before its end was noticed is lost
        sender.send(peer_of(new), *piece(number))
        zmq.zmq_poll([(item, zmq.POLLIN) for item in new.sockets()], 100)
        found += new.receive(2**24)
        if found:
            break
    assert found


def _bind_again(sockets: Sockets, port: str) -> ZmqTransport:
    for _ in range(100):
        try:
            return sockets.transport(RECEIVER, port)
        except AddressInUse:
            zmq.zmq_poll([], 20)
    raise AssertionError("the port was not given back")


def test_a_malformed_endpoint_is_a_wire_error(sender: ZmqTransport) -> None:
    peer = Peer(name="d", incarnation=3, control_endpoint="x", data_endpoints={"zmq": "nowhere"})
    with pytest.raises(WireError, match="d cannot be reached at 'nowhere'"):
        sender.connect(peer)


def test_each_port_of_a_range_is_tried(sockets: Sockets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse):
            sockets.transport(1, str(port))
        if port < 65_500:
            transport = sockets.transport(1, f"{port}-{port + 30}")
            assert not transport.endpoints["zmq"].endswith(f":{port}")


def test_no_ping_goes_where_a_full_queue_may_keep_zeromq_from_reading(sender: ZmqTransport) -> None:
    """It would abort the process if the peer died then."""
    nobody = Peer(name="d", incarnation=3, control_endpoint="x", data_endpoints={"zmq": "tcp://127.0.0.1:1"})
    assert not sender.send(nobody, *piece(1))
    made = (*sender.sockets(), *sender.blocked())
    assert [each.getsockopt(zmq.HEARTBEAT_IVL) for each in made] == [0, 0]
    assert [each.getsockopt(zmq.TCP_KEEPALIVE) for each in made] == [1, 1]
