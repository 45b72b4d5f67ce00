"""The Triton kernel behind `rope`: from the outputs of the qkv projection to rotated queries and cached KV, at once."""

import torch
import triton
import triton.language as tl

_HEADS = 8  # of a program


@triton.jit  # type: ignore[untyped-decorator]
def rope_kernel(
    qkv: tl.tensor,
    qkv_row: tl.tensor,  # stride
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    slots: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,  # of a head
    width: tl.constexpr,  # the power of two that holds it
    block_size: tl.constexpr,
    heads: tl.constexpr,
    normed: tl.constexpr,
    quantised: tl.constexpr,
) -> None:
    """Program (n, i) treats some heads of token n: queries, then keys, then values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    column = tl.arange(0, width)
    place = head[:, None] * (2 * half) + column[None, :]
    mask = (head < num_heads + 2 * num_kv_heads)[:, None] & (column < half)[None, :]
    raw_first = tl.load(qkv + row * qkv_row + place, mask=mask, other=0.0)
    raw_second = tl.load(qkv + row * qkv_row + place + half, mask=mask, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)
        weight = tl.where((head < num_heads)[:, None], q_weight, k_weight) + column[None, :]
        first = first * scale[:, None] * tl.load(weight, mask=mask, other=0.0)
        second = second * scale[:, None] * tl.load(weight + half, mask=mask, other=0.0)
    angle = tl.load(positions + row).to(tl.int64) * (2 * half) + column
    inside = column < half
    cos_first = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
    cos_second = tl.load(cos + angle + half, mask=inside, other=0.0)[None, :]
    sin_first = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
    sin_second = tl.load(sin + angle + half, mask=inside, other=0.0)[None, :]
    rotated = (head < num_heads + num_kv_heads)[:, None]
    new_first = tl.where(rotated, first * cos_first + second * sin_first, raw_first.to(tl.float32))
    new_second = tl.where(rotated, second * cos_second + first * sin_second, raw_second.to(tl.float32))

    is_query = (head < num_heads)[:, None] & mask
    to_q = q + row * num_heads * (2 * half) + place
    tl.store(to_q, new_first.to(q.dtype.element_ty), mask=is_query)
    tl.store(to_q + half, new_second.to(q.dtype.element_ty), mask=is_query)

    slot = tl.load(slots + row).to(tl.int64)
    kv_head = head - num_heads
    kept = (kv_head >= 0) & (kv_head < 2 * num_kv_heads) & (slot >= 0)
    cache_row = (slot // block_size * (2 * num_kv_heads) + kv_head) * block_size + slot % block_size
    to_kv = kv + cache_row[:, None] * (2 * half) + column[None, :]
    if quantised:
        largest = tl.maximum(tl.max(tl.abs(new_first), 1), tl.max(tl.abs(new_second), 1))
        codes = tl.where(largest > 0.0, 127.0 / tl.where(largest > 0.0, largest, 1.0), 0.0)[:, None]
        new_first = tl.floor(new_first * codes + 0.5)
        new_second = tl.floor(new_second * codes + 0.5)
        tl.store(scales + cache_row, largest / 127.0, mask=kept)
    tl.store(to_kv, new_first.to(kv.dtype.element_ty), mask=kept[:, None] & mask)
    tl.store(to_kv + half, new_second.to(kv.dtype.element_ty), mask=kept[:, None] & mask)


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    slots: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """See `rope.rope_and_store`, which has checked all of these."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    q_weight, k_weight = tables if norms is None else norms
    grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))
    rope_kernel[grid](
        qkv, qkv.stride(0), positions, *tables, q_weight, k_weight, slots, q, kv, q if scales is None else scales,
        num_heads, num_kv_heads, eps, half=head_dim // 2, width=triton.next_power_of_2(head_dim // 2),
        block_size=block_size, heads=_HEADS, normed=norms is not None, quantised=scales is not None,
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
