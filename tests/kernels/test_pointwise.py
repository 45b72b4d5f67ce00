"""Norms, rotation, KV writes and gates: close to their twins, and of the same bits whatever is computed beside them."""

import pytest
import torch

from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.pointwise import (
    HeadNorms,
    PointwiseKernels,
    WrittenRows,
    add_and_norm_plain,
    silu_and_multiply_plain,
    write_heads_plain,
)
from kvrelay.kernels.quantized_kv import quantize_kv

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 15, 16, 17, 64, 576, 1000]
KV_DTYPES = [*DTYPES, torch.int8]
HEADS = [(9, 3, 64, 16), (3, 1, 6, 5), (4, 4, 16, 8), (2, 1, 80, 64), (1, 1, 2, 1)]  # as in test_attention
NUM_POSITIONS = 40


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(result: torch.Tensor, expected: torch.Tensor, ulps: float) -> None:
    """Up to some units in the last place of float32 of the largest value, and one of bfloat16 of each."""
    assert result.dtype == expected.dtype
    relative = 0.0 if expected.dtype == torch.float32 else 2**-7
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(result, expected, rtol=relative, atol=ulps * 2**-23 * largest)


class Written:
    """A cache full of other values, and rows that go to scattered slots of it."""

    def __init__(self, heads: tuple[int, int, int, int], kv_type: torch.dtype, num_rows: int = 7) -> None:
        num_heads, num_kv_heads, head_dim, block_size = heads
        generator = torch.Generator().manual_seed(5)
        kv = random(9, 2, num_kv_heads, block_size, head_dim)
        self.kv = quantize_kv(kv) if kv_type == torch.int8 else kv.to(kv_type)
        self.qkv = random(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
        self.slots = torch.randperm(9 * block_size, generator=generator)[:num_rows]
        self.positions = torch.randint(0, NUM_POSITIONS, (num_rows,), generator=generator)
        self.begun = torch.unique(self.slots // block_size)[:2]
        half = random(NUM_POSITIONS, head_dim // 2)
        self.tables = (torch.cat((half.cos(), half.cos()), 1), torch.cat((-half.sin(), half.sin()), 1))
        self.norms = HeadNorms(random(head_dim) + 1, random(head_dim) - 1, 1e-5)
        self.block_size = block_size

    def rows(self, first: int = 0, last: int | None = None) -> WrittenRows:
        """Some of the rows; blocks are begun with the first."""
        chosen = slice(first, last)
        begun = self.begun if first == 0 else self.begun[:0]
        return WrittenRows.build(
            self.positions[chosen], self.slots[chosen], begun, self.block_size, len(self.kv), NUM_POSITIONS
        )


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_heads_are_written_as_by_the_twin(
    native: NativeLibrary, heads: tuple[int, int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    """Into their slots, zeros into what is begun, and nothing anywhere else."""
    case, twin = Written(heads, dtype), Written(heads, dtype)
    norms = case.norms if normed else None
    for query_type in DTYPES:
        kernels = PointwiseKernels(native, 1)
        query = kernels.write_heads(case.qkv, case.kv, case.rows(), case.tables, norms, query_type)
        expected = write_heads_plain(twin.qkv, twin.kv, twin.rows(), twin.tables, norms, query_type)
        assert_close(query, expected, 4)
        assert_close(case.kv, twin.kv, 4)
    zeros = case.kv == 0
    assert torch.equal(zeros, twin.kv == 0)
    untouched = torch.ones(len(case.kv), dtype=torch.bool)
    untouched[case.slots // case.block_size] = False
    assert torch.equal(case.kv[untouched], Written(heads, dtype).kv[untouched])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_are_quantised_as_by_the_twin(
    native: NativeLibrary, heads: tuple[int, int, int, int], normed: bool
) -> None:
    """Values in the same bits. A key is rounded once before, so that one code in hundreds is the neighbour."""
    case, twin = Written(heads, torch.int8), Written(heads, torch.int8)
    norms = case.norms if normed else None
    PointwiseKernels(native, 1).write_heads(case.qkv, case.kv, case.rows(), case.tables, norms, torch.float32)
    write_heads_plain(twin.qkv, twin.kv, twin.rows(), twin.tables, norms, torch.float32)
    assert torch.equal(case.kv[:, 1], twin.kv[:, 1])
    keys, keys_of_twin = case.kv[:, 0], twin.kv[:, 0]
    scales, scales_of_twin = (each[..., -4:].contiguous().view(torch.float32) for each in (keys, keys_of_twin))
    torch.testing.assert_close(scales, scales_of_twin, rtol=2**-20, atol=0)
    apart = (keys[..., :-4].int() - keys_of_twin[..., :-4].int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01


def test_heads_of_any_magnitude_are_quantised(native: NativeLibrary) -> None:
    """Nothing, next to nothing, nearly too much, halves of a unit; and what is not finite is told by the scale."""
    head_dim, heads = 8, (1, 1, 8, 16)
    case = Written(heads, torch.int8)
    values = torch.zeros(7, head_dim)
    values[1, 0], values[2, 1] = 1e-38, 3e38
    values[3] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127])
    values[4, 3], values[5, 3], values[6, 7] = torch.nan, torch.inf, -torch.inf
    case.qkv.view(7, 3, head_dim)[:, 2] = values
    PointwiseKernels(native, 1).write_heads(case.qkv, case.kv, case.rows(), case.tables, None, torch.float32)
    written = case.kv[case.slots // 16, 1, 0, case.slots % 16]
    assert torch.equal(written[:4], quantize_kv(values[:4]))
    codes, scales = written[:, :-4], written[:, -4:].contiguous().view(torch.float32)[:, 0]
    assert codes[:2].eq(0).all()
    assert codes[2].tolist() == [0, 127, 0, 0, 0, 0, 0, 0]
    assert codes[3].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]
    assert codes[5:].eq(0).all()
    assert scales.isfinite().tolist() == [True] * 4 + [False] * 3


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_written_rows_have_the_same_bits_one_by_one(
    native: NativeLibrary, heads: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """And with two threads."""
    whole, single, threaded = (Written(heads, dtype) for _ in range(3))
    query = PointwiseKernels(native, 1).write_heads(
        whole.qkv, whole.kv, whole.rows(), whole.tables, whole.norms, torch.float32
    )
    again = PointwiseKernels(native, 2).write_heads(
        threaded.qkv, threaded.kv, threaded.rows(), threaded.tables, threaded.norms, torch.float32
    )
    assert torch.equal(query, again)
    assert torch.equal(whole.kv, threaded.kv)
    for row in range(len(whole.qkv)):
        one = PointwiseKernels(native, 1).write_heads(
            single.qkv[row : row + 1], single.kv, single.rows(row, row + 1), single.tables, single.norms, torch.float32
        )
        assert torch.equal(one[0], query[row])
    assert torch.equal(single.kv, whole.kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_are_those_of_the_twin(native: NativeLibrary, size: int, dtype: torch.dtype) -> None:
    """With and without a sum before; rows of all magnitudes, one of zeros."""
    weight, kernels = random(size) + 1, PointwiseKernels(native, 1)
    for added in (None, random(5, size)):
        residual = random(5, size) * torch.tensor([1e-3, 1.0, 100.0, 0.0, 1.0])[:, None]
        twin = residual.clone()
        result = kernels.add_and_norm(residual, added, weight, 1e-5, dtype)
        expected = add_and_norm_plain(twin, added, weight, 1e-5, dtype)
        assert torch.equal(residual, twin)
        for row, row_of_twin in zip(result, expected, strict=True):
            assert_close(row, row_of_twin, 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gates_are_those_of_the_twin(native: NativeLibrary, size: int, dtype: torch.dtype) -> None:
    """From nothing to wide open; the exponent's rounding grows with it, to 2**-17 at 50."""
    x = random(4, 2 * size) * 10
    x[0, 0], x[1, 0], x[2, 0] = -200.0, 200.0, -50.0
    result = PointwiseKernels(native, 1).silu_and_multiply(x, dtype)
    expected = silu_and_multiply_plain(x, dtype)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=2**-16 if dtype == torch.float32 else 2**-7, atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_neither_threads_nor_other_rows_matter(native: NativeLibrary, size: int) -> None:
    """For norms and gates."""
    x, weight = random(6, 2 * size), random(2 * size)
    one, two = PointwiseKernels(native, 1), PointwiseKernels(native, 2)
    gates, norms = one.silu_and_multiply(x, torch.float32), one.add_and_norm(x.clone(), x, weight, 1e-5, torch.float32)
    assert torch.equal(two.silu_and_multiply(x, torch.float32), gates)
    assert torch.equal(two.add_and_norm(x.clone(), x, weight, 1e-5, torch.float32), norms)
    for row in range(len(x)):
        own = x[row : row + 1]
        assert torch.equal(one.silu_and_multiply(own, torch.float32)[0], gates[row])
        assert torch.equal(one.add_and_norm(own.clone(), own, weight, 1e-5, torch.float32)[0], norms[row])


def test_what_is_not_a_number_stays_so(native: NativeLibrary) -> None:
    """In its row."""
    x = torch.zeros(2, 64)
    x[1, 3] = float("nan")
    kernels = PointwiseKernels(native, 1)
    assert kernels.silu_and_multiply(x, torch.bfloat16).isnan().sum(1).tolist() == [0, 1]
    assert kernels.add_and_norm(x, None, torch.ones(64), 1e-5, torch.bfloat16).isnan().sum(1).tolist() == [0, 64]


@pytest.mark.parametrize(
    ("positions", "slots", "begun"),
    [([40], [0], []), ([0], [45], []), ([0], [-1], []), ([0], [0], [9]), ([0, 1], [0], [])],
)
def test_places_that_do_not_exist_are_refused(positions: list[int], slots: list[int], begun: list[int]) -> None:
    """Native code would write there."""
    where, to, new = (torch.tensor(each, dtype=torch.int64) for each in (positions, slots, begun))
    with pytest.raises(ValueError, match="expected int64"):
        WrittenRows.build(where, to, new, 5, 9, NUM_POSITIONS)


def test_other_tensors_are_refused(native: NativeLibrary) -> None:
    """By sentences that say what was expected."""
    kernels, case = PointwiseKernels(native, 1), Written(HEADS[0], torch.float32)
    for qkv in (case.qkv[:, :-1].contiguous(), case.qkv[:3], case.qkv.double()):
        with pytest.raises(ValueError, match="expected float32 \\[N, \\(num_heads"):
            kernels.write_heads(qkv, case.kv, case.rows(), case.tables, None, torch.float32)
    with pytest.raises(ValueError, match="int8 with 4 bytes more"):
        kernels.write_heads(case.qkv, case.kv.to(torch.int8), case.rows(), case.tables, None, torch.float32)
    with pytest.raises(ValueError, match="expected float32 \\[N, size\\]"):
        kernels.add_and_norm(torch.zeros(2, 4), torch.zeros(2, 3), torch.ones(4), 1e-5, torch.float32)
    with pytest.raises(ValueError, match="expected float32 \\[N, 2 \\* size\\]"):
        kernels.silu_and_multiply(torch.zeros(2, 3), torch.float32)
