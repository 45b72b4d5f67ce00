"""Attention over the paged KV cache, of decoding rows and of prefill chunks: plain torch, and the choice.

KV of a layer is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys first, already holding the positions of
this step. It has the type of q, or int8 with one float32 scale per token and head, `[num_blocks, 2, num_kv_heads,
block_size]`. Query head h reads KV head `h // (num_heads // num_kv_heads)`. What lies in a block after the last
position of its sequence is never used.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import paged_attention_triton


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    num_positions: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Row n of q attends over the first `num_positions[n]` positions, its own the last; without any it gives 0.

    q `[N, num_heads, head_dim]`, its heads contiguous; block_tables `[N, max_blocks]` and num_positions `[N]`, int32;
    out like q, contiguous. The work launched depends on the shapes alone. Ids and counts are not checked.

    Raises ValueError if the shapes or types are others.
    """
    _check(q, kv, scales, block_tables, num_positions, out)
    if num_positions.shape[0] != q.shape[0]:
        raise ValueError(f"{num_positions.shape[0]} rows are counted, expected the {q.shape[0]} of q.")
    if takes_triton(q):
        paged_attention_triton.decode(q, kv, scales, block_tables, num_positions, out)
        return
    for row, length in enumerate(num_positions.tolist()):
        _attend(q[row : row + 1], kv, scales, block_tables[row], length, out[row : row + 1])


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    num_positions: torch.Tensor,
    max_queries: int,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """The last tokens of S sequences attend over all positions up to their own; what came before is in the cache.

    q `[N, num_heads, head_dim]`, its heads contiguous: rows `query_starts[s]` to `query_starts[s + 1]` are the last
    tokens of sequence s, which has `num_positions[s]` in all. block_tables `[S, max_blocks]`, query_starts `[S + 1]`
    and num_positions `[S]`, int32; out like q, contiguous. max_queries is the most rows of a sequence, or more.

    Raises ValueError if the shapes or types are others.
    """
    _check(q, kv, scales, block_tables, num_positions, out)
    if query_starts.shape[0] != num_positions.shape[0] + 1 or query_starts.dtype != torch.int32:
        raise ValueError(f"{query_starts.shape[0]} starts of {num_positions.shape[0]} sequences; expected one more.")
    if takes_triton(q):
        paged_attention_triton.prefill(q, kv, scales, block_tables, query_starts, num_positions, max_queries, out)
        return
    starts = query_starts.tolist()
    for table, start, stop, length in zip(block_tables, starts, starts[1:], num_positions.tolist(), strict=False):
        _attend(q[start:stop], kv, scales, table, length, out[start:stop])


def _attend(
    q: torch.Tensor, kv: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, length: int, out: torch.Tensor
) -> None:
    """The last queries of one sequence, in float64."""
    if not length or not len(q):
        out.zero_()
        return
    _, _, _, block_size, _ = kv.shape
    blocks = table[: -(-length // block_size)].long()
    cached = kv[blocks].double()
    if scales is not None:
        cached *= scales[blocks].double()[..., None]
    keys, values = cached.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # each [num_kv_heads, length, head_dim]
    visible = torch.ones(len(q), length, dtype=torch.bool, device=q.device).tril(length - len(q))
    found = F.scaled_dot_product_attention(
        q.double().transpose(0, 1), keys, values, attn_mask=visible, enable_gqa=True
    )  # of CPU tensors in float64, where no approximation is made
    out.copy_(found.transpose(0, 1))


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    num_positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    shapes = (
        q.dim() == 3
        and kv.dim() == 5
        and kv.shape[1] == 2
        and kv.shape[4] == q.shape[2]
        and q.shape[1] % kv.shape[2] == 0
        and out.shape == q.shape
        and tables.dim() == 2
        and len(tables) == len(num_positions)
    )
    heads = q.stride()[1:] == (q.shape[2], 1) and kv.is_contiguous() and out.is_contiguous() and tables.stride(1) == 1
    types = tables.dtype == num_positions.dtype == torch.int32 and kv.dtype == (
        q.dtype if scales is None else torch.int8
    )
    if scales is not None:
        types = types and scales.dtype == torch.float32 and scales.shape == kv.shape[:4] and scales.is_contiguous()
    if not (shapes and heads and types):
        raise ValueError(
            f"q {q.dtype} {list(q.shape)}, kv {kv.dtype} {list(kv.shape)}, tables {tables.dtype} {list(tables.shape)}, "
            f"positions {num_positions.dtype} {list(num_positions.shape)} and out {list(out.shape)} do not "
            "fit together."
        )
