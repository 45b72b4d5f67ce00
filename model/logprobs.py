"""Logarithms of the probabilities that the network itself gives, before temperature and filters."""

from collections.abc import Iterable

import numpy as np
import torch

from kvrelay.types import LOWEST_LOGPROB, Sequence, TokenLogprobs, TopLogprob

_PART = 128  # logits


def logprobs_of(
    logits: torch.Tensor, sequences: list[Sequence], token_ids: Iterable[int]
) -> list[TokenLogprobs | None]:
    """For each row of logits `[rows, vocab]` what its sequence asks for, about the token that was sampled from it.

    Each row is looked at by itself, and one whose sequence asks for nothing not at all: None.
    """
    return [
        None if (num_top := sequence.params.logprobs) is None else token_logprobs(_float32(row), token_id, num_top)
        for row, sequence, token_id in zip(logits, sequences, token_ids, strict=True)
    ]


def token_logprobs(row: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural logarithms of the softmax of float32 logits `[vocab]`: of one token, and of the `num_top` likeliest.

    Computed in float64, in an order that depends on the vocabulary's size alone. The likeliest come first; equal
    logits by their ids, the lowest first.
    """
    scores = row.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    top = (TopLogprob(each, _told(scores[each])) for each in _likeliest(row, num_top))
    return TokenLogprobs(_told(scores[token_id]), tuple(top))


def _likeliest(row: np.ndarray, count: int) -> list[int]:
    """The ids of the largest logits.

    Only those that can be among them are sorted: as many parts of the row have a logit as large as the `count`-th of
    their maxima, so that no smaller one is among the largest.
    """
    if count == 0:
        return []
    candidates = np.arange(len(row))
    if count * _PART <= len(row):
        maxima = np.maximum.reduceat(row, candidates[::_PART])
        candidates = np.flatnonzero(row >= np.partition(maxima, -count)[-count])
    order = np.argsort(-row[candidates], kind="stable")
    likeliest: list[int] = candidates[order][:count].tolist()
    return likeliest


def _told(logprob: np.float64) -> float:
    return max(float(logprob), LOWEST_LOGPROB)


def _float32(row: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = row.float().cpu().numpy()
    return numbers
