"""Weights of GGUF stay what they are, others are quantised within half a step, and packing loses nothing."""

import gguf
import numpy as np
import pytest
import torch

from kvrelay.kernels.grouped_weights import FROM_GGUF, GroupedWeights, from_q4_0, from_q8_0, to_int4, to_int8
from kvrelay.kernels.linear_packing import (
    Form,
    PackedWeights,
    pack_floats,
    pack_grouped,
    packed_shape,
    unpack_floats,
    unpack_grouped,
    unpack_rows,
)

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
SHAPES = [(1, 1), (15, 31), (16, 32), (17, 33), (48, 96), (33, 64)]


def random_blocks(name: str, outputs: int = 19, groups: int = 3) -> torch.Tensor:
    """Rows of blocks of any bytes, with scales and minima that are finite and of both signs."""
    generator = np.random.default_rng(7)
    blocks = generator.integers(0, 256, (outputs, groups, BLOCK_BYTES[name]), dtype=np.uint8)
    halves = generator.standard_normal((outputs, groups, 2)).astype(np.float16)
    halves[0, 0] = 6e-8, -6e-8  # the smallest that are not zero
    num_halves = 2 if name == "Q4_1" else 1
    blocks[..., : 2 * num_halves] = halves[..., :num_halves].copy().view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def same(a: GroupedWeights, b: GroupedWeights) -> bool:
    """Bit for bit, but for what fills up the last group."""
    minima = (a.minima is None and b.minima is None) or (
        a.minima is not None and b.minima is not None and torch.equal(a.minima, b.minima)
    )
    return minima and torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and a.columns == b.columns


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_blocks_of_gguf_keep_their_values(name: str) -> None:
    """Those that the gguf package reads from them, but for the rounding of its own products and sums."""
    blocks = random_blocks(name)
    values = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    torch.testing.assert_close(FROM_GGUF[name](blocks).values, torch.from_numpy(values), rtol=2.0**-22, atol=2.0**-20)


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_packing_blocks_loses_nothing(name: str) -> None:
    """Also where neither outputs nor groups fill their tiles."""
    weights = FROM_GGUF[name](random_blocks(name))
    assert same(unpack_grouped(pack_grouped(weights)), weights)


@pytest.mark.parametrize("columns", [31, 45, 64, 70])
@pytest.mark.parametrize("form", Form)
def test_rows_are_those_of_the_whole_matrix(form: Form, columns: int) -> None:
    weights = torch.randn(37, columns, generator=torch.Generator().manual_seed(3))
    quantise = {Form.INT4: to_int4, Form.INT8: to_int8}
    packed = pack_grouped(quantise[form](weights)) if form in quantise else pack_floats(weights, form)
    whole = unpack_grouped(packed).values if form in quantise else unpack_floats(packed).float()
    rows = torch.tensor([36, 0, 15, 16, 0])
    assert torch.equal(unpack_rows(packed, rows), whole[rows])


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@pytest.mark.parametrize("form", [Form.BF16, Form.FP32])
def test_packing_floats_loses_nothing(form: Form, outputs: int, columns: int) -> None:
    """At any shape."""
    weights = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(1))
    expected = weights.to(torch.bfloat16) if form is Form.BF16 else weights
    assert torch.equal(unpack_floats(pack_floats(weights, form)), expected)


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 3e4])
def test_quantised_weights_are_off_by_half_a_step(outputs: int, columns: int, magnitude: float) -> None:
    """The step is a float16, rounded up, so that the ends of a group are not cut off; and packing loses nothing."""
    weights = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(1)).clamp(-2, 2) * magnitude
    for quantise in (to_int8, to_int4):
        grouped = quantise(weights)
        half_step = grouped.scales.float().repeat_interleave(32, 1)[:, :columns] / 2
        assert torch.all((grouped.values - weights).abs() <= half_step * 1.001)
        unpacked = unpack_grouped(pack_grouped(grouped))
        assert same(unpacked, grouped)


def test_equal_weights_are_kept() -> None:
    """Groups without a range, of zeros too, have no step to divide by."""
    weights = torch.tensor([0.0, 0.5, -0.25]).unsqueeze(1).expand(3, 40)
    assert torch.equal(to_int4(weights).values, weights)
    torch.testing.assert_close(to_int8(weights).values, weights, rtol=1e-3, atol=0)


def test_rows_can_be_joined_before_packing() -> None:
    """As q, k and v are."""
    blocks = random_blocks("Q4_1")
    joined = pack_grouped(FROM_GGUF["Q4_1"](torch.cat((blocks[:5], blocks[5:]))))
    assert torch.equal(joined.tiles, pack_grouped(FROM_GGUF["Q4_1"](blocks)).tiles)


@pytest.mark.parametrize(
    "weights", [torch.tensor([[torch.nan]]), torch.tensor([[7e4]]), torch.zeros(3), torch.zeros(0, 4)]
)
def test_weights_that_cannot_be_quantised_are_refused(weights: torch.Tensor) -> None:
    """Not finite, too large for a float16 scale, or no matrix."""
    for quantise in (to_int8, to_int4):
        with pytest.raises(ValueError, match="cannot be quantised"):
            quantise(weights)


def test_what_is_not_what_it_says_is_refused() -> None:
    """Blocks of another kind, scales whose minima overflow, tiles of another matrix, forms of the other kind."""
    with pytest.raises(ValueError, match="no rows of Q8_0"):
        from_q8_0(random_blocks("Q4_1"))
    large = torch.zeros(1, 18, dtype=torch.uint8)
    large[0, 1] = 0x7B  # a scale of 57344
    with pytest.raises(ValueError, match="above 8188"):
        from_q4_0(large)
    packed = pack_grouped(from_q8_0(random_blocks("Q8_0")))
    with pytest.raises(ValueError, match="expected uint8"):
        PackedWeights(Form.INT4, packed.outputs, packed.columns, packed.tiles)
    with pytest.raises(ValueError, match="unpack_grouped"):
        unpack_floats(packed)
    with pytest.raises(ValueError, match="unpack_floats"):
        unpack_grouped(pack_floats(torch.zeros(2, 2), Form.FP32))
    with pytest.raises(ValueError, match="quantise them first"):
        pack_floats(torch.zeros(2, 2), Form.INT8)


def test_the_shapes_of_the_bundled_model() -> None:
    """Bytes per weight: 5, 8.5, 16 and 32 bits."""
    sizes = {form: packed_shape(form, 960, 576) for form in Form}
    assert sizes == {Form.INT4: (60, 5760), Form.INT8: (60, 9792), Form.BF16: (60, 18432), Form.FP32: (60, 36864)}
