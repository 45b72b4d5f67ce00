"""Where KV leaves and enters memory: what is written by whom, and under which lease."""

from dataclasses import replace

import pytest

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.messages import LeaseId
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.protocol.actions import SendPiece
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import PieceHeader, unpack
from tests.transfer.nouns import LAYOUT, new_peer

PEER = new_peer(5)
SIZE = LAYOUT.block_bytes
GEOMETRY = Geometry(LAYOUT.num_layers, 8, SIZE)
BLOCK_IDS, TARGETS = (4, 5, 1), (0, 2, 3)


def memory(seed: int) -> BlockMemory:
    made = BlockMemory.create(GEOMETRY)
    made.buffer[:] = bytes((seed + i // SIZE) % 256 for i in range(GEOMETRY.num_bytes))
    return made


def piece(*, one_sided: bool, targets: tuple[int, ...] = TARGETS) -> SendPiece:
    header = PieceHeader(LeaseId(5, 1), 1, 1, 0, 3, 0, 1, 2, "float16", 3 * SIZE)
    return SendPiece(PEER, header, BLOCK_IDS, targets, one_sided)


def content(of: BlockMemory, block_ids: tuple[int, ...]) -> bytes:
    return b"".join(of.views(1, block_ids))


def test_a_piece_is_packed_for_a_receiver_that_shares_nothing() -> None:
    here, there = memory(10), memory(100)
    header, payload = Outlet(here, lambda _: None).take(piece(one_sided=True))
    assert payload == content(here, BLOCK_IDS)
    assert Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), payload)
    assert content(there, TARGETS) == content(here, BLOCK_IDS)


def test_a_piece_is_written_once_into_memory_that_is_shared() -> None:
    here, there = memory(10), memory(100)
    before = bytes(there.buffer)
    header, payload = Outlet(here, {PEER.incarnation: there}.get).take(piece(one_sided=True))
    assert payload is None
    assert Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), payload)
    expected = memory(100)
    expected.write(1, TARGETS, content(here, BLOCK_IDS))
    assert bytes(there.buffer) == bytes(expected.buffer) != before


def test_nothing_is_written_under_a_lease_that_does_not_allow_it() -> None:
    here, there = memory(10), memory(100)
    _, payload = Outlet(here, {PEER.incarnation: there}.get).take(piece(one_sided=False))
    assert payload == content(here, BLOCK_IDS)
    assert bytes(there.buffer) == bytes(memory(100).buffer)


def test_blocks_that_the_receiver_does_not_have_are_not_written_to() -> None:
    here, there = memory(10), memory(100)
    _, payload = Outlet(here, {PEER.incarnation: there}.get).take(piece(one_sided=True, targets=(0, 2, 8)))
    assert payload == content(here, BLOCK_IDS)
    assert bytes(there.buffer) == bytes(memory(100).buffer)


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_piece_of_several_layers_goes_into_each_of_them(one_sided: bool) -> None:
    here, there, expected = memory(10), memory(100), memory(100)
    single = piece(one_sided=one_sided)
    several = replace(single, header=single.header._replace(layer=0, num_layers=2, payload_bytes=6 * SIZE))
    header, payload = Outlet(here, {PEER.incarnation: there}.get).take(several)
    assert (payload is None) == one_sided
    assert Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), payload)
    for layer in range(2):
        expected.write(layer, TARGETS, *here.views(layer, BLOCK_IDS))
    assert bytes(there.buffer) == bytes(expected.buffer)


def test_a_wrong_digest_in_the_last_of_several_layers_is_seen() -> None:
    here, there = memory(10), memory(100)
    single = piece(one_sided=True)
    several = replace(single, header=single.header._replace(layer=0, num_layers=2, payload_bytes=6 * SIZE))
    header, _ = Outlet(here, {PEER.incarnation: there}.get).take(several)
    there.views(1, TARGETS)[0][-1] ^= 1
    assert not Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), None)


def test_a_wrong_digest_is_seen_wherever_the_payload_lies() -> None:
    here, there = memory(10), memory(100)
    header, _ = Outlet(here, {PEER.incarnation: there}.get).take(piece(one_sided=True))
    there.views(1, TARGETS)[0][0] ^= 1
    assert not Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), None)
    payload = bytearray(content(here, BLOCK_IDS))
    payload[-1] ^= 1
    before = bytes(there.buffer)
    assert not Inlet(there, LAYOUT).land(unpack(header), Place(TARGETS), bytes(payload))
    assert bytes(there.buffer) == before
