"""Weights in the order in which the native kernels read them: `kernels/native/linear.h` describes each form."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from kvrelay.kernels.grouped_weights import GroupedWeights
from kvrelay.kernels.quantized_rows import GROUP

_LANES = 16  # outputs of a tile
_FOURS = 4  # columns that one instruction multiplies


class Form(StrEnum):
    """How weights are kept. Activations are quantised to 8 bits for the first two, and rounded to bfloat16 for bf16."""

    INT4 = "int4"
    INT8 = "int8"
    BF16 = "bf16"
    FP32 = "fp32"


_FLOATS = {Form.BF16: (torch.bfloat16, 2), Form.FP32: (torch.float32, 1)}  # and how many lie side by side


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A matrix `[outputs, columns]` as uint8 `[tiles, tile_bytes]`, one tile for each 16 outputs."""

    form: Form
    outputs: int
    columns: int
    tiles: torch.Tensor

    def __post_init__(self) -> None:
        """Raises ValueError if the tiles are not what the other fields say."""
        shape = packed_shape(self.form, self.outputs, self.columns)
        if self.tiles.dtype != torch.uint8 or self.tiles.shape != shape or not self.tiles.is_contiguous():
            raise ValueError(
                f"Packed weights of {str(self.tiles.dtype).removeprefix('torch.')} {list(self.tiles.shape)} are not "
                f"{self.outputs} x {self.columns} weights in {self.form}; expected uint8 {list(shape)}, contiguous."
            )


def packed_shape(form: Form, outputs: int, columns: int) -> tuple[int, int]:
    """The tiles that `outputs` x `columns` weights take, and the bytes of each."""
    groups = -(-columns // GROUP)
    tile_bytes = {
        Form.INT4: groups * (16 * GROUP // 2 + 64),
        Form.INT8: -(-groups // 2) * 2 * (16 * GROUP + 32),
        Form.BF16: -(-columns // 2) * 64,
        Form.FP32: columns * 64,
    }
    return -(-outputs // _LANES), tile_bytes[form]


def pack_grouped(weights: GroupedWeights) -> PackedWeights:
    """Packs 4-bit weights (those with minima) as int4, others as int8."""
    if weights.minima is None:
        form, tiles = Form.INT8, _pack_int8(weights.codes, weights.scales)
    else:
        form, tiles = Form.INT4, _pack_int4(weights.codes, weights.scales, weights.minima)
    return PackedWeights(form, len(weights.codes), weights.columns, tiles.flatten(1))


def pack_floats(weights: torch.Tensor, form: Form) -> PackedWeights:
    """Packs floating-point weights `[outputs, columns]` as bf16, rounded to the nearest, or fp32.

    Raises ValueError for other forms: `to_int8` and `to_int4` come before `pack_grouped`.
    """
    if form not in _FLOATS:
        raise ValueError(f"Floating-point weights cannot be packed as {form}; quantise them first.")
    outputs, columns = weights.shape
    dtype, width = _FLOATS[form]
    padded = _whole_tiles(torch.nn.functional.pad(weights, (0, -columns % width)))
    tiles = padded.to(dtype).view(-1, _LANES, -(-columns // width), width)
    return PackedWeights(form, outputs, columns, tiles.transpose(1, 2).contiguous().flatten(1).view(torch.uint8))


def unpack_grouped(weights: PackedWeights) -> GroupedWeights:
    """The inverse of `pack_grouped`, bit for bit. ValueError for other forms."""
    if weights.form not in (Form.INT4, Form.INT8):
        raise ValueError(f"Weights packed as {weights.form} are not in groups; use unpack_floats.")
    return _grouped_rows(weights, torch.arange(weights.outputs))


def unpack_floats(weights: PackedWeights) -> torch.Tensor:
    """The inverse of `pack_floats`: bfloat16 or float32 `[outputs, columns]`. ValueError for other forms."""
    if weights.form not in _FLOATS:
        raise ValueError(f"Weights packed as {weights.form} are in groups; use unpack_grouped.")
    return _float_rows(weights, torch.arange(weights.outputs))


def unpack_rows(weights: PackedWeights, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the matrix, float32 `[len(rows), columns]`: an embedding may be the last layer's weights too.

    rows is int64 `[rows]`, each below `outputs`. Only their own bytes are read, not the tiles they lie in.
    """
    return _float_rows(weights, rows).float() if weights.form in _FLOATS else _grouped_rows(weights, rows).values


def _float_rows(weights: PackedWeights, rows: torch.Tensor) -> torch.Tensor:
    dtype, width = _FLOATS[weights.form]
    units = weights.tiles.view(dtype).view(len(weights.tiles), -1, _LANES, width)
    return units[rows // _LANES, :, rows % _LANES].flatten(1)[:, : weights.columns]


def _grouped_rows(weights: PackedWeights, rows: torch.Tensor) -> GroupedWeights:
    unpack, groups = (_int4_rows if weights.form is Form.INT4 else _int8_rows), -(-weights.columns // GROUP)
    codes, scales, minima = unpack(weights.tiles, rows // _LANES, rows % _LANES, groups)
    return GroupedWeights(codes, scales, minima, weights.columns)


def _pack_int4(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """`[tiles, groups, 320]`: of a byte `[i, output, j]` the low half is column 4 * i + j, the high half 16 more."""
    halves = _whole_tiles(codes).view(-1, _LANES, scales.shape[1], 2, 4, _FOURS)
    both = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat((both, _pack_halves(scales), _pack_halves(minima)), dim=2)


def _int4_rows(
    tiles: torch.Tensor, tile: torch.Tensor, lane: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    parts = tiles.view(-1, groups, 320)
    both = parts[:, :, :256].view(-1, groups, 4, _LANES, _FOURS)[tile, :, :, lane]
    halves = parts[:, :, 256:].view(-1, groups, 2, _LANES, 2)[tile, :, :, lane].view(torch.float16)
    return torch.stack((both & 15, both >> 4), dim=2).flatten(1), halves[:, :, 0, 0], halves[:, :, 1, 0]


def _pack_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[tiles, pairs of groups, 1088]`: a byte `[i, output, j]` is column 4 * i + j."""
    ordered = _whole_tiles(codes).view(-1, _LANES, scales.shape[1], 8, _FOURS).permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat((_pairs(ordered), _pairs(_pack_halves(scales))), dim=2)


def _int8_rows(
    tiles: torch.Tensor, tile: torch.Tensor, lane: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    parts = tiles.view(len(tiles), -1, 1088)
    pairs = parts.shape[1]
    codes = parts[:, :, :1024].view(-1, pairs, 2, 8, _LANES, _FOURS)[tile, :, :, :, lane].flatten(1)
    halves = parts[:, :, 1024:].view(-1, pairs, 2, _LANES, 2)[tile, :, :, lane].view(torch.float16).flatten(1)
    return codes[:, : groups * GROUP], halves[:, :groups], None


def _pack_halves(halves: torch.Tensor) -> torch.Tensor:
    """float16 `[outputs, groups]` as bytes `[tiles, groups, 32]`."""
    return _whole_tiles(halves).view(-1, _LANES, halves.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _pairs(parts: torch.Tensor) -> torch.Tensor:
    """`[tiles, groups, bytes]` as `[tiles, pairs of groups, 2 * bytes]`."""
    return torch.nn.functional.pad(parts, (0, 0, 0, parts.shape[1] % 2)).view(len(parts), -1, 2 * parts.shape[2])


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    missing = rows.new_zeros(-len(rows) % _LANES, *rows.shape[1:])
    return torch.cat((rows, missing)) if len(missing) else rows
