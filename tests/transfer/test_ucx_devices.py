"""UCX between workers whose KV is on a device: payload that never passes through the host, and when it has to."""

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvrelay.config import PrefillSettings
from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.transfer import ucx_worker
from kvrelay.transfer.data_plane import open_data_plane
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import DigestKind, seal, unpack
from kvrelay.transfer.ucx_frames import pack_hello
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.transport import Arrived
from tests.transfer.device_ends import DeviceEnd, DeviceEnds
from tests.transfer.plane import LAYOUT, NUM_BLOCKS, End, Ends, meet, poll, receive, send
from tests.transfer.test_ucx_transport import process, said
from tests.transfer.ucx_ends import STRANGER, Stranger, fault, wait_for

BLOCKS, TARGETS = (5, 1, 2), (8, 3, 590)


@pytest.fixture
def ends() -> Iterator[DeviceEnds]:
    made = DeviceEnds()
    yield made
    made.close()


@pytest.fixture
def hosts() -> Iterator[Ends]:
    """Makes ends whose KV is on the host."""
    made = Ends("ucx", first_incarnation=50)
    yield made
    made.close()


def hand_over(sender: End, receiver: End) -> Arrived:
    """One piece, from end to end."""
    send(sender, sender.piece(meet(sender, receiver), 1, BLOCKS, TARGETS))
    (piece,) = receive(receiver, bool)
    assert receiver.land(piece, TARGETS)
    assert receiver.content(1, TARGETS) == sender.content(1, BLOCKS)
    return piece


def test_payload_goes_from_device_to_device_with_a_digest_that_was_made_there(ends: DeviceEnds) -> None:
    piece = hand_over(ends.make(), ends.make())
    assert isinstance(piece.payload, DeviceBytes)
    assert unpack(piece.header).digest_kind is DigestKind.DEVICE_DIGEST


def test_where_one_end_has_its_kv_on_the_host_payload_goes_through_it(ends: DeviceEnds, hosts: Ends) -> None:
    device, host = ends.make(), hosts.make()
    for sender, receiver in ((device, host), (host, device)):
        piece = hand_over(sender, receiver)
        assert isinstance(piece.payload, memoryview)
        assert unpack(piece.header).digest_kind is DigestKind.CONTENT


def test_the_rendezvous_protocol_brings_the_same(ends: DeviceEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between GPUs: the receiver fetches payload when it has said where to."""
    monkeypatch.setattr(ucx_worker, "has_rdma", lambda: True)
    sender, receiver, every = ends.make(), ends.make(), tuple(range(NUM_BLOCKS))
    send(sender, sender.piece(meet(sender, receiver), 1, every[::-1], every))
    assert not receiver.transport.receive(2**24)
    wait_for(lambda: bool(take_all(receiver)), sender)
    assert receiver.land(receiver.arrived[0], every)
    assert receiver.content(1, every) == sender.content(1, every[::-1])


def take_all(receiver: End) -> list[Arrived]:
    receiver.arrived += receiver.transport.receive(2**24)
    return receiver.arrived


def test_the_thread_that_moves_payload_enters_the_device_before_anything_moves(
    ends: DeviceEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    end = ends.make()
    monkeypatch.setattr(end.staged.room, "enter", lambda: entered.append(len(end.transport._connections)))  # type: ignore[attr-defined]
    for _ in range(2):
        end.transport.receive(1)
    assert entered == [0]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
            ],
        ),
    ],
)
def test_another_process_sends_from_its_device_until_it_is_killed(device: str) -> None:
    every = tuple(range(NUM_BLOCKS))
    ends, others = DeviceEnds(device), DeviceEnds(device, STRANGER)
    receiver, like_sender = ends.make(), others.make()
    transport = receiver.transport
    assert isinstance(transport, UcxTransport)
    assert transport.on_device
    before, sent = receiver.content(0, every), like_sender.content(0, every)
    with process("send", str(STRANGER), receiver.peer.model_dump_json(), device) as other:
        said(other, "here")
        while len(take_all(receiver)) <= 40 and other.poll() is None:  # a GPU's kernels are compiled first
            poll(receiver)
        os.kill(other.pid, signal.SIGKILL)
    wait_for(lambda: not transport._listener._incoming, receiver)
    wait_for(lambda: not transport._worker._abandoned, receiver)
    damaged, *pieces = receiver.arrived
    assert isinstance(damaged.payload, DeviceBytes)
    damaged.payload.tensor[1000] ^= 16
    damaged.payload.tensor.cpu()  # waits until that is done
    assert not receiver.land(damaged, every)
    assert receiver.content(0, every) == before
    for piece in pieces:
        assert receiver.land(piece, every)
        assert receiver.content(0, every) == sent
        receiver.staged.write(0, every, before)
    for each in (ends, others):
        each.close()


# the choice of it


def with_all(ends: DeviceEnds, end: DeviceEnd) -> DeviceEnd:
    """The same end, with all transports that a worker with KV on a device has."""
    end.transport.close()
    settings = PrefillSettings.model_validate({"transport": "auto"})
    plane = open_data_plane(settings, ends.context, end.incarnation, end.staged, LAYOUT, None, end.staged)
    ends.stack.callback(plane.transport.close)
    return replace(end, transport=plane.transport, outlet=plane.outlet, inlet=plane.inlet)


def test_between_devices_ucx_is_the_best_and_zmq_takes_over_when_it_breaks(ends: DeviceEnds) -> None:
    sender, receiver = with_all(ends, ends.make()), with_all(ends, ends.make())
    assert list(sender.transport.endpoints) == ["ucx", "zmq"]
    assert isinstance(hand_over(sender, receiver).payload, DeviceBytes)
    peer = receiver.peer
    packed = sender.outlet.take(sender.piece(peer, 0, BLOCKS, TARGETS))
    sender.transport._all[0]._connections[peer.incarnation].close()  # type: ignore[attr-defined]
    assert sender.transport.ready(peer.incarnation)
    with pytest.raises(WireError, match="ZeroMQ"):
        sender.transport.send(peer, *packed)
    assert isinstance(hand_over(sender, receiver).payload, memoryview)


def test_where_ucx_finds_no_cuda_payload_goes_through_the_host(
    ends: DeviceEnds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ucx_worker, "_CUDA", "none of what UCX lists")
    end, other = ends.make(), ends.make()
    monkeypatch.setattr(end.staged.room, "is_cuda", True)
    end = with_all(ends, end)
    assert list(end.transport.endpoints) == ["zmq", "ucx"]
    assert sum("UCX finds no CUDA here" in record.getMessage() for record in caplog.records) == 1
    for sender, receiver in ((other, end), (end, other)):
        assert isinstance(hand_over(sender, receiver).payload, memoryview)


# what is refused


def test_a_digest_of_another_kind_is_none(ends: DeviceEnds) -> None:
    """Each is right for what it was made of."""
    sender, receiver = ends.make(), ends.make()
    staged = sender.staged
    header = sender.piece(receiver.peer, 1, BLOCKS, TARGETS).header
    packed, digest = staged.gather(range(1, 2), BLOCKS)
    content, before = staged.fetch(packed), receiver.content(1, TARGETS)
    of_content, of_digest = seal(header, content), seal(header, digest)._replace(digest_kind=DigestKind.DEVICE_DIGEST)
    for wrong, payload in ((of_content, packed), (of_digest, content)):
        assert not receiver.inlet.land(wrong, Place(TARGETS), payload)
    assert receiver.content(1, TARGETS) == before


def test_a_payload_for_a_device_ends_the_connection_where_there_is_none(hosts: Ends) -> None:
    receiver = hosts.make()
    stranger = Stranger(hosts, receiver)
    stranger.let_in()
    stranger.send(1, b"payload", on_device=True)
    wait_for(lambda: receiver.transport.counters["payload_malformed"] == 1, receiver)
    assert receiver.transport.receive(2**20) == []


def test_a_probe_is_none_on_a_device(ends: DeviceEnds) -> None:
    receiver = ends.make()
    stranger = Stranger(ends, receiver)
    stranger.stream.send(pack_hello(STRANGER, receiver.incarnation))
    stranger.send(0, b"?", on_device=True)
    wait_for(lambda: receiver.transport.counters["ucx_refused"] == 1, receiver)


def test_a_device_without_room_ends_the_connection(ends: DeviceEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends.make(), ends.make()
    peer = meet(sender, receiver)

    def take(num_bytes: int) -> DeviceBytes:
        raise WireError(f"no room for {num_bytes} bytes")

    monkeypatch.setattr(receiver.staged.room, "take", take)
    send(sender, sender.piece(peer, 0, BLOCKS, TARGETS))
    assert "over UCX" in fault(sender, peer.incarnation, receiver)
    assert receiver.transport.counters["payload_malformed"] == 1
