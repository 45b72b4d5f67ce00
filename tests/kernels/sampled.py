"""Rows to sample from, with ties, and settings of every kind."""

import random

import torch

from kvrelay.kernels.gumbel import RowSampling
from kvrelay.types import RequestKey, SamplingParams, Sequence


def tied_logits(num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """float32 with many equal ones, and some -inf; in every other row all are negative."""
    made = torch.Generator().manual_seed(seed)
    logits = (torch.randn((num_rows, vocab), generator=made) * 3).round(decimals=1)
    logits[1::2] -= 20
    return logits.masked_fill(torch.rand((num_rows, vocab), generator=made) < 0.05, -torch.inf)


def sequences(num_rows: int, vocab: int, seed: int) -> list[Sequence]:
    """Rows with filters of every kind, alone and together, as the model's sampler takes them."""
    chosen = random.Random(seed)
    return [_sequence(chosen, vocab) for _ in range(num_rows)]


def _sequence(chosen: random.Random, vocab: int) -> Sequence:
    params = SamplingParams(
        max_tokens=9,
        temperature=chosen.choice([0.0, 0.7, 1.0, 1.5, 1e-4, 1e-300]),
        top_k=chosen.choice([0, 0, 1, 5, vocab - 1, vocab, 2**31 - 1]),
        top_p=chosen.choice([1.0, 1.0, 0.95, 0.5, 1e-9]),
        min_p=chosen.choice([0.0, 0.0, 1e-3, 0.1, 1.0]),
        seed=chosen.randrange(2**64),
    )
    generated = chosen.randrange(1000)
    return Sequence(RequestKey("named", 0), chosen.randrange(8), 1, params, [0] * (3 + generated), 3)


def row_sampling(rows: list[Sequence], device: str = "cpu") -> RowSampling:
    """The same for the kernels."""

    def tensor(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return RowSampling(
        tensor([row.params.temperature for row in rows], torch.float64),
        tensor([row.params.top_k for row in rows], torch.int32),
        tensor([row.params.top_p for row in rows], torch.float64),
        tensor([row.params.min_p for row in rows], torch.float64),
        tensor([row.params.seed - (row.params.seed >> 63 << 64) for row in rows], torch.int64),
        tensor([row.sample for row in rows], torch.int64),
        tensor([row.num_generated_tokens for row in rows], torch.int64),
    )
