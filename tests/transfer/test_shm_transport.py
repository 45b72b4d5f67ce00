"""What only shared memory does: who gets it, who does not, and what is said on its socket that nobody understands."""

import os
import socket
from collections.abc import Callable

import pytest
import zmq

from kvrelay.block_memory import BlockMemory
from kvrelay.errors import WireError
from kvrelay.mailbox import MemoryShared
from kvrelay.messages import Peer
from kvrelay.transfer import shm_connection, shm_listener
from kvrelay.transfer.shm_frames import (
    TOKEN_BYTES,
    Address,
    Hello,
    boot_id,
    pack_geometry,
    parse_address,
    unpack_geometry,
    unpack_hello,
)
from kvrelay.transfer.shm_transport import ShmTransport
from kvrelay.transport import MAX_HEADERS
from tests.transfer.plane import GEOMETRY, End, Ends, meet, receive, send, tries

STRANGER = 77


@pytest.fixture
def transport_kind() -> str:
    return "shm"


def address_of(end: End) -> Address:
    return parse_address(end.transport.endpoints["shm"])


def raw(ends: Ends, address: Address) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends.stack.callback(made.close)
    made.settimeout(10)
    made.connect(address.abstract)
    return made


def listen(ends: Ends) -> tuple[socket.socket, Peer]:
    """A receiver that the test plays itself."""
    address = Address(boot_id(), f"kvrelay-test-{os.urandom(8).hex()}", bytes(TOKEN_BYTES))
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends.stack.callback(made.close)
    made.settimeout(10)
    made.bind(address.abstract)
    made.listen()
    return made, Peer(
        name="liar", incarnation=STRANGER, control_endpoint="tcp://h:1", data_endpoints={"shm": str(address)}
    )


def wait_for(end: End, check: Callable[[], bool]) -> None:
    for _ in tries():
        end.transport.receive(2**20)
        if check():
            return
        zmq.zmq_poll([(each, zmq.POLLIN) for each in end.transport.sockets()], 50)
    raise AssertionError("it never happened")


def fault(end: End, incarnation: int) -> str:
    """Why a peer's memory will not come."""
    reasons: list[str] = []

    def failed() -> bool:
        try:
            assert not end.transport.ready(incarnation)
        except WireError as error:
            reasons.append(str(error))
        return bool(reasons)

    wait_for(end, failed)
    return reasons[0]


# the receiver


def test_it_is_shared_with_who_shows_the_token(ends: Ends, receiver: End) -> None:
    stranger = raw(ends, address_of(receiver))
    stranger.send(Hello(STRANGER, receiver.incarnation, address_of(receiver).token).pack())
    wait_for(receiver, lambda: receiver.transport.counters["shm_shared"] == 1)
    assert list(receiver.transport.news()) == [MemoryShared(STRANGER)]
    frame, descriptors, _, _ = socket.recv_fds(stranger, 256, 1)
    BlockMemory.open(unpack_geometry(frame), descriptors[0]).write(0, (3,), b"x" * GEOMETRY.block_bytes)
    assert receiver.content(0, (3,)) == b"x" * GEOMETRY.block_bytes


def test_nobody_else_gets_it(ends: Ends, receiver: End) -> None:
    address, me = address_of(receiver), receiver.incarnation
    good = Hello(STRANGER, me, address.token).pack()
    bad = [
        b"x",
        os.urandom(300),
        good[:-1],
        good + b"x",
        b"XXXX" + good[4:],
        Hello(STRANGER, me, bytes(TOKEN_BYTES)).pack(),
        Hello(STRANGER, me + 1, address.token).pack(),
    ]
    strangers = [raw(ends, address) for _ in bad]
    for stranger, frame in zip(strangers, bad, strict=True):
        stranger.send(frame)
    raw(ends, address).close()  # leaves before it says a word
    wait_for(receiver, lambda: receiver.transport.counters["shm_refused"] == len(bad) + 1)
    assert not list(receiver.transport.news())
    for stranger in strangers:
        assert socket.recv_fds(stranger, 256, 1)[:2] == (b"", [])
    assert len(list(receiver.transport.sockets())) == 1


def test_who_says_nothing_is_not_waited_for(ends: Ends, receiver: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_listener, "HELLO_S", -1.0)
    raw(ends, address_of(receiver))
    wait_for(receiver, lambda: receiver.transport.counters["shm_refused"] == 1)


def test_a_crowd_of_strangers_is_bounded(ends: Ends, receiver: End, sender: End) -> None:
    for _ in range(2 * shm_listener.MAX_STRANGERS):
        raw(ends, address_of(receiver))
        receiver.transport.receive(1)
    assert len(list(receiver.transport.sockets())) <= shm_listener.MAX_STRANGERS + 1
    meet(sender, receiver)


def test_one_incarnation_is_one_process(ends: Ends, receiver: End, sender: End) -> None:
    """The end of a process must never free what another may still write to."""
    meet(sender, receiver)
    transport = receiver.transport
    assert isinstance(transport, ShmTransport)
    processes = transport._listener._processes
    processes[sender.incarnation] = shm_listener.Process(1, processes[sender.incarnation].descriptor)
    liar = raw(ends, address_of(receiver))
    liar.send(Hello(sender.incarnation, receiver.incarnation, address_of(receiver).token).pack())
    wait_for(receiver, lambda: receiver.transport.counters["shm_refused"] == 1)
    assert socket.recv_fds(liar, 256, 1)[:2] == (b"", [])


def test_garbage_headers_are_counted_and_the_next_piece_still_arrives(ends: Ends, sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    piece = sender.piece(peer, 0, (1,), (1,))
    header, _ = sender.outlet.take(piece)
    stranger = raw(ends, address_of(receiver))
    stranger.send(Hello(STRANGER, receiver.incarnation, address_of(receiver).token).pack())
    torn = [b"x", header[:-1], header + b"x"]
    garbage = [*torn, os.urandom(len(header)), header * (MAX_HEADERS + 1), os.urandom(60_000)]
    for frame in garbage:
        stranger.send(frame)
    wait_for(receiver, lambda: receiver.transport.counters["payload_malformed"] == len(garbage))
    send(sender, piece)
    assert [(found.peer, found.header) for found in receive(receiver, bool)] == [(sender.incarnation, header)]


def test_headers_of_several_pieces_come_in_one_packet_in_order(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    pieces = [sender.outlet.take(sender.piece(peer, 0, (block,), (block,)))[0] for block in range(3)]
    assert sender.transport.send(peer, b"".join(pieces), None)
    assert [found.header for found in receive(receiver, bool)] == pieces
    assert sender.transport.counters["shm_pieces_sent"] == receiver.transport.counters["shm_pieces_received"] == 3
    assert sender.transport.counters["shm_bytes_sent"] == receiver.transport.counters["shm_bytes_received"]


def test_a_header_of_another_sender_comes_under_the_name_of_who_sent_it(ends: Ends, sender: End, receiver: End) -> None:
    header, _ = sender.outlet.take(sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    stranger = raw(ends, address_of(receiver))
    stranger.send(Hello(STRANGER, receiver.incarnation, address_of(receiver).token).pack())
    stranger.send(header)
    assert [found.peer for found in receive(receiver, bool)] == [STRANGER]  # whose lease it is not


# the sender


def test_another_host_is_known_by_its_boot_id(sender: End, receiver: End) -> None:
    address = address_of(receiver)
    elsewhere = Address("0" * 36, address.socket, address.token)
    peer = receiver.peer.model_copy(update={"data_endpoints": {"shm": str(elsewhere)}})
    with pytest.raises(WireError, match="is on another host"):
        sender.transport.connect(peer)


def test_the_same_host_may_still_be_out_of_reach(sender: End, receiver: End) -> None:
    nowhere = Address(boot_id(), "kvrelay-nobody", bytes(TOKEN_BYTES))
    peer = receiver.peer.model_copy(update={"data_endpoints": {"shm": str(nowhere)}})
    with pytest.raises(WireError, match="Connection refused"):
        sender.transport.connect(peer)
    assert not sender.transport.ready(peer.incarnation)


def test_a_receiver_that_says_no_is_not_written_to(ends: Ends, sender: End) -> None:
    listener, peer = listen(ends)
    sender.transport.connect(peer)
    connection, _ = listener.accept()
    assert unpack_hello(connection.recv(256)).sender == sender.incarnation
    connection.close()
    assert fault(sender, STRANGER) == "liar does not share its memory with this process."
    _, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    assert payload is not None


def test_a_receiver_that_says_nothing_is_not_waited_for(
    ends: Ends, sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_connection, "ANSWER_S", -1.0)
    _, peer = listen(ends)
    sender.transport.connect(peer)
    assert "did not share its memory" in fault(sender, STRANGER)


@pytest.mark.parametrize("kind", ["garbage", "no descriptor", "two descriptors", "a pipe", "wrong size", "twice"])
def test_what_is_no_memory_is_not_written_to(ends: Ends, sender: End, receiver: End, kind: str) -> None:
    listener, peer = listen(ends)
    sender.transport.connect(peer)
    connection, _ = listener.accept()
    ends.stack.callback(connection.close)
    before = set(os.listdir("/proc/self/fd"))
    frame, memory = pack_geometry(GEOMETRY), receiver.memory.descriptor
    pipes = os.pipe()
    match kind:
        case "garbage":
            socket.send_fds(connection, [b"x" * 40], [memory])
        case "no descriptor":
            connection.send(frame)
        case "two descriptors":
            socket.send_fds(connection, [frame], [memory, memory])
        case "a pipe":
            socket.send_fds(connection, [frame], [pipes[0]])
        case "wrong size":
            socket.send_fds(connection, [pack_geometry(GEOMETRY.__class__(2, 3, 4))], [memory])
        case "twice":
            socket.send_fds(connection, [frame], [memory])
            socket.send_fds(connection, [frame], [memory])
    assert "liar" in fault(sender, STRANGER)
    for pipe in pipes:
        os.close(pipe)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 0
    _, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    assert payload is not None


def test_who_hangs_up_is_not_written_to_any_more(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    piece = sender.piece(peer, 0, (1,), (1,))
    assert sender.outlet.take(piece)[1] is None
    receiver.transport.close()
    assert "w2 does not share" in fault(sender, peer.incarnation)
    assert sender.outlet.take(piece)[1] is not None
    with pytest.raises(WireError):
        sender.transport.send(peer, sender.outlet.take(piece)[0], None)


def test_payload_that_nobody_wrote_is_refused(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    with pytest.raises(WireError, match="was not written"):
        sender.transport.send(peer, b"header", b"payload")


def test_addresses_come_back_as_they_were() -> None:
    address = Address(boot_id(), "kvrelay-x", bytes(range(TOKEN_BYTES)))
    assert parse_address(str(address)) == address
