"""Inputs of the rope kernel, of any shape."""

from dataclasses import dataclass

import torch

from kvrelay.kernels.rope import rope_and_store
from kvrelay.model.layers import RotaryEmbedding


@dataclass(frozen=True)
class Shape:
    """Of a projection's outputs and the cache."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    normed: bool = False
    quantised: bool = False


@dataclass(frozen=True)
class Written:
    """All that was written, on the CPU."""

    q: torch.Tensor
    kv: torch.Tensor
    scales: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """The cache's content in float32, NaN where nothing was written."""
        return self.kv.float() if self.scales is None else self.kv.float() * self.scales[..., None]


def rotated(
    shape: Shape, slots: list[int], rows: slice = slice(None), module: object = None, on: str = "cpu"
) -> Written:
    """Rotates and stores some of the tokens, one for each slot, by the kernels of a module, or as users do."""
    made = torch.Generator().manual_seed(3)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn((len(slots), heads * shape.head_dim + 16), generator=made).to(on, shape.dtype)[rows, 16:]
    positions = torch.randint(0, 40, (len(slots),), generator=made).to(on)[rows]
    weights = torch.rand((2, shape.head_dim), generator=made).to(on)
    rotary = RotaryEmbedding.build(1e4, shape.head_dim, (), 40, torch.device(on))
    size = (-(-max(slots) // shape.block_size) + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    kv = torch.full(size, 77 if shape.quantised else torch.nan, dtype=torch.int8 if shape.quantised else shape.dtype)
    scales = torch.full(size[:4], torch.nan).to(on) if shape.quantised else None
    q = torch.full((len(qkv), shape.num_heads, shape.head_dim), torch.nan, dtype=shape.dtype).to(on)
    kv, to = kv.to(on), torch.tensor(slots).to(on)[rows]
    norms = (weights[0], weights[1]) if shape.normed else None
    tables = (rotary.cos, rotary.sin)
    if module is None:
        rope_and_store(qkv, positions, tables, norms, 1e-6, to, q, kv, scales)
    else:
        module.rope_and_store(qkv, positions, tables, norms, 1e-6, to, q, kv, scales)  # type: ignore[attr-defined]
    return Written(q.cpu(), kv.cpu(), None if scales is None else scales.cpu())
