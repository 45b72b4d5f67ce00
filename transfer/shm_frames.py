"""What is said on the Unix socket of shared memory before the first piece, and where that socket is.

    sender -> receiver   hello:  magic 4s | version u8 | sender u64 | receiver u64 | token 16s
    receiver -> sender   memory: magic 4s | version u8 | layers u32 | blocks u64 | block bytes u64, and a descriptor

All little-endian, sender and receiver as incarnations. A receiver that says no closes the connection. From then on the
sender sends headers of pieces, one after the other, as many as a packet holds.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from kvrelay.block_memory import Geometry
from kvrelay.errors import WireError
from kvrelay.transfer.protocol.piece import HEADER_BYTES
from kvrelay.transport import MAX_HEADERS
from kvrelay.types import Incarnation

MAGIC = b"KVRM"
VERSION = 1
TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<4sBQQ{TOKEN_BYTES}s")
_MEMORY = struct.Struct("<4sBIQQ")
MAX_FRAME_BYTES = MAX_HEADERS * HEADER_BYTES

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this run of this machine's kernel. Raises OSError where there is no such name."""
    return _BOOT_ID.read_text().strip()


@dataclass(frozen=True, slots=True)
class Address:
    """A socket in the abstract namespace of one machine, and the token that opens it."""

    boot_id: str
    socket: str
    token: bytes

    def __str__(self) -> str:
        return f"{self.boot_id}/{self.socket}/{self.token.hex()}"

    @property
    def abstract(self) -> str:
        """For `bind` and `connect`: no file, so nothing is left of it."""
        return f"\0{self.socket}"


def parse_address(text: str) -> Address:
    """Back from `str`.

    Raises:
        WireError: not of that form.
    """
    machine, _, rest = text.partition("/")
    name, _, token = rest.partition("/")
    try:
        address = Address(machine, name, bytes.fromhex(token))
    except ValueError:
        address = Address("", "", b"")
    if not (machine and 0 < len(name) <= 64 and "\0" not in name and len(address.token) == TOKEN_BYTES):
        raise WireError("An address of shared memory is malformed.")
    return address


@dataclass(frozen=True, slots=True)
class Hello:
    """Who asks whom for its memory, and the token that says that it may."""

    sender: Incarnation
    receiver: Incarnation
    token: bytes

    def pack(self) -> bytes:
        """As one packet."""
        return _HELLO.pack(MAGIC, VERSION, self.sender, self.receiver, self.token)


def unpack_hello(frame: bytes) -> Hello:
    """Back from `pack`.

    Raises:
        WireError: anything else.
    """
    _check(frame, _HELLO.size)
    _, _, sender, receiver, token = _HELLO.unpack(frame)
    return Hello(sender, receiver, token)


def pack_geometry(geometry: Geometry) -> bytes:
    """The packet that comes with the memory's descriptor."""
    return _MEMORY.pack(MAGIC, VERSION, geometry.num_layers, geometry.num_blocks, geometry.block_bytes)


def unpack_geometry(frame: bytes) -> Geometry:
    """Back from `pack_geometry`.

    Raises:
        WireError: anything else.
    """
    _check(frame, _MEMORY.size)
    _, _, num_layers, num_blocks, block_bytes = _MEMORY.unpack(frame)
    return Geometry(num_layers, num_blocks, block_bytes)


def _check(frame: bytes, size: int) -> None:
    if len(frame) != size or frame[: len(MAGIC)] != MAGIC or frame[len(MAGIC)] != VERSION:
        raise WireError(f"A packet about shared memory has {len(frame)} bytes and starts with {frame[:5]!r}.")
