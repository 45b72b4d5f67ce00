"""The building blocks of a decoder layer, in plain torch. N is the number of packed token rows of a step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear map, or several of the same input whose outputs are joined (weights `[out, in]`, biases `[out]`).

    Several weights occur when a checkpoint is mapped as it is: joining them would copy what processes share.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in]` to `[N, sum of out]`."""
        outputs = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation in float32 (Zhang and Sennrich, 2019); the result has type `dtype`."""

    weight: torch.Tensor  # float32
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises over the last dimension of a float32 tensor."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of a step's positions, float32 `[N, 1, head_dim]`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates float32 heads `[N, heads, head_dim]`, pairing each element with the one half a head away."""
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * self.cos, torch.cat((second, first), dim=-1), self.sin)


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Rotary positions (Su et al., 2021), with per-frequency divisors for scaled contexts."""

    cos: torch.Tensor  # float32 [positions, head_dim]
    sin: torch.Tensor

    @classmethod
    def build(
        cls, theta: float, head_dim: int, divisors: tuple[float, ...], num_positions: int, device: torch.device
    ) -> "RotaryEmbedding":
        """Tables for all positions of the context; `divisors` is empty or has head_dim / 2 entries."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / theta**exponents
        if divisors:
            frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device))

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """The rotation of positions `[N]`."""
        return Rotation(self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None])


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """SiLU-gated feed-forward (Shazeer, 2020)."""

    gate_up: Projection
    down: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` to `[N, hidden]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
