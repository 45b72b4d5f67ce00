"""The native sampler gives the tokens of the plain one, and says the same when it cannot."""

import pytest
import torch

from kvrelay.errors import InternalError
from kvrelay.kernels.native_library import load_native
from kvrelay.kernels.sampling import SamplingKernel
from kvrelay.model.native_sampler import NativeSampler
from kvrelay.model.sampler import Sampler
from kvrelay.types import RequestKey, SamplingParams, Sequence
from tests.places import CACHE_DIR


@pytest.fixture(scope="module")
def sampler() -> NativeSampler:
    native = load_native(CACHE_DIR)
    assert native is not None, "the log says why"
    return NativeSampler(SamplingKernel(native, 2))


def sequence(index: int, **params: float) -> Sequence:
    """One that has generated `index` tokens."""
    return Sequence(
        RequestKey(f"r{index}", 0),
        index % 3,
        1,
        SamplingParams.model_validate({"max_tokens": 9, **params}),
        [5] * (4 + index),
        4,
    )


def test_tokens_are_those_of_the_plain_sampler(sampler: NativeSampler) -> None:
    options: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 50, "top_p": 0.8},
    ]
    sequences = [
        sequence(index, seed=17 + index, **options[index % len(options)]) for index in range(10 * len(options))
    ]
    logits = 4 * torch.randn(len(sequences), 1000, generator=torch.Generator().manual_seed(1))
    assert sampler.sample(logits, sequences) == Sampler().sample(logits, sequences)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_name_the_request(sampler: NativeSampler, bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[1, 7] = bad
    with pytest.raises(InternalError, match=r"r4: the network gave (nan|inf)"):
        sampler.sample(logits, [sequence(3, temperature=1.0), sequence(4, temperature=0.0)])
