"""Logprobs: of the network's own distribution, each row by itself, and in one order whatever else is computed."""

import math

import numpy as np
import pytest
import torch

from kvrelay.model.logprobs import logprobs_of, token_logprobs
from kvrelay.types import LOWEST_LOGPROB, RequestKey, SamplingParams, Sequence


def sequence(logprobs: int | None, **params: float) -> Sequence:
    settings = SamplingParams.model_validate({"max_tokens": 9, "logprobs": logprobs} | params)
    return Sequence(RequestKey("r", 0), 0, 1, settings, [0, 0, 0], 3)


def random_rows(num_rows: int, vocab_size: int = 500) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 4


def test_they_are_the_logarithm_of_the_softmax() -> None:
    row = random_rows(1)[0].numpy()
    total = math.log(math.fsum(math.exp(logit) for logit in row.tolist()))
    told = token_logprobs(row, 17, 3)
    assert told.logprob == pytest.approx(float(row[17]) - total, rel=1e-14)
    best = sorted(range(len(row)), key=lambda token: -row[token])[:3]
    assert [each.token_id for each in told.top] == best
    assert [each.logprob for each in told.top] == pytest.approx([float(row[each]) - total for each in best], rel=1e-14)


@pytest.mark.parametrize("vocab_size", [20, 2559, 2560, 2561, 5000])
def test_the_likeliest_are_those_of_a_plain_sort(vocab_size: int) -> None:
    """Of rows with many ties, for vocabularies around the size from which on not all of it is sorted."""
    for num_top in (1, 7, 20):
        row = torch.round(random_rows(1, vocab_size)[0] * 2).numpy()
        expected = sorted(range(vocab_size), key=lambda token: (-row[token], token))[:num_top]
        assert [each.token_id for each in token_logprobs(row, 0, num_top).top] == expected


def test_temperature_and_filters_change_nothing() -> None:
    """Of the raw distribution: what excludes a token from sampling does not touch its logprob."""
    logits = random_rows(1)
    plain, filtered = sequence(5), sequence(5, temperature=0.3, top_k=1, top_p=0.1, min_p=0.5)
    assert logprobs_of(logits, [plain], [7]) == logprobs_of(logits, [filtered], [7])


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Co-resident sequences change each other's logprobs in a mode called batch-invariant (vllm#51187)."""
    logits = random_rows(32, 49_152)
    sequences = [sequence(row % 21) for row in range(32)]
    together = logprobs_of(logits, sequences, range(32))
    assert together == [logprobs_of(logits[row : row + 1], [sequences[row]], [row])[0] for row in range(32)]
    assert together[::-1] == logprobs_of(logits.flip(0), sequences[::-1], range(31, -1, -1))


@pytest.mark.parametrize(("num_top", "ids"), [(0, []), (1, [30]), (3, [30, 70, 90]), (5, [30, 70, 90, 0, 1])])
def test_ties_go_to_the_lowest_ids(num_top: int, ids: list[int]) -> None:
    row = np.zeros(100, np.float32)
    row[[70, 30, 90]] = 4.0
    assert [each.token_id for each in token_logprobs(row, 5, num_top).top] == ids


def test_of_a_small_vocabulary_there_are_no_more_than_it_has() -> None:
    told = token_logprobs(np.array([0.0, 1.0], np.float32), 0, 20)
    assert [each.token_id for each in told.top] == [1, 0]
    assert told.top[1].logprob == told.logprob


def test_what_cannot_be_said_in_json_has_a_name() -> None:
    told = token_logprobs(np.array([0.0, -np.inf, -1e30], np.float32), 1, 3)
    assert told == (LOWEST_LOGPROB, ((0, 0.0), (2, LOWEST_LOGPROB), (1, LOWEST_LOGPROB)))


def test_who_asks_for_none_costs_nothing() -> None:
    class Row:
        def float(self) -> None:
            raise AssertionError("the logits were looked at")

    rows: torch.Tensor = [Row(), random_rows(1)[0]]  # type: ignore[assignment]
    first, second = logprobs_of(rows, [sequence(None), sequence(0)], [1, 2])
    assert first is None
    assert second is not None
    assert second.top == ()


def test_sixteen_bit_logits_are_accepted() -> None:
    logits = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16)
    assert logprobs_of(logits, [sequence(1)], [1]) == logprobs_of(logits.float(), [sequence(1)], [1])
