"""The Triton kernels behind `norm_and_gate`: each row is computed by one program, or each value by itself."""

import torch
import triton
import triton.language as tl

_WIDTH = 1024


@triton.jit  # type: ignore[untyped-decorator]
def add_rms_norm_kernel(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    added: tl.constexpr,
) -> None:
    """Program n adds and normalises row n."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < size
    x = tl.load(hidden + row * size + column, mask=inside, other=0.0)
    if added:
        x += tl.load(delta + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * size + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    normed = x * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def silu_and_mul_kernel(gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, width: tl.constexpr) -> None:
    """Program (n, i) computes `width` values of row n."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < size
    gate = tl.load(gate_up + row * (2 * size) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * size) + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """See `norm_and_gate.add_rms_norm`, which has checked all of these."""
    num_rows, size = hidden.shape
    width = triton.next_power_of_2(size)
    add_rms_norm_kernel[(num_rows,)](
        hidden, hidden if delta is None else delta, weight, out, size, eps,
        width=width, added=delta is not None, enable_fp_fusion=False, num_warps=max(4, min(16, width // 512)),
    )  # fmt: skip


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See `norm_and_gate.silu_and_mul`, which has checked all of these."""
    num_rows, size = out.shape
    grid = (num_rows, triton.cdiv(size, _WIDTH))
    silu_and_mul_kernel[grid](gate_up, out, size, width=_WIDTH, enable_fp_fusion=False, num_warps=4)
