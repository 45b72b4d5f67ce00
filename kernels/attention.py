"""Attention over the paged KV cache for the packed rows of a step: the native kernel and its plain twin.

Decoding rows and prefill chunks are computed in one order of reduction: tiles of 64 positions, counted from the
sequence's beginning. A row's bits depend on its query and on the KV of its sequence up to its position, not on the
other rows, how a prompt was cut into chunks, the block size, where blocks lie, or the number of threads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.quantized_kv import dequantize_kv, row_size

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as the native sources number them
KV_TYPES = {**TYPES, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which rows belong to which of S sequences, and where the KV of those lies. All int64, on the CPU.

    Sequence s has rows `row_offsets[s]` to `row_offsets[s + 1]`, its positions from `starts[s]` on, and the blocks
    `block_ids[table_offsets[s] : table_offsets[s + 1]]`, which cover them. Made once for a step, for all layers.
    """

    row_offsets: torch.Tensor  # [S + 1]
    starts: torch.Tensor  # [S]
    table_offsets: torch.Tensor  # [S + 1]
    block_ids: torch.Tensor
    block_size: int
    num_blocks: int  # that the ids were checked against

    @classmethod
    def build(
        cls, spans: Sequence[tuple[int, int]], block_tables: Sequence[Sequence[int]], block_size: int, num_blocks: int
    ) -> "PagedRows":
        """From the first position and the one after the last of each sequence's rows, and its block table.

        Raises ValueError if a span is empty, a table is too short, or a block does not exist.
        """
        tables = []
        for (start, stop), table in zip(spans, block_tables, strict=True):
            needed = table[: -(-stop // block_size)]
            if not 0 <= start < stop or len(needed) * block_size < stop or not _exist(needed, num_blocks):
                raise ValueError(
                    f"Positions {start} to {stop} do not lie in blocks {list(table)}; expected at least one position "
                    f"and a table of blocks of {block_size} that covers them, out of {num_blocks} blocks."
                )
            tables.append(needed)
        return cls(
            row_offsets=_offsets([stop - start for start, stop in spans]),
            starts=torch.tensor([start for start, _ in spans], dtype=torch.int64),
            table_offsets=_offsets([len(table) for table in tables]),
            block_ids=torch.tensor([block for table in tables for block in table], dtype=torch.int64),
            block_size=block_size,
            num_blocks=num_blocks,
        )

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return int(self.row_offsets[-1])


class AttentionKernel:
    """The native kernel on `num_threads` threads."""

    def __init__(self, native: NativeLibrary, num_threads: int) -> None:
        self.num_threads = num_threads
        self._attend = native.function("kvrelay_attend", "pppiiiiiiippppii")

    def __call__(self, query: torch.Tensor, kv: torch.Tensor, rows: PagedRows, dtype: torch.dtype) -> torch.Tensor:
        """Causal attention of query `[N, num_heads, head_dim]`, float32 or bfloat16, to the same shape in `dtype`.

        kv is one layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, float32 or bfloat16; with the latter
        queries and weights are rounded to bfloat16 as well. Or it is int8, its rows as `quantize_kv` gives them; then
        queries and weights become integers too where the processor multiplies those. `dtype` is float32 or bfloat16.
        Nothing behind a sequence's last position is read.

        Raises ValueError if shapes or types are others.
        """
        check_attention(query, kv, rows, dtype)
        output = torch.empty(query.shape, dtype=dtype)
        num_kv_heads, block_size = kv.shape[2:4]
        self._attend(
            query.data_ptr(),
            kv.data_ptr(),
            output.data_ptr(),
            *(KV_TYPES[each] for each in (query.dtype, kv.dtype, dtype)),
            query.shape[1],
            num_kv_heads,
            query.shape[2],
            block_size,
            rows.row_offsets.data_ptr(),
            rows.starts.data_ptr(),
            rows.table_offsets.data_ptr(),
            rows.block_ids.data_ptr(),
            len(rows.starts),
            self.num_threads,
        )
        return output


def attend_plain(query: torch.Tensor, kv: torch.Tensor, rows: PagedRows, dtype: torch.dtype) -> torch.Tensor:
    """The twin of `AttentionKernel` in plain torch, in float64 but for what is rounded to bfloat16."""
    check_attention(query, kv, rows, dtype)
    outputs = [torch.empty(0, *query.shape[1:], dtype=torch.float64)]
    for index, start in enumerate(rows.starts.tolist()):
        own = query[rows.row_offsets[index] : rows.row_offsets[index + 1]]
        blocks = kv.index_select(0, rows.block_ids[rows.table_offsets[index] : rows.table_offsets[index + 1]])
        outputs.append(_attend_sequence(own, dequantize_kv(blocks) if kv.dtype == torch.int8 else blocks, start))
    return torch.cat(outputs).to(dtype)


def check_attention(query: torch.Tensor, kv: torch.Tensor, rows: PagedRows, dtype: torch.dtype) -> None:
    """Raises ValueError if these cannot be the queries, KV and rows of one call."""
    fits = query.dim() == 3 and kv.dim() == 5 and kv.shape[1] == 2 and kv.shape[4] == row_size(query.shape[2], kv.dtype)
    fits = fits and query.shape[1] % kv.shape[2] == 0 and query.shape[0] == rows.num_rows
    fits = fits and kv.shape[3] == rows.block_size and kv.shape[0] >= rows.num_blocks
    fits = fits and all(one.is_contiguous() and one.device.type == "cpu" for one in (query, kv))
    if not (fits and {query.dtype, dtype} <= TYPES.keys() and kv.dtype in KV_TYPES):
        raise ValueError(
            f"Queries of {_described(query)} cannot attend to KV of {_described(kv)} as {rows.num_rows} rows over "
            f"{rows.num_blocks} blocks of {rows.block_size} with a result of {dtype}; expected [N, num_heads, "
            "head_dim] and [num_blocks, 2, num_kv_heads, block_size, head_dim], float32 or bfloat16, KV also int8 with "
            "4 bytes more for each head, contiguous and on the CPU."
        )


def _attend_sequence(query: torch.Tensor, blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Query `[n, num_heads, head_dim]` at positions from `start` on, over a sequence's blocks, to float64."""
    stop, group = start + len(query), query.shape[1] // blocks.shape[2]
    keys, values = (
        part.transpose(0, 1).flatten(1, 2)[:, :stop].double().repeat_interleave(group, 0) for part in blocks.unbind(1)
    )
    scores = query.to(blocks.dtype).double().transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(query.shape[2])
    hidden = torch.arange(stop) > torch.arange(start, stop)[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().to(blocks.dtype).double()
    return (weights @ values / weights.sum(-1, keepdim=True)).transpose(0, 1)


def _exist(blocks: Sequence[int], num_blocks: int) -> bool:
    return min(blocks, default=0) >= 0 and max(blocks, default=0) < num_blocks


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
