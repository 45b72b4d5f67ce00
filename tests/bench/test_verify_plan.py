"""What is asked: the same for the same seed, within limits, and with every kind of question in it."""

import pytest

from kvrelay.bench.verify_plan import Limits, Question, make_plan

LIMITS = Limits(vocab_size=1000, max_model_len=640)


def questions(num_requests: int = 1000, concurrency: int = 33, limits: Limits = LIMITS) -> list[Question]:
    return [question for wave in make_plan(1, num_requests, concurrency, limits) for question in wave]


def test_it_follows_from_the_seed() -> None:
    assert make_plan(1, 50, 33, LIMITS) == make_plan(1, 50, 33, LIMITS)
    assert make_plan(1, 50, 33, LIMITS) != make_plan(2, 50, 33, LIMITS)


@pytest.mark.parametrize("num_requests", [1, 2, 7, 100, 1000])
def test_there_are_as_many_as_asked_for(num_requests: int) -> None:
    plan = make_plan(3, num_requests, 33, LIMITS)
    assert sum(map(len, plan)) == num_requests
    assert all(plan)


def test_requests_are_alone_and_among_up_to_32_others() -> None:
    assert {len(wave) for wave in make_plan(1, 140, 33, LIMITS)} == {1, 2, 4, 9, 17, 33}
    assert {len(wave) for wave in make_plan(1, 140, 5, LIMITS)} == {1, 2, 4, 5}
    assert {len(wave) for wave in make_plan(1, 20, 1, LIMITS)} == {1}


def test_a_question_asked_again_is_the_same_in_everything() -> None:
    asked: dict[int, Question] = {}
    for question in questions():
        assert asked.setdefault(question.number, question) == question
    assert 300 < 1000 - len(asked) < 500


def test_there_is_every_kind_of_question() -> None:
    asked = {question.number: question for question in questions()}
    bodies = [question.body for question in asked.values()]
    assert {body["temperature"] == 0 for body in bodies} == {True, False}
    assert {body["ignore_eos"] for body in bodies} == {True, False}
    assert {body["max_tokens"] for body in bodies} == {1, 2, 5, 16, 33, 64, 96}
    assert {body["logprobs"] for body in bodies} == {0, 1, 5, 20}
    assert len({body["seed"] for body in bodies}) == len(bodies)
    assert {len(question.prompt) for question in asked.values()} >= {1, 7, 15, 17, 31, 33, 63, 65, 129, 257, 513}
    prompts = {question.prompt for question in asked.values()}
    assert len(prompts) < len(asked), "some prompts are asked with other options"
    grown = [
        one for one in prompts if any(one[: len(other)] == other for other in prompts if 16 < len(other) < len(one))
    ]
    assert len(grown) > 50


@pytest.mark.parametrize("max_model_len", [2, 3, 50, 640])
def test_all_of_it_fits(max_model_len: int) -> None:
    for question in questions(300, limits=Limits(7, max_model_len)):
        body = question.body
        assert 1 <= len(body["prompt"]) <= max_model_len - body["max_tokens"]
        assert set(body["prompt"]) <= set(range(7))


def test_no_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="no room"):
        make_plan(1, 1, 1, Limits(10, 1))
