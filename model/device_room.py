"""Memory of a device that torch lends for KV that arrives."""

import torch

from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.model.streams import Streams


class TorchRoom:
    """See `DeviceRoom`. torch keeps what is freed for the next one."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        """Takes nothing yet."""
        self.is_cuda = device.type == "cuda"
        self._device = device
        self._streams = streams

    def enter(self) -> None:
        """See `DeviceRoom`."""
        self._streams.enter()

    def take(self, num_bytes: int) -> DeviceBytes:
        """See `DeviceRoom`."""
        try:
            with self._streams.arriving():
                return DeviceBytes(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError as error:
            raise WireError(f"The device has no room for {num_bytes} bytes of KV that arrive: {error}") from error
