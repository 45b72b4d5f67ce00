"""Matrices and activations that tests of linear layers share, and how exact their products have to be."""

import torch

from kvrelay.kernels.grouped_weights import to_int4, to_int8
from kvrelay.kernels.linear import operands
from kvrelay.kernels.linear_packing import Form, PackedWeights, pack_floats, pack_grouped, unpack_grouped


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(form: Form, outputs: int, columns: int) -> PackedWeights:
    """A random matrix in any form."""
    weights = random(outputs, columns, seed=outputs + columns) / 8
    match form:
        case Form.INT4:
            return pack_grouped(to_int4(weights))
        case Form.INT8:
            return pack_grouped(to_int8(weights))
        case _:
            return pack_floats(weights, form)


def rounding_errors(x: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """How far sums of float32 may be from exact ones: each of the operations rounds the sum of magnitudes at most.

    They are two roundings for a column of floats, and three for a group (minima, scales, products).
    """
    activations, matrix = operands(x, weights)
    steps = 2 * weights.columns
    if weights.form is Form.INT4:
        grouped = unpack_grouped(weights)
        assert grouped.minima is not None
        matrix = matrix.abs() + 2 * grouped.minima.float().abs().repeat_interleave(32, 1)[:, : weights.columns]
        steps = 3 * grouped.scales.shape[1]
    return (activations.abs() @ matrix.abs().T) * (steps + 2) * 2.0**-24
