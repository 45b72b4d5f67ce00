"""Weights as the native kernels read them: packed once per machine into a file that all workers map.

Matrices that a GGUF file keeps in groups of 32 stay what they are; others are quantised, or keep their precision.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from kvrelay.checkpoint import Checkpoint
from kvrelay.kernels.grouped_weights import GroupedWeights, joined, to_int4, to_int8
from kvrelay.kernels.linear_packing import Form, PackedWeights, pack_floats, pack_grouped, packed_shape
from kvrelay.model.config import ModelConfig
from kvrelay.model.tensors import (
    EMBEDDING,
    LM_HEAD,
    Shape,
    TensorReader,
    check_tensors,
    expected_shapes,
    packing,
)
from kvrelay.model.weight_cache import TensorSpec, cached_weights
from kvrelay.model.weights import conversion_progress, open_reader

_CPU = torch.device("cpu")


class Quantization(StrEnum):
    """How matrices are kept. AUTO takes the file's own, and for what is stored otherwise quantised, 8 bits."""

    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a network: packed matrices, and as floats vectors and an embedding of its own."""

    matrices: Mapping[str, PackedWeights]
    tensors: Mapping[str, torch.Tensor]

    @property
    def forms(self) -> str:
        """Names what the KV that it computes depends on, such as `int4+int8`."""
        return "+".join(sorted({matrix.form for matrix in self.matrices.values()}))


def read_packed_weights(
    checkpoint: Checkpoint, config: ModelConfig, quantization: Quantization, dtype: torch.dtype, cache_dir: Path
) -> PackedModel:
    """Maps the packed weights into memory that all processes of the machine share; named as in `packing(config)`.

    `dtype`, bfloat16 or float32, is that of what is not quantised. Raises ModelError if the checkpoint is damaged or
    does not fit `config`, StartError if the cache cannot be written.
    """
    reader, shapes = open_reader(checkpoint, config), expected_shapes(config)
    check_tensors(reader, shapes)
    parts_of = packing(config)
    planner = WeightPlanner(reader, shapes, config, quantization, Form.BF16 if dtype is torch.bfloat16 else Form.FP32)
    forms = {name: planner.form(name, parts) for name, parts in parts_of.items()}
    with conversion_progress(checkpoint, len(parts_of), "for the CPU kernels") as advance:
        specs = {name: planner.spec(name, parts, forms[name], advance) for name, parts in parts_of.items()}
        stored = cached_weights(checkpoint.fingerprint, list(specs.values()), cache_dir)
    found = {name: stored[spec.name] for name, spec in specs.items()}
    matrices = {
        name: PackedWeights(form, *_matrix_shape(shapes, parts_of[name]), found[name])
        for name, form in forms.items()
        if form is not None
    }
    return PackedModel(matrices, {name: found[name] for name, form in forms.items() if form is None})


@dataclass(frozen=True, slots=True)
class WeightPlanner:
    """What becomes of each tensor. `floats` is the form of matrices that are not quantised."""

    reader: TensorReader
    shapes: Mapping[str, Shape]
    config: ModelConfig
    quantization: Quantization
    floats: Form

    def form(self, name: str, parts: tuple[str, ...]) -> Form | None:
        """None: it stays a plain tensor."""
        if len(self.shapes[parts[0]]) == 1 or (name == EMBEDDING and not self.config.tied_embeddings):
            return None
        match self.quantization:
            case Quantization.NONE:
                return self.floats
            case Quantization.INT8:
                return Form.INT8
            case Quantization.INT4:  # every token's choice depends on these few
                return Form.INT8 if name in (EMBEDDING, LM_HEAD) else Form.INT4
            case Quantization.AUTO:
                return self._own_form(parts)

    def _own_form(self, parts: tuple[str, ...]) -> Form:
        forms = {self.reader.form(part) for part in parts}
        if len(forms) == 1 and (form := forms.pop()) is not None:
            return form
        return Form.INT8 if any(self.reader.dtype(part) is None for part in parts) else self.floats

    def spec(self, name: str, parts: tuple[str, ...], form: Form | None, advance: Callable[[], None]) -> TensorSpec:
        """The tensor in the cache file."""
        if form is None:
            shape, dtype = self._plain(parts)
            return TensorSpec(name, shape, dtype, lambda: _counted(advance, lambda: self.joined_floats(parts)))
        packed = packed_shape(form, *_matrix_shape(self.shapes, parts))
        return TensorSpec(
            f"{name}.{form}", packed, torch.uint8, lambda: _counted(advance, lambda: self._packed(parts, form).tiles)
        )

    def _plain(self, parts: tuple[str, ...]) -> tuple[Shape, torch.dtype]:
        shape = self.shapes[parts[0]]
        is_matrix = len(shape) == 2 and self.floats is Form.BF16
        return (sum(self.shapes[part][0] for part in parts), *shape[1:]), torch.bfloat16 if is_matrix else torch.float32

    def joined_floats(self, parts: tuple[str, ...]) -> torch.Tensor:
        """A tensor that is not quantised."""
        return torch.cat([self.reader.read(part) for part in parts])

    def _packed(self, parts: tuple[str, ...], form: Form) -> PackedWeights:
        if form in (Form.BF16, Form.FP32):
            return pack_floats(self.joined_floats(parts), form)
        return pack_grouped(self.grouped(parts, form))

    def grouped(self, parts: tuple[str, ...], form: Form, device: torch.device = _CPU) -> GroupedWeights:
        """A matrix in INT4 or INT8, as it is stored or quantised on a device."""
        if all(self.reader.form(part) is form for part in parts):
            return joined([self.reader.grouped(part) for part in parts])
        return (to_int4 if form is Form.INT4 else to_int8)(self.joined_floats(parts).to(device))


def _counted(advance: Callable[[], None], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    advance()
    return make()


def _matrix_shape(shapes: Mapping[str, Shape], parts: tuple[str, ...]) -> tuple[int, int]:
    return sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
