"""What a step tells a device before it computes: many small arrays, taken there by one copy that nobody waits for."""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it, and again for any others


class DeviceArrays:
    """Arrays of fixed shapes and types in one piece of a device's memory, which keeps its place."""

    def __init__(self, like: Sequence[np.ndarray], device: torch.device) -> None:
        """Memory for arrays like these; `tensors` are on the device what these are, once `fill` was called."""
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in like]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.tensors = [self._view(offset, array) for offset, array in zip(self._offsets, like, strict=True)]

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Queues the copy, from pinned memory of its own, which torch keeps until the copy is done.

        Raises ValueError if an array has another shape or type than the one it stands for.
        """
        host = torch.empty(len(self._memory), dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        content = host.numpy()
        for offset, array, tensor in zip(self._offsets, arrays, self.tensors, strict=True):
            if array.shape != tensor.shape or array.dtype.itemsize != tensor.itemsize:
                raise ValueError(f"{array.dtype} {list(array.shape)} is no {tensor.dtype} {list(tensor.shape)}.")
            content[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._memory.copy_(host, non_blocking=True)

    def _view(self, offset: int, array: np.ndarray) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._memory[offset : offset + array.nbytes].view(dtype).view(array.shape)


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays in memory of their own on a device, once what is queued there before is done."""
    made = DeviceArrays(arrays, device)
    made.fill(arrays)
    return made.tensors
