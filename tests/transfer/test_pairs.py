"""All transports of a worker as one: what a pair settles on, and what happens when that fails."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from kvrelay.config import PrefillSettings
from kvrelay.errors import TransportMissing, WireError
from kvrelay.messages import Peer
from kvrelay.transfer import data_plane, shm_connection, ucx_connection
from kvrelay.transfer.data_plane import DataPlane, open_data_plane
from kvrelay.transfer.shm_frames import boot_id, parse_address
from tests.transfer.plane import LAYOUT, End, Ends, meet, meet_peer, receive, send


class Workers(Ends):
    """Ends with all the transports that `--transport` names."""

    def worker(self, transport: str) -> End:
        made = self.make()
        made.transport.close()
        plane = self.plane(transport, made)
        return End(made.incarnation, made.memory, plane.transport, plane.outlet, plane.inlet)

    def plane(self, transport: str, end: End, *, on_host: bool = True) -> DataPlane:
        settings = PrefillSettings.model_validate({"transport": transport})
        host = end.memory if on_host else None
        plane = open_data_plane(settings, self.context, end.incarnation, end.memory, LAYOUT, host)
        self.stack.callback(plane.transport.close)
        return plane


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("zmq")
    yield made
    made.close()


def used(sender: End) -> set[str]:
    return {name.partition("_")[0] for name, count in sender.transport.counters.items() if "pieces" in name and count}


def hand_over(sender: End, receiver: End, peer: Peer) -> None:
    send(sender, sender.piece(peer, 1, (5, 6), (8, 7)))
    assert receiver.land(receive(receiver, bool)[0], (8, 7))
    assert receiver.content(1, (8, 7)) == sender.content(1, (5, 6))


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("auto", "auto", "shm"),
        ("auto", "zmq", "zmq"),
        ("zmq", "auto", "zmq"),
        ("shm", "auto", "shm"),
        ("auto", "shm", "shm"),
        ("auto", "ucx", "ucx"),
        ("ucx", "auto", "ucx"),
        ("zmq", "zmq", "zmq"),
    ],
)
def test_a_pair_uses_the_best_that_both_have(workers: Workers, here: str, there: str, expected: str) -> None:
    sender, receiver = workers.worker(here), workers.worker(there)
    hand_over(sender, receiver, meet(sender, receiver))
    assert used(sender) == {expected}
    assert sender.transport.counters[f"{expected}_agreed"] == 1


def test_a_pair_that_has_none_in_common_is_told_why(workers: Workers) -> None:
    sender, receiver = workers.worker("shm"), workers.worker("zmq")
    with pytest.raises(WireError, match=r"No transport reaches w2\. w2 does not share memory\."):
        sender.transport.connect(receiver.peer)


@pytest.mark.parametrize(("rdma", "expected"), [(False, "zmq"), (True, "ucx")])
def test_a_peer_of_another_host_gets_payload_by_the_fastest_way(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, rdma: bool, expected: str
) -> None:
    """UCX knows faster ways than TCP, but over TCP it is not the faster one."""
    monkeypatch.setattr(data_plane, "has_rdma", lambda: rdma)
    sender, receiver = workers.worker("auto"), workers.worker("auto")
    elsewhere = receiver.peer.data_endpoints["shm"].replace(boot_id(), "0" * 36)
    peer = receiver.peer.model_copy(update={"data_endpoints": {**receiver.peer.data_endpoints, "shm": elsewhere}})
    hand_over(sender, receiver, meet_peer(sender, peer, receiver))
    assert used(sender) == {expected}


@pytest.mark.parametrize(
    ("silent", "expected"),
    [([shm_connection], "zmq"), ([ucx_connection], "shm"), ([shm_connection, ucx_connection], "zmq")],
)
def test_a_transport_that_is_not_answered_is_left_out(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, silent: list[ModuleType], expected: str
) -> None:
    for each in silent:
        monkeypatch.setattr(each, "ANSWER_S", -1.0)
    sender, receiver = workers.worker("auto"), workers.worker("auto")
    hand_over(sender, receiver, meet(sender, receiver))
    assert used(sender) == {expected}


def test_until_it_is_settled_a_peer_is_not_ready(workers: Workers) -> None:
    sender, receiver = workers.worker("auto"), workers.worker("auto")
    sender.transport.connect(receiver.peer)
    assert not sender.transport.ready(receiver.incarnation)  # the receiver has not even looked yet
    meet(sender, receiver)
    sender.transport.forget(receiver.incarnation)
    with pytest.raises(WireError):
        sender.transport.ready(receiver.incarnation)


def test_a_peer_whose_only_transport_broke_is_lost(workers: Workers) -> None:
    sender, receiver = workers.worker("shm"), workers.worker("auto")
    peer = meet(sender, receiver)
    header, payload = sender.outlet.take(sender.piece(peer, 0, (1,), (1,)))
    assert payload is None
    receiver.transport.close()
    sender.transport.receive(1)
    with pytest.raises(WireError):
        sender.transport.send(peer, header, payload)
    with pytest.raises(WireError, match="No transport is left"):
        sender.transport.send(peer, *sender.outlet.take(sender.piece(peer, 0, (1,), (1,))))
    with pytest.raises(WireError, match="No transport reaches"):
        sender.transport.ready(peer.incarnation)


def test_the_next_best_takes_over_when_one_breaks(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "has_rdma", lambda: True)
    sender, receiver = workers.worker("auto"), workers.worker("auto")
    peer = meet(sender, receiver)
    hand_over(sender, receiver, peer)
    for number, expected in enumerate(({"shm", "ucx"}, {"shm", "ucx", "zmq"})):
        transport = sender.transport._all[number]  # type: ignore[attr-defined]
        transport._connections[peer.incarnation].close()  # as when it broke
        sender.transport.receive(1)
        assert sender.transport.ready(peer.incarnation)
        hand_over(sender, receiver, peer)
        assert used(sender) == expected


def test_what_cannot_start_is_named_once_and_the_next_is_taken(
    workers: Workers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = workers.make()
    assert list(workers.plane("auto", end, on_host=False).transport.endpoints) == ["zmq", "ucx"]
    assert [record.getMessage() for record in caplog.records] == [
        "Transport shm cannot be used here: KV memory of a device cannot be shared; the next best is used."
    ]
    with pytest.raises(TransportMissing, match="--transport"):
        workers.plane("shm", end, on_host=False)

    def fail(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(data_plane, "ShmTransport", fail)
    assert list(workers.plane("auto", end).transport.endpoints) == ["zmq", "ucx"]
    assert "Function not implemented" in caplog.records[-1].getMessage()


def test_the_best_is_named_first(workers: Workers) -> None:
    worker = workers.worker("auto")
    assert list(worker.transport.endpoints) == ["shm", "zmq", "ucx"]
    assert parse_address(worker.transport.endpoints["shm"]).boot_id == boot_id()
