"""Sampling: the distribution, the filters, and that noise depends on nothing but its four names."""

import math

import numpy as np
import pytest
import torch

from kvrelay.errors import InternalError
from kvrelay.model.noise import gumbel_noise
from kvrelay.model.sampler import Sampler, filtered_logits
from kvrelay.types import RequestKey, SamplingParams, Sequence


def sequence(num_generated: int = 0, sample: int = 0, **params: float) -> Sequence:
    settings = SamplingParams.model_validate({"max_tokens": 9, "seed": 1} | params)
    return Sequence(RequestKey("named", 0), sample, 1, settings, [0] * (3 + num_generated), 3)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 as its paper defines it, in plain integers."""
    low, (k0, k1), (c0, c1, c2, c3) = 2**64 - 1, key, counter
    for _ in range(10):
        left, right = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & low, (left >> 64) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & low, (k1 + 0xBB67AE8584CAA73B) & low
    return c0, c1, c2, c3


def draws(logits: torch.Tensor, num: int, **params: float) -> np.ndarray:
    sequences = [sequence(index, 0, **params) for index in range(num)]
    tokens = Sampler().sample(logits.expand(num, -1), sequences)
    return np.bincount(tokens, minlength=logits.shape[-1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.3])
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * 8000
    observed = draws(logits, 8000, temperature=temperature, seed=77)
    assert (((observed - expected) ** 2) / expected).sum() < 22.46  # chi-square, 6 degrees of freedom, p = 0.001


def test_draws_of_other_samples_and_seeds_are_independent() -> None:
    logits = torch.zeros(4)
    pairs = np.zeros((4, 4))
    for index in range(8000):
        first, second, third = Sampler().sample(
            logits.expand(3, -1), [sequence(index), sequence(index, sample=1), sequence(index, seed=2)]
        )
        pairs[first, second] += 0.5
        pairs[first, third] += 0.5
    assert (((pairs - 500) ** 2) / 500).sum() < 37.7  # 15 degrees of freedom, p = 0.001


def test_noise_is_a_fixed_function_of_seed_sample_index_and_token() -> None:
    words = [word for block in range(3) for word in philox((7, 2), (1 + block, 5, 0, 0))]
    uniform = [((word >> 12) + 0.5) / 2**52 for word in words]
    assert gumbel_noise(7, 2, 5, 12).tolist() == pytest.approx([-math.log(-math.log(u)) for u in uniform], rel=1e-12)
    np.testing.assert_array_equal(gumbel_noise(7, 2, 5, 1000)[:3], gumbel_noise(7, 2, 5, 3))
    others = [gumbel_noise(8, 2, 5, 3), gumbel_noise(7, 3, 5, 3), gumbel_noise(7, 2, 6, 3)]
    assert all((noise != gumbel_noise(7, 2, 5, 3)).all() for noise in others)


def test_noise_of_one_index_never_overlaps_the_next() -> None:
    assert not set(gumbel_noise(1, 0, 0, 50_000)) & set(gumbel_noise(1, 0, 1, 50_000))


def test_noise_is_finite_at_the_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, 2**64 - 1], np.uint64)

    class Extremes:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self, num: int) -> np.ndarray:
            return words.copy()

    monkeypatch.setattr(np.random, "Philox", Extremes)
    assert np.isfinite(gumbel_noise(0, 0, 0, 2)).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(32, 500, generator=torch.Generator().manual_seed(3)) * 3
    sequences = [sequence(row, seed=row, temperature=row % 3 * 0.5, top_p=0.9, top_k=row) for row in range(32)]
    together = Sampler().sample(logits, sequences)
    alone = [Sampler().sample(logits[row : row + 1], [sequences[row]])[0] for row in range(32)]
    assert together == alone
    assert Sampler().sample(logits.flip(0), sequences[::-1]) == together[::-1]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [70, 30, 90]] = 4.0
    assert Sampler().sample(logits, [sequence(temperature=0.0)] * 2) == [30, 0]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.5, -2.0]])
    assert all(Sampler().sample(logits, [sequence(i, temperature=1e-300)]) == [1] for i in range(50))


def test_sixteen_bit_logits_are_accepted() -> None:
    assert Sampler().sample(torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16), [sequence(temperature=0.0)]) == [1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        ({"min_p": 0.24}, [0, 1, 3, 4]),
        ({"min_p": 0.3}, [0, 1, 3]),
        ({"top_k": 2, "top_p": 0.56}, [1]),  # top_p counts what top_k left: 0.4 of 0.7 is 0.571
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"min_p": 0.6, "top_p": 0.58}, [1, 3]),
        ({"temperature": 0.5, "min_p": 0.3}, [1, 3]),  # min_p sees probabilities after temperature
    ],
)
def test_filters_keep_exactly(params: dict[str, float], kept: list[int]) -> None:
    row = np.log(np.array([0.15, 0.4, 0.05, 0.3, 0.1], np.float32))
    scores = filtered_logits(row, sequence(0, 0, **params).params)
    assert np.flatnonzero(np.isfinite(scores)).tolist() == kept
    temperature = params.get("temperature", 1.0)
    np.testing.assert_allclose(scores[kept], (row[kept] - row.max()) / temperature, rtol=1e-6)
    observed = draws(torch.from_numpy(row), 300, **params)
    assert set(np.flatnonzero(observed)) <= set(kept)


def test_top_p_that_is_reached_exactly_keeps_no_more() -> None:
    scores = filtered_logits(np.zeros(4, np.float32), sequence(top_p=0.5).params)
    assert np.isfinite(scores).tolist() == [True, True, False, False]


def test_top_p_over_a_flat_large_vocabulary_is_exact() -> None:
    row = np.zeros(50_000, np.float32)
    row[40_000:] = 1e-3  # the likeliest; the nucleus goes on with the lowest ids
    kept = np.isfinite(filtered_logits(row, sequence(top_p=0.5).params))
    weights = np.exp(row.astype(np.float64))
    assert kept[40_000:].all()
    assert kept[: kept[:40_000].sum()].all()
    assert weights[kept].sum() >= 0.5 * weights.sum() > weights[kept].sum() - weights.max()


def test_top_p_keeps_what_a_plain_loop_keeps() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        row = np.round(generator.standard_normal(300) * generator.choice([0.1, 1, 4, 10]), 1).astype(np.float32)
        params = sequence(top_p=float(generator.choice([0.01, 0.3, 0.9, 0.99])), top_k=int(generator.integers(0, 300)))
        kept = np.flatnonzero(np.isfinite(filtered_logits(row, params.params)))
        assert kept.tolist() == plain_nucleus(row, params.params)


def plain_nucleus(row: np.ndarray, params: SamplingParams) -> list[int]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    last = row[order[params.top_k - 1]] if params.top_k else -np.inf
    order = [token for token in order if row[token] >= last]
    weights = [math.exp(row[token] - row.max()) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if reached >= params.top_p * sum(weights):
            break
        kept.append(token)
        reached += weight
    return sorted(kept)


def test_logits_that_are_not_numbers_name_the_request() -> None:
    with pytest.raises(InternalError, match="named"):
        Sampler().sample(torch.tensor([[0.0, float("nan"), 1.0]]), [sequence()])
