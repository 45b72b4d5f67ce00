"""Where KV leaves and enters a worker's memory. Both ends belong to the compute thread, which knows the leases.

A lease begins, ends and is confirmed as released in the sender's compute thread, and that same thread writes into the
receiver's memory, at once, when it is told to send a piece. So no write can follow what it says afterwards: neither
the KVCommit, nor the KVReleased that lets the receiver give the blocks to somebody else.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from kvrelay.block_memory import BlockMemory
from kvrelay.device_memory import DeviceBytes, DeviceMemory
from kvrelay.transfer.conversion import convert
from kvrelay.transfer.protocol.actions import SendPiece
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import (
    PieceHeader,
    is_intact,
    is_intact_on_device,
    pack_sealed,
    pack_sealed_on_device,
)
from kvrelay.types import Incarnation, KVLayout

MAX_TAKEN_BYTES = 16 * 2**20  # out of memory between two looks at messages


class KVMemory(Protocol):
    """A worker's own KV. Both raise IndexError for a layer or block that does not exist."""

    def views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks of a layer, in order, in as few parts as they lie in."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Puts bytes into blocks of a layer. Raises WireError if they are too many or too few."""
        ...


class Outlet:
    """Takes pieces out of a sender's memory."""

    def __init__(
        self,
        memory: KVMemory,
        shared: Callable[[Incarnation], BlockMemory | None],
        device: Callable[[Incarnation], DeviceMemory | None] = lambda _: None,
    ) -> None:
        """`shared` gives the memory that a receiver shares with this process, None if it does not.

        `device` gives our own, on a device, if the receiver takes payload from there to its device.
        """
        self._memory = memory
        self._shared = shared
        self._device = device

    def take(self, piece: SendPiece) -> tuple[bytes, bytes | DeviceBytes | None]:
        """The piece's sealed header and its payload, None if it was written to where it belongs."""
        header = piece.header
        if (device := self._device(piece.peer.incarnation)) is not None:
            packed, digest = device.gather(header.layers, piece.block_ids)
            return pack_sealed_on_device(header, digest), packed
        if (target := self._target(piece)) is not None:
            return pack_sealed(header, self._written(piece, target)), None
        payload = b"".join(b"".join(self._memory.views(layer, piece.block_ids)) for layer in header.layers)
        return pack_sealed(header, [payload]), payload

    def _written(self, piece: SendPiece, target: BlockMemory) -> Iterator[memoryview]:
        """Its payload, each part once it is written: what was just read is digested before the next is read."""
        for layer in piece.header.layers:
            parts = self._memory.views(layer, piece.block_ids)
            target.write(layer, piece.target_block_ids, *parts)
            yield from parts

    def _target(self, piece: SendPiece) -> BlockMemory | None:
        """The receiver's memory, if the lease allows to write there and the blocks are as they should be."""
        target = self._shared(piece.peer.incarnation) if piece.one_sided else None
        header = piece.header
        fits = target is not None and all(
            target.holds(layer, piece.target_block_ids, header.layer_bytes) for layer in header.layers
        )
        return target if fits else None


class Inlet:
    """Puts accepted pieces into a receiver's memory."""

    def __init__(self, memory: KVMemory, layout: KVLayout, device: DeviceMemory | None = None) -> None:
        """`layout` is the memory's; `device` is the same memory, if it is on one."""
        self._memory = memory
        self._layout = layout
        self._device = device

    def land(self, header: PieceHeader, place: Place, payload: bytes | memoryview | DeviceBytes | None) -> bool:
        """Verifies a piece and makes sure that it lies in its place; False if its digest is wrong.

        `payload` is None when the sender has written it there by itself.
        """
        if isinstance(payload, DeviceBytes):
            return self._device is not None and self._land_on_device(self._device, header, place, payload)
        if payload is None:
            parts = (self._memory.views(layer, place.block_ids) for layer in header.layers)
            return is_intact(header, *chain.from_iterable(parts))
        intact = is_intact(header, payload)
        if intact:
            self._write(header, place, payload)
        return intact

    def _land_on_device(self, device: DeviceMemory, header: PieceHeader, place: Place, packed: DeviceBytes) -> bool:
        """As `land`. Blocks of another size go through the host, where they are converted."""
        intact = is_intact_on_device(header, len(packed), device.digest(packed))
        if intact and header.block_size == self._layout.block_size:
            device.scatter(header.layers, place.block_ids, packed)
        elif intact:
            self._write(header, place, device.fetch(packed))
        return intact

    def _write(self, header: PieceHeader, place: Place, payload: bytes | memoryview) -> None:
        content = memoryview(payload).cast("B")
        for index, layer in enumerate(header.layers):
            part = content[index * header.layer_bytes : (index + 1) * header.layer_bytes]
            self._memory.write(layer, place.block_ids, self._converted(header, layer, place, part))

    def _converted(self, header: PieceHeader, layer: int, place: Place, payload: memoryview) -> bytes | memoryview:
        if header.block_size == self._layout.block_size:
            return payload
        blocks = b"".join(self._memory.views(layer, place.block_ids))
        return convert(payload, header.block_size, place, blocks, self._layout)
