"""Weights as Triton's kernels read them: floating-point, or 8-bit codes in groups with a scale and a minimum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.checkpoint import Checkpoint
from kvrelay.errors import ModelError
from kvrelay.kernels.grouped_weights import GroupedWeights
from kvrelay.kernels.linear_packing import Form
from kvrelay.kernels.matmul import GROUP, dequantised, matmul, quantised_matmul
from kvrelay.model.config import ModelConfig
from kvrelay.model.network import FORMS
from kvrelay.model.packed_weights import Quantization, WeightPlanner
from kvrelay.model.tensors import check_tensors, expected_shapes, packing
from kvrelay.model.weights import open_reader

TritonWeights = Mapping[str, torch.Tensor | GroupedWeights]


class Matrix(Protocol):
    """A weight `[outputs, inputs]`, with a bias or not."""

    @property
    def num_outputs(self) -> int:
        """Rows of the weight."""
        ...

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Puts the product with x `[N, inputs]` into out `[N, outputs]`, of any type."""
        ...

    def rows(self, indexes: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, float32 `[N, inputs]`."""
        ...


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """See `Matrix`. weight `[outputs, inputs]`, of the type of what it multiplies; bias `[outputs]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        """See `Matrix`."""
        return len(self.weight)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Matrix`."""
        matmul(x, self.weight, self.bias, out)

    def rows(self, indexes: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        return self.weight.index_select(0, indexes).float()


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """See `Matrix`. codes int8 `[outputs, inputs]`, scales and minimums `[outputs, inputs / 32]`, bias `[outputs]`."""

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weights: GroupedWeights, bias: torch.Tensor | None, device: torch.device) -> "CodedMatrix":
        """From codes without a sign, which are 128 too large if there are no minima."""
        codes, scales = weights.codes.to(device), weights.scales.to(device)
        if weights.minima is None:
            return cls((codes ^ 0x80).view(torch.int8), scales, torch.zeros_like(scales), bias)
        return cls(codes.view(torch.int8), scales, weights.minima.to(device), bias)

    @property
    def num_outputs(self) -> int:
        """See `Matrix`."""
        return len(self.codes)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Matrix`."""
        quantised_matmul(x, self.codes, self.scales, self.minimums, self.bias, out)

    def rows(self, indexes: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        codes, scales, minimums = (each.index_select(0, indexes) for each in (self.codes, self.scales, self.minimums))
        return dequantised(codes, scales, minimums, torch.float32)


def read_grouped_weights(
    checkpoint: Checkpoint, config: ModelConfig, quantization: Quantization, device: torch.device
) -> TritonWeights:
    """The weights, named as in `packing(config)`, with matrices in groups where `quantization` says so.

    What is not stored so is quantised on the device. Raises ModelError if the checkpoint is damaged or does not fit
    `config`, or if a matrix has no whole groups.
    """
    reader, shapes = open_reader(checkpoint, config), expected_shapes(config)
    check_tensors(reader, shapes)
    planner = WeightPlanner(reader, shapes, config, quantization, Form.BF16)
    weights: dict[str, torch.Tensor | GroupedWeights] = {}
    for name, parts in packing(config).items():
        form = planner.form(name, parts)
        if form not in (Form.INT4, Form.INT8):
            weights[name] = planner.joined_floats(parts)
            continue
        if shapes[parts[0]][1] % GROUP:
            raise ModelError(
                f"{checkpoint.name}: {name} has {shapes[parts[0]][1]} inputs, no whole groups of {GROUP}, which a GPU "
                "needs to multiply it in 8 bits; set --quantization none."
            )
        weights[name] = planner.grouped(parts, form, device)
    return weights


class MatrixMaker:
    """Takes weights to a device, all of one type but what is kept in codes, and joins those of one product."""

    def __init__(self, config: ModelConfig, weights: TritonWeights, dtype: torch.dtype, device: torch.device) -> None:
        self._groups = {name: each for name, each in weights.items() if isinstance(each, GroupedWeights)}
        self._floats = {name: each for name, each in weights.items() if isinstance(each, torch.Tensor)}
        self._dtype = dtype
        self._device = device
        self._parts_of = packing(config)

    @property
    def forms(self) -> str:
        """Names what the KV that it computes depends on, such as `bf16` or `int4+int8`."""
        forms = {Form.INT8 if each.minima is None else Form.INT4 for each in self._groups.values()}
        return "+".join(sorted(forms)) or FORMS[self._dtype]

    def vector(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the packed form, whose parts are joined if the checkpoint has them apart."""
        parts = (name,) if name in self._floats else self._parts_of[name]
        found = [self._floats[part].to(self._device, dtype) for part in parts]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found)

    def linear(self, stem: str) -> Matrix:
        """The weight and, if there is one, the bias of a projection."""
        has_bias = f"{stem}.bias" in self._parts_of
        return self.matrix(f"{stem}.weight", self.vector(f"{stem}.bias", self._dtype) if has_bias else None)

    def matrix(self, name: str, bias: torch.Tensor | None = None) -> Matrix:
        """A weight of the packed form."""
        if name in self._groups:
            return CodedMatrix.of(self._groups[name], bias, self._device)
        return FloatMatrix(self.vector(name, self._dtype), bias)
