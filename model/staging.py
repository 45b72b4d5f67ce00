"""KV of a device on its way out and in: gathered on the device, then copied through a few fixed buffers of the host.

Everything is queued on a stream of its own, beside what the network computes. What leaves waits for the layer that
computed it, and for no later one; what enters waits for the steps that may still read what the blocks held before, and
later steps wait for it. Where the device is the CPU the very same code runs; only `Streams` has nothing to order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from kvrelay.block_memory import Bytes, Geometry
from kvrelay.device_memory import DeviceBytes
from kvrelay.kernels.block_copy import gather_blocks, scatter_blocks
from kvrelay.kernels.digest import digest_bytes
from kvrelay.model.device_room import TorchRoom
from kvrelay.model.streams import Mark, Streams

BUDGET_BYTES = 8 << 20  # of the host, and as many of the device: four pieces of a hand-over, twice over
_NUM_SLOTS = 4


@dataclass(slots=True)
class _Slot:
    """Room for some blocks, packed, on the device and on the host; free when `done` is reached."""

    packed: torch.Tensor  # [capacity, block_bytes] on the device
    host: torch.Tensor  # [capacity, block_bytes]
    content: memoryview  # the bytes of `host`
    done: Mark | None = None


class StagedMemory:
    """Blocks of every layer in a device's memory. Belongs to one thread, but for `room`: see `DeviceMemory`."""

    def __init__(self, kv: torch.Tensor, streams: Streams, budget_bytes: int = BUDGET_BYTES) -> None:
        """`kv` is `[num_layers, num_blocks, block_bytes]`, uint8 and contiguous.

        `budget_bytes` bounds the staging buffers of the host, and those of the device, but each holds a block at least.
        """
        self.geometry = Geometry(*kv.shape)
        self._kv = kv
        self._streams = streams
        self._capacity = max(1, budget_bytes // _NUM_SLOTS // self.geometry.block_bytes)
        self._slots = cycle([self._new_slot() for _ in range(_NUM_SLOTS)])
        self._computed: dict[int, Mark] = {}  # by layer
        with streams.copying():
            self._digest = torch.empty(1, dtype=torch.int64, device=kv.device)
        self._digest_on_host = streams.host_buffer(1, self._digest.nbytes)
        self.room = TorchRoom(kv.device, streams)

    def computed(self, layer: int) -> None:
        """Says that the KV of a layer was queued by the network: reading that layer waits for it, and for no more."""
        self._computed[layer] = self._streams.computed()

    def views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks of a layer, in order.

        They lie in a staging buffer, which the next call of any method may overwrite: copy what is to be kept.

        Raises:
            IndexError: a layer or block that does not exist.
        """
        self.geometry.check(layer, block_ids)
        if len(block_ids) <= self._capacity:
            return [self._fetch(layer, block_ids)] if block_ids else []
        return [memoryview(bytes(self._fetch(layer, part))) for part in self._parts(block_ids)]

    def write(self, layer: int, block_ids: Sequence[int], payload: Bytes) -> None:
        """Puts bytes into blocks of a layer, and touches no others. The payload is not read any more on return.

        Raises:
            IndexError: a layer or block that does not exist.
            WireError: there are more or fewer bytes than the blocks take.
        """
        self.geometry.check(layer, block_ids)
        source = memoryview(payload).cast("B")
        self.geometry.check_payload(block_ids, source.nbytes)
        for part in self._parts(block_ids):
            size = len(part) * self.geometry.block_bytes
            self._land(layer, part, source[:size])
            source = source[size:]

    def gather(self, layers: range, block_ids: Sequence[int]) -> tuple[DeviceBytes, bytes]:
        """Some blocks of adjacent layers, packed as `[layers, blocks, block_bytes]` on the device, and their digest.

        For transports that read a device's memory by themselves; complete when this returns. See `DeviceMemory`.

        Raises:
            IndexError: a layer or block that does not exist.
        """
        shape = self._shape(layers, block_ids)
        with self._streams.copying():
            packed = torch.empty(shape, dtype=torch.uint8, device=self._kv.device)
        for layer, part in zip(layers, packed, strict=True):
            self._gather(layer, block_ids, part)
        content = DeviceBytes(packed.view(-1))
        return content, self.digest(content)

    def scatter(self, layers: range, block_ids: Sequence[int], packed: DeviceBytes) -> None:
        """Puts what is packed on the device, and complete, into blocks; touches no others.

        Its memory may be freed at once, but not be changed before copies that are queued now are done.

        Raises:
            IndexError: a layer or block that does not exist.
            WireError: there are more or fewer bytes than the blocks take.
        """
        shape = self._shape(layers, block_ids)
        self.geometry.check_payload(tuple(block_ids) * len(layers), len(packed))
        read = self._streams.computed()
        with self._streams.copying():
            ids = self._streams.upload(block_ids)
            for layer, part in zip(layers, packed.tensor.view(shape), strict=True):
                self._scatter(layer, ids, part, read)
        self._streams.retain(packed.tensor)
        self._landed()

    def digest(self, packed: DeviceBytes) -> bytes:
        """See `DeviceMemory`. Waits for all copies that are queued, since it is made behind them."""
        with self._streams.copying():
            digest_bytes(packed.tensor, self._digest)
            self._digest_on_host.copy_(self._digest.view(torch.uint8).view(1, -1), non_blocking=True)
        self._streams.copied().synchronize()
        return self._digest_on_host.numpy().tobytes()

    def fetch(self, packed: DeviceBytes) -> bytes:
        """A copy on the host."""
        content: bytes = packed.tensor.cpu().numpy().tobytes()
        return content

    def _fetch(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        slot, num_blocks = self._free_slot(), len(block_ids)
        self._gather(layer, block_ids, slot.packed[:num_blocks])
        with self._streams.copying():
            slot.host[:num_blocks].copy_(slot.packed[:num_blocks], non_blocking=True)
        self._streams.copied().synchronize()
        return slot.content[: num_blocks * self.geometry.block_bytes]

    def _land(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        slot, num_blocks = self._free_slot(), len(block_ids)
        slot.content[: payload.nbytes] = payload
        read = self._streams.computed()
        with self._streams.copying():
            ids = self._streams.upload(block_ids)
            slot.packed[:num_blocks].copy_(slot.host[:num_blocks], non_blocking=True)
            self._scatter(layer, ids, slot.packed[:num_blocks], read)
        slot.done = self._landed()

    def _gather(self, layer: int, block_ids: Sequence[int], packed: torch.Tensor) -> None:
        self._streams.copy_after(self._computed.get(layer) or self._streams.computed())
        with self._streams.copying():
            gather_blocks(self._kv[layer], self._streams.upload(block_ids), packed)

    def _scatter(self, layer: int, ids: torch.Tensor, packed: torch.Tensor, read: Mark) -> None:
        """`read` is behind the steps that may still read these blocks. Only this waits for it, no copy before it."""
        self._streams.copy_after(read)
        scatter_blocks(packed, ids, self._kv[layer])

    def _landed(self) -> Mark:
        """A mark behind what was scattered, for which later steps wait."""
        mark = self._streams.copied()
        self._streams.compute_after(mark)
        return mark

    def _shape(self, layers: range, block_ids: Sequence[int]) -> tuple[int, int, int]:
        """Of blocks that are packed; all of them must exist."""
        for layer in layers:
            self.geometry.check(layer, block_ids)
        return len(layers), len(block_ids), self.geometry.block_bytes

    def _parts(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """As many blocks at a time as a slot holds."""
        return (block_ids[first : first + self._capacity] for first in range(0, len(block_ids), self._capacity))

    def _free_slot(self) -> _Slot:
        slot = next(self._slots)
        if slot.done is not None:
            slot.done.synchronize()
        return slot

    def _new_slot(self) -> _Slot:
        host = self._streams.host_buffer(self._capacity, self.geometry.block_bytes)
        with self._streams.copying():
            packed = torch.empty(host.shape, dtype=torch.uint8, device=self._kv.device)
        return _Slot(packed, host, host.numpy().reshape(-1).data)
