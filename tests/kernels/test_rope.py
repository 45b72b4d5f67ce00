"""Rotation and the write into the cache, interpreted: close to the float64 twin, and nothing else is written."""

from types import ModuleType

import pytest
import torch

from kvrelay.kernels.rope import rope_and_store
from kvrelay.model.layers import Rotation
from tests.kernels.interpreted import load_kernels
from tests.kernels.rotated import Shape, rotated

pytestmark = pytest.mark.usefixtures("interpreter")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SLOTS = [0, 37, -1, 5, 21]
SHAPES = (
    Shape(BF16, 9, 3, 64, 16),
    Shape(FP32, 4, 1, 128, 8),
    Shape(FP16, 2, 2, 80, 24, normed=True),
    Shape(BF16, 7, 1, 16, 9, normed=True, quantised=True),
    Shape(FP32, 1, 3, 20, 64, quantised=True),
)
CLOSE = {BF16: (2.0**-7, 1e-3), FP16: (2.0**-10, 1e-4), FP32: (2e-6, 2e-6)}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted."""
    return load_kernels("rope_triton", interpreted=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_close_to_the_twin(kernels: ModuleType, shape: Shape) -> None:
    found, twin = rotated(shape, SLOTS, module=kernels), rotated(shape, SLOTS)
    rtol, atol = CLOSE[shape.dtype]
    torch.testing.assert_close(found.q, twin.q, rtol=rtol, atol=atol)
    # Codes may differ by one where a value lies halfway.
    atol = 5.0 / 127 if shape.quantised else atol
    torch.testing.assert_close(found.values(), twin.values(), rtol=rtol, atol=atol, equal_nan=True)
    written = found.values().isfinite().all(-1).all(2).all(1).flatten().nonzero().flatten().tolist()
    assert written == sorted(slot for slot in SLOTS if slot >= 0)
    if shape.quantised:
        assert found.kv[found.scales != found.scales].eq(77).all()


def test_codes_hold_values_to_half_a_step() -> None:
    exact, coded = (rotated(Shape(FP32, 2, 2, 32, 8, quantised=quantised), SLOTS) for quantised in (False, True))
    assert coded.scales is not None
    off = (exact.values() - coded.values()).abs() / coded.scales[..., None]
    assert off[~off.isnan()].max() <= 0.5001
    assert coded.kv[coded.scales == coded.scales].abs().amax(-1).eq(127).all()


def test_a_token_has_the_same_bits_alone(kernels: ModuleType) -> None:
    shape = SHAPES[2]
    many, one = (rotated(shape, SLOTS, rows, kernels) for rows in (slice(None), slice(3, 4)))
    assert torch.equal(many.q[3:4], one.q)
    assert torch.equal(many.kv[0, ..., 5, :], one.kv[0, ..., 5, :])


def test_the_rotation_is_the_models() -> None:
    qkv, table = torch.randn(1, 3 * 8), torch.rand(2, 4, 8)
    q, kv = torch.empty(1, 1, 8), torch.empty(1, 2, 1, 4, 8)
    at = torch.tensor([3])
    rope_and_store(qkv, at, (table[0], table[1]), None, 0.0, at, q, kv)
    expected = Rotation(table[0, 3], table[1, 3])(qkv.view(1, 3, 8)[:, :1])
    torch.testing.assert_close(q, expected)


def test_what_does_not_fit_is_refused() -> None:
    qkv, table, at = torch.randn(1, 24), torch.rand(4, 8), torch.tensor([3])
    q, kv = torch.empty(1, 1, 8), torch.empty(1, 2, 1, 4, 8)
    for wrong in ((qkv[:, :16], at, q, kv), (qkv, at.int(), q, kv), (qkv, at, q.half(), kv), (qkv, at, q, kv[..., :4])):
        with pytest.raises(ValueError, match="do not fit together"):
            rope_and_store(wrong[0], wrong[1], (table, table), None, 0.0, at, wrong[2], wrong[3])
    with pytest.raises(ValueError, match="do not fit int8 KV"):
        rope_and_store(qkv, at, (table, table), None, 0.0, at, q, kv.to(torch.int8), torch.empty(1, 2, 1, 5))
