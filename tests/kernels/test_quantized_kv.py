"""Heads in int8: close to what they were, each by itself, and not a number where a value was none."""

import pytest
import torch

from kvrelay.kernels.quantized_kv import dequantize_kv, quantize_kv, row_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 7, 64])
def test_values_come_back_within_half_a_unit_of_their_head(head_dim: int, dtype: torch.dtype) -> None:
    """Whatever the others are."""
    heads = (
        torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(1))
        * 10 ** torch.arange(-4.0, 1)[:, None, None]
    )
    heads = heads.to(dtype)
    rows = quantize_kv(heads)
    assert rows.dtype == torch.int8
    assert rows.shape == (5, 3, row_size(head_dim, torch.int8))
    unit = heads.float().abs().amax(-1, keepdim=True) / 127
    assert ((dequantize_kv(rows) - heads.float()).abs() <= unit * 0.5001).all()
    assert torch.equal(rows[2, 1], quantize_kv(heads[2, 1]))


def test_halves_of_a_unit_go_to_even() -> None:
    rows = quantize_kv(torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]))
    assert rows[:-4].tolist() == [127, 0, 2, 2, 0, -2, -127]
    assert dequantize_kv(rows).tolist() == [127, 0, 2, 2, 0, -2, -127]


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_next_to_nothing_is_nothing(value: float) -> None:
    """Its inverse is not finite."""
    assert dequantize_kv(quantize_kv(torch.tensor([value, 0.0]))).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_breaks_its_head_and_no_other(value: float) -> None:
    heads = torch.ones(2, 3)
    heads[1, 2] = value
    found = dequantize_kv(quantize_kv(heads), torch.bfloat16)
    assert found[0].tolist() == [1.0, 1.0, 1.0]
    assert found[1].isnan().all()


def test_other_types_have_no_scale() -> None:
    assert row_size(64, torch.bfloat16) == 64
