"""Host memory of KV blocks that another process can map: it has no name, so nothing of it outlives its processes.

Per layer the blocks lie one after the other, `block_bytes` each; a block of one layer is contiguous. The kernel gives
pages when they are first touched, so memory that no block used yet costs nothing.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise

from kvrelay.errors import WireError

Bytes = bytes | bytearray | memoryview

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many blocks there are, and the bytes of one block of one layer."""

    num_layers: int
    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """All layers together."""
        return self.num_layers * self.num_blocks * self.block_bytes

    def has(self, layer: int, block_ids: Sequence[int]) -> bool:
        """Whether all of them exist."""
        exist = not block_ids or 0 <= min(block_ids) <= max(block_ids) < self.num_blocks
        return exist and 0 <= layer < self.num_layers

    def check(self, layer: int, block_ids: Sequence[int]) -> None:
        """Raises IndexError if the layer or one of the blocks does not exist."""
        if not self.has(layer, block_ids):
            raise IndexError(
                f"Blocks {list(block_ids)} of layer {layer} do not all exist: there are {self.num_blocks} in each of "
                f"{self.num_layers} layers."
            )

    def check_payload(self, block_ids: Sequence[int], num_bytes: int) -> None:
        """Raises WireError if these are more or fewer bytes than the blocks take."""
        if num_bytes != (expected := len(block_ids) * self.block_bytes):
            raise WireError(
                f"A payload for {len(block_ids)} KV blocks has {num_bytes} bytes, but {expected} were expected."
            )


class BlockMemory:
    """Blocks of every layer, mapped from an anonymous file whose size is sealed, so that no access can ever fault.

    `buffer` is all of it, as writable bytes; `descriptor` is the file's, open as long as this object lives.
    """

    def __init__(self, geometry: Geometry, descriptor: int) -> None:
        """Maps `descriptor` and owns it from here on; see `create` and `open`."""
        self.geometry = geometry
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        mapped = mmap.mmap(descriptor, geometry.num_bytes)
        with suppress(OSError):  # a kernel without huge pages; with them copies take a fifth less time
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(mapped)

    @classmethod
    def create(cls, geometry: Geometry) -> "BlockMemory":
        """New memory, all zeros. Raises OSError where the system has no such files."""
        descriptor = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, geometry.num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return cls(geometry, descriptor)

    @classmethod
    def open(cls, geometry: Geometry, descriptor: int) -> "BlockMemory":
        """Another process's memory, by a descriptor that it passed; takes the descriptor, also when it raises.

        Raises:
            WireError: it is not sealed memory of this geometry.
        """
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            size = os.fstat(descriptor).st_size
        except OSError:
            sealed, size = False, 0
        if not sealed or size != geometry.num_bytes or not size:
            os.close(descriptor)
            raise WireError(f"A descriptor was passed that is no sealed memory of {geometry.num_bytes} bytes.")
        return cls(geometry, descriptor)

    def views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The blocks in order, without a copy: one view for each run of adjacent ones.

        Raises:
            IndexError: a layer or block that does not exist.
        """
        runs = list(_runs(block_ids))
        self.geometry.check(layer, list(chain.from_iterable(runs)))  # what lies between two ends exists if they do
        size = self.geometry.block_bytes
        base = layer * self.geometry.num_blocks
        return [self.buffer[(base + first) * size : (base + last + 1) * size] for first, last in runs]

    def holds(self, layer: int, block_ids: Sequence[int], num_bytes: int) -> bool:
        """Whether these blocks exist and take just so many bytes."""
        return self.geometry.has(layer, block_ids) and num_bytes == len(block_ids) * self.geometry.block_bytes

    def write(self, layer: int, block_ids: Sequence[int], *parts: Bytes) -> None:
        """Puts bytes, however they are split, into blocks of a layer, and touches no others.

        Raises:
            IndexError: a layer or block that does not exist.
            WireError: there are more or fewer bytes than the blocks take.
        """
        targets = self.views(layer, block_ids)
        self.geometry.check_payload(block_ids, sum(memoryview(part).nbytes for part in parts))
        if len(targets) == len(parts) == 1:  # by far the most common
            targets[0][:] = memoryview(parts[0]).cast("B")
            return
        for target, source in _paired(targets, parts):
            target[:] = source


def _paired(targets: Iterable[memoryview], parts: Iterable[Bytes]) -> Iterator[tuple[memoryview, memoryview]]:
    """Cuts two lists of as many bytes into pairs of equal length."""
    sources = (memoryview(part).cast("B") for part in parts)
    source = memoryview(b"")
    for target in targets:
        begin = 0
        while begin < target.nbytes:
            while not source.nbytes:
                source = next(sources)
            size = min(target.nbytes - begin, source.nbytes)
            yield target[begin : begin + size], source[:size]
            begin, source = begin + size, source[size:]


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last block of each run of adjacent ids."""
    if not block_ids:
        return
    if tuple(block_ids) == tuple(range(block_ids[0], block_ids[-1] + 1)):  # the most common, and found faster so
        yield block_ids[0], block_ids[-1]
        return
    breaks = [index for index, (one, other) in enumerate(pairwise(block_ids), 1) if other != one + 1]
    for begin, end in pairwise((0, *breaks, len(block_ids))):
        yield block_ids[begin], block_ids[end - 1]
