"""KV in a device's memory, for those who move it without the host: bytes there, who packs them, and room for more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBytes:
    """Bytes that lie in a row on a device and are all there; whoever drops the last reference frees them."""

    tensor: Any  # torch's: [num_bytes], uint8

    def __len__(self) -> int:
        """How many."""
        return len(self.tensor)

    @property
    def exposed(self) -> Any:
        """What tells UCX where they are: an array as CUDA shows it, or of the host where that is the device."""
        return self.tensor if self.tensor.is_cuda else self.tensor.numpy()


class DeviceRoom(Protocol):
    """Memory of a device for KV that arrives. Belongs to the control thread."""

    @property
    def is_cuda(self) -> bool:
        """Whether only those can reach it who know CUDA."""
        ...

    def enter(self) -> None:
        """Makes the device known to the calling thread, so that others' code finds it there."""
        ...

    def take(self, num_bytes: int) -> DeviceBytes:
        """So many bytes, with anything in them; nothing that is queued on the device touches them.

        Raises:
            WireError: the device has no room for them.
        """
        ...


class DeviceMemory(Protocol):
    """A worker's KV on a device. `room` is the control thread's, all else the compute thread's.

    `gather` and `scatter` raise IndexError for a layer or block that does not exist. Digests are those of
    `kernels/digest.py`, eight bytes, little-endian.
    """

    @property
    def room(self) -> DeviceRoom:
        """Where KV may arrive before it is verified."""
        ...

    def gather(self, layers: range, block_ids: Sequence[int]) -> tuple[DeviceBytes, bytes]:
        """Some blocks of adjacent layers, packed as `[layers, blocks, block_bytes]`, and their digest."""
        ...

    def scatter(self, layers: range, block_ids: Sequence[int], packed: DeviceBytes) -> None:
        """Puts what `gather` would give into blocks. Raises WireError if it has another size."""
        ...

    def digest(self, packed: DeviceBytes) -> bytes:
        """Of bytes that anybody packed. Raises ValueError if they are no whole words."""
        ...

    def fetch(self, packed: DeviceBytes) -> bytes:
        """A copy on the host."""
        ...
