"""Ends of UCX whose KV lies on a device: a GPU, or the CPU, which is as good as one to the code that moves it."""

from dataclasses import dataclass

import torch

from kvrelay.block_memory import BlockMemory
from kvrelay.model.staging import StagedMemory
from kvrelay.model.streams import CudaStreams, HostStreams
from kvrelay.transfer.ports import Inlet, Outlet
from kvrelay.transfer.ucx_transport import UcxTransport
from kvrelay.types import Incarnation
from tests.transfer.plane import GEOMETRY, LAYOUT, End, Ends


@dataclass(kw_only=True)
class DeviceEnd(End):
    """`memory` is what the KV began as, and the KV itself where the device is the CPU."""

    staged: StagedMemory

    def content(self, layer: int, block_ids: tuple[int, ...]) -> bytes:
        """What lies in these blocks."""
        return b"".join(self.staged.views(layer, block_ids))


class DeviceEnds(Ends):
    """Makes ends on one device."""

    def __init__(self, device: str = "cpu", first_incarnation: Incarnation = 1) -> None:
        super().__init__("ucx", first_incarnation)
        self._device = torch.device(device)

    def make(self) -> DeviceEnd:
        """One more worker."""
        made = super().make()
        assert isinstance(made, DeviceEnd)
        return made

    def end(self, incarnation: Incarnation, memory: BlockMemory) -> DeviceEnd:
        """A worker with this memory."""
        content = torch.frombuffer(memory.buffer, dtype=torch.uint8).to(self._device)
        shape = (GEOMETRY.num_layers, GEOMETRY.num_blocks, GEOMETRY.block_bytes)
        streams = HostStreams() if self._device.type == "cpu" else CudaStreams(self._device)
        staged = StagedMemory(content.view(shape), streams)
        ucx = UcxTransport("127.0.0.1", "0", incarnation=incarnation, room=staged.room, max_queued=4)
        outlet = Outlet(staged, lambda _: None, lambda peer: staged if ucx.takes_device(peer) else None)
        return DeviceEnd(incarnation, memory, ucx, outlet, Inlet(staged, LAYOUT, staged), staged=staged)
