"""Matrix products, interpreted: close to the float64 twins, and a row's bits do not depend on the rows beside it."""

from types import ModuleType

import pytest
import torch

from kvrelay.kernels.matmul import dequantised, matmul, quantised_matmul
from tests.kernels.interpreted import load_kernels

pytestmark = pytest.mark.usefixtures("interpreter")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 1e-5}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted."""
    return load_kernels("matmul_triton", interpreted=True)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    """float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(outputs: int, inputs: int) -> torch.Tensor:
    """int8, the extremes too."""
    return torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 33, 65), (65, 40, 96)])
def test_products(kernels: ModuleType, size: tuple[int, int, int], dtype: torch.dtype, biased: bool) -> None:
    rows, outputs, inputs = size
    x, weight = normal(rows, inputs + 8).to(dtype)[:, 8:], (normal(outputs, inputs, seed=2) / 8).to(dtype)
    bias = normal(outputs, seed=3).to(dtype) if biased else None
    out = torch.full((rows, outputs), torch.nan, dtype=dtype)
    expected = out.clone()
    kernels.matmul(x, weight, bias, out)
    matmul(x, weight, bias, expected)
    torch.testing.assert_close(out, expected, rtol=ROUNDED[dtype], atol=2e-5)


@pytest.mark.parametrize("minimums", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", [(1, 1, 32), (3, 33, 96), (66, 40, 160)])
def test_products_with_codes(
    kernels: ModuleType, size: tuple[int, int, int], dtype: torch.dtype, minimums: bool
) -> None:
    rows, outputs, inputs = size
    x, codes, bias = normal(rows, inputs).to(dtype), coded(outputs, inputs), normal(outputs).to(dtype)
    scales = (normal(outputs, inputs // 32 if minimums else 1, seed=5).abs() / 400).half()
    scales, least = (scales, normal(*scales.shape, seed=6).half()) if minimums else (scales[:, 0].contiguous(), None)
    out = torch.full((rows, outputs), torch.nan)
    expected = out.clone()
    kernels.quantised_matmul(x, codes, scales, least, bias, out)
    quantised_matmul(x, codes, scales, least, bias, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=5e-5)
    if least is not None:
        kernels.matmul(x, dequantised(codes, scales, least, dtype), bias, expected)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_has_the_same_bits_alone(kernels: ModuleType, dtype: torch.dtype) -> None:
    x, weight, codes = normal(70, 96).to(dtype), normal(40, 96, seed=2).to(dtype), coded(40, 96)
    many, one = torch.empty(70, 40), torch.empty(1, 40)
    for row in (5, 69):
        kernels.matmul(x, weight, None, many)
        kernels.matmul(x[row : row + 1], weight, None, one)
        assert torch.equal(many[row : row + 1], one)
        kernels.quantised_matmul(x, codes, normal(40), None, None, many)
        kernels.quantised_matmul(x[row : row + 1], codes, normal(40), None, None, one)
        assert torch.equal(many[row : row + 1], one)


def test_every_tile_is_computed_once(kernels: ModuleType) -> None:
    """Of more rows than are neighbours, and outputs."""
    x, weight = torch.arange(16 * 19).float()[:, None], torch.arange(70).float()[:, None]
    out = torch.full((16 * 19, 70), torch.nan)
    kernels.matmul(x, weight, None, out)
    assert torch.equal(out, x @ weight.T)


def test_tiles_follow_from_the_weight_alone(kernels: ModuleType) -> None:
    assert [kernels._shape(outputs, BF16)["outputs"] for outputs in (576, 4096, 8192, 16384, 128256)] == [
        32,
        32,
        64,
        128,
        128,
    ]


def test_what_does_not_fit_is_refused() -> None:
    x, codes, scales, out = normal(2, 64), coded(3, 64), normal(3, 2), torch.empty(2, 3)
    for wrong in ((x[:, :63], normal(3, 64), out), (x, normal(64, 3).T, out), (x, normal(3, 64), out[:, :2])):
        with pytest.raises(ValueError, match="do not fit together"):
            matmul(wrong[0], wrong[1], None, wrong[2])
    with pytest.raises(ValueError, match="expected one type"):
        matmul(x, normal(3, 64).half(), None, out)
    with pytest.raises(ValueError, match=r"A bias \[2\] does not fit"):
        matmul(x, normal(3, 64), normal(2), out)
    for scale, least in ((scales, None), (normal(3, 1), scales), (normal(2, 3).T, scales)):
        with pytest.raises(ValueError, match="expected int8 codes and scales"):
            quantised_matmul(x, codes, scale, least, None, out)
    with pytest.raises(ValueError, match="no whole groups of 32"):
        quantised_matmul(x[:, :48], coded(3, 48), normal(3, 1), normal(3, 1), None, out)
