"""Heads of keys and values as 8-bit integers, each with a scale of its own: how they lie in the cache, in plain torch.

A *row* is one head of one token: head_dim codes, and behind them the four bytes of a float32, what a unit of the codes
is worth. A row depends on its head alone, so that it is the same whatever is written beside it.
"""

import torch

_SCALE_BYTES = 4
_LEAST = 1e-30  # heads of less are zeros, since 127 over it may be too large


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one head of one token in a cache of this type."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_kv(x: torch.Tensor) -> torch.Tensor:
    """Rows int8 `[..., head_dim + 4]` of heads `[..., head_dim]` of any floating type.

    Codes are from -127 to 127, ties to even; the scale is the largest magnitude / 127, and not a number if a value is
    not finite.
    """
    x = x.float()
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > _LEAST, 127 / most, 0)
    codes = (x * inverse).nan_to_num().round().to(torch.int8)
    scales = most / 127 + (x * 0).sum(-1, keepdim=True)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def dequantize_kv(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heads `[..., head_dim]` in `dtype` of rows as `quantize_kv` gives them."""
    codes, scales = rows[..., :-_SCALE_BYTES], rows[..., -_SCALE_BYTES:]
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (codes.float() * scales).to(dtype)
