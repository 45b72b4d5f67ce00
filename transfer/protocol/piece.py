"""The binary header in front of every piece of KV, and the digest that makes a flipped bit anywhere noticed.

A piece is a run of adjacent blocks, the same ones in each of some adjacent layers: payload
`[num_layers, num_blocks, 2, num_heads, block_size, row_bytes]`. The header is little-endian without padding, the digest
last:

    magic 4s | version u8 | dtype u8 | digest kind u8 | lease incarnation u64 | lease counter u64 | sender u64
    | layer u16 | num_layers u16 | first_block u32 | num_blocks u32 | head_start u16 | num_heads u16 | block_size u16
    | payload_bytes u64 | digest u64

The digest is XXH3 (64 bits; https://github.com/Cyan4973/xxHash) over the header before it and the payload, or, as its
kind says, over the header and the eight bytes of a digest of the payload that was made where it lies, on a device
(`kernels/digest.py`).
"""

import struct
from collections.abc import Iterable, Sized
from enum import IntEnum
from typing import NamedTuple

import xxhash

from kvrelay.errors import WireError
from kvrelay.messages import LeaseId

Payload = bytes | bytearray | memoryview

MAGIC = b"KVRP"
VERSION = 3
_FIELDS = struct.Struct("<4sBBBQQQHHIIHHHQ")
_SIZE = struct.Struct("<Q")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _DIGEST.size

DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3, "int8": 4}
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}
_MAX_ROW_BYTES = 4 * 2**16


class DigestKind(IntEnum):
    """What of the payload goes into a piece's digest."""

    CONTENT = 1
    DEVICE_DIGEST = 2


_DIGEST_KINDS = {int(kind): kind for kind in DigestKind}


class PieceHeader(NamedTuple):
    """What a piece holds and under which lease it comes. Block indexes count from the sequence's first block.

    `layer` is the first of `num_layers`.
    """

    lease_id: LeaseId
    sender: int  # incarnation
    layer: int
    first_block: int
    num_blocks: int
    head_start: int
    num_heads: int
    block_size: int
    dtype: str
    payload_bytes: int
    num_layers: int = 1
    digest: int = 0
    digest_kind: DigestKind = DigestKind.CONTENT

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token; they follow from the size of the payload."""
        return self.payload_bytes // self._num_rows

    @property
    def layers(self) -> range:
        """The layers it holds blocks of."""
        return range(self.layer, self.layer + self.num_layers)

    @property
    def layer_bytes(self) -> int:
        """Payload of each of the layers."""
        return self.payload_bytes // self.num_layers

    @property
    def _num_rows(self) -> int:
        return self.num_layers * self.num_blocks * 2 * self.num_heads * self.block_size

    @property
    def block_mask(self) -> int:
        """The piece's block indexes as bits of an integer."""
        return ((1 << self.num_blocks) - 1) << self.first_block


def _pack_fields(header: PieceHeader) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        DTYPE_CODES[header.dtype],
        header.digest_kind,
        *header.lease_id,
        header.sender,
        header.layer,
        header.num_layers,
        header.first_block,
        header.num_blocks,
        header.head_start,
        header.num_heads,
        header.block_size,
        header.payload_bytes,
    )


def digest(header: PieceHeader, *parts: Payload) -> int:
    """XXH3 over every field of the header but the digest, then the payload, in however many parts it lies."""
    return _digest(_pack_fields(header), parts)


def _digest(fields: bytes, parts: Iterable[Payload]) -> int:
    hasher = xxhash.xxh3_64(fields)
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


def seal(header: PieceHeader, *parts: Payload) -> PieceHeader:
    """The header with the digest filled in."""
    return header._replace(digest=digest(header, *parts))


def pack_sealed(header: PieceHeader, parts: Iterable[Payload]) -> bytes:
    """What `pack` gives of a header that `seal` gives; takes one part of the payload after the other."""
    fields = _pack_fields(header)
    return fields + _DIGEST.pack(_digest(fields, parts))


def is_intact(header: PieceHeader, *parts: Payload) -> bool:
    """True if neither a bit of the header nor of the payload differs from what was sealed."""
    size = sum(memoryview(part).nbytes for part in parts)
    fits = header.digest_kind is DigestKind.CONTENT and size == header.payload_bytes
    return fits and digest(header, *parts) == header.digest


def pack_sealed_on_device(header: PieceHeader, device_digest: bytes) -> bytes:
    """As `pack_sealed`, for payload of which only a digest is known here."""
    return pack_sealed(header._replace(digest_kind=DigestKind.DEVICE_DIGEST), [device_digest])


def is_intact_on_device(header: PieceHeader, num_bytes: int, device_digest: bytes) -> bool:
    """As `is_intact`, for payload of which only size and digest are known here."""
    fits = header.digest_kind is DigestKind.DEVICE_DIGEST and num_bytes == header.payload_bytes
    return fits and digest(header, device_digest) == header.digest


def pack(header: PieceHeader) -> bytes:
    """Header to `HEADER_BYTES` bytes."""
    return _pack_fields(header) + _DIGEST.pack(header.digest)


def unpack(frame: Payload) -> PieceHeader:
    """Bytes to a header that is consistent in itself. Whether it fits a lease is the receiver's to say.

    Raises:
        WireError: wrong length, magic or version, unknown dtype or digest, an empty piece, or a payload size that does
            not follow from blocks, heads and block size.
    """
    size = memoryview(frame).nbytes
    if size != HEADER_BYTES:
        raise WireError(f"A piece header has {HEADER_BYTES} bytes, not {size}.")
    magic, version, dtype, kind, incarnation, counter, *rest = _FIELDS.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"A piece header starts with {MAGIC!r} and version {VERSION}, not {magic!r} and {version}.")
    if dtype not in _DTYPES:
        raise WireError(f"A piece header names dtype {dtype}; the known ones are {DTYPE_CODES}.")
    if kind not in _DIGEST_KINDS:
        raise WireError(f"A piece header names digest {kind}; the known ones are {list(_DIGEST_KINDS)}.")
    sender, layer, num_layers, first_block, num_blocks, head_start, num_heads, block_size, payload_bytes = rest
    header = PieceHeader(
        LeaseId(incarnation, counter),
        sender,
        layer,
        first_block,
        num_blocks,
        head_start,
        num_heads,
        block_size,
        _DTYPES[dtype],
        payload_bytes,
        num_layers,
        digest=_DIGEST.unpack_from(frame, _FIELDS.size)[0],
        digest_kind=_DIGEST_KINDS[kind],
    )
    _check_size(header)
    return header


def split(frame: bytes) -> list[bytes]:
    """Packed headers that lie one after the other.

    Raises:
        WireError: it does not end where one ends.
    """
    if not frame or len(frame) % HEADER_BYTES:
        raise WireError(f"Piece headers have {HEADER_BYTES} bytes each, and {len(frame)} is no multiple of that.")
    return [frame[begin : begin + HEADER_BYTES] for begin in range(0, len(frame), HEADER_BYTES)]


def payload_bytes(header: bytes) -> int:
    """The size that a packed header tells, without a look at the rest."""
    size: int = _SIZE.unpack_from(header, _FIELDS.size - _SIZE.size)[0]
    return size


def _check_size(header: PieceHeader) -> None:
    rows, size = header._num_rows, header.payload_bytes
    if not rows or size % rows or not 0 < size // rows < _MAX_ROW_BYTES:
        raise WireError(
            f"A piece of {header.num_layers} layers, {header.num_blocks} blocks, {header.num_heads} heads and "
            f"{header.block_size} tokens of {header.dtype} cannot have a payload of {header.payload_bytes} bytes."
        )


def check_piece(header: Payload, payload: Sized) -> None:
    """Makes sure that a header is one and that its payload, of so many bytes as its length is, is complete.

    Raises:
        WireError: malformed, truncated or too long.
    """
    expected, found = unpack(header).payload_bytes, len(payload)
    if expected != found:
        raise WireError(f"A piece announces {expected} bytes of payload and brings {found}.")
