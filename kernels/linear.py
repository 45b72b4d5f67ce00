"""Linear layers over packed weights: the native kernels, and their plain twin.

The bits of a row's products depend on that row alone: not on other rows, and not on the number of threads.
"""

import torch

from kvrelay.kernels.linear_packing import Form, PackedWeights, unpack_floats, unpack_grouped
from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.quantized_rows import GROUP, check_rows, quantize_rows_plain

# As `kernels/native/linear.h` numbers them.
FORM_NUMBERS = {form: number for number, form in enumerate((Form.INT4, Form.INT8, Form.BF16, Form.FP32))}

_BLOCK_ROWS = 16
_WORKSPACE_FLOATS = 16 * _BLOCK_ROWS  # for each block of rows and group of columns: kWorkspaceBytes


class LinearKernels:
    """Multiplies rows of activations with packed weights, on `num_threads` threads."""

    def __init__(self, native: NativeLibrary, num_threads: int) -> None:
        self.num_threads = num_threads
        self._linear = native.function("kvrelay_linear", "ipiippiippi")

    def __call__(
        self,
        x: torch.Tensor,
        weights: PackedWeights,
        bias: torch.Tensor | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x @ weights.T + bias` in float32 `[rows, outputs]`, added to `add_to` in its place if that is given.

        x is float32 `[rows, columns]` and finite, bias float32 `[outputs]`, add_to float32 `[rows, outputs]`; all
        contiguous and on the CPU. Raises ValueError if they are not.
        """
        check_linear(x, weights, bias, add_to)
        out = torch.empty(len(x), weights.outputs) if add_to is None else add_to
        workspace = torch.empty(-(-len(x) // _BLOCK_ROWS), -(-weights.columns // GROUP), _WORKSPACE_FLOATS)
        self._linear(
            FORM_NUMBERS[weights.form],
            x.data_ptr(),
            *x.shape,
            weights.tiles.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.outputs,
            add_to is not None,
            out.data_ptr(),
            workspace.data_ptr(),
            self.num_threads,
        )
        return out


def linear_plain(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None = None, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `LinearKernels` in plain torch: the same activations and weights, multiplied in float64."""
    check_linear(x, weights, bias, add_to)
    activations, matrix = operands(x, weights)
    out = activations.double() @ matrix.double().T
    if bias is not None:
        out += bias
    return out.float() if add_to is None else add_to.add_(out.float())


def operands(x: torch.Tensor, weights: PackedWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels multiply: activations and weights after quantising or rounding, in float32."""
    match weights.form:
        case Form.INT4 | Form.INT8:
            return quantize_rows_plain(x).values[:, : weights.columns], unpack_grouped(weights).values
        case Form.BF16:
            return x.to(torch.bfloat16).float(), unpack_floats(weights).float()
        case Form.FP32:
            return x, unpack_floats(weights)


def check_linear(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, add_to: torch.Tensor | None
) -> None:
    """Raises ValueError if these cannot be multiplied."""
    check_rows(x)
    if x.shape[1] != weights.columns:
        raise ValueError(f"Rows of {x.shape[1]} cannot be multiplied with weights of {weights.columns} columns.")
    shapes = {"bias": (bias, (weights.outputs,)), "add_to": (add_to, (len(x), weights.outputs))}
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}; "
                f"expected float32 {list(shape)}, contiguous and on the CPU."
            )
