"""Rows of activations as 8-bit integers with a scale for each group of 32: the native kernel and its plain twin."""

from dataclasses import dataclass

import torch

from kvrelay.kernels.native_library import NativeLibrary

GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A value is `codes * scales`; columns are filled up with zeros to whole groups of 32.

    codes int8 `[rows, groups * 32]`, -127 to 127; of float32 `[rows, groups]` are scales (the largest magnitude / 127)
    and sums (of the values of the group); offsets int32 `[rows, groups]` are -128 times the sum of the codes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        """How many rows."""
        return len(self.codes)

    @property
    def values(self) -> torch.Tensor:
        """What the integers stand for, float32 `[rows, groups * 32]`."""
        return (self.codes.view(len(self), -1, GROUP) * self.scales.unsqueeze(2)).flatten(1)


def quantize_rows(native: NativeLibrary, x: torch.Tensor, num_threads: int) -> QuantizedRows:
    """Quantises `x`, float32 `[rows, columns]`, finite and contiguous, on the CPU.

    Raises ValueError if it is something else.
    """
    check_rows(x)
    rows, columns = x.shape
    groups = -(-columns // GROUP)
    made = QuantizedRows(
        codes=torch.empty(rows, groups * GROUP, dtype=torch.int8),
        scales=torch.empty(rows, groups),
        sums=torch.empty(rows, groups),
        offsets=torch.empty(rows, groups, dtype=torch.int32),
    )
    outputs = (made.codes.data_ptr(), made.scales.data_ptr(), made.sums.data_ptr(), made.offsets.data_ptr())
    native.function("kvrelay_quantize_rows", "piippppi")(x.data_ptr(), rows, columns, *outputs, num_threads)
    return made


def quantize_rows_plain(x: torch.Tensor) -> QuantizedRows:
    """The twin of `quantize_rows` in plain torch, with the same bits."""
    check_rows(x)
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    most = groups.abs().amax(2)
    inverse = torch.where(most > 0, 127 / most, 0)
    codes = (groups * inverse.unsqueeze(2)).round()
    code_sums = codes.sum(2)
    scales = most / 127
    return QuantizedRows(
        codes.flatten(1).to(torch.int8), scales, scales * code_sums, (-128 * code_sums).to(torch.int32)
    )


def check_rows(x: torch.Tensor) -> None:
    """Raises ValueError if `x` cannot be rows of activations."""
    if x.dim() != 2 or x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"Activations of {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device} cannot be multiplied; "
            "expected float32 [rows, columns], contiguous and on the CPU."
        )
