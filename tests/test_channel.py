"""Control sockets: what comes in is typed or counted, what goes out never blocks, lost connections are events."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeVar

import pytest
import zmq

from kvrelay import channel
from kvrelay.channel import MAX_MESSAGE_BYTES, Connection, Listener, Route, port_range, split_endpoint
from kvrelay.encoding import encode
from kvrelay.errors import AddressInUse, WireError
from kvrelay.messages import (
    Drain,
    GatewayHello,
    KVCommit,
    LeaseId,
    Message,
)

HERE, THERE = 2**64 - 1, 17
DEADLINE_S = 10.0
T = TypeVar("T")


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listener(context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[Listener]:
    listener = Listener(context, "127.0.0.1", "0", incarnation=HERE)
    yield listener
    listener.close()


@pytest.fixture
def connect(context: "zmq.Context[zmq.Socket[bytes]]", listener: Listener) -> Iterator[Callable[..., Connection]]:
    made: list[Connection] = []
    numbers = count()

    def make(incarnation: int = THERE, *, queue_early: bool = True) -> Connection:
        made.append(
            Connection(context, listener.endpoint, incarnation=incarnation, numbers=numbers, queue_early=queue_early)
        )
        return made[-1]

    yield make
    for connection in made:
        if not connection.socket.closed:
            connection.close()


def until(get: Callable[[], list[T]], count: int = 1) -> list[T]:
    got: list[T] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(got) < count and time.monotonic() < deadline:
        got += get()
        time.sleep(0.001)
    return got


def rebind(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> Listener:
    """Another process at the address of one whose socket is being closed."""
    host, port = split_endpoint(endpoint)
    tried: list[Listener] = []
    deadline = time.monotonic() + DEADLINE_S
    while not tried:
        try:
            tried.append(Listener(context, host, port, incarnation=2))
        except AddressInUse:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return tried[0]


def lost(listener: Listener) -> list[int]:
    """Whose loss is found while nothing else comes."""
    assert listener.receive() == []
    return listener.lost()


def unread(listener: Listener) -> list[bool]:
    """Not empty when there is something to read."""
    return [True] * bool(int(listener.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def test_messages_go_both_ways(listener: Listener, connect: Callable[..., Connection]) -> None:
    connection = connect()
    hello = GatewayHello(source=THERE, registered=True)
    assert connection.send(hello)
    assert until(listener.receive) == [(THERE, hello)]
    answer = Drain(source=HERE, target=THERE)
    assert listener.send(THERE, answer)
    assert until(connection.receive) == [answer]


def test_a_lost_connection_is_told_once_and_after_its_last_words(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    connection.send(Drain(source=THERE))
    assert len(until(listener.receive)) == 1
    assert listener.lost() == []
    connection.close()
    assert until(lambda: lost(listener)) == [THERE]
    assert listener.lost() == []


def test_a_new_process_behind_a_reused_descriptor_is_not_taken_for_the_dead_one(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    gone: list[int] = []
    for incarnation in range(1, 30):
        connection = connect(incarnation)
        connection.send(Drain(source=incarnation))
        assert [peer for peer, _ in until(listener.receive)] == [incarnation]
        assert listener.send(incarnation, Drain(source=HERE))
        gone += listener.lost()
        assert incarnation not in gone
        connection.close()
    gone += until(lambda: lost(listener), 29 - len(gone))
    assert sorted(gone) == list(range(1, 30))


def test_the_connecting_end_sees_loss_and_return(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    first = Listener(context, "127.0.0.1", "0", incarnation=1)
    connection = Connection(context, first.endpoint, incarnation=THERE, numbers=count(), queue_early=False)
    assert until(connection.changes) == [True]
    first.close()
    assert until(connection.changes) == [False]
    assert not connection.send(Drain(source=THERE))
    second = rebind(context, first.endpoint)
    assert until(connection.changes) == [True]
    connection.close()
    second.close()


def test_a_connection_that_was_made_again_before_its_loss_was_seen_is_replaced_too(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    first = Listener(context, "127.0.0.1", "0", incarnation=1)
    connection = Connection(context, first.endpoint, incarnation=THERE, numbers=count(), queue_early=False)
    assert until(connection.changes) == [True]
    first.close()
    second = rebind(context, first.endpoint)
    early = (THERE, Drain(source=THERE))
    assert early in until(lambda: second.receive() if connection.send(early[1]) else [])
    assert until(connection.changes) == [False]
    assert until(connection.changes) == [True]
    hello = GatewayHello(source=THERE, registered=True)
    assert connection.send(hello)
    assert until(lambda: [heard for heard in second.receive() if heard != early], 2) == [(THERE, None), (THERE, hello)]
    connection.close()
    second.close()


def test_a_process_that_reconnects_is_heard_even_while_its_old_connection_seems_alive(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    first = connect()
    first.send(Drain(source=THERE))
    until(listener.receive)
    second = connect()  # the first is still open, as after a cable was pulled
    second.send(Drain(source=THERE))
    assert until(listener.receive, 2) == [(THERE, None), (THERE, Drain(source=THERE))]
    assert listener.send(THERE, Drain(source=HERE))
    assert until(second.receive) == [Drain(source=HERE)]
    first.close()
    second.send(GatewayHello(source=THERE, registered=True))
    assert until(listener.receive) == [(THERE, GatewayHello(source=THERE, registered=True))]
    assert listener.lost() == []  # it was told, and the end of the old connection does not hit the new one
    second.close()
    assert until(lambda: lost(listener)) == [THERE]


def test_a_loss_is_told_between_the_last_words_and_the_first_ones_of_the_next_connection(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    said = [Drain(source=THERE, target=HERE), Drain(source=THERE)]
    first = connect(queue_early=False)
    assert until(first.changes) == [True]
    first.send(said[0])
    assert until(lambda: unread(listener))
    first.close()
    second = connect(queue_early=False)
    assert until(second.changes) == [True]
    second.send(said[1])
    assert until(listener.receive, 3) == [(THERE, said[0]), (THERE, None), (THERE, said[1])]
    assert listener.lost() == []


def test_words_of_an_old_connection_that_are_read_after_those_of_the_new_one_count_for_nothing(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    first, second = connect(), connect()
    second.send(Drain(source=THERE))
    assert until(listener.receive) == [(THERE, Drain(source=THERE))]
    first.send(Drain(source=THERE, target=HERE))
    assert until(lambda: [*listener.receive(), *[True] * listener.counters["stale_message"]]) == [True]
    first.close()
    second.send(GatewayHello(source=THERE, registered=True))
    assert until(listener.receive) == [(THERE, GatewayHello(source=THERE, registered=True))]
    assert listener.lost() == []


def test_who_speaks_and_leaves_before_it_is_heard_is_lost_too(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    connection.send(Drain(source=THERE))
    assert until(lambda: unread(listener))
    connection.close()
    assert until(listener.receive) == [(THERE, Drain(source=THERE))]
    assert until(lambda: lost(listener)) == [THERE]


def test_a_connection_that_leads_nowhere_is_made_again(
    listener: Listener, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes over a routing id and leaves must not leave its owner connected, unheard and unaware."""
    monkeypatch.setattr(channel, "PING_MS", 50)
    monkeypatch.setattr(channel, "PING_TIMEOUT_MS", 200)
    owner = connect(queue_early=False)
    assert until(owner.changes) == [True]
    assert owner.send(Drain(source=THERE))
    assert until(listener.receive)
    with zmq.Context() as elsewhere:
        thief = Connection(elsewhere, listener.endpoint, incarnation=THERE, numbers=count(), queue_early=True)
        thief.send(Drain(source=THERE))
        assert until(listener.receive)
        assert owner.send(Drain(source=THERE))  # is never read
        thief.close()
    assert until(owner.changes, 2) == [False, True]
    assert owner.send(Drain(source=THERE))
    assert until(listener.receive, 2) == [(THERE, None), (THERE, Drain(source=THERE))]
    assert listener.send(THERE, GatewayHello(source=HERE, registered=True))
    assert until(owner.receive)


def test_nobody_there_is_an_answer_not_an_error(listener: Listener) -> None:
    assert not listener.send(999, Drain(source=HERE))
    assert listener.counters["unknown_peer"] == 1


def test_a_peer_that_does_not_read_would_block(listener: Listener, connect: Callable[..., Connection]) -> None:
    connection = connect()
    connection.send(Drain(source=THERE))
    until(listener.receive)
    big = KVCommit(
        source=HERE, request_id="r" * 256, attempt=0, lease_id=LeaseId(1, 1), first_token_ids=(2**31 - 1,) * 128
    )
    for _ in range(200_000):
        if not listener.send(THERE, big):
            break
    assert listener.counters["would_block"] == 1


def test_messages_for_another_incarnation_are_dropped_and_counted(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    commit = KVCommit(source=THERE, target=5, request_id="r", attempt=0, lease_id=LeaseId(5, 1), first_token_ids=(1,))
    for message in (Drain(source=THERE, target=5), commit):
        connection.send(message)
    assert until(listener.receive) == [(THERE, commit)]  # a commit passes: its sender waits for an answer
    assert listener.counters["stale_message"] == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"not json"],
        [encode(Drain(source=4))],
        [encode(Drain(source=THERE)), b"more"],
        [b""],
        [b'{"kind":"nonsense","source":17}'],
    ],
    ids=["not json", "another's name", "two frames", "empty", "unknown kind"],
)
def test_malformed_messages_are_counted_and_harm_nobody(
    listener: Listener, connect: Callable[..., Connection], frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    for _ in range(3):
        connection.socket.send_multipart(frames)
    connection.send(Drain(source=THERE))
    assert until(listener.receive) == [(THERE, Drain(source=THERE))]
    assert listener.counters["malformed_message"] == 3
    assert len(caplog.records) == 1


def test_a_stranger_with_another_routing_id_is_not_heard(
    context: "zmq.Context[zmq.Socket[bytes]]", listener: Listener, connect: Callable[..., Connection]
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"z" * 32)
    stranger.connect(listener.endpoint)
    stranger.send(encode(Drain(source=1)))
    assert until(lambda: [1] * (listener.receive() == [] and listener.counters["malformed_message"]))
    stranger.close(linger=0)


def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(
    listener: Listener, connect: Callable[..., Connection]
) -> None:
    connect(THERE).socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    other = connect(18)
    message: Message = Drain(source=18)
    other.send(message)
    assert until(listener.receive) == [(18, message)]


def test_a_taken_port_is_named(context: "zmq.Context[zmq.Socket[bytes]]", listener: Listener) -> None:
    host, port = split_endpoint(listener.endpoint)
    with pytest.raises(AddressInUse, match=port):
        Listener(context, host, port, incarnation=1)


def test_a_range_takes_the_first_free_port(context: "zmq.Context[zmq.Socket[bytes]]", listener: Listener) -> None:
    host, port = split_endpoint(listener.endpoint)
    second = Listener(context, host, f"{port}-{int(port) + 20}", incarnation=1)
    assert int(port) < int(split_endpoint(second.endpoint)[1]) <= int(port) + 20
    second.close()


@pytest.mark.parametrize("ports", ["70000", "10-5", "60000-70000"])
def test_impossible_ranges_are_refused(ports: str) -> None:
    with pytest.raises(ValueError, match="7000-7010"):
        port_range(ports)


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://", "http://a:1", "tcp://a:b"])
def test_addresses_are_checked(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
    with pytest.raises(AddressInUse, match="tcp://127"):
        split_endpoint(endpoint)
    if endpoint != "nowhere":
        return
    with pytest.raises(WireError, match="tcp://"):
        Connection(context, endpoint, incarnation=1, numbers=count(), queue_early=True)


def test_routing_ids_never_start_with_the_byte_that_zeromq_reserves() -> None:
    assert bytes(Route(0, 0))[0] != 0
