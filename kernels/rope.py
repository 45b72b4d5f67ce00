"""Head norms, rotary positions and the write into the KV cache: plain torch, in float64, and the choice."""

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import rope_triton


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    slots: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Rotates the queries of N tokens into `q`, their keys into the cache, and copies their values there.

    qkv `[N, (num_heads + 2 * num_kv_heads) * head_dim]`, rows of any stride; positions `[N]` and slots `[N]`, int64:
    slot `block_id * block_size + offset`, or -1 for a token that is not kept. tables: cosines and signed sines,
    float32 `[positions, head_dim]` (Su et al., 2021). norms: weights of the RMS norms of each query and key head before
    the rotation, float32 `[head_dim]`. q `[N, num_heads, head_dim]`; kv and scales as in `paged_attention`: into int8
    each head of a token is rounded to 127ths of its largest value.

    Raises ValueError if the shapes or types are others.
    """
    _check(qkv, positions, slots, q, kv, scales)
    if takes_triton(qkv):
        rope_triton.rope_and_store(qkv, positions, tables, norms, eps, slots, q, kv, scales)
        return
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    heads = qkv.double().view(num_rows, -1, head_dim)
    to_rotate, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    rotated = _rotated(_normed(to_rotate, num_heads, norms, eps), positions, tables)
    q.copy_(rotated[:, :num_heads])
    kept = slots >= 0
    block_ids, offsets = slots[kept] // block_size, slots[kept] % block_size
    new = torch.cat((rotated[kept, num_heads:], values[kept]), dim=1).view(-1, 2, num_kv_heads, head_dim)
    if scales is not None:
        largest = new.abs().amax(-1)
        scales[block_ids, :, :, offsets] = (largest / 127).float()
        new = (new * (127 / largest.clamp(min=1e-300))[..., None] + 0.5).floor()
    kv[block_ids, :, :, offsets] = new.to(kv.dtype)


def _normed(
    heads: torch.Tensor, num_heads: int, norms: tuple[torch.Tensor, torch.Tensor] | None, eps: float
) -> torch.Tensor:
    if norms is None:
        return heads
    q, k = heads[:, :num_heads], heads[:, num_heads:]
    return torch.cat([F.rms_norm(x, w.shape, w.double(), eps) for x, w in zip((q, k), norms, strict=True)], dim=1)


def _rotated(heads: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (table[positions].double()[:, None] for table in tables)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((second, first), dim=-1) * sin


def _check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    shapes = (
        q.dim() == 3
        and kv.dim() == 5
        and kv.shape[4] == q.shape[2]
        and qkv.shape == (len(q), (q.shape[1] + 2 * kv.shape[2]) * q.shape[2])
        and positions.shape == slots.shape == q.shape[:1]
    )
    types = positions.dtype == slots.dtype == torch.int64 and kv.dtype == (q.dtype if scales is None else torch.int8)
    if not (shapes and types and qkv.stride(-1) == 1 and q.is_contiguous() and kv.is_contiguous()):
        raise ValueError(
            f"qkv {qkv.dtype} {list(qkv.shape)}, positions {positions.dtype} {list(positions.shape)}, slots "
            f"{slots.dtype} {list(slots.shape)}, q {q.dtype} {list(q.shape)} and kv {kv.dtype} {list(kv.shape)} do not "
            "fit together."
        )
    if scales is not None and (scales.shape != kv.shape[:4] or scales.dtype != torch.float32):
        raise ValueError(f"Scales {scales.dtype} {list(scales.shape)} do not fit int8 KV {list(kv.shape)}.")
