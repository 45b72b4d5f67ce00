"""Chooses the next token of every sequence from its logits.

Sampling is Gumbel-max (Gumbel, 1954; see Maddison et al., 2014): the token with the largest logit plus noise is a
draw from the softmax. Unlike drawing from cumulated probabilities, rounding in one logit cannot move all others.
"""

import numpy as np
import torch

from kvrelay.errors import InternalError
from kvrelay.model.noise import gumbel_noise
from kvrelay.types import SamplingParams, Sequence

_FLOORS = (-4.0, -8.0, -np.inf)  # logarithms of probabilities relative to the largest


class Sampler:
    """Stateless: the same logits and sequences always give the same tokens, each row by itself."""

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """The next token id for each row of logits `[rows, vocab]`; equal candidates go to the lowest id.

        Raises InternalError, naming the request, if a row's best logit is not a finite number.
        """
        rows = logits.float().cpu().numpy()
        best = rows.argmax(axis=1)  # numpy gives the first of equals, and NaN before any number
        return [self._next(row, int(top), sequence) for row, top, sequence in zip(rows, best, sequences, strict=True)]

    def _next(self, row: np.ndarray, best: int, sequence: Sequence) -> int:
        if not np.isfinite(row[best]):
            raise InternalError(f"Request {sequence.key.request_id}: the network gave {row[best]} as its best logit.")
        if sequence.params.temperature == 0.0:
            return best
        scores = filtered_logits(row, sequence.params)
        scores += gumbel_noise(sequence.params.seed, sequence.sample, sequence.num_generated_tokens, len(row))
        return int(scores.argmax())


def filtered_logits(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits after temperature, min_p, top_k and top_p, in vLLM's order: float64 `[vocab]`, -inf where excluded.

    The largest is 0. The softmax of the result is the distribution that is sampled from.
    """
    scores = row.astype(np.float64)
    scores -= scores.max()  # before the division, so that a tiny temperature gives -inf, never NaN
    with np.errstate(over="ignore"):
        scores /= params.temperature
    if params.min_p > 0.0:
        scores[scores < np.log(params.min_p)] = -np.inf
    if 0 < params.top_k < len(scores):
        # As in vLLM, tokens equal to the last one that fits stay too.
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    return _nucleus(scores, params.top_p) if params.top_p < 1.0 else scores


def _nucleus(scores: np.ndarray, top_p: float) -> np.ndarray:
    """Keeps the likeliest tokens until their probabilities reach top_p, the one that reaches it included.

    Among equal ones at the edge the lowest ids stay. Sorting values is much faster than sorting ids, so that the
    edge is found first and its ids after it.
    """
    wanted = top_p * np.exp(scores).sum()
    for floor in _FLOORS:  # only tokens above it are sorted, if they are enough
        falling = np.sort(scores[scores > floor])[::-1]
        reached = np.cumsum(np.exp(falling))
        if reached[-1] >= wanted:
            break
    num_kept = min(int(np.searchsorted(reached, wanted)) + 1, len(falling))
    edge = falling[num_kept - 1]
    inside = scores > edge
    at_edge = np.flatnonzero(scores == edge)
    kept = np.concatenate([np.flatnonzero(inside), at_edge[: num_kept - int(inside.sum())]])
    result = np.full_like(scores, -np.inf)
    result[kept] = scores[kept]
    return result
