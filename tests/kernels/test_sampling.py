"""Sampling in native code: the very tokens of its twin, the sampler in numpy."""

import itertools

import numpy as np
import pytest
import torch

from kvrelay.kernels.native_library import NativeLibrary
from kvrelay.kernels.sampling import Draw, SamplingKernel
from kvrelay.model.sampler import Sampler
from kvrelay.types import RequestKey, SamplingParams, Sequence

FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-300},
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.5},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 4000},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
)


def sequences(num: int, offset: int, params: dict[str, float]) -> list[Sequence]:
    """Of several seeds, some of 64 bits, samples and indexes."""
    made = []
    for row in range(num):
        seed = (offset + row) * 0x9E3779B97F4A7C15 % 2**64
        settings = SamplingParams.model_validate({"max_tokens": 9, "seed": seed} | params)
        made.append(Sequence(RequestKey("named", 0), row % 3, 1, settings, [0] * (3 + row % 7), 3))
    return made


def draws(sampled: list[Sequence]) -> list[Draw]:
    return [
        Draw(
            one.params.temperature,
            one.params.top_k,
            one.params.top_p,
            one.params.min_p,
            one.params.seed,
            one.sample,
            one.num_generated_tokens,
        )
        for one in sampled
    ]


def assert_same(native: NativeLibrary, logits: torch.Tensor, sampled: list[Sequence]) -> None:
    tokens, best = SamplingKernel(native, 1)(logits, draws(sampled))
    assert tokens == Sampler().sample(logits, sampled)
    assert best == logits.amax(1).tolist()


def logits_of(num: int, vocab: int, scale: float, rounded: bool = False) -> torch.Tensor:
    logits = torch.randn(num, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    return (logits * 4).round() / 4 if rounded else logits  # rounded ones are equal to many others


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 257, 1000, 5003])
def test_tokens_are_those_of_the_twin(native: NativeLibrary, vocab: int, params: dict[str, float]) -> None:
    """From flat to peaked, with and without equal logits."""
    for scale, rounded in itertools.product((0.0, 0.3, 3.0, 12.0), (False, True)):
        assert_same(native, logits_of(6, vocab, scale, rounded), sequences(6, vocab, params))


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_of_a_real_vocabulary_are_those_of_the_twin(native: NativeLibrary, params: dict[str, float]) -> None:
    """Its last chunk is not whole."""
    for scale, rounded in ((0.1, False), (2.5, False), (6.0, True)):
        assert_same(native, logits_of(3, 49_157, scale, rounded), sequences(3, 11, params))


def test_many_draws_of_one_row_are_those_of_the_twin(native: NativeLibrary) -> None:
    """10,000 of a small vocabulary at the edge of every filter."""
    row = torch.linspace(0, -6, 40).roll(7)
    filters: list[dict[str, float]] = [{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}, {"temperature": 0.6}]
    for params in filters:
        assert_same(native, row.repeat(2000, 1), sequences(2000, 5, params))


def test_excluded_and_extreme_logits(native: NativeLibrary) -> None:
    """What has no probability is never drawn; the largest and smallest floats are logits like others."""
    logits = torch.full((4, 300), -torch.inf)
    logits[0, 123] = -3.0
    logits[1, [7, 200]] = 3e38
    logits[2] = torch.linspace(-1, 1, 300) * 3e38
    logits[3, ::2] = torch.linspace(-1e-30, 20.0, 150)
    for params in FILTERS:
        with np.errstate(over="ignore", invalid="ignore"):
            assert_same(native, logits, sequences(4, 3, params))


def test_neither_threads_nor_other_rows_matter(native: NativeLibrary) -> None:
    """Rows are shared among threads."""
    sampled = [one for params in FILTERS for one in sequences(3, 9, params)]
    logits = logits_of(len(sampled), 1000, 2.0)
    whole = SamplingKernel(native, 1)(logits, draws(sampled))
    assert SamplingKernel(native, 2)(logits, draws(sampled)) == whole
    for row, one in enumerate(sampled):
        assert SamplingKernel(native, 1)(logits[row : row + 1], draws([one]))[0] == [whole[0][row]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_is_told(native: NativeLibrary, temperature: float) -> None:
    """And the token that has it; not a number counts more than any number, the first most."""
    logits = torch.zeros(4, 500)
    logits[0, [300, 400]] = torch.nan
    logits[0, 2] = torch.inf
    logits[1, [77, 88]] = torch.inf
    logits[2] = -torch.inf
    tokens, best = SamplingKernel(native, 1)(logits, draws(sequences(4, 0, {"temperature": temperature})))
    assert np.isnan(best[0])
    assert best[1:] == [torch.inf, -torch.inf, 0.0]
    assert tokens[:3] == [300, 77, 0]


@pytest.mark.parametrize("logits", [torch.zeros(5), torch.zeros(2, 5), torch.zeros(1, 0), torch.zeros(1, 5).double()])
def test_other_tensors_are_refused(native: NativeLibrary, logits: torch.Tensor) -> None:
    """By a sentence that says what was expected."""
    with pytest.raises(ValueError, match="expected float32 \\[rows, vocab\\]"):
        SamplingKernel(native, 1)(logits, draws(sequences(1, 0, {})))
