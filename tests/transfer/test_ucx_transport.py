"""What only UCX does: who is let in, what is said on its sockets that nobody understands, and processes that end."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvrelay.config import PrefillSettings
from kvrelay.errors import TransportMissing, WireError
from kvrelay.messages import Peer
from kvrelay.transfer import ucx_connection, ucx_incoming, ucx_listener
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.protocol.piece import HEADER_BYTES
from kvrelay.transfer.ucx_frames import PROBE, Stream, Welcome, pack_hello, split_tag, tag, unpack_hello
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.transfer.ucx_worker import UcxWorker, _address_of
from tests.transfer.plane import NUM_BLOCKS, End, Ends, meet, meet_peer, poll, receive, send, tries

ROOT = Path(__file__).parents[2]
STRANGER = 77


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends("ucx")
    yield made
    made.close()


@pytest.fixture
def sender(ends: Ends) -> End:
    return ends.make()


@pytest.fixture
def receiver(ends: Ends) -> End:
    return ends.make()


def port_of(end: End) -> int:
    return int(end.transport.endpoints["ucx"].rpartition(":")[2])


def raw(ends: Ends, end: End) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port_of(end)), timeout=10)
    ends.stack.callback(made.close)
    return made


def wait_for(check: Callable[[], bool], *ends: End) -> None:
    for _ in tries():
        for end in ends:
            end.transport.receive(2**20)
        if check():
            return
        poll(*ends)
    raise AssertionError("it never happened")


def fault(end: End, incarnation: int, *others: End) -> str:
    """Why nothing goes to a peer."""
    reasons: list[str] = []

    def failed() -> bool:
        try:
            end.transport.ready(incarnation)
        except WireError as error:
            reasons.append(str(error))
        return bool(reasons)

    wait_for(failed, end, *others)
    return reasons[0]


def listen(ends: Ends) -> tuple[socket.socket, Peer]:
    """A receiver that the test plays itself."""
    made = socket.create_server(("127.0.0.1", 0))
    ends.stack.callback(made.close)
    made.settimeout(10)
    address = f"tcp://127.0.0.1:{made.getsockname()[1]}"
    return made, Peer(name="liar", incarnation=STRANGER, control_endpoint="tcp://h:1", data_endpoints={"ucx": address})


def accept(ends: Ends, listener: socket.socket) -> socket.socket:
    made, _ = listener.accept()
    ends.stack.callback(made.close)
    made.settimeout(10)
    return made


# the receiver


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        os.urandom(21),
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
    stranger = Stream(raw(ends, receiver))
    welcomes: list[Welcome] = []

    def welcomed() -> bool:
        stranger.hear(2**16)
        welcomes.extend(filter(None, [stranger.take_welcome()]))
        return bool(welcomes)

    wait_for(welcomed, receiver)
    worker = UcxWorker("127.0.0.1", range(1))
    ends.stack.callback(worker.close)
    endpoint = worker.connect(welcomes[0].address)
    ends.stack.callback(worker.disconnect, endpoint)
    sent = [worker.send(endpoint, tag(welcomes[0].connection, number), payload) for number, payload in messages]

    def arrived() -> bool:
        worker.progress()
        return all(each.done for each in sent)

    wait_for(arrived, receiver)
    stranger.send(pack_hello(STRANGER, receiver.incarnation))

    def ended() -> bool:
        worker.progress()
        stranger.hear(2**16)
        return stranger.ended

    wait_for(ended, receiver)
    assert receiver.transport.counters["ucx_pieces_received"] == 0
    send(sender, sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    assert [piece.peer for piece in receive(receiver, bool)] == [sender.incarnation]


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
    assert payload is not None
    assert sender.transport.send(peer, header, payload[:change] if change < 0 else payload + b"x")
    wait_for(lambda: receiver.transport.counters["payload_malformed"] == 1, receiver, sender)
    assert receiver.transport.counters["ucx_pieces_received"] == 0


def test_a_payload_over_the_limit_ends_the_connection(ends: Ends, sender: End) -> None:
    narrow = UcxTransport("127.0.0.1", "0", incarnation=9, max_frame_bytes=1000)
    ends.stack.callback(narrow.close)
    receiver = End(9, sender.memory, narrow, sender.outlet, sender.inlet)
    peer = meet(sender, receiver)
    send(sender, sender.piece(peer, 0, (1, 2, 3), (1, 2, 3)))
    wait_for(lambda: narrow.counters["payload_malformed"] == 1, receiver, sender)
    assert "over UCX" in fault(sender, 9)


def test_who_announces_too_much_is_disconnected(ends: Ends, receiver: End) -> None:
    eager = UcxTransport("127.0.0.1", "0", incarnation=9, max_queued=30)  # the receiver allows 4
    ends.stack.callback(eager.close)
    sender = End(9, receiver.memory, eager, receiver.outlet, receiver.inlet)
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    for _ in range(30):
        assert eager.send(peer, header, payload)
    wait_for(lambda: receiver.transport.counters["payload_malformed"] == 1, receiver, sender)


def test_what_is_under_way_is_bounded_in_bytes(ends: Ends, receiver: End) -> None:
    narrow = UcxTransport("127.0.0.1", "0", incarnation=9, max_frame_bytes=1000)
    ends.stack.callback(narrow.close)
    sender = End(9, receiver.memory, narrow, receiver.outlet, receiver.inlet)
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1, 2), (1, 2)))  # 840 bytes
    assert [narrow.send(peer, header, payload) for _ in range(3)] == [True, True, False]
    assert narrow.counters["payload_would_block"] == 1
    (full,) = narrow.blocked()
    assert not zmq.zmq_poll([(full, zmq.POLLOUT)], 0)
    assert len(receive(receiver, lambda found: len(found) == 2)) == 2
    wait_for(lambda: bool(zmq.zmq_poll([(each, zmq.POLLOUT) for each in narrow.blocked()], 0)), sender)
    assert narrow.send(peer, header, payload)
    assert not narrow.blocked()


def test_a_large_piece_goes_alone(ends: Ends, receiver: End) -> None:
    narrow = UcxTransport("127.0.0.1", "0", incarnation=9, max_frame_bytes=1000)
    ends.stack.callback(narrow.close)
    sender = End(9, receiver.memory, narrow, receiver.outlet, receiver.inlet)
    send(sender, sender.piece(meet(sender, receiver), 0, (1, 2, 3, 4), (1, 2, 3, 4)))
    assert len(receive(receiver, bool)) == 1


# the sender


def test_a_receiver_that_took_the_address_of_another_gets_nothing(sender: End, receiver: End) -> None:
    peer = receiver.peer.model_copy(update={"incarnation": STRANGER})
    sender.transport.connect(peer)
    assert "Another process answers" in fault(sender, STRANGER, receiver)


@pytest.mark.parametrize("kind", ["garbage", "damaged", "no address", "hangs up", "unexpected answer"])
def test_a_receiver_that_is_none_is_not_sent_to(ends: Ends, sender: End, receiver: End, kind: str) -> None:
    listener, peer = listen(ends)
    sender.transport.connect(peer)
    connection = accept(ends, listener)
    transport = receiver.transport
    assert isinstance(transport, UcxTransport)
    welcome = Welcome(STRANGER, 5, transport._worker.address).pack()
    match kind:
        case "garbage":
            connection.send(os.urandom(100))
        case "damaged":
            connection.send(welcome[:-3] + bytes([welcome[-3] ^ 4]) + welcome[-2:])
        case "no address":
            connection.send(Welcome(STRANGER, 5, b"").pack())
        case "hangs up":
            connection.close()
        case "unexpected answer":
            connection.send(welcome + b"x")
    assert "liar" in fault(sender, STRANGER)


def test_a_receiver_that_says_nothing_is_not_waited_for(
    ends: Ends, sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_connection, "ANSWER_S", -1.0)
    _, peer = listen(ends)
    sender.transport.connect(peer)
    assert "did not answer" in fault(sender, STRANGER)


def test_nobody_listens(sender: End, receiver: End) -> None:
    peer = receiver.peer
    receiver.transport.close()
    sender.transport.connect(peer)
    assert "w2" in fault(sender, peer.incarnation)


def test_a_piece_without_payload_is_refused(sender: End, receiver: End) -> None:
    with pytest.raises(WireError, match="no payload"):
        sender.transport.send(meet(sender, receiver), b"header", None)


# processes that end


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.transfer.ucx_process", *args]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def said(started: subprocess.Popen[str], word: str) -> str:
    assert started.stdout is not None
    found, _, rest = started.stdout.readline().partition(" ")
    assert found.strip() == word
    return rest


def test_the_end_of_a_receiver_is_noticed_and_leaves_nothing(sender: End) -> None:
    before = set(os.listdir("/dev/shm"))
    with process("receive", str(STRANGER)) as other:
        peer = meet_peer(sender, Peer.model_validate_json(said(other, "here")))
        blocks = tuple(range(NUM_BLOCKS))
        header, payload = sender.outlet.take(sender.piece(peer, 0, blocks, blocks))
        assert sender.transport.send(peer, header, payload)
        said(other, "moving")
        os.kill(other.pid, signal.SIGSTOP)
        while sender.transport.send(peer, header, payload):
            continue
        os.kill(other.pid, signal.SIGKILL)
        assert "over UCX any more" in fault(sender, STRANGER)
    with pytest.raises(WireError):
        sender.transport.send(peer, header, payload)
    assert not list(sender.transport.blocked())
    transport = sender.transport
    assert isinstance(transport, UcxTransport)
    wait_for(lambda: not transport._worker._abandoned, sender)
    assert set(os.listdir("/dev/shm")) == before


def test_the_end_of_a_sender_in_mid_transfer_is_no_trouble(sender: End, receiver: End) -> None:
    transport = receiver.transport
    assert isinstance(transport, UcxTransport)
    with process("send", str(STRANGER), receiver.peer.model_dump_json()) as other:
        said(other, "here")
        wait_for(lambda: transport.counters["ucx_pieces_received"] > 10, receiver)
        os.kill(other.pid, signal.SIGKILL)
    wait_for(lambda: not transport._listener._incoming, receiver)
    wait_for(lambda: not transport._worker._abandoned, receiver)
    send(sender, sender.piece(meet(sender, receiver), 0, (1,), (1,)))
    assert sender.incarnation in {piece.peer for piece in receive(receiver, bool)}


# where it cannot be


def plane(transport: str, end: End, context: "zmq.Context[zmq.Socket[bytes]]", bind: str = "127.0.0.1") -> list[str]:
    settings = PrefillSettings.model_validate({"transport": transport, "bind": bind})
    made = open_data_plane(settings, context, end.incarnation, end.memory, end.memory).transport
    made.close()
    return list(made.endpoints)


def test_without_its_package_the_next_one_is_taken(
    ends: Ends, sender: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plane("auto", sender, ends.context) == ["shm", "ucx", "zmq"]
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    caplog.set_level(logging.INFO)
    assert plane("auto", sender, ends.context) == ["shm", "zmq"]
    (record,) = caplog.records
    assert "Transport ucx cannot be used here: ucxx cannot be loaded" in record.getMessage()
    with pytest.raises(TransportMissing, match=r"pip install 'kvrelay\[ucx-cu13\]'.*--transport"):
        plane("ucx", sender, ends.context)


def test_an_address_of_no_device_cannot_be_bound(ends: Ends, sender: End, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TransportMissing, match="no network device has 127"):
        plane("ucx", sender, ends.context, "127.0.0.9")
    assert plane("auto", sender, ends.context, "127.0.0.9") == ["shm", "zmq"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_each_port_of_a_range_is_tried(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="busy"):
            UcxTransport("127.0.0.1", str(port), incarnation=1)
        if port < 65_500:
            transport = UcxTransport("127.0.0.1", f"{port}-{port + 30}", incarnation=1)
            ends.stack.callback(transport.close)
            assert port < int(transport.endpoints["ucx"].rpartition(":")[2]) <= port + 30


def listening() -> set[str]:
    """Addresses, in hex, at which this process or another listens."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}


def test_nothing_listens_at_another_address_than_the_one_given(ends: Ends) -> None:
    before = listening()
    ends.make()
    added = listening() - before
    assert len(added) == 2  # ours and UCX's
    assert {address.partition(":")[0] for address in added} == {"0100007F"}


def addresses() -> list[str]:
    """Of this machine's devices, but for the loop."""
    found = [_address_of(name) for _, name in socket.if_nameindex()]
    return [address for address in found if address and not address.startswith("127.")]


@pytest.mark.skipif(not addresses(), reason="no network device but the loop has an address")
def test_the_address_of_a_network_device_serves_as_well(ends: Ends, sender: End) -> None:
    there = UcxTransport(addresses()[0], "0", incarnation=9)
    here = UcxTransport(addresses()[0], "0", incarnation=8)
    for each in (there, here):
        ends.stack.callback(each.close)
    receiver, other = (
        End(each._incarnation, sender.memory, each, sender.outlet, sender.inlet) for each in (there, here)
    )
    send(other, other.piece(meet(other, receiver), 0, (1,), (1,)))
    assert len(receive(receiver, bool)) == 1


def test_every_address_is_bound_when_asked_to(ends: Ends, sender: End) -> None:
    transport = UcxTransport("*", "0", incarnation=9)
    ends.stack.callback(transport.close)
    assert transport.endpoints["ucx"].startswith("tcp://0.0.0.0:")
    receiver = End(9, sender.memory, transport, sender.outlet, sender.inlet)
    address = transport.endpoints["ucx"].replace("0.0.0.0", "127.0.0.1")
    peer = receiver.peer.model_copy(update={"data_endpoints": {"ucx": address}})
    meet_peer(sender, peer, receiver)
    send(sender, sender.piece(peer, 0, (1,), (1,)))
    assert len(receive(receiver, bool)) == 1


def test_a_hang_up_signal_still_ends_the_process() -> None:
    """UCX would take it to wait for a debugger."""
    code = (
        "from kvrelay.transfer.ucx_worker import UcxWorker; import os, signal;"
        "worker = UcxWorker('127.0.0.1', range(1)); os.kill(os.getpid(), signal.SIGHUP)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGHUP, "")


def test_tags_and_hellos_come_back_as_they_were() -> None:
    assert split_tag(tag(2**32 - 1, 7)) == (2**32 - 1, 7)
    assert unpack_hello(pack_hello(2**64 - 1, 5)) == (2**64 - 1, 5)


def test_a_stream_tells_its_end_after_what_came_before() -> None:
    here, there = socket.create_server(("127.0.0.1", 0)), None
    with here:
        there = socket.create_connection(here.getsockname())
        stream = Stream(here.accept()[0])
    there.sendall(b"last words")
    there.close()
    for _ in tries():
        stream.hear(100)
        if stream.ended:
            break
    assert stream.take_all() == b"last words"
    stream.close()


def test_two_workers_of_a_process_can_be_told_apart() -> None:
    first, second = UcxWorker("127.0.0.1", range(1)), UcxWorker("127.0.0.1", range(1))
    assert first.address != second.address
    first.close()
    second.close()
