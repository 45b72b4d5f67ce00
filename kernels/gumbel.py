"""Gumbel-max sampling with temperature, top-k, top-p and min-p, a row at a time: plain torch, and the choice.

The token with the largest score plus Gumbel noise is a draw from the softmax (Gumbel, 1954; Maddison et al., 2014).
The noise of a token is a function of (seed, sample, index, token id) alone: Philox4x64-10 (Salmon et al., 2011) under
the key (seed, sample); token t takes word t mod 4 of the counter (1 + t // 4, index, 0, 0).
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.kernels.launch import HAS_TRITON, takes_triton

if HAS_TRITON:
    from kvrelay.kernels import gumbel_triton

_WORD = 2**64


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each of N rows is sampled: tensors `[N]` on the logits' device."""

    temperature: torch.Tensor  # float64; 0 takes the best token
    top_k: torch.Tensor  # int32; tokens equal to the last that fits stay too; 0 or the vocabulary's size: all stay
    top_p: torch.Tensor  # float64; among equal tokens at the edge the lowest ids stay; 1 or more: all stay
    min_p: torch.Tensor  # float64, of the best token's probability; 0: all stay
    seeds: torch.Tensor  # int64, the bits of an unsigned number
    samples: torch.Tensor  # int64
    indexes: torch.Tensor  # int64, of the token that is drawn

    def fields(self) -> tuple[torch.Tensor, ...]:
        """All of them, in their order."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.samples, self.indexes


_TYPES = (torch.float64, torch.int32, torch.float64, torch.float64, torch.int64, torch.int64, torch.int64)


def sample_tokens(logits: torch.Tensor, sampling: RowSampling, out: torch.Tensor) -> None:
    """Draws a token id for each row of float32 logits `[N, vocab]` into out `[N]`, int64; the lowest of equal ones.

    min-p is applied first, then top-k, then top-p. A row whose best logit is no finite number gets -1. On a GPU the
    probabilities that top-p adds up are rounded to float32 before they are added.

    Raises ValueError if the shapes or types are others.
    """
    shapes = all(field.shape == logits.shape[:1] for field in (*sampling.fields(), out))
    types = tuple(field.dtype for field in sampling.fields()) == _TYPES and out.dtype == torch.int64
    if logits.dim() != 2 or logits.dtype != torch.float32 or not (shapes and types and logits.is_contiguous()):
        raise ValueError(
            f"Logits {logits.dtype} {list(logits.shape)}, {len(sampling.seeds)} settings and ids {out.dtype} "
            f"{list(out.shape)} do not fit together; expected float32 [N, vocab], N of each type named, int64 [N]."
        )
    if takes_triton(logits):
        gumbel_triton.sample(logits, sampling, out)
        return
    for row, values in enumerate(zip(*(field.tolist() for field in sampling.fields()), strict=True)):
        out[row] = _drawn(logits[row].double(), *values)


def _drawn(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, sample: int, index: int
) -> int:
    if not logits.max().isfinite():
        return -1
    if temperature == 0:
        return _first_best(logits)
    scores = (logits - logits.max()) / temperature
    if min_p > 0:
        scores[scores < np.log(min_p)] = -torch.inf
    if 0 < top_k < len(scores):
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        falling, ids = scores.sort(descending=True, stable=True)
        reached = falling.exp().cumsum(0)
        scores[ids[int((reached < top_p * scores.exp().sum()).sum()) + 1 :]] = -torch.inf
    return _first_best(scores + torch.from_numpy(_noise(seed, sample, index, len(scores))))


def _first_best(scores: torch.Tensor) -> int:
    return int((scores == scores.max()).nonzero()[0, 0])


def _noise(seed: int, sample: int, index: int, vocab: int) -> np.ndarray:
    key = np.array([seed % _WORD, sample % _WORD], np.uint64)
    words = np.random.Philox(key=key, counter=np.array([0, index % _WORD, 0, 0], np.uint64)).random_raw(vocab)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise
