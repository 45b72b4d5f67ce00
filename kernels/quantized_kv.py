"""Heads of keys and values as 8-bit integers, each with a scale of its own: how they lie in the cache, in plain torch.

A *row* is one head of one token: head_dim codes, and behind them the four bytes of a float32, what a unit of the codes
is worth. A row depends on its head alone, so that it is the same whatever is written beside it.
"""

import torch

_SCALE_BYTES = 4


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one head of one token in a cache of this type."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_kv(x: torch.Tensor) -> torch.Tensor:
    """Rows int8 `[..., head_dim + 4]` of heads `[..., head_dim]` of any floating type.

    Codes are from -127 to 127, ties to even; the scale is the largest magnitude / 127, which is not finite if a value
    is not. Where that makes no codes, they are 0.
    """
    x = x.float()
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # 127 / most would multiply by the reciprocal, which rounds twice
    codes = (x * inverse).nan_to_num(0, 0, 0).round().to(torch.int8)
    return torch.cat((codes, (most / 127).view(torch.int8)), dim=-1)


def dequantize_kv(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heads `[..., head_dim]` in `dtype` of rows as `quantize_kv` gives them."""
    codes, scales = rows[..., :-_SCALE_BYTES], rows[..., -_SCALE_BYTES:]
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (codes.float() * scales).to(dtype)
