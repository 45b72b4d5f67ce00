"""The Triton kernels behind `matmul`: one program sums one tile of the result over all inputs, in one loop.

The tile and the depth of a step follow from the weight's shape and type alone, never from the number of rows: an
output is the same sum in the same order, by the same matrix instructions, whatever rows are beside it. 64 rows are what
Hopper's instruction computes anyway. Few rows leave most of a tile empty, which costs nothing while the weights are
what is waited for; a weight with few outputs gets narrower tiles, so that enough programs read it. Code is
not specialised on the number of rows either, which also spares compiling it again while requests wait.
"""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import dot_options

_ROWS = 64
_NEIGHBOURS = 8  # tiles of rows that run at a time, so that they find each other's inputs in the cache
_MIN_PROGRAMS = 96
GROUP = 32


@triton.jit  # type: ignore[untyped-decorator]
def _tile(num_rows: tl.tensor, num_outputs: tl.tensor, rows: tl.constexpr, outputs: tl.constexpr, near: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and outputs of a program: `near` tiles of rows by all of outputs, then the next ones."""
    number = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(num_rows, rows), tl.cdiv(num_outputs, outputs)
    first = number // (near * output_tiles) * near
    height = tl.minimum(row_tiles - first, near)
    within = number % (near * output_tiles)
    row = (first + within % height) * rows + tl.arange(0, rows)
    output = within // height * outputs + tl.arange(0, outputs)
    return row.to(tl.int64), output.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def matmul_kernel(
    x: tl.tensor,
    x_row: tl.tensor,  # stride
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    depth: tl.constexpr,
    near: tl.constexpr,
    biased: tl.constexpr,
) -> None:
    """Each program computes `rows` x `outputs` values of `x @ weight.T + bias`."""
    row, output = _tile(num_rows, num_outputs, rows, outputs, near)
    step = tl.arange(0, depth)
    acc = tl.zeros((rows, outputs), tl.float32)
    for start in range(0, num_inputs, depth):
        inside = start + step < num_inputs
        a = tl.load(
            x + row[:, None] * x_row + (start + step)[None, :],
            mask=(row < num_rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + output[None, :] * num_inputs + (start + step)[:, None],
            mask=(output < num_outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if biased:
        acc += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(out + row[:, None] * num_outputs + output[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def quantised_matmul_kernel(
    x: tl.tensor,
    x_row: tl.tensor,  # stride
    codes: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    depth: tl.constexpr,
    near: tl.constexpr,
    group: tl.constexpr,  # inputs that share a scale and a minimum; 0: all of an output share a scale
    biased: tl.constexpr,
) -> None:
    """As `matmul_kernel`, of a weight that is made from codes on the way, or scaled once summed."""
    row, output = _tile(num_rows, num_outputs, rows, outputs, near)
    step = tl.arange(0, depth)
    known = output < num_outputs
    acc = tl.zeros((rows, outputs), tl.float32)
    for start in range(0, num_inputs, depth):
        inside = start + step < num_inputs
        a = tl.load(
            x + row[:, None] * x_row + (start + step)[None, :],
            mask=(row < num_rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            codes + output[:, None] * num_inputs + (start + step)[None, :],
            mask=known[:, None] & inside[None, :],
            other=0,
        )
        if group > 0:
            number: tl.constexpr = depth // group
            part = start // group + tl.arange(0, number)
            place = output[:, None] * (num_inputs // group) + part[None, :]
            grouped = known[:, None] & (part < num_inputs // group)[None, :]
            scale = tl.load(scales + place, mask=grouped, other=0.0).to(tl.float32)[:, :, None]
            minimum = tl.load(minimums + place, mask=grouped, other=0.0).to(tl.float32)[:, :, None]
            values = tl.reshape(b.to(tl.float32), (outputs, number, group)) * scale + minimum
            b = tl.reshape(values, (outputs, depth))
        acc = tl.dot(a, tl.trans(b.to(a.dtype)), acc, input_precision="ieee")
    if group == 0:
        acc *= tl.load(scales + output, mask=known, other=0.0).to(tl.float32)[None, :]
    if biased:
        acc += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)[None, :]
    mask = (row < num_rows)[:, None] & known[None, :]
    tl.store(out + row[:, None] * num_outputs + output[None, :], acc.to(out.dtype.element_ty), mask=mask)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See `matmul.matmul`, which has checked all of these."""
    num_outputs, num_inputs = weight.shape
    shape = _shape(num_outputs, x.dtype)
    matmul_kernel[_grid(len(x), num_outputs, shape)](
        x, x.stride(0), weight, weight if bias is None else bias, out, len(x), num_outputs, num_inputs,
        **shape, biased=bias is not None, enable_fp_fusion=False, num_warps=4, **dot_options(4),
    )  # fmt: skip


def quantised_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `matmul.quantised_matmul`, which has checked all of these."""
    num_outputs, num_inputs = codes.shape
    shape = _shape(num_outputs, x.dtype)
    quantised_matmul_kernel[_grid(len(x), num_outputs, shape)](
        x, x.stride(0), codes, scales, scales if minimums is None else minimums, scales if bias is None else bias, out,
        len(x), num_outputs, num_inputs, **shape, group=0 if minimums is None else GROUP,
        biased=bias is not None, enable_fp_fusion=False, num_warps=4, **dot_options(4),
    )  # fmt: skip


def _grid(num_rows: int, num_outputs: int, shape: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(num_rows, shape["rows"]) * triton.cdiv(num_outputs, shape["outputs"]),)


def _shape(num_outputs: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:
        return {"rows": 16, "outputs": 32, "depth": GROUP, "near": _NEIGHBOURS}
    outputs = 128
    while outputs > 32 and triton.cdiv(num_outputs, outputs) < _MIN_PROGRAMS:
        outputs //= 2
    return {"rows": _ROWS, "outputs": outputs, "depth": 64, "near": _NEIGHBOURS}
