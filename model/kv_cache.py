"""The KV cache of one worker: blocks of keys and values, and their bytes for the hand-over.

A block that holds at least one token has no garbage in the places after it: whoever begins a block zeroes the rest
(see `attention`). Attention may therefore read whole blocks and mask the scores, since 0 times garbage could be NaN.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.errors import WireError
from kvrelay.types import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class KVCache:
    """`tensor[layer]` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys first, then values."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Raises ValueError if the layout's dtype is unknown or there is not one block."""
        if layout.dtype not in DTYPES or num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks of {layout.dtype} were asked for; expected >= 1 of {list(DTYPES)}")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.tensor = _zeros(shape, DTYPES[layout.dtype], device)
        self._bytes = self.tensor.view(torch.uint8).view(layout.num_layers, num_blocks, layout.block_bytes)

    def read(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        """A copy of some blocks of a layer, one after the other: `len(block_ids) * block_bytes` bytes.

        Raises IndexError for a layer or block that does not exist.
        """
        index = self._index(layer, block_ids)
        if self._bytes.device.type == "cpu":
            chosen = self._bytes[layer].numpy()[index]
        else:
            chosen = self._bytes[layer][torch.from_numpy(index).to(self._bytes.device)].cpu().numpy()
        return memoryview(chosen.reshape(-1))

    def write(self, layer: int, block_ids: Sequence[int], payload: bytes | bytearray | memoryview) -> None:
        """Puts bytes as `read` gives them into blocks of a layer, and touches no others.

        Raises IndexError for a layer or block that does not exist, WireError if the payload has another size.
        """
        index = self._index(layer, block_ids)
        expected = len(index) * self.layout.block_bytes
        if (size := memoryview(payload).nbytes) != expected:
            raise WireError(f"A payload for {len(index)} KV blocks has {size} bytes, but {expected} were expected.")
        rows = np.frombuffer(payload, np.uint8).reshape(len(index), self.layout.block_bytes)
        if self._bytes.device.type == "cpu":
            self._bytes[layer].numpy()[index] = rows
            return
        device = self._bytes.device
        self._bytes[layer].index_copy_(0, torch.from_numpy(index).to(device), torch.from_numpy(rows.copy()).to(device))

    def _index(self, layer: int, block_ids: Sequence[int]) -> np.ndarray:
        if not 0 <= layer < self.layout.num_layers:
            raise IndexError(f"layer {layer} does not exist: the cache has {self.layout.num_layers} layers")
        index = np.asarray(block_ids, np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_blocks):
            raise IndexError(f"block ids {index.min()} to {index.max()} do not all exist: there are {self.num_blocks}")
        return index


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU they take no memory before they are written: numpy leaves that to the kernel."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
