"""The KV cache of one worker: blocks of keys and values, and their bytes for the hand-over.

A block that holds at least one token has no garbage in the places after it: whoever begins a block zeroes the rest
(see `attention`). Attention may therefore read whole blocks and mask the scores, since 0 times garbage could be NaN.
"""

from collections.abc import Sequence

import torch

from kvrelay.block_memory import BlockMemory, Geometry
from kvrelay.errors import WireError
from kvrelay.types import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class KVCache:
    """`tensor[layer]` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys first, then values.

    `host` is the memory behind it on the CPU, which other processes can map; None where a device has its own.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Raises ValueError if the layout's dtype is unknown or there is not one block."""
        if layout.dtype not in DTYPES or num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks of {layout.dtype} were asked for; expected >= 1 of {list(DTYPES)}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.host: BlockMemory | None = None
        if device.type == "cpu":
            self.host = BlockMemory.create(Geometry(layout.num_layers, num_blocks, layout.block_bytes))
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.tensor = _zeros(shape, DTYPES[layout.dtype], device, self.host)
        self._bytes = self.tensor.view(torch.uint8).view(layout.num_layers, num_blocks, layout.block_bytes)

    def views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks of a layer, in order, in as few parts as they lie in; on the CPU not copied.

        Raises IndexError for a layer or block that does not exist.
        """
        if self.host is not None:
            return self.host.views(layer, block_ids)
        index = self._index(layer, block_ids)
        return [self._bytes[layer][index].cpu().numpy().reshape(-1).data]

    def read(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        """A copy of some blocks of a layer, one after the other: `len(block_ids) * block_bytes` bytes.

        Raises IndexError for a layer or block that does not exist.
        """
        return memoryview(b"".join(self.views(layer, block_ids)))

    def write(self, layer: int, block_ids: Sequence[int], payload: bytes | bytearray | memoryview) -> None:
        """Puts bytes as `read` gives them into blocks of a layer, and touches no others.

        Raises IndexError for a layer or block that does not exist, WireError if the payload has another size.
        """
        if self.host is not None:
            self.host.write(layer, block_ids, payload)
            return
        index = self._index(layer, block_ids)
        expected = len(block_ids) * self.layout.block_bytes
        if (size := memoryview(payload).nbytes) != expected:
            raise WireError(f"A payload for {len(block_ids)} KV blocks has {size} bytes, but {expected} were expected.")
        rows = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(len(block_ids), self.layout.block_bytes)
        self._bytes[layer].index_copy_(0, index, rows.to(self._bytes.device))

    def _index(self, layer: int, block_ids: Sequence[int]) -> torch.Tensor:
        if not 0 <= layer < self.layout.num_layers:
            raise IndexError(f"layer {layer} does not exist: the cache has {self.layout.num_layers} layers")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise IndexError(f"blocks {list(block_ids)} do not all exist: there are {self.num_blocks}")
        return torch.tensor(block_ids, dtype=torch.int64, device=self._bytes.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, host: BlockMemory | None) -> torch.Tensor:
    """Zeros. On the CPU they take no memory before they are touched."""
    if host is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(host.buffer, dtype=dtype).view(shape)
