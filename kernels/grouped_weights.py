"""Matrices of weights as unsigned codes in groups of 32 columns, as GGUF has them or made of floating-point numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.kernels.quantized_rows import GROUP

_LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """A weight is `scale * code + minimum`, or `scale * (code - 128)` if there are no minima.

    codes uint8 `[outputs, groups * 32]`, below 16 if there are minima; scales and minima float16 `[outputs, groups]`.
    What fills up the last group means nothing, since activations there are zero.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    columns: int

    @property
    def values(self) -> torch.Tensor:
        """The weights in float32 `[outputs, columns]`."""
        codes = self.codes.view(*self.scales.shape, GROUP).float()
        scales = self.scales.float().unsqueeze(2)
        minima = -128 * scales if self.minima is None else self.minima.float().unsqueeze(2)
        return (scales * codes + minima).flatten(1)[:, : self.columns]


def joined(parts: list[GroupedWeights]) -> GroupedWeights:
    """The rows of several matrices of as many columns, one after the other; all of them have minima, or none has."""
    minima = [part.minima for part in parts if part.minima is not None]
    return GroupedWeights(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
        parts[0].columns,
    )


def from_q4_0(blocks: torch.Tensor) -> GroupedWeights:
    """Rows of Q4_0 blocks, uint8 `[outputs, groups * 18]`, with the very same values; ValueError if they are none.

    A block is a scale in float16 and 16 bytes of codes from which 8 is taken; the low halves come first.
    """
    split = _blocks(blocks, "Q4_0", 18)
    scales = _halves(split, 0)
    minima = -8 * scales
    if not torch.isfinite(minima).all():
        raise ValueError("Scales of Q4_0 above 8188 cannot be kept with their minima; use another quantisation.")
    return GroupedWeights(_nibbles(split[..., 2:]), scales, minima, split.shape[1] * GROUP)


def from_q4_1(blocks: torch.Tensor) -> GroupedWeights:
    """Rows of Q4_1 blocks, uint8 `[outputs, groups * 20]`: as `from_q4_0`, but the minimum follows the scale."""
    split = _blocks(blocks, "Q4_1", 20)
    return GroupedWeights(_nibbles(split[..., 4:]), _halves(split, 0), _halves(split, 2), split.shape[1] * GROUP)


def from_q8_0(blocks: torch.Tensor) -> GroupedWeights:
    """Rows of Q8_0 blocks, uint8 `[outputs, groups * 34]`: a scale in float16 and 32 signed codes."""
    split = _blocks(blocks, "Q8_0", 34)
    return GroupedWeights((split[..., 2:] ^ 0x80).flatten(1), _halves(split, 0), None, split.shape[1] * GROUP)


def to_int8(weights: torch.Tensor) -> GroupedWeights:
    """Quantises floating-point weights `[outputs, columns]`: off by half a step, 1/254 of a group's largest, at most.

    Raises ValueError if they are not finite or too large.
    """
    groups = _float_groups(weights)
    most = groups.abs().amax(2)
    scales = _halves_not_below(most / 127)
    codes = (groups / _divisors(scales)).round().clamp(-127, 127) + 128
    return GroupedWeights(codes.to(torch.uint8).flatten(1), scales, None, weights.shape[1])


def to_int4(weights: torch.Tensor) -> GroupedWeights:
    """Quantises floating-point weights `[outputs, columns]`: off by half a step, 1/30 of a group's range, at most.

    Raises ValueError if they are not finite or too large.
    """
    groups = _float_groups(weights)
    minima = -_halves_not_below(-groups.amin(2))
    scales = _halves_not_below((groups.amax(2) - minima.float()) / 15)
    codes = ((groups - minima.float().unsqueeze(2)) / _divisors(scales)).round().clamp(0, 15)
    return GroupedWeights(codes.to(torch.uint8).flatten(1), scales, minima, weights.shape[1])


FROM_GGUF: dict[str, Callable[[torch.Tensor], GroupedWeights]] = {
    "Q4_0": from_q4_0,
    "Q4_1": from_q4_1,
    "Q8_0": from_q8_0,
}


def _blocks(blocks: torch.Tensor, name: str, block_bytes: int) -> torch.Tensor:
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % block_bytes or not blocks.shape[1]:
        raise ValueError(
            f"Blocks of {str(blocks.dtype).removeprefix('torch.')} {list(blocks.shape)} are no rows of {name}; "
            f"expected uint8 [outputs, a multiple of {block_bytes}]."
        )
    return blocks.reshape(len(blocks), -1, block_bytes)


def _halves(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=2).flatten(1)


def _float_groups(weights: torch.Tensor) -> torch.Tensor:
    """float32 `[outputs, groups, 32]`. What fills up the last group repeats its last column, to change no range."""
    values = weights.float()
    if weights.dim() != 2 or not values.numel() or not (values.abs().amax() <= _LARGEST_HALF):
        raise ValueError(
            f"Weights of {list(weights.shape)} cannot be quantised; expected [outputs, columns], all of them "
            f"finite and {_LARGEST_HALF:g} in magnitude at most."
        )
    missing = -weights.shape[1] % GROUP
    return torch.cat((values, values[:, -1:].expand(-1, missing)), dim=1).view(len(values), -1, GROUP)


def _halves_not_below(values: torch.Tensor) -> torch.Tensor:
    """The nearest float16 that is not below: a smaller step, or a larger minimum, would cut off the ends of a group."""
    halves = values.to(torch.float16)
    return torch.where(halves.float() < values, torch.nextafter(halves, torch.full_like(halves, torch.inf)), halves)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: a group of equal values has none."""
    return torch.where(scales > 0, scales.float(), 1).unsqueeze(2)
