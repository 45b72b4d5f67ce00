"""The Triton kernels behind `paged_attention`: one order of reduction for decoding and prefill.

The positions of a context are cut into splits of `_SPLIT`, and these into tiles, all at fixed places. Within a split an
online softmax (Milakov and Gimelshein, 2018; Dao, 2023) goes from tile to tile; the splits are then merged from the
first to the last. Decoding computes the splits of a row in parallel (flash-decoding, Dao et al., 2023) and merges them
in a second kernel; prefill does both in one. Both run the very same functions on each tile, `_attend` and `_weights`.

What holds for a token's bits: splits, tiles, the order in which they are added, and every operation between the
matrix products are the same in both kernels, whatever else is in the batch, however the prompt was cut into chunks and
whatever the block size; tiles of positions that a token does not see leave its sums as they are. What the hardware
adds: inside a matrix product it sums 8 or 16 products at a time in an order of its own, and a row's sum over a tile
goes over the lanes that hold the row. So both kernels must get the same matrix instruction and spread a row over the
same lanes: `_shape` chooses 16 rows for each warp, and all columns, in both. The compiler promises none of this; the
tests look at the layouts that it chose for each GPU, and `make gpu-check` at the bits. Tiles are larger on GPUs whose
matrix units read shared memory, so different GPUs may give different bits, as do different types of KV.
"""

import math

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import dot_options, has_warpgroups

_SPLIT = 512
_LOG2_E = math.log2(math.e)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(top: tl.tensor, other_top: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The larger maximum of two sums of powers of two, and what each sum is then multiplied by."""
    new_top = tl.maximum(top, other_top)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing was visible yet: no inf - inf
    return new_top, tl.exp2(top - origin), tl.exp2(other_top - origin)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor,  # [rows, dims]
    seen: tl.tensor,  # [rows], the last position that each row sees
    kv: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    num_positions: tl.tensor,
    start: tl.tensor,  # of the tile
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    factor: tl.tensor,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    masked: tl.constexpr,
    quantised: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds one tile of positions to the online softmax of all rows."""
    positions = start + tl.arange(0, tile)
    dim = tl.arange(0, dims)
    inside = positions < num_positions
    block = tl.load(table + positions // block_size, mask=inside, other=0).to(tl.int64)
    key_row = (block * (2 * num_kv_heads) + kv_head) * block_size + positions % block_size
    value_row = key_row + num_kv_heads * block_size
    # What lies beyond the context may be anything, and 0 times NaN is NaN: it is never read.
    keys = tl.load(
        kv + key_row[None, :] * head_dim + dim[:, None], mask=inside[None, :] & (dim < head_dim)[:, None], other=0
    )
    values = tl.load(
        kv + value_row[:, None] * head_dim + dim[None, :], mask=inside[:, None] & (dim < head_dim)[None, :], other=0
    )
    scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee")
    if quantised:
        scores *= tl.load(scales + key_row, mask=inside, other=0.0)[None, :]
    if masked:
        scores = tl.where(positions[None, :] <= seen[:, None], scores, float("-inf"))
    new_top, fade, _ = _weights(top, tl.max(scores, 1) * factor)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, factor, -origin[:, None]))
    total = total * fade + tl.sum(weights, 1)
    if quantised:
        weights *= tl.load(scales + value_row, mask=inside, other=0.0)[None, :]
    acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(
    q: tl.tensor,
    seen: tl.tensor,
    first_seen: tl.tensor,  # the smallest of `seen`
    kv: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    quantised: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Maxima, sums and weighted values of positions `begin` to `end`, which lie in one split that begins at `begin`."""
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, dims), tl.float32)
    # Tiles that every row sees whole need no mask, which would not change their bits.
    whole = tl.maximum(begin, tl.minimum(end, first_seen + 1) // tile * tile)
    for start in range(begin, whole, tile):
        top, total, acc = _attend(
            q, seen, kv, scales, table, kv_head, num_kv_heads, end, start, top, total, acc, factor,
            head_dim, dims, block_size, tile, False, quantised,
        )  # fmt: skip
    for start in range(whole, end, tile):
        top, total, acc = _attend(
            q, seen, kv, scales, table, kv_head, num_kv_heads, end, start, top, total, acc, factor,
            head_dim, dims, block_size, tile, True, quantised,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["table_width"])  # type: ignore[untyped-decorator]
def decode_kernel(
    q: tl.tensor,
    q_row: tl.tensor,  # stride
    kv: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    table_width: tl.tensor,
    num_positions: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    partial: tl.tensor,
    num_kv_heads: tl.tensor,
    factor: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    split: tl.constexpr,
    quantised: tl.constexpr,
) -> None:
    """Program (s, h, n): split s of row n's context for the query heads that share KV head h."""
    number, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(num_positions + row)
    begin = number * split
    if begin >= length:
        return
    lane, dim = tl.arange(0, rows), tl.arange(0, dims)
    head = kv_head * group + lane
    valid = lane < group
    mask = valid[:, None] & (dim < head_dim)[None, :]
    found = tl.load(q + row * q_row + head[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
    seen = tl.full((rows,), 0, tl.int32) + length - 1
    top, total, acc = _attend_split(
        found, seen, length - 1, kv, scales, tables + row * table_width, kv_head, num_kv_heads, begin,
        tl.minimum(begin + split, length), factor, rows, head_dim, dims, block_size, tile, quantised,
    )  # fmt: skip
    place = (row * tl.num_programs(0) + number) * (num_kv_heads * group) + head
    tl.store(tops + place, top, mask=valid)
    tl.store(totals + place, total, mask=valid)
    tl.store(partial + place[:, None] * head_dim + dim[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["max_splits"])  # type: ignore[untyped-decorator]
def merge_kernel(
    tops: tl.tensor,
    totals: tl.tensor,
    partial: tl.tensor,
    num_positions: tl.tensor,
    max_splits: tl.tensor,
    out: tl.tensor,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    split: tl.constexpr,
) -> None:
    """Program (h, n) merges the splits of head h of row n, from the first to the last."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0)
    dim = tl.arange(0, dims)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((dims,), tl.float32)
    one = tl.arange(0, 1)
    for number in range(0, tl.cdiv(tl.load(num_positions + row), split)):
        place = (row * max_splits + number) * num_heads + head
        values = tl.load(partial + place * head_dim + dim, mask=dim < head_dim, other=0.0)
        top, old, new = _weights(top, tl.load(tops + place + one))
        total = total * old + tl.load(totals + place + one) * new
        acc = acc * old + values * new
    acc = acc / tl.where(total > 0.0, total, 1.0)  # without positions it is 0
    tl.store(out + (row * num_heads + head) * head_dim + dim, acc.to(out.dtype.element_ty), mask=dim < head_dim)


@triton.jit(do_not_specialize=["table_width"])  # type: ignore[untyped-decorator]
def prefill_kernel(
    q: tl.tensor,
    q_row: tl.tensor,  # stride
    kv: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    table_width: tl.tensor,
    query_starts: tl.tensor,
    num_positions: tl.tensor,
    out: tl.tensor,
    num_kv_heads: tl.tensor,
    factor: tl.tensor,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    split: tl.constexpr,
    quantised: tl.constexpr,
) -> None:
    """Program (t, h, n): some neighbouring queries of sequence n, for the query heads that share KV head h."""
    queries: tl.constexpr = rows // group
    # The last queries see the most: they begin first.
    first, kv_head, sequence = (
        (tl.num_programs(0) - 1 - tl.program_id(0)) * queries,
        tl.program_id(1),
        tl.program_id(2).to(tl.int64),
    )
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if first >= num_queries:
        return
    length = tl.load(num_positions + sequence)
    lane, dim = tl.arange(0, rows), tl.arange(0, dims)
    query = first + lane // group
    head = kv_head * group + lane % group
    valid = (lane < queries * group) & (query < num_queries)
    mask = valid[:, None] & (dim < head_dim)[None, :]
    row = (start + query).to(tl.int64)
    found = tl.load(q + row[:, None] * q_row + head[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
    seen = length - num_queries + query
    first_seen = length - num_queries + first
    end = tl.minimum(first_seen + queries, length)
    top = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, dims), tl.float32)
    for begin in range(0, end, split):
        split_top, split_total, split_acc = _attend_split(
            found, seen, first_seen, kv, scales, tables + sequence * table_width, kv_head, num_kv_heads, begin,
            tl.minimum(begin + split, end), factor, rows, head_dim, dims, block_size, tile, quantised,
        )  # fmt: skip
        top, old, new = _weights(top, split_top)
        total = total * old + split_total * new
        acc = acc * old[:, None] + split_acc * new[:, None]
    num_heads = num_kv_heads * group
    place = (row[:, None] * num_heads + head[:, None]) * head_dim + dim[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    num_positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `paged_attention.decode_attention`, which has checked all of these."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    max_splits = triton.cdiv(tables.shape[1] * block_size, _SPLIT)
    tops, totals = torch.empty((2, num_rows, max_splits, num_heads), dtype=torch.float32, device=q.device)
    partial = torch.empty((num_rows, max_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
    shape = _shape(q, kv, wide=False)
    decode_kernel[(max_splits, num_kv_heads, num_rows)](
        q, q.stride(0), kv, q if scales is None else scales, tables, tables.stride(0), num_positions,
        tops, totals, partial, num_kv_heads, _LOG2_E / math.sqrt(head_dim),
        **shape, split=_SPLIT, quantised=scales is not None, enable_fp_fusion=False, **dot_options(3),
    )  # fmt: skip
    merge_kernel[(num_heads, num_rows)](
        tops, totals, partial, num_positions, max_splits, out,
        head_dim=head_dim, dims=shape["dims"], split=_SPLIT, enable_fp_fusion=False, num_warps=1,
    )  # fmt: skip


def prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    num_positions: torch.Tensor,
    max_queries: int,
    out: torch.Tensor,
) -> None:
    """See `paged_attention.prefill_attention`, which has checked all of these."""
    num_kv_heads = kv.shape[2]
    shape = _shape(q, kv, wide=True)
    grid = (triton.cdiv(max_queries, shape["rows"] // shape["group"]), num_kv_heads, len(num_positions))
    prefill_kernel[grid](
        q, q.stride(0), kv, q if scales is None else scales, tables, tables.stride(0), query_starts, num_positions,
        out, num_kv_heads, _LOG2_E / math.sqrt(q.shape[2]),
        **shape, split=_SPLIT, quantised=scales is not None, enable_fp_fusion=False, **dot_options(3),
    )  # fmt: skip


def _shape(q: torch.Tensor, kv: torch.Tensor, *, wide: bool) -> dict[str, int]:
    """Tile and warps, by head size and GPU; both kernels give a row the same lanes, so that they sum alike."""
    group, head_dim = q.shape[1] // kv.shape[2], q.shape[2]
    dims = max(16, triton.next_power_of_2(head_dim))
    tile = max(16, min(64, 8192 // dims)) if has_warpgroups(q.device) else 32 if dims <= 64 else 16
    if q.dtype == torch.float32:
        rows, num_warps, tile = max(16, triton.next_power_of_2(group)), 8 if dims <= 64 else 4, 16
    elif dims > 128:  # two sums of so many columns do not fit into the registers of a warp with 16 rows
        rows, num_warps = 64, 8
    elif has_warpgroups(q.device) and not wide:
        rows, num_warps = 64, 4
    else:
        rows, num_warps = (128, 8) if wide or group > 16 else (16, 1)
    return {
        "group": group,
        "rows": rows,
        "head_dim": head_dim,
        "dims": dims,
        "block_size": kv.shape[3],
        "tile": tile,
        "num_warps": num_warps,
    }
