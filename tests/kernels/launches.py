"""Launches of every kernel as models make them, to be compiled for GPUs that are not here."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from kvrelay.kernels.gumbel import RowSampling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Launch:
    """A call of a module's Python functions; only its types, shapes and options matter."""

    module: str
    name: str
    call: Callable[[ModuleType], None]

    def __str__(self) -> str:
        return f"{self.module.removesuffix('_triton')}-{self.name}"


def attention(
    dtype: torch.dtype, group: int, head_dim: int, *, block_size: int = 16, quantised: bool = False
) -> Launch:
    """Decoding and prefill over 8 KV heads."""

    def call(module: ModuleType) -> None:
        q = torch.zeros(4, 8 * group, head_dim, dtype=dtype)
        kv = torch.zeros(2, 2, 8, block_size, head_dim, dtype=torch.int8 if quantised else dtype)
        scales = torch.zeros(kv.shape[:4]) if quantised else None
        tables, counts = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        module.decode(q, kv, scales, tables, counts, torch.empty_like(q))
        starts = torch.zeros(5, dtype=torch.int32)
        module.prefill(q, kv, scales, tables, starts, counts, 4, torch.empty_like(q))

    name = f"{_name(dtype)}{'-int8' * quantised}-{group}x{head_dim}-blocks-of-{block_size}"
    return Launch("paged_attention_triton", name, call)


def norm(size: int) -> Launch:
    """bfloat16 added to a residual stream."""

    def call(module: ModuleType) -> None:
        delta = torch.zeros(2, size, dtype=BF16)
        module.add_rms_norm(torch.zeros(2, size), delta, torch.zeros(size), 1e-5, torch.empty_like(delta))

    return Launch("norm_and_gate_triton", f"norm-{size}", call)


def silu(size: int) -> Launch:
    """bfloat16 gates."""

    def call(module: ModuleType) -> None:
        module.silu_and_mul(torch.zeros(2, 2 * size, dtype=BF16), torch.zeros(2, size, dtype=BF16))

    return Launch("norm_and_gate_triton", f"silu-{size}", call)


def rope(head_dim: int, *, normed: bool = False, quantised: bool = False) -> Launch:
    """32 query heads and 8 KV heads of bfloat16."""

    def call(module: ModuleType) -> None:
        q = torch.zeros(2, 32, head_dim, dtype=BF16)
        kv = torch.zeros(2, 2, 8, 16, head_dim, dtype=torch.int8 if quantised else BF16)
        table, weight = torch.zeros(64, head_dim), torch.zeros(head_dim)
        counts, norms = torch.zeros(2, dtype=torch.int64), (weight, weight) if normed else None
        scales = torch.zeros(kv.shape[:4]) if quantised else None
        module.rope_and_store(
            torch.zeros(2, 48 * head_dim, dtype=BF16), counts, (table, table), norms, 1e-6, counts, q, kv, scales
        )  # fmt: skip

    return Launch("rope_triton", f"{head_dim}{'-normed' * normed}{'-int8' * quantised}", call)


def matmul(dtype: torch.dtype, outputs: int) -> Launch:
    """2048 inputs, with a bias."""

    def call(module: ModuleType) -> None:
        x, weight = torch.zeros(2, 2048, dtype=dtype), torch.empty(outputs, 2048, dtype=dtype)
        module.matmul(x, weight, weight[:, 0].contiguous(), torch.empty(2, outputs, dtype=dtype))

    return Launch("matmul_triton", f"{_name(dtype)}-{outputs}", call)


def quantised(outputs: int, *, grouped: bool) -> Launch:
    """2048 inputs of bfloat16, without a bias."""

    def call(module: ModuleType) -> None:
        x, codes = torch.zeros(2, 2048, dtype=BF16), torch.empty(outputs, 2048, dtype=torch.int8)
        scales = torch.empty(outputs, 64, dtype=FP16) if grouped else torch.empty(outputs, dtype=FP16)
        module.quantised_matmul(
            x, codes, scales, scales if grouped else None, None, torch.empty(2, outputs, dtype=BF16)
        )

    return Launch("matmul_triton", f"int8{'-groups' * grouped}-{outputs}", call)


def sampling(vocab: int) -> Launch:
    """A row."""

    def call(module: ModuleType) -> None:
        real, whole = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
        rows = RowSampling(real, whole.int(), real, real, whole, whole, whole)
        module.sample(torch.zeros(1, vocab), rows, whole)

    return Launch("gumbel_triton", str(vocab), call)


def block_copy(row_bytes: int) -> Launch:
    """Blocks packed and unpacked."""

    def call(module: ModuleType) -> None:
        layer, ids = torch.zeros(2, row_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        module.gather(layer, ids, layer[:1])
        module.scatter(layer[:1], ids, layer)

    return Launch("block_copy_triton", str(row_bytes), call)


def digest(num_words: int) -> Launch:
    """Of a piece of KV."""

    def call(module: ModuleType) -> None:
        module.digest(torch.zeros(num_words, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))

    return Launch("digest_triton", str(num_words), call)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What models of 1 to 8 billion parameters launch.
USUAL = (
    attention(BF16, 4, 128),
    norm(4096),
    silu(14336),
    rope(128),
    matmul(BF16, 2048),
    matmul(BF16, 16384),
    quantised(4096, grouped=True),
    sampling(128256),
    block_copy(65536),
    digest(1 << 18),
)
RARE = (
    attention(BF16, 3, 64),
    attention(BF16, 4, 128, block_size=64, quantised=True),
    attention(FP16, 1, 80, block_size=8),
    attention(BF16, 32, 128),
    attention(BF16, 4, 256),
    attention(FP32, 4, 128, block_size=24),
    attention(FP32, 3, 64),
    norm(576),
    norm(16384),
    silu(1536),
    rope(64, normed=True),
    rope(80, quantised=True),
    rope(128, normed=True, quantised=True),
    matmul(BF16, 4096),
    matmul(FP16, 8192),
    matmul(FP32, 2048),
    quantised(2048, grouped=False),
    quantised(16384, grouped=True),
    sampling(49152),
    *(block_copy(row_bytes) for row_bytes in (24584, 8196, 8191)),
)
