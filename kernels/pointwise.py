"""What happens to rows between the matrix products of a decoder layer: native kernels and their plain twins.

Every row is computed by itself; its sums are made in an order that its length alone decides.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.attention import KV_TYPES, TYPES
from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.quantized_kv import quantize_kv, row_size


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of each query and key head (Qwen3), float32 `[head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Where N rows stand and where their KV goes, int64 on the CPU. Made once for a step, for all layers.

    `slots` are `block * block_size + offset`; `begun` are blocks whose first token is among the rows and last is not.
    """

    positions: torch.Tensor  # [N]
    slots: torch.Tensor  # [N]
    begun: torch.Tensor
    block_size: int
    num_blocks: int  # that slots and blocks were checked against
    num_positions: int  # and positions

    @classmethod
    def build(
        cls,
        positions: torch.Tensor,
        slots: torch.Tensor,
        begun: torch.Tensor,
        block_size: int,
        num_blocks: int,
        num_positions: int,
    ) -> "WrittenRows":
        """Checks that all exist. Raises ValueError if one does not, or they are no int64 `[N]`, `[N]`, `[n]`."""
        made = cls(positions, slots, begun, block_size, num_blocks, num_positions)
        limits = ((positions, num_positions), (slots, num_blocks * block_size), (begun, num_blocks))
        if positions.shape != slots.shape or not all(_indexes(each, limit) for each, limit in limits):
            raise ValueError(
                f"{_described(positions)}, {_described(slots)} and {_described(begun)} cannot be positions below "
                f"{num_positions}, as many slots in {num_blocks} blocks of {block_size}, and begun blocks; expected "
                "int64 of one dimension, contiguous and on the CPU."
            )
        return made


class PointwiseKernels:
    """The native kernels on `num_threads` threads."""

    def __init__(self, native: NativeLibrary, num_threads: int) -> None:
        self.num_threads = num_threads
        self._write_heads = native.function("kvrelay_write_heads", "ppppppppppiiiiiiiifi")
        self._add_and_norm = native.function("kvrelay_add_and_norm", "pppfpiiii")
        self._silu_and_multiply = native.function("kvrelay_silu_and_multiply", "ppiiii")

    def write_heads(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        rows: WrittenRows,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: HeadNorms | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Rotates queries and keys, writes keys and values into the cache, and gives the queries in `dtype`.

        qkv is float32 `[N, (num_heads + 2 * num_kv_heads) * head_dim]`, kv one layer `[num_blocks, 2, num_kv_heads,
        block_size, head_dim]`, tables are cosines and signed sines, float32 `[num_positions, head_dim]`: see
        `model.layers.RotaryEmbedding`. kv and `dtype` are float32 or bfloat16; kv may be int8, and gets rows as
        `quantize_kv` gives them. Queries are `[N, num_heads, head_dim]`.
        Begun blocks are filled with zeros first: what is sent of them is the same everywhere.

        Raises ValueError if shapes or types are others.
        """
        num_heads = check_heads(qkv, kv, rows, tables, norms, dtype)
        (num_kv_heads, block_size), head_dim = kv.shape[2:4], tables[0].shape[1]
        query = torch.empty(len(qkv), num_heads, head_dim, dtype=dtype)
        self._write_heads(
            qkv.data_ptr(),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            *(each.data_ptr() for each in (*tables, rows.positions, rows.slots, rows.begun, query, kv)),
            TYPES[dtype],
            KV_TYPES[kv.dtype],
            *(len(qkv), num_heads, num_kv_heads, head_dim, block_size, len(rows.begun)),
            0.0 if norms is None else norms.eps,
            self.num_threads,
        )
        return query

    def add_and_norm(
        self, residual: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """`residual += added`, then its root mean square norm times weight, in `dtype`, float32 or bfloat16.

        residual and added are float32 `[N, size]`, weight float32 `[size]`. Raises ValueError if they are not.
        """
        check_norm(residual, added, weight, dtype)
        output = torch.empty(residual.shape, dtype=dtype)
        self._add_and_norm(
            residual.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            eps,
            output.data_ptr(),
            TYPES[dtype],
            *residual.shape,
            self.num_threads,
        )
        return output

    def silu_and_multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """SiLU of the first half of each row times the second: float32 `[N, 2 * size]` to `[N, size]` in `dtype`.

        Raises ValueError if x is something else, or `dtype` neither float32 nor bfloat16.
        """
        check_gate(x, dtype)
        num_rows, size = len(x), x.shape[1] // 2
        output = torch.empty(num_rows, size, dtype=dtype)
        self._silu_and_multiply(x.data_ptr(), output.data_ptr(), TYPES[dtype], num_rows, size, self.num_threads)
        return output


def write_heads_plain(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    rows: WrittenRows,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The twin of `PointwiseKernels.write_heads` in plain torch."""
    num_heads = check_heads(qkv, kv, rows, tables, norms, dtype)
    (num_kv_heads, block_size), head_dim = kv.shape[2:4], tables[0].shape[1]
    query, key, value = torch.split(qkv.view(len(qkv), -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query = F.rms_norm(query, (head_dim,), norms.query, norms.eps)
        key = F.rms_norm(key, (head_dim,), norms.key, norms.eps)
    cos, sin = (table[rows.positions][:, None] for table in tables)
    query, key = (part * cos + part.roll(head_dim // 2, -1) * sin for part in (query, key))
    kv[rows.begun] = 0
    # Indexes on both sides of a slice put their dimension first: [N, 2, num_kv_heads, head_dim].
    new = torch.stack((key, value), 1)
    new = quantize_kv(new) if kv.dtype == torch.int8 else new.to(kv.dtype)
    kv[rows.slots // block_size, :, :, rows.slots % block_size] = new
    return query.to(dtype)


def add_and_norm_plain(
    residual: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """The twin of `PointwiseKernels.add_and_norm` in plain torch."""
    check_norm(residual, added, weight, dtype)
    if added is not None:
        residual += added
    return F.rms_norm(residual, weight.shape, weight, eps).to(dtype)


def silu_and_multiply_plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The twin of `PointwiseKernels.silu_and_multiply` in plain torch."""
    check_gate(x, dtype)
    gate, up = x.chunk(2, dim=1)
    return (F.silu(gate) * up).to(dtype)


def check_heads(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    rows: WrittenRows,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None,
    dtype: torch.dtype,
) -> int:
    """The number of query heads. Raises ValueError if these cannot be the arguments of one call."""
    head_dim = tables[0].shape[-1]
    num_heads, rest = divmod(qkv.shape[-1], head_dim)
    num_heads -= 2 * kv.shape[2] if kv.dim() == 5 else num_heads
    table = (rows.num_positions, head_dim)
    weights = () if norms is None else (norms.query, norms.key)
    fits = qkv.dim() == 2 and len(qkv) == len(rows.slots) and rest == 0 and num_heads > 0 and head_dim % 2 == 0
    fits = (
        fits
        and kv.shape[1] == 2
        and kv.shape[4] == row_size(head_dim, kv.dtype)
        and kv.shape[3] == rows.block_size
        and kv.shape[0] >= rows.num_blocks
    )
    fits = fits and all(each.shape == table for each in tables) and all(each.shape == table[1:] for each in weights)
    fits = fits and all(map(_is_float32, (qkv, *tables, *weights))) and kv.dtype in KV_TYPES and dtype in TYPES
    if not (fits and kv.is_contiguous() and kv.is_cpu):
        raise ValueError(
            f"Rows of {_described(qkv)} cannot be written to KV of {_described(kv)} as {len(rows.slots)} slots in "
            f"{rows.num_blocks} blocks of {rows.block_size}; expected float32 [N, (num_heads + 2 * num_kv_heads) * "
            "head_dim] and [num_blocks, 2, num_kv_heads, block_size, head_dim], int8 with 4 bytes more for each head, "
            "an even head_dim, float32 tables [num_positions, head_dim] and norms [head_dim], all contiguous and on "
            "the CPU."
        )
    return num_heads


def check_norm(residual: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError if these cannot be rows, what is added to them, and weights of their norm."""
    others = (residual, weight) if added is None else (residual, weight, added)
    fits = residual.dim() == 2 and weight.shape == residual.shape[1:] and dtype in TYPES
    if not (fits and all(map(_is_float32, others)) and (added is None or added.shape == residual.shape)):
        raise ValueError(
            f"Rows {', '.join(map(_described, others))} cannot be normed to {dtype}; expected float32 [N, size], "
            "[size] and [N, size], contiguous and on the CPU, and float32 or bfloat16."
        )


def check_gate(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError if x cannot be a gate beside what it opens."""
    if x.dim() != 2 or x.shape[1] % 2 or not _is_float32(x) or dtype not in TYPES:
        raise ValueError(
            f"Rows of {_described(x)} cannot become gated ones of {dtype}; expected float32 [N, 2 * size], contiguous "
            "and on the CPU, and float32 or bfloat16."
        )


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.is_cpu


def _indexes(tensor: torch.Tensor, limit: int) -> bool:
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_cpu:
        return False
    return not len(tensor) or (int(tensor.min()) >= 0 and int(tensor.max()) < limit)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
