"""Products with a weight `[outputs, inputs]`, plain or of 8-bit codes: plain torch, in float64, and the choice."""

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import matmul_triton

GROUP = 32  # inputs that share a scale and a minimum


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out = x @ weight.T + bias`, summed in float32 in an order that does not depend on the number of rows.

    x `[N, inputs]`, its rows of any stride, weight `[outputs, inputs]`, of one type; bias `[outputs]`; out
    `[N, outputs]` of any type.

    Raises ValueError if the shapes or types are others.
    """
    _check(x, weight, bias, out)
    if weight.dtype != x.dtype:
        raise ValueError(f"A weight of {weight.dtype} does not fit {x.dtype}; expected one type.")
    if takes_triton(x):
        matmul_triton.matmul(x, weight, bias, out)
        return
    out.copy_(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))


def quantised_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """As `matmul`, of a weight of int8 codes `[outputs, inputs]`.

    Without minimums, `w = scale * code` with one scale for each output, `[outputs]`, applied to the sum. With them,
    `w = scale * code + minimum`, rounded to the type of x, with scales and minimums `[outputs, inputs / 32]`: the
    result has the bits of `matmul` with that weight.

    Raises ValueError if the shapes or types are others.
    """
    _check(x, codes, bias, out)
    outputs, inputs = codes.shape
    wanted = (outputs,) if minimums is None else (outputs, inputs // GROUP)
    others = [scales] if minimums is None else [scales, minimums]
    if codes.dtype != torch.int8 or any(each.shape != wanted or not each.is_contiguous() for each in others):
        raise ValueError(
            f"Codes {codes.dtype} {list(codes.shape)} and scales {list(scales.shape)} do not fit together; expected "
            f"int8 codes and scales, and minimums if any, {list(wanted)}, contiguous."
        )
    if minimums is not None and inputs % GROUP:
        raise ValueError(f"A weight of {inputs} inputs has no whole groups of {GROUP}.")
    if takes_triton(x):
        matmul_triton.quantised_matmul(x, codes, scales, minimums, bias, out)
        return
    weight = dequantised(codes, scales, minimums, torch.float64 if minimums is None else x.dtype).double()
    out.copy_(F.linear(x.double(), weight, None if bias is None else bias.double()))


def dequantised(
    codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight that codes stand for, `[outputs, inputs]`; see `quantised_matmul`."""
    if minimums is None:
        return (codes.double() * scales.double()[:, None]).to(dtype)
    groups = codes.view(len(codes), -1, GROUP).float()
    return (groups * scales.float()[..., None] + minimums.float()[..., None]).view(codes.shape).to(dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    shapes = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] and out.shape == (len(x), len(weight))
    if not shapes or not (x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"Rows {list(x.shape)}, a weight {list(weight.shape)} and a result {list(out.shape)} do not fit together; "
            "expected [N, inputs], [outputs, inputs] and [N, outputs], the last two contiguous."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"A bias {list(bias.shape)} does not fit a weight {list(weight.shape)}.")
