"""Rows of activations become integers, each group of 32 by itself."""

import pytest
import torch

from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.quantized_rows import QuantizedRows, quantize_rows, quantize_rows_plain

COLUMNS = [1, 31, 32, 33, 576, 1000]


def rows_of(columns: int, rows: int = 5) -> torch.Tensor:
    """Of all magnitudes, one row of zeros, and values that lie halfway between two codes."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    x *= torch.tensor([1e-20, 1.0, 3e4, 0.0, 1.0])[:rows].unsqueeze(1)
    x[-1] = torch.arange(columns) % 64 - 31.5
    x[-1, ::32] = 127
    return x


def same_bits(a: QuantizedRows, b: QuantizedRows) -> bool:
    """Whether two are equal in all their parts."""
    pairs = ((a.codes, b.codes), (a.scales, b.scales), (a.sums, b.sums), (a.offsets, b.offsets))
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_kernel_gives_the_bits_of_its_twin(native: NativeLibrary, columns: int) -> None:
    """On every level: integers are exact, and each float is one operation."""
    x = rows_of(columns)
    assert same_bits(quantize_rows(native, x, num_threads=1), quantize_rows_plain(x))


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_value_is_off_by_half_a_step_at_most(columns: int) -> None:
    """And the columns that were added are zeros."""
    x = rows_of(columns)
    quantized = quantize_rows_plain(x)
    step = quantized.scales.repeat_interleave(32, dim=1)
    padded = torch.nn.functional.pad(x, (0, step.shape[1] - columns))
    assert torch.all((quantized.values - padded).abs() <= step * 0.5001)
    assert not quantized.values[:, columns:].any()


def test_neither_threads_nor_other_rows_matter(native: NativeLibrary) -> None:
    """Each row is quantised by itself."""
    x = rows_of(576)
    whole = quantize_rows(native, x, num_threads=1)
    assert same_bits(quantize_rows(native, x, num_threads=2), whole)
    for i in range(len(x)):
        alone = quantize_rows(native, x[i : i + 1], num_threads=1)
        assert torch.equal(alone.codes[0], whole.codes[i])
        assert torch.equal(alone.scales[0], whole.scales[i])


@pytest.mark.parametrize(
    "x",
    [torch.zeros(4), torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(4, 8).T, torch.zeros(2, 4, device="meta")],
)
def test_other_tensors_are_refused(native: NativeLibrary, x: torch.Tensor) -> None:
    """By a sentence that says what was expected."""
    with pytest.raises(ValueError, match=r"expected float32 \[rows, columns\]"):
        quantize_rows(native, x, num_threads=1)
