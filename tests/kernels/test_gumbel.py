"""Sampling, interpreted: the very tokens of the twin and of the model's sampler."""

from types import ModuleType

import numpy as np
import pytest
import torch

from kvrelay.kernels.gumbel import sample_tokens
from kvrelay.model.sampler import Sampler
from tests.kernels.interpreted import load_kernels
from tests.kernels.sampled import row_sampling, sequences, tied_logits

# Infinite logits are meant, and numpy, which interprets, remarks on their differences.
pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted, with tiles of which a small vocabulary fills several."""
    module = load_kernels("gumbel_triton", interpreted=True)
    vars(module)["_SCANNED"] = 256
    vars(module)["_PICKED"] = 64
    return module


def sampled(kernels: ModuleType, logits: torch.Tensor, rows: int, seed: int, only: slice = slice(None)) -> list[int]:
    """What the kernels draw for some of the rows."""
    settings = row_sampling(sequences(rows, logits.shape[1], seed)[only])
    out = torch.full((len(settings.seeds),), -7)
    kernels.sample(logits[only].contiguous(), settings, out)
    ids: list[int] = out.tolist()
    return ids


def test_tokens_are_those_of_twin_and_sampler(kernels: ModuleType) -> None:
    rows, vocab = 16, 331
    logits, known = tied_logits(rows, vocab, seed=1), sequences(rows, vocab, seed=2)
    twin = torch.empty(rows, dtype=torch.int64)
    sample_tokens(logits, row_sampling(known), twin)
    expected = Sampler().sample(logits, known)
    assert twin.tolist() == expected
    assert sampled(kernels, logits, rows, seed=2) == expected


@pytest.mark.soak
def test_many_tokens_are_those_of_the_sampler(kernels: ModuleType) -> None:
    for seed in range(8):
        vocab = 200 + 7 * seed
        logits, known = tied_logits(40, vocab, seed), sequences(40, vocab, seed)
        assert sampled(kernels, logits, 40, seed) == Sampler().sample(logits, known)


@pytest.mark.soak
def test_the_twin_draws_the_tokens_of_the_sampler() -> None:
    for seed in range(100):
        logits, known = tied_logits(60, 5000, seed), sequences(60, 5000, seed)
        out = torch.empty(60, dtype=torch.int64)
        sample_tokens(logits, row_sampling(known), out)
        assert out.tolist() == Sampler().sample(logits, known)


@pytest.mark.parametrize("vocab", [1, 5, 128])
def test_vocabularies_that_fill_no_tile(kernels: ModuleType, vocab: int) -> None:
    logits = tied_logits(4, vocab, seed=3).nan_to_num(neginf=-9.0)
    assert sampled(kernels, logits, 4, seed=4) == Sampler().sample(logits, sequences(4, vocab, seed=4))


def test_a_row_draws_the_same_token_alone(kernels: ModuleType) -> None:
    logits = tied_logits(6, 150, seed=5)
    together = sampled(kernels, logits, 6, seed=6)
    assert [sampled(kernels, logits, 6, 6, slice(row, row + 1)) for row in (1, 5)] == [[together[1]], [together[5]]]


@pytest.mark.parametrize("best", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_finite_best_logit_are_told(kernels: ModuleType, best: float) -> None:
    logits = tied_logits(3, 70, seed=7)
    logits[1:] = -torch.inf
    logits[1:, 66] = best
    ids, settings = torch.full((3,), -7), row_sampling(sequences(3, 70, seed=8))
    assert sampled(kernels, logits, 3, seed=8)[1:] == [-1, -1]
    sample_tokens(logits, settings, ids)
    assert ids.ge(0).tolist() == [True, False, False]


BELOW_HALF = float(np.float32(np.log(0.5)))  # the largest float32 that is less than the logarithm itself


@pytest.mark.parametrize(
    ("logits", "temperature", "top_p", "min_p"),
    [
        ([-0.0, 0.0, -5.0], 1.0, 0.4, 0.0),  # equal whatever their signs, and the first is kept
        ([0.0] + [BELOW_HALF] * 60, 1.0, 1.0, 0.5),  # just too unlikely
        ([2.0, 2.0, 1.0], 1e-300, 0.5, 0.0),  # a heat whose inverse is beyond float32
        ([0.0] + [-1.0] * 60, 1.0, 0.0, 0.0),  # nothing is to be reached: the best stays
    ],
)
def test_only_the_first_token_stays(
    kernels: ModuleType, logits: list[float], temperature: float, top_p: float, min_p: float
) -> None:
    rows = row_sampling(sequences(4, len(logits), seed=9))
    rows.temperature[:], rows.top_k[:], rows.top_p[:], rows.min_p[:] = temperature, 0, top_p, min_p
    out, twin = torch.full((4,), -7), torch.full((4,), -7)
    kernels.sample(torch.tensor([logits] * 4), rows, out)
    sample_tokens(torch.tensor([logits] * 4), rows, twin)
    assert out.tolist() == twin.tolist() == [0] * 4


def test_what_does_not_fit_is_refused() -> None:
    settings, out = row_sampling(sequences(2, 9, seed=1)), torch.empty(2, dtype=torch.int64)
    for logits, ids in ((torch.zeros(3, 9), out), (torch.zeros(2, 9).half(), out), (torch.zeros(2, 9), out.int())):
        with pytest.raises(ValueError, match="do not fit together"):
            sample_tokens(logits, settings, ids)
