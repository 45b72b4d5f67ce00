"""The piece header: what goes in comes out, and nothing else is taken for it."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import WireError
from kvrelay.messages import LeaseId
from kvrelay.transfer.protocol.piece import (
    DTYPE_CODES,
    HEADER_BYTES,
    DigestKind,
    PieceHeader,
    check_piece,
    is_intact,
    is_intact_on_device,
    pack,
    pack_sealed,
    pack_sealed_on_device,
    payload_bytes,
    seal,
    split,
    unpack,
)

U64 = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> PieceHeader:
    dtype = draw(st.sampled_from(sorted(DTYPE_CODES)))
    num_layers, num_blocks, num_heads, block_size, row_bytes = (draw(st.integers(1, 64)) for _ in range(5))
    return PieceHeader(
        lease_id=LeaseId(draw(U64), draw(U64)),
        sender=draw(U64),
        layer=draw(st.integers(0, 2**16 - 1)),
        first_block=draw(st.integers(0, 2**32 - 1)),
        num_blocks=num_blocks,
        head_start=draw(st.integers(0, 2**16 - 1)),
        num_heads=num_heads,
        block_size=block_size,
        dtype=dtype,
        payload_bytes=num_layers * num_blocks * 2 * num_heads * block_size * row_bytes,
        num_layers=num_layers,
        digest=draw(U64),
        digest_kind=draw(st.sampled_from(DigestKind)),
    )


def small_piece() -> tuple[PieceHeader, bytes]:
    payload = bytes(range(96))
    header = PieceHeader(LeaseId(7, 1), 9, 1, 3, 2, 0, 1, 2, "float16", len(payload), num_layers=3)
    return seal(header, payload), payload


@given(headers())
def test_a_header_survives_the_wire(header: PieceHeader) -> None:
    assert unpack(pack(header)) == header


@given(headers())
def test_the_size_of_a_row_follows_from_the_payload(header: PieceHeader) -> None:
    num_rows = header.num_layers * header.num_blocks * 2 * header.num_heads * header.block_size
    assert num_rows * header.row_bytes == header.payload_bytes == header.num_layers * header.layer_bytes


@settings(max_examples=300)
@given(st.binary(max_size=2 * HEADER_BYTES) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_a_wire_error_and_nothing_worse(frame: bytes) -> None:
    with pytest.raises(WireError):
        unpack(frame)


@settings(max_examples=300)
@given(st.binary(min_size=HEADER_BYTES - 7, max_size=HEADER_BYTES - 7))
def test_random_fields_behind_a_right_start_are_consistent_or_a_wire_error(rest: bytes) -> None:
    try:
        header = unpack(b"KVRP\x03\x02\x01" + rest)
    except WireError:
        return
    assert pack(header) == b"KVRP\x03\x02\x01" + rest


def test_every_flipped_bit_of_a_piece_is_noticed() -> None:
    header, payload = small_piece()
    frame = pack(header) + payload
    assert is_intact(unpack(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = unpack(flipped[:HEADER_BYTES])
        except WireError:
            continue
        assert not is_intact(found, flipped[HEADER_BYTES:]), f"bit {bit}"


def test_every_flipped_bit_of_a_piece_on_a_device_is_noticed() -> None:
    header, payload = small_piece()
    frame = pack_sealed_on_device(header, b"8 bytes.") + b"8 bytes."
    found = unpack(frame[:HEADER_BYTES])
    assert is_intact_on_device(found, len(payload), b"8 bytes.")
    assert not is_intact_on_device(found, len(payload) - 1, b"8 bytes.")
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = unpack(flipped[:HEADER_BYTES])
        except WireError:
            continue
        assert not is_intact_on_device(found, len(payload), bytes(flipped[HEADER_BYTES:])), f"bit {bit}"


def test_a_digest_is_taken_for_no_other_kind() -> None:
    """Eight bytes of payload may be the digest of others."""
    header = small_piece()[0]._replace(payload_bytes=8, num_layers=1, num_blocks=1)
    assert not is_intact(unpack(pack_sealed_on_device(header, b"8 bytes.")), b"8 bytes.")
    assert not is_intact_on_device(seal(header, b"8 bytes."), 8, b"8 bytes.")


def test_a_truncated_or_padded_payload_is_not_intact() -> None:
    header, payload = small_piece()
    assert not is_intact(header, payload[:-1])
    assert not is_intact(header, payload + b"\0")


def test_a_payload_that_is_not_as_long_as_the_header_says_is_a_wire_error() -> None:
    header, payload = small_piece()
    check_piece(pack(header), payload)
    for wrong in (payload[:-1], payload + b"\0"):
        with pytest.raises(WireError, match=f"announces {len(payload)} bytes of payload and brings {len(wrong)}"):
            check_piece(pack(header), wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"payload_bytes": 97},
        {"payload_bytes": 0},
        {"num_blocks": 0},
        {"num_heads": 0},
        {"block_size": 0},
        {"num_layers": 0},
    ],
)
def test_a_payload_size_that_does_not_follow_from_the_layout_is_a_wire_error(change: dict[str, int]) -> None:
    with pytest.raises(WireError, match="cannot have a payload"):
        unpack(pack(small_piece()[0]._replace(**change)))  # type: ignore[arg-type]


def test_wrong_magic_version_dtype_and_length_are_named() -> None:
    frame = bytearray(pack(small_piece()[0]))
    with pytest.raises(WireError, match="starts with"):
        unpack(b"KVRX" + frame[4:])
    with pytest.raises(WireError, match="starts with"):
        unpack(frame[:4] + b"\x01" + frame[5:])
    with pytest.raises(WireError, match="dtype 9"):
        unpack(frame[:5] + b"\x09" + frame[6:])
    with pytest.raises(WireError, match="digest 3"):
        unpack(frame[:6] + b"\x03" + frame[7:])
    with pytest.raises(WireError, match=f"{HEADER_BYTES} bytes, not {HEADER_BYTES + 1}"):
        unpack(frame + b"\0")


def test_the_header_is_what_its_docstring_says() -> None:
    header, _ = small_piece()
    fields = struct.unpack("<4sBBBQQQHHIIHHHQQ", pack(header))
    assert fields == (b"KVRP", 3, 2, 1, 7, 1, 9, 1, 3, 3, 2, 0, 1, 2, 96, header.digest)


def test_headers_that_lie_behind_each_other_are_told_apart_if_they_are_whole() -> None:
    header, payload = small_piece()
    frame = pack(header)
    assert split(frame * 3) == [frame] * 3
    assert payload_bytes(frame) == len(payload)
    for torn in (b"", frame[:-1], frame + b"x"):
        with pytest.raises(WireError, match="multiple"):
            split(torn)


@given(headers(), st.binary(max_size=64))
def test_sealing_and_packing_at_once_gives_the_same(header: PieceHeader, payload: bytes) -> None:
    assert pack_sealed(header, [payload[:5], payload[5:]]) == pack(seal(header, payload))
