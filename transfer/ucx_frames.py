"""What is said on the TCP connection beside UCX, which announces each payload and tells that it was taken.

    receiver -> sender   welcome: magic 4s | version u8 | receiver u64 | connection u32 | on device u8 | size u16
                                  | digest u64, and a UCX address
    sender -> receiver   hello:   magic 4s | version u8 | sender u64 | receiver u64
    sender -> receiver   header of a piece, one for each payload
    receiver -> sender   one byte for each payload that was taken

All little-endian, sender and receiver as incarnations. The payload goes over UCX under the tag `connection u32 |
on device u1 | number u31`: number 0 is a probe that shows that UCX gets through, then come the pieces. A receiver never
gives a connection's number away again, so tags never repeat between two incarnations. The digest is XXH3 over the
address: UCX ends the process that gives it a garbled one.

The welcome of a receiver whose KV is on a device that UCX reaches is 1 in `on device`. A sender that is like it sends
from device to device then, and says so in the tag: the receiver has to know where payload goes before it begins to
come, and the header may be slower.
"""

import socket
import struct
from dataclasses import dataclass

import xxhash

from kvrelay.errors import WireError
from kvrelay.types import Incarnation

MAGIC = b"KVRU"
VERSION = 2
TAKEN = b"+"
PROBE = b"?"
MAX_NUMBER = 2**31 - 1
_ON_DEVICE = 2**31
_WELCOME = struct.Struct("<4sBQI?HQ")
_HELLO = struct.Struct("<4sBQQ")
HELLO_BYTES = _HELLO.size

# A connection that died in silence (a cable, a firewall) is over after about five seconds.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
_READ_BYTES = 2**16


def tag(connection: int, number: int, *, on_device: bool = False) -> int:
    """Names one payload, which goes to the receiver's device if it comes from one."""
    return connection << 32 | _ON_DEVICE * on_device | number


def split_tag(value: int) -> tuple[int, int, bool]:
    """Back from `tag`: the connection, the number in it, and where it goes."""
    return value >> 32, value & MAX_NUMBER, bool(value & _ON_DEVICE)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Who listens, which number a connection has there, where UCX finds it, and whether payload may go to a device."""

    receiver: Incarnation
    connection: int
    address: bytes
    on_device: bool = False

    def pack(self) -> bytes:
        """As it is sent."""
        size, digest = len(self.address), xxhash.xxh3_64_intdigest(self.address)
        fields = _WELCOME.pack(MAGIC, VERSION, self.receiver, self.connection, self.on_device, size, digest)
        return fields + self.address


def pack_hello(sender: Incarnation, receiver: Incarnation) -> bytes:
    """Who sends, and to whom it means to send."""
    return _HELLO.pack(MAGIC, VERSION, sender, receiver)


def unpack_hello(frame: bytes) -> tuple[Incarnation, Incarnation]:
    """Back from `pack_hello`: sender and receiver.

    Raises:
        WireError: anything else.
    """
    magic, version, sender, receiver = _HELLO.unpack(frame)
    _check(magic, version)
    return sender, receiver


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC or version != VERSION:
        raise WireError(f"A connection begins with {MAGIC!r} and version {VERSION}, not {magic!r} and {version}.")


class Stream:
    """A TCP connection that never blocks. Frames are few and small: one that finds no room means a peer that is stuck.

    `ended` says that nothing more will come; what came before can still be taken.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket."""
        connected.setblocking(False)
        for option in _KEEPALIVE:
            connected.setsockopt(*option)
        self._socket = connected
        self._bytes = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """What to poll; -1 once it is closed."""
        return self._socket.fileno()

    def hear(self, limit: int) -> None:
        """Reads what is there, while fewer than `limit` bytes wait to be taken."""
        try:
            while not self.ended and len(self._bytes) < limit:
                frame = self._socket.recv(_READ_BYTES)
                self._bytes += frame
                self.ended = not frame
        except BlockingIOError:
            return
        except OSError:  # reset: as over as an orderly end
            self.ended = True

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes; None while there are fewer."""
        if len(self._bytes) < size:
            return None
        taken = bytes(self._bytes[:size])
        del self._bytes[:size]
        return taken

    def take_all(self) -> bytes:
        """All that is there."""
        return self.take(len(self._bytes)) or b""

    def take_welcome(self) -> Welcome | None:
        """A whole welcome; None while it is not there.

        Raises:
            WireError: something else came.
        """
        if len(self._bytes) < _WELCOME.size:
            return None
        magic, version, receiver, connection, on_device, size, digest = _WELCOME.unpack_from(self._bytes)
        _check(magic, version)
        if (frame := self.take(_WELCOME.size + size)) is None:
            return None
        address = frame[_WELCOME.size :]
        if not address or xxhash.xxh3_64_intdigest(address) != digest:
            raise WireError("The address of its UCX arrived damaged.")
        return Welcome(receiver, connection, address, on_device)

    def send(self, frame: bytes) -> None:
        """All of it.

        Raises:
            WireError: the connection is over, or the peer reads nothing.
        """
        try:
            sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise WireError(f"{error.strerror}.") from error
        if sent < len(frame):
            raise WireError("The other end reads nothing.")

    def close(self) -> None:
        """At once; a second time is fine."""
        self._socket.close()
        self.ended = True
