"""The meeting place of two threads: in order, bounded, and never a lost wake-up."""

import threading
from collections.abc import Iterator

import pytest

from kvrelay.mailbox import (
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    MAX_UNSEEN,
    GatewayLost,
    Mailbox,
    PayloadSent,
    PeerLost,
    PieceArrived,
    PieceWaiting,
    SendPayload,
    ToGateway,
)
from kvrelay.messages import Drain, Peer

PEER = Peer(name="d", incarnation=5, control_endpoint="tcp://h:1", data_endpoints={"zmq": "tcp://h:2"})


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def payload(num_bytes: int) -> SendPayload:
    return SendPayload(PEER, b"header", bytes(num_bytes), deadline=1.0)


def woken(mailbox: Mailbox) -> bool:
    """Whether the control thread would not wait any more."""
    try:
        return bool(mailbox.wake_socket.recv(10))
    except BlockingIOError:
        return False


def test_events_come_in_order(mailbox: Mailbox) -> None:
    events = [PeerLost(peer) for peer in range(5)]
    for event in events:
        mailbox.deliver(event)
    assert mailbox.take(0.0) == events
    assert mailbox.take(0.0) == []


def test_an_event_ends_the_wait(mailbox: Mailbox) -> None:
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend(mailbox.take(60.0)))
    thread.start()
    mailbox.deliver(GatewayLost(1))
    thread.join(30)
    assert taken == [GatewayLost(1)]


def test_an_order_wakes_the_control_thread_once_it_is_there(mailbox: Mailbox) -> None:
    order = ToGateway(1, Drain(source=2))
    assert mailbox.fall_asleep()
    mailbox.post([order])
    assert mailbox.wake_socket.recv(10) == b"w"
    assert mailbox.orders() == [order]
    assert mailbox.fall_asleep()
    mailbox.post([])
    assert not woken(mailbox)


def test_nobody_is_woken_who_is_awake_or_was_woken_already(mailbox: Mailbox) -> None:
    mailbox.post([payload(1)])
    assert not woken(mailbox)
    assert not mailbox.fall_asleep()  # there is something to do, so no wait begins
    mailbox.orders()
    assert mailbox.fall_asleep()
    mailbox.post([payload(1)])
    mailbox.post([payload(1)])
    assert mailbox.wake_socket.recv(10) == b"w"
    mailbox.get_up()
    mailbox.post([payload(1)])
    assert not woken(mailbox)


def test_orders_that_take_long_to_make_are_seen_while_they_are_made(mailbox: Mailbox) -> None:
    """Else a receiver would wait until the last piece is packed."""
    seen: list[bool] = []

    def make() -> Iterator[SendPayload]:
        for _ in range(MAX_UNSEEN + 1):
            yield payload(1)
            seen.append(woken(mailbox))

    assert mailbox.fall_asleep()
    mailbox.post(make())
    assert seen == [False] * (MAX_UNSEEN - 1) + [True, False]
    assert len(mailbox.orders()) == MAX_UNSEEN + 1


def test_a_full_pipe_is_awake_enough(mailbox: Mailbox) -> None:
    for _ in range(100_000):
        mailbox.wake()
    assert mailbox.wake_socket.recv(1) == b"w"


def test_events_are_bounded_in_number_and_in_bytes(mailbox: Mailbox) -> None:
    for _ in range(MAX_EVENTS):
        assert mailbox.has_room
        mailbox.deliver(PeerLost(1))
    assert not mailbox.has_room
    mailbox.take(0.0)
    assert mailbox.has_room
    mailbox.deliver_piece(PieceArrived(1, b"", bytes(MAX_PAYLOAD_BYTES)))
    assert not mailbox.has_room
    mailbox.next_piece()
    assert mailbox.has_room
    for _ in range(MAX_EVENTS):
        assert mailbox.has_room
        mailbox.deliver_piece(PieceArrived(1, b"header", None))
    assert not mailbox.has_room


def test_pieces_wait_apart_and_only_the_first_of_them_is_told(mailbox: Mailbox) -> None:
    first, second = PieceArrived(1, b"1", None), PieceArrived(1, b"2", b"payload")
    mailbox.deliver_piece(first)
    mailbox.deliver_piece(second)
    mailbox.deliver(PeerLost(1))
    assert mailbox.take(0.0) == [PieceWaiting(), PeerLost(1)]
    assert [mailbox.next_piece(), mailbox.has_pieces, mailbox.next_piece()] == [first, True, second]
    assert (mailbox.has_pieces, mailbox.next_piece()) == (False, None)
    mailbox.deliver_piece(first)
    assert mailbox.take(0.0) == [PieceWaiting()]


def test_payload_that_found_no_room_is_told_when_there_is_some(mailbox: Mailbox) -> None:
    large, small = payload(MAX_PAYLOAD_BYTES - 10), payload(10)
    mailbox.post([large, small])
    assert mailbox.payload_room == 0
    mailbox.payload_done([small])
    assert mailbox.take(0.0) == []  # not for every little piece
    mailbox.payload_done([large])
    assert mailbox.take(0.0) == [PayloadSent()]
    assert mailbox.payload_room == MAX_PAYLOAD_BYTES


def test_payload_that_always_found_room_is_not_told(mailbox: Mailbox) -> None:
    order = payload(10)
    mailbox.post([order])
    assert mailbox.payload_room == MAX_PAYLOAD_BYTES - 10
    mailbox.payload_done([order])
    assert mailbox.take(0.0) == []


def test_payload_that_lies_where_it_belongs_takes_no_room(mailbox: Mailbox) -> None:
    order = SendPayload(PEER, b"header", None, deadline=1.0)
    mailbox.post([order])
    assert mailbox.payload_room == MAX_PAYLOAD_BYTES
    mailbox.payload_done([order])
    mailbox.deliver_piece(PieceArrived(1, b"header", None))
    assert mailbox.has_room
