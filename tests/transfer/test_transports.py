"""What every transport does, over real sockets: each test runs over all of them."""

import random

import pytest
import zmq

from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.messages import Peer
from kvrelay.transfer.protocol.piece import unpack
from tests.transfer.plane import NUM_BLOCKS, End, Ends, meet, receive, send


@pytest.fixture(params=["zmq", "shm", "ucx", "ucx of devices"])
def transport_kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_it_names_its_endpoint(sender: End, ends: Ends) -> None:
    assert list(sender.transport.endpoints) == [ends.kind]


def test_pieces_of_odd_sizes_arrive_whole_and_in_order(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    draw = random.Random(1)
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sent = []
    found = []
    for count in (1, 2, 3, 7, 64, 129, 1, 300):
        targets = tuple(free.pop() for _ in range(count))
        sources = tuple(draw.sample(range(NUM_BLOCKS), count))
        if count % 2:
            sources, targets = tuple(sorted(sources)), tuple(sorted(targets))
        piece = sender.piece(peer, count % 2, sources, targets)
        send(sender, piece)
        sent.append(piece)
        found += receiver.transport.receive(2**24)
    found += receive(receiver, lambda more: len(found) + len(more) == len(sent))
    assert [unpack(each.header).num_blocks for each in found] == [piece.header.num_blocks for piece in sent]
    for each, piece in zip(found, sent, strict=True):
        assert each.peer == sender.incarnation
        assert receiver.land(each, piece.target_block_ids)
        layer = piece.header.layer
        assert receiver.content(layer, piece.target_block_ids) == sender.content(layer, piece.block_ids)


def test_a_piece_of_several_layers_arrives_in_each_of_them(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    send(sender, sender.piece(peer, 0, (1, 2, 5), (9, 4, 0), num_layers=2))
    assert receiver.land(receive(receiver, bool)[0], (9, 4, 0))
    for layer in range(2):
        assert receiver.content(layer, (9, 4, 0)) == sender.content(layer, (1, 2, 5))


def test_blocks_that_no_piece_names_keep_their_bytes(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    others = tuple(set(range(NUM_BLOCKS)) - {4, 9})
    before = receiver.content(0, others), receiver.content(1, tuple(range(NUM_BLOCKS)))
    send(sender, sender.piece(peer, 0, (1, 2), (9, 4)))
    assert receiver.land(receive(receiver, bool)[0], (9, 4))
    assert (receiver.content(0, others), receiver.content(1, tuple(range(NUM_BLOCKS)))) == before


def test_a_byte_that_changed_on_the_way_is_noticed(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    send(sender, sender.piece(peer, 0, (1, 2), (9, 4)))
    (piece,) = receive(receiver, bool)
    if piece.payload is None:
        receiver.memory.views(0, (4,))[0][0] ^= 1
    elif isinstance(piece.payload, DeviceBytes):
        piece.payload.tensor[-1] ^= 1
    else:
        damaged = bytearray(piece.payload)
        damaged[-1] ^= 1
        piece = piece._replace(payload=bytes(damaged))
    assert not receiver.land(piece, (9, 4))


def test_bytes_and_pieces_are_counted_on_both_sides(sender: End, receiver: End, ends: Ends) -> None:
    peer = meet(sender, receiver)
    for count in (1, 5):
        send(sender, sender.piece(peer, 0, tuple(range(count)), tuple(range(count))))
    receive(receiver, lambda found: len(found) == 2)
    for end, verb in ((sender, "sent"), (receiver, "received")):
        assert end.transport.counters[f"{ends.kind}_pieces_{verb}"] == 2
        assert end.transport.counters[f"{ends.kind}_bytes_{verb}"] == 6 * 420


def test_receive_stops_at_its_limit(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    for number in range(3):
        send(sender, sender.piece(peer, 0, (number,), (number,)))
    assert len(receive(receiver, lambda found: len(found) == 3)) == 3
    for number in range(3):
        send(sender, sender.piece(peer, 0, (number,), (number,)))
    zmq.zmq_poll([(each, zmq.POLLIN) for each in receiver.transport.sockets()], 5_000)
    assert len(receiver.transport.receive(1)) == 1


def test_a_receiver_that_does_not_read_makes_send_say_no(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    large = tuple(range(NUM_BLOCKS))
    piece = sender.piece(peer, 0, large, large)
    header, payload = sender.outlet.take(piece)
    send(sender, piece)
    num_sent = 1
    while sender.transport.send(peer, header, payload):
        num_sent += 1
        assert num_sent < 20_000
    assert sender.transport.counters["payload_would_block"] >= 1
    assert len(list(sender.transport.blocked())) == 1
    assert len(receive(receiver, lambda found: len(found) == num_sent)) == num_sent
    send(sender, piece)
    assert not list(sender.transport.blocked())


def test_one_sender_reaches_many_receivers_and_the_other_way_round(ends: Ends) -> None:
    workers = [ends.make() for _ in range(3)]
    pairs = [(here, there) for here in workers for there in workers if here is not there]
    for here, there in pairs:
        meet(here, there)
    for here, there in pairs:
        send(here, here.piece(there.peer, 0, (here.incarnation,), (here.incarnation + 10,)))
    for there in workers:
        found = receive(there, lambda pieces: len(pieces) == 2)
        assert sorted(piece.peer for piece in found) == sorted({1, 2, 3} - {there.incarnation})
        assert all(there.land(piece, (piece.peer + 10,)) for piece in found)


def test_a_receiver_that_is_gone_is_no_trouble_and_can_be_forgotten(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    receiver.transport.close()
    piece = sender.piece(peer, 0, (1,), (1,))
    for _ in range(100):
        try:
            if not sender.transport.send(peer, *sender.outlet.take(piece)):
                break
        except WireError:
            break
        sender.transport.receive(1)
    else:
        raise AssertionError("pieces were taken for a receiver that is gone")
    sender.transport.forget(peer.incarnation)
    assert not list(sender.transport.blocked())
    sender.transport.forget(peer.incarnation)  # a second time is fine


def test_a_sender_that_is_gone_is_no_trouble(ends: Ends, receiver: End) -> None:
    gone = ends.make()
    send(gone, gone.piece(meet(gone, receiver), 0, (1,), (1,)))
    gone.transport.close()
    assert len(receive(receiver, bool)) == 1
    again = ends.make()
    send(again, again.piece(meet(again, receiver), 0, (2,), (2,)))
    assert [piece.peer for piece in receive(receiver, bool)] == [again.incarnation]


def test_a_peer_without_such_an_endpoint_cannot_be_reached(sender: End) -> None:
    peer = Peer(name="d", incarnation=9, control_endpoint="tcp://h:1", data_endpoints={"pigeon": "coop"})
    with pytest.raises(WireError, match="d does not"):
        sender.transport.connect(peer)


@pytest.mark.parametrize("address", ["nowhere", "a/b", "a/b/c", "/" * 40, "tcp://:", "\0/x/" + "00" * 16])
def test_a_malformed_endpoint_is_a_wire_error(sender: End, ends: Ends, address: str) -> None:
    peer = Peer(name="d", incarnation=9, control_endpoint="tcp://h:1", data_endpoints={ends.kind: address})
    with pytest.raises(WireError):
        sender.transport.connect(peer)
    sender.transport.forget(9)


def test_connecting_twice_is_connecting_once(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    sockets = list(sender.transport.sockets())
    sender.transport.connect(peer)
    assert list(sender.transport.sockets()) == sockets
    assert sender.transport.ready(peer.incarnation)


def test_a_forgotten_peer_is_met_again(sender: End, receiver: End) -> None:
    peer = meet(sender, receiver)
    sender.transport.forget(peer.incarnation)
    assert not sender.transport.ready(peer.incarnation)
    send(sender, sender.piece(meet(sender, receiver), 0, (3,), (3,)))
    assert receiver.land(receive(receiver, bool)[0], (3,))
