"""The comparison: every bit counts, text does not, and the first answer is what others must equal."""

import math
from dataclasses import replace

import pytest

from kvrelay.bench.verify_compare import Answer, AnswerToken, Comparison, difference
from kvrelay.bench.verify_plan import Question

TOKENS = (
    AnswerToken(5, -0.25, (("token_id:5", -0.25), ("token_id:3", -1.5))),
    AnswerToken(6, -0.1 - 2**-53, (("token_id:6", 0.0),)),
)
ANSWER = Answer(TOKENS, "length", cached_tokens=16)
FIRST, SECOND = Question(0, (1, 2), ()), Question(1, (3,), ())


def changed(index: int, **fields: object) -> Answer:
    tokens = [token._replace(**fields) if at == index else token for at, token in enumerate(TOKENS)]  # type: ignore[arg-type]
    return replace(ANSWER, tokens=tuple(tokens))


def test_the_same_is_the_same_whatever_was_cached() -> None:
    assert difference(0, ANSWER, replace(ANSWER, cached_tokens=0)) is None


@pytest.mark.parametrize(
    ("got", "index", "words"),
    [
        (changed(0, token_id=7), 0, "id 7 (-0.25), not 5 (-0.25)"),
        (changed(1, logprob=math.nextafter(TOKENS[1].logprob, 0)), 1, "logprob"),
        (changed(0, top=(("token_id:5", -0.25), ("token_id:3", math.nextafter(-1.5, 0)))), 0, "other likeliest"),
        (changed(0, top=(("token_id:5", -0.25), ("token_id:4", -1.5))), 0, "other likeliest"),
        (changed(0, top=TOKENS[0].top[::-1]), 0, "other likeliest"),
        (changed(1, top=(("token_id:6", -0.0),)), 1, "other likeliest"),
        (replace(ANSWER, tokens=TOKENS[:1]), 1, "one answer ends"),
        (replace(ANSWER, tokens=TOKENS + TOKENS[:1]), 2, "one answer ends"),
        (replace(ANSWER, finish_reason="stop"), None, "ended by stop, not by length"),
        (Answer(error="No workers."), None, "No workers."),
    ],
)
def test_one_bit_is_a_difference(got: Answer, index: int | None, words: str) -> None:
    found = difference(4, ANSWER, got)
    assert found is not None
    assert (found.request, found.index) == (4, index)
    assert words in str(found)


def test_the_first_answer_is_what_all_later_ones_must_equal() -> None:
    comparison = Comparison()
    comparison.begin("a")
    for question, answer in ((FIRST, ANSWER), (SECOND, changed(0, token_id=9)), (FIRST, ANSWER)):
        comparison.add(question, answer)
    comparison.begin("b")
    for question, answer in ((FIRST, ANSWER), (SECOND, ANSWER), (FIRST, changed(1, logprob=-3.0))):
        comparison.add(question, answer)
    first, second = comparison.arms
    assert (first.requests, first.compared, first.mismatches) == (3, 1, 0)
    assert (second.requests, second.compared, second.mismatches) == (3, 3, 2)
    assert (comparison.requests, comparison.mismatches) == (6, 2)
    assert (first.cached_tokens, second.cached_tokens) == (48, 48)
    assert second.record["first_difference"] == {
        "request": 1,
        "index": 0,
        "what": "id 5 (-0.25), not 9 (-0.25)",
        "expected": {"id": 9, "logprob": -0.25},
        "got": {"id": 5, "logprob": -0.25},
    }


def test_an_answer_that_failed_is_a_mismatch_and_nothing_to_compare_with() -> None:
    comparison = Comparison()
    arm = comparison.begin("a")
    for answer in (Answer(error="Full."), ANSWER, ANSWER):
        comparison.add(FIRST, answer)
    assert (arm.requests, arm.compared, arm.mismatches) == (3, 1, 1)
    assert "Full." in str(arm.first)


def test_an_answer_belongs_to_an_arm() -> None:
    with pytest.raises(ValueError, match="begin"):
        Comparison().add(FIRST, ANSWER)
