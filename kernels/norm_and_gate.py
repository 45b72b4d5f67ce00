"""What happens to each row between the matrix products: plain torch, in float64, and the choice."""

import torch
import torch.nn.functional as F  # noqa: N812

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import norm_and_gate_triton


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Adds `delta` to the residual stream `hidden` in place, and puts its RMS norm, times `weight`, into `out`.

    hidden and weight float32, `[N, size]` and `[size]`; delta and out `[N, size]` of any type; all contiguous. Zhang
    and Sennrich, 2019.

    Raises ValueError if the shapes or types are others.
    """
    rows = [hidden, out] if delta is None else [hidden, out, delta]
    same = all(row.shape == hidden.shape and row.is_contiguous() for row in rows) and hidden.dim() == 2
    if not same or weight.shape != hidden.shape[1:] or not hidden.dtype == weight.dtype == torch.float32:
        raise ValueError(
            f"A residual stream {hidden.dtype} {list(hidden.shape)}, a weight {weight.dtype} {list(weight.shape)} and "
            f"a result {list(out.shape)} do not fit together; expected float32 [N, size] and [size], and [N, size]."
        )
    if takes_triton(hidden):
        norm_and_gate_triton.add_rms_norm(hidden, delta, weight, eps, out)
        return
    if delta is not None:
        hidden += delta
    out.copy_(F.rms_norm(hidden.double(), weight.shape, weight.double(), eps))


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`out = silu(gate) * up`, rounded once (Shazeer, 2020).

    gate_up `[N, 2 * size]`, gates first, out `[N, size]` of the same type; both contiguous.

    Raises ValueError if the shapes or types are others.
    """
    shapes = gate_up.dim() == out.dim() == 2 and gate_up.shape == (len(out), 2 * out.shape[1])
    if not shapes or gate_up.dtype != out.dtype or not (gate_up.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"Gates and values {gate_up.dtype} {list(gate_up.shape)} do not fit {out.dtype} {list(out.shape)}; "
            "expected [N, 2 * size] and [N, size] of one type, contiguous."
        )
    if takes_triton(gate_up):
        norm_and_gate_triton.silu_and_mul(gate_up, out)
        return
    gate, up = gate_up.double().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)
