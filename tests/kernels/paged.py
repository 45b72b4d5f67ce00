"""Paged KV of some sequences, with NaN wherever no position lies, to try attention on."""

from dataclasses import dataclass

import torch

from kvrelay.kernels.paged_attention import decode_attention, prefill_attention

# Relative and absolute, from the float64 twin: what rounding to the type, of weights and results, explains.
TOLERANCE = {torch.bfloat16: (1e-2, 4e-3), torch.float16: (1.5e-3, 1e-3), torch.float32: (1e-5, 2e-6)}


@dataclass(frozen=True)
class Shape:
    """Of a layer's KV and the queries over it."""

    dtype: torch.dtype
    group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    quantised: bool = False


@dataclass(frozen=True)
class Paged:
    """The KV of sequences and their queries, one for each position; everything of one seed is equal."""

    shape: Shape
    lengths: tuple[int, ...]
    kv: torch.Tensor
    scales: torch.Tensor | None
    tables: torch.Tensor  # [sequences, max_blocks]
    queries: tuple[torch.Tensor, ...]  # of each sequence, [length, num_heads, head_dim]

    def to(self, device: str) -> "Paged":
        """The same on another device."""
        moved = [None if each is None else each.to(device) for each in (self.kv, self.scales, self.tables)]
        assert moved[0] is not None
        assert moved[2] is not None
        queries = tuple(each.to(device) for each in self.queries)
        return Paged(self.shape, self.lengths, moved[0], moved[1], moved[2], queries)


def paged(shape: Shape, lengths: tuple[int, ...]) -> Paged:
    """Sequence s has the same keys, values and queries at any block size; its blocks lie anywhere."""
    generator = torch.Generator().manual_seed(5)
    size, heads = shape.block_size, (shape.num_kv_heads, shape.head_dim)
    width = max(-(-length // size) for length in lengths)
    num_blocks = len(lengths) * width + 1
    dtype = torch.int8 if shape.quantised else shape.dtype
    kv = torch.full((num_blocks, 2, heads[0], size, heads[1]), 77 if shape.quantised else torch.nan, dtype=dtype)
    scales = torch.full(kv.shape[:4], torch.nan) if shape.quantised else None
    tables = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(size)).view(len(lengths), width)
    queries = []
    for table, length in zip(tables, lengths, strict=True):
        where, offsets = table[torch.arange(length) // size], torch.arange(length) % size
        content = torch.randn((length, 2, *heads), generator=generator)
        kv[where, :, :, offsets] = (content * 40).clamp(-127, 127).to(dtype) if shape.quantised else content.to(dtype)
        if scales is not None:
            scales[where, :, :, offsets] = torch.rand((length, 2, heads[0]), generator=generator) / 40
        queries.append(torch.randn((length, shape.group * heads[0], heads[1]), generator=generator).to(shape.dtype))
    return Paged(shape, lengths, kv, scales, tables.int(), tuple(queries))


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    """Counts, as kernels take them."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def decoded(on: Paged, rows: list[tuple[int, int]], module: object = None) -> torch.Tensor:
    """Decodes rows of (sequence, number of positions) by the kernels of a module, or as users do."""
    q = torch.stack([on.queries[sequence][max(length, 1) - 1] for sequence, length in rows])
    q = torch.cat((q, q), dim=1)[:, : q.shape[1]]  # rows that are further apart than they are long
    tables = on.tables[[sequence for sequence, _ in rows]]
    counts, out = int32([length for _, length in rows], q.device), torch.full(q.shape, torch.nan, dtype=q.dtype)
    out = out.to(q.device)
    if module is None:
        decode_attention(q, on.kv, tables, counts, out, on.scales)
    else:
        module.decode(q, on.kv, on.scales, tables, counts, out)  # type: ignore[attr-defined]
    return out


def prefilled(on: Paged, chunks: list[tuple[int, int, int]], module: object = None) -> torch.Tensor:
    """Prefills chunks of (sequence, begin, end), packed, by the kernels of a module, or as users do."""
    q = torch.cat([on.queries[sequence][begin:end] for sequence, begin, end in chunks])
    q = torch.cat((q, q), dim=1)[:, : q.shape[1]]
    sizes = [end - begin for _, begin, end in chunks]
    starts = int32([sum(sizes[:index]) for index in range(len(sizes) + 1)], q.device)
    counts, out = int32([end for _, _, end in chunks], q.device), torch.full(q.shape, torch.nan, dtype=q.dtype)
    out, tables = out.to(q.device), on.tables[[sequence for sequence, _, _ in chunks]]
    if module is None:
        prefill_attention(q, on.kv, tables, starts, counts, max(sizes), out, on.scales)
    else:
        module.prefill(q, on.kv, on.scales, tables, starts, counts, max(sizes), out)  # type: ignore[attr-defined]
    return out


def assert_close(found: torch.Tensor, twin: torch.Tensor) -> None:
    """Within the tolerance of the type; NaN is close to nothing."""
    rtol, atol = TOLERANCE[twin.dtype]
    torch.testing.assert_close(found.cpu(), twin, rtol=rtol, atol=atol)
