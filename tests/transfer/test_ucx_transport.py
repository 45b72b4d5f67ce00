"""What only UCX does: receivers that are none, processes that end, addresses, and machines that lack it."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvrelay.config import PrefillSettings
from kvrelay.errors import TransportMissing, WireError
from kvrelay.messages import Peer
from kvrelay.transfer import ucx_connection
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.ucx_frames import Stream, Welcome, pack_hello, split_tag, tag, unpack_hello
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.transfer.ucx_worker import UcxWorker, _address_of
from tests.transfer.plane import LAYOUT, NUM_BLOCKS, End, Ends, meet, meet_peer, receive, send, tries
from tests.transfer.ucx_ends import STRANGER, accept, fault, listen, wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def transport_kind() -> str:
    return "ucx"


# the sender


def test_a_receiver_that_took_the_address_of_another_gets_nothing(sender: End, receiver: End) -> None:
    peer = receiver.peer.model_copy(update={"incarnation": STRANGER})
    sender.transport.connect(peer)
    assert "Another process answers" in fault(sender, STRANGER, receiver)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("garbage", "begins with"),
        ("damaged", "arrived damaged"),
        ("no address", "arrived damaged"),
        ("hangs up", "takes nothing"),
        ("unexpected answer", "something unexpected"),
    ],
)
def test_a_receiver_that_is_none_is_not_sent_to(ends: Ends, sender: End, receiver: End, kind: str, reason: str) -> None:
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
    told = fault(sender, STRANGER)
    assert "liar" in told
    assert reason in told


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
    assert not list(Path("/dev/shm").glob("ucx*"))


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
    made = open_data_plane(settings, context, end.incarnation, end.memory, LAYOUT, end.memory).transport
    made.close()
    return list(made.endpoints)


def test_without_its_package_the_next_one_is_taken(
    ends: Ends, sender: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plane("auto", sender, ends.context) == ["shm", "zmq", "ucx"]
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    caplog.set_level(logging.INFO)
    assert plane("auto", sender, ends.context) == ["shm", "zmq"]
    (record,) = caplog.records
    assert "Transport ucx cannot be used here: ucxx cannot be loaded" in record.getMessage()
    assert record.levelno == logging.INFO  # an extra that nobody asked for
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
    """Addresses, in hex, at which this process listens."""
    ours = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}


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
    assert split_tag(tag(2**32 - 1, 7)) == (2**32 - 1, 7, False)
    assert split_tag(tag(1, 2**31 - 1, on_device=True)) == (1, 2**31 - 1, True)
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


def test_ucx_makes_no_shared_memory() -> None:
    worker = UcxWorker("127.0.0.1", range(1))
    assert "tcp/lo" in worker._context.info
    assert not [name for name in ("posix/", "sysv/", "cma/") if name in worker._context.info]
    worker.close()


def test_two_workers_of_a_process_can_be_told_apart() -> None:
    first, second = UcxWorker("127.0.0.1", range(1)), UcxWorker("127.0.0.1", range(1))
    assert first.address != second.address
    first.close()
    second.close()


def test_what_a_worker_has_logged_to_a_file_stays_there(tmp_path: Path) -> None:
    """UCX opens its own log; by a path that leads to ours, it would cut off what is there."""
    code = """
import sys
from kvrelay.transfer.ucx_transport import UcxTransport
sys.stderr.write("before ")
UcxTransport("127.0.0.1", "0", incarnation=1).close()
sys.stderr.write("after")
"""
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=True)
    assert (tmp_path / "log").read_text() == "before after"
