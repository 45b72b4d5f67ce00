"""The KV cache of one worker: blocks of keys and values, and their bytes for the hand-over.

A block that holds at least one token has no garbage in the places after it: whoever begins a block zeroes the rest
(see `attention`). Attention may therefore read whole blocks and mask the scores, since 0 times garbage could be NaN.
"""

from collections.abc import Sequence

import torch

from kvrelay.block_memory import BlockMemory, Bytes, Geometry
from kvrelay.model.staging import StagedMemory
from kvrelay.model.streams import CudaStreams
from kvrelay.types import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KV_DTYPES = {**DTYPES, "int8": torch.int8}


class KVCache:
    """`tensor[layer]` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys first, then values.

    In int8 each head of a token has four bytes more, its scale: see `kernels.quantized_kv`.

    On the CPU `host` is the memory behind it, which other processes can map; on a GPU `staged` copies from and to it.
    The other one is None.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Raises ValueError if the layout's dtype is unknown or there is not one block."""
        if layout.dtype not in _KV_DTYPES or num_blocks < 1:
            raise ValueError(
                f"{num_blocks} blocks of {layout.dtype} were asked for; expected >= 1 of {list(_KV_DTYPES)}"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.host: BlockMemory | None = None
        self.staged: StagedMemory | None = None
        self._memory: BlockMemory | StagedMemory
        dtype = _KV_DTYPES[layout.dtype]
        row_size = layout.row_bytes // dtype.itemsize
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, row_size)
        if device.type == "cpu":  # memory that takes none before it is touched
            self._memory = self.host = BlockMemory.create(Geometry(layout.num_layers, num_blocks, layout.block_bytes))
            self.tensor = torch.frombuffer(self.host.buffer, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            content = self.tensor.view(torch.uint8).view(layout.num_layers, num_blocks, layout.block_bytes)
            self._memory = self.staged = StagedMemory(content, CudaStreams(device))

    def computed(self, layer: int) -> None:
        """Whoever computes says so when the KV of a layer was queued, before that of the next: see `StagedMemory`."""
        if self.staged is not None:
            self.staged.computed(layer)

    def views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of some blocks of a layer, in order, in as few parts as they lie in.

        On the CPU not copied; of a GPU they last until the next call of any method. Raises IndexError for a layer or
        block that does not exist.
        """
        return self._memory.views(layer, block_ids)

    def read(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        """A copy of some blocks of a layer, one after the other: `len(block_ids) * block_bytes` bytes.

        Raises IndexError for a layer or block that does not exist.
        """
        return memoryview(b"".join(self.views(layer, block_ids)))

    def write(self, layer: int, block_ids: Sequence[int], payload: Bytes) -> None:
        """Puts bytes as `read` gives them into blocks of a layer, and touches no others.

        Raises IndexError for a layer or block that does not exist, WireError if the payload has another size.
        """
        self._memory.write(layer, block_ids, payload)
