"""Who is let in by the receiving end of UCX, and what it makes of what nobody should say."""

import random
import socket
from collections.abc import Callable

import pytest
import zmq

from kvrelay.transfer import ucx_incoming, ucx_listener
from kvrelay.transfer.protocol.piece import HEADER_BYTES
from kvrelay.transfer.ucx_frames import PROBE, pack_hello
from tests.transfer.plane import End, Ends, meet, receive, send, tries
from tests.transfer.ucx_ends import STRANGER, Stranger, fault, narrow, raw, wait_for


@pytest.fixture
def transport_kind() -> str:
    return "ucx"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        random.Random(1).randbytes(21),
        bytes(100_000),
        pack_hello(STRANGER, 2)[:-1] + b"\xff",
        pack_hello(STRANGER, 2).replace(b"KVRU", b"KVRX"),
        pack_hello(0, 2),
        pack_hello(STRANGER, 3),  # the hello of a sender that means another incarnation
        pack_hello(STRANGER, 2) + bytes(HEADER_BYTES),
    ],
)
def test_who_says_something_else_is_not_let_in(ends: Ends, sender: End, receiver: End, garbage: bytes) -> None:
    stranger = raw(ends, receiver)
    stranger.sendall(garbage)
    wait_for(lambda: receiver.transport.counters["ucx_refused"] == 1, receiver)
    assert is_over(stranger)
    send(sender, sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    assert [piece.peer for piece in receive(receiver, bool)] == [sender.incarnation]


def is_over(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            continue
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize("messages", [[(0, b"x")], [(0, PROBE), (0, PROBE)], [(1, PROBE), (1, PROBE)], [(40, PROBE)]])
def test_who_sends_something_else_than_a_probe_is_not_let_in(
    ends: Ends, sender: End, receiver: End, messages: list[tuple[int, bytes]]
) -> None:
    stranger = Stranger(ends, receiver)
    for number, payload in messages:
        stranger.send(number, payload)
    stranger.stream.send(pack_hello(STRANGER, receiver.incarnation))
    stranger.wait_for(lambda: stranger.stream.ended)
    assert receiver.transport.counters["ucx_refused"] == 1
    send(sender, sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    assert [piece.peer for piece in receive(receiver, bool)] == [sender.incarnation]


def test_who_announces_more_than_may_be_under_way_is_disconnected(ends: Ends, sender: End, receiver: End) -> None:
    header, _ = sender.outlet.take(sender.piece(receiver.peer, 0, (1,), (1,)))
    stranger = Stranger(ends, receiver)
    stranger.let_in()
    stranger.stream.send(header * 4)
    stranger.stream.send(header)
    stranger.wait_for(lambda: stranger.stream.ended)
    assert receiver.transport.counters["payload_malformed"] == 1


def test_a_sender_that_comes_again_has_left(ends: Ends, receiver: End) -> None:
    strangers = [Stranger(ends, receiver) for _ in range(2)]
    for stranger in strangers:
        stranger.let_in()
    strangers[0].wait_for(lambda: strangers[0].stream.ended)
    assert not strangers[1].stream.ended


def test_who_says_nothing_is_not_waited_for(ends: Ends, receiver: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_incoming, "HELLO_S", -1.0)
    before = len(list(receiver.transport.sockets()))
    stranger = raw(ends, receiver)
    assert is_over_after(lambda: receiver.transport.receive(1), stranger)
    assert len(list(receiver.transport.sockets())) == before


def is_over_after(step: Callable[[], object], connection: socket.socket) -> bool:
    connection.setblocking(False)
    for _ in tries():
        step()
        try:
            if not connection.recv(4096):
                return True
        except BlockingIOError:
            continue
    return False


def test_a_crowd_of_strangers_is_bounded(ends: Ends, receiver: End, sender: End) -> None:
    for _ in range(2 * ucx_listener.MAX_STRANGERS):
        raw(ends, receiver)
        receiver.transport.receive(1)
    assert len(list(receiver.transport.sockets())) <= ucx_listener.MAX_STRANGERS + 3
    meet(sender, receiver)


def test_a_header_that_is_none_ends_the_connection(ends: Ends, sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    assert sender.transport.send(peer, b"x" * HEADER_BYTES, b"payload")
    assert "over UCX" in fault(sender, peer.incarnation, receiver)
    assert receiver.transport.counters["payload_malformed"] == 1
    sender.transport.forget(peer.incarnation)
    send(sender, sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    assert len(receive(receiver, bool)) == 1


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_size_than_announced_is_dropped(sender: End, receiver: End, change: int) -> None:
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    assert isinstance(payload, bytes)
    assert sender.transport.send(peer, header, payload[:change] if change < 0 else payload + b"x")
    wait_for(lambda: receiver.transport.counters["payload_malformed"] == 1, receiver, sender)
    assert receiver.transport.counters["ucx_pieces_received"] == 0


def test_a_payload_over_the_limit_ends_the_connection(ends: Ends, sender: End) -> None:
    receiver, transport = narrow(ends, sender, max_frame_bytes=1000)
    peer = meet(sender, receiver)
    send(sender, sender.piece(peer, 0, (1, 2, 3), (1, 2, 3)))
    wait_for(lambda: transport.counters["payload_malformed"] == 1, receiver, sender)
    assert "over UCX" in fault(sender, 9)


def test_who_announces_too_much_is_disconnected(ends: Ends, receiver: End) -> None:
    sender, eager = narrow(ends, receiver, max_queued=30)  # the receiver allows 4
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    for _ in range(30):
        assert eager.send(peer, header, payload)
    wait_for(lambda: receiver.transport.counters["payload_malformed"] == 1, receiver, sender)


def test_what_is_under_way_is_bounded_in_bytes(ends: Ends, receiver: End) -> None:
    sender, transport = narrow(ends, receiver, max_frame_bytes=1000)
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1, 2), (1, 2)))  # 840 bytes
    assert [transport.send(peer, header, payload) for _ in range(3)] == [True, True, False]
    assert transport.counters["payload_would_block"] == 1
    (full,) = transport.blocked()
    assert not zmq.zmq_poll([(full, zmq.POLLOUT)], 0)
    assert len(receive(receiver, lambda found: len(found) == 2)) == 2
    wait_for(lambda: bool(zmq.zmq_poll([(each, zmq.POLLOUT) for each in transport.blocked()], 0)), sender)
    assert transport.send(peer, header, payload)
    assert not transport.blocked()


def test_a_large_piece_goes_alone(ends: Ends, receiver: End) -> None:
    sender, _ = narrow(ends, receiver, max_frame_bytes=1000)
    send(sender, sender.piece(meet(sender, receiver), 0, (1, 2, 3, 4), (1, 2, 3, 4)))
    assert len(receive(receiver, bool)) == 1


def test_what_a_sender_announced_before_it_left_is_waited_for(ends: Ends, sender: End, receiver: End) -> None:
    header, payload = sender.outlet.take(sender.piece(receiver.peer, 0, (1,), (1,)))
    assert isinstance(payload, bytes)
    stranger = Stranger(ends, receiver)
    stranger.let_in()
    stranger.stream.send(header)
    stranger.stream.close()
    for _ in range(3):
        assert receiver.transport.receive(1) == []
    stranger.send(1, payload)
    assert receiver.transport.counters["ucx_pieces_received"] == 1


def test_what_was_left_over_is_called_for(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    for number in range(2):
        send(sender, sender.piece(peer, 0, (number,), (number,)))
    found = 0
    for _ in tries():
        found += len(receiver.transport.receive(1))
        if found == 2:
            break
        assert zmq.zmq_poll([(each, zmq.POLLIN) for each in receiver.transport.sockets()], 5_000)
    assert found == 2
