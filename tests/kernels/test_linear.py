"""Linear layers over packed weights: near their twin, and the same bits whatever else is computed with a row."""

import pytest
import torch

from kvrelay.kernels.linear import LinearKernels, linear_plain
from kvrelay.kernels.linear_packing import Form
from kvrelay.kernels.native_library import NativeLibrary
from tests.kernels.matrices import packed, random, rounding_errors

SHAPES = [(1, 1), (16, 32), (17, 33), (15, 1), (40, 63), (64, 576), (96, 160)]
ROWS = [1, 2, 3, 7, 8, 9, 31, 129, 300]


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_products_are_those_of_the_twin(native: NativeLibrary, form: Form, outputs: int, columns: int) -> None:
    """At odd shapes, in few and in many rows."""
    kernels, weights = LinearKernels(native, num_threads=1), packed(form, outputs, columns)
    for rows in (1, 5, 20):
        x = random(rows, columns, seed=rows)
        error = (kernels(x, weights) - linear_plain(x, weights)).abs()
        assert torch.all(error <= rounding_errors(x, weights))


@pytest.mark.parametrize("form", Form)
def test_bias_and_residual_are_added(native: NativeLibrary, form: Form) -> None:
    """Once each, in the last tile too; and what is not asked for is not read."""
    kernels, weights, x = LinearKernels(native, num_threads=1), packed(form, 40, 96), random(9, 96)
    bias, residual = random(40, seed=1), random(9, 40, seed=2)
    product = kernels(x, weights)
    assert torch.equal(kernels(x, weights, bias), product + bias)
    assert torch.equal(kernels(x, weights, add_to=residual.clone()), residual + product)
    place = residual.clone()
    assert kernels(x, weights, bias, add_to=place) is place
    assert torch.equal(place, residual + (product + bias))


@pytest.mark.parametrize("form", Form)
def test_every_output_is_written_and_nothing_else(native: NativeLibrary, form: Form) -> None:
    """Into memory that is full of NaN, between other memory."""
    weights, x = packed(form, 40, 96), random(9, 96)
    around = torch.full((9 + 2, 40), torch.nan)
    function = native.function("kvrelay_linear", "ipiippiippi")
    number = list(Form).index(form)
    workspace = torch.full((9 * 96,), torch.nan)
    function(
        number,
        x.data_ptr(),
        9,
        96,
        weights.tiles.data_ptr(),
        None,
        40,
        0,
        around[1:].data_ptr(),
        workspace.data_ptr(),
        1,
    )
    assert torch.equal(around[1:-1], LinearKernels(native, num_threads=1)(x, weights))
    assert around[0].isnan().all()
    assert around[-1].isnan().all()


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_the_same_bits_alone_and_among_others(native: NativeLibrary, form: Form, rows: int) -> None:
    """In calls of one row, of two parts, and all at once; on one thread and on two."""
    weights, x = packed(form, 56, 160), random(rows, 160)
    kernels = LinearKernels(native, num_threads=1)
    whole = kernels(x, weights)
    assert torch.equal(torch.cat([kernels(row.unsqueeze(0), weights) for row in x]), whole)
    parts = [kernels(part.contiguous(), weights) for part in (x[: rows // 3], x[rows // 3 :])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(LinearKernels(native, num_threads=2)(x, weights), whole)


def test_rows_that_hold_nothing_finite_spoil_no_other(native: NativeLibrary) -> None:
    """A request whose numbers overflow fails alone."""
    for form in Form:
        weights, x = packed(form, 48, 96), random(9, 96)
        kernels = LinearKernels(native, num_threads=1)
        spoilt = x.clone()
        spoilt[4] = torch.inf
        rest = torch.arange(9) != 4
        assert torch.equal(kernels(spoilt, weights)[rest], kernels(x, weights)[rest])


@pytest.mark.parametrize("form", Form)
def test_a_call_of_no_rows_gives_none(native: NativeLibrary, form: Form) -> None:
    """As torch does."""
    assert LinearKernels(native, num_threads=1)(torch.empty(0, 32), packed(form, 16, 32)).shape == (0, 16)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": torch.zeros(2, 31)}, "Rows of 31 cannot be multiplied with weights of 32 columns"),
        ({"x": torch.zeros(2, 32, dtype=torch.float16)}, r"expected float32 \[rows, columns\]"),
        ({"bias": torch.zeros(17)}, r"bias is float32 \[17\].*expected float32 \[16\]"),
        ({"bias": torch.zeros(32)[::2]}, "contiguous"),
        ({"add_to": torch.zeros(3, 16)}, r"add_to is float32 \[3, 16\].*expected float32 \[2, 16\]"),
    ],
)
def test_what_does_not_fit_is_refused(native: NativeLibrary, changes: dict[str, torch.Tensor], sentence: str) -> None:
    """Before any memory is touched."""
    arguments = {"x": torch.zeros(2, 32), "weights": packed(Form.INT8, 16, 32), **changes}
    with pytest.raises(ValueError, match=sentence):
        LinearKernels(native, num_threads=1)(**arguments)  # type: ignore[arg-type]
