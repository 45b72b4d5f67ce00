"""Norms and gates, interpreted: close to the float64 twins, each row by itself."""

from types import ModuleType

import pytest
import torch

from kvrelay.kernels.norm_and_gate import add_rms_norm, silu_and_mul
from tests.kernels.interpreted import load_kernels

pytestmark = pytest.mark.usefixtures("interpreter")

ROUNDED = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 4e-6}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted."""
    return load_kernels("norm_and_gate_triton", interpreted=True)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    """float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 7), (5, 576), (2, 1025)])
@pytest.mark.parametrize("added", [True, False])
def test_norm(kernels: ModuleType, num_rows: int, size: int, dtype: torch.dtype, added: bool) -> None:
    hidden, delta, weight = normal(num_rows, size), normal(num_rows, size, seed=2).to(dtype), normal(size, seed=3)
    twin, out = hidden.clone(), torch.full((num_rows, size), torch.nan, dtype=dtype)
    expected = out.clone()
    kernels.add_rms_norm(hidden, delta if added else None, weight, 1e-5, out)
    add_rms_norm(twin, delta if added else None, weight, 1e-5, expected)
    assert torch.equal(hidden, twin)
    torch.testing.assert_close(out, expected, rtol=ROUNDED[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 1024), (2, 1537)])
def test_silu(kernels: ModuleType, num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (normal(num_rows, 2 * size) * 4).to(dtype)
    out = torch.full((num_rows, size), torch.nan, dtype=dtype)
    expected = out.clone()
    kernels.silu_and_mul(gate_up, out)
    silu_and_mul(gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=ROUNDED[dtype], atol=1e-6)


def test_a_row_has_the_same_bits_alone(kernels: ModuleType) -> None:
    hidden, gate_up = normal(9, 100), normal(9, 200)
    many, one = torch.empty(9, 100), torch.empty(1, 100)
    kernels.add_rms_norm(hidden, None, hidden[0], 1e-5, many)
    kernels.add_rms_norm(hidden[7:8].clone(), None, hidden[0], 1e-5, one)
    assert torch.equal(many[7:8], one)
    kernels.silu_and_mul(gate_up, many)
    kernels.silu_and_mul(gate_up[7:8].clone(), one)
    assert torch.equal(many[7:8], one)


@pytest.mark.parametrize(
    ("hidden", "weight", "out"),
    [
        (normal(2, 4).double(), normal(4), normal(2, 4)),
        (normal(2, 4), normal(5), normal(2, 4)),
        (normal(2, 4), normal(4), normal(2, 5)),
        (normal(2, 8)[:, ::2], normal(4), normal(2, 4)),
    ],
)
def test_norms_of_what_does_not_fit_are_refused(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="do not fit together; expected float32"):
        add_rms_norm(hidden, None, weight, 1e-5, out)


@pytest.mark.parametrize("gate_up", [normal(2, 9), normal(2, 8).half(), normal(2, 16)[:, ::2], normal(3, 8)])
def test_gates_that_do_not_fit_are_refused(gate_up: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \[N, 2 \* size\]"):
        silu_and_mul(gate_up, normal(2, 4))
