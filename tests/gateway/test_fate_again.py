"""A hand-over that failed is tried once more, and the client must not notice."""

import pytest

from kvrelay.errors import HandOverFailed, NoWorkers
from kvrelay.gateway.fate import Again, Effect, Send, Tokens
from kvrelay.messages import PrefillRequest
from tests.gateway.bench import ALONE, D1, D2, TIMEOUT_S, Bench, P, aborted, ends, indexes
from tests.gateway.nouns import route, token

FAILED = "hand_over_failed"


@pytest.fixture
def bench() -> Bench:
    """A request whose hand-over to D1 failed after the first token was given out."""
    bench = Bench()
    bench.submit(route(P, D1, D2))
    bench.tokens(P, token(0))
    return bench


def again(effects: list[Effect]) -> list[Again]:
    return [effect for effect in effects if isinstance(effect, Again)]


def tried_again(bench: Bench) -> None:
    assert again(bench.failed(D1, FAILED)) == [Again("r", D1, "It broke.")]
    bench.fate.again("r", route(P, D1, D2).avoiding(D1))


def test_the_others_drop_the_attempt_and_the_next_one_goes_another_way(bench: Bench) -> None:
    effects = bench.failed(D1, FAILED)
    assert (ends(effects), aborted(effects)) == ([], {P, D2})
    assert again(effects) == [Again("r", D1, "It broke.")]
    (sent,) = bench.fate.again("r", route(P, D1, D2).avoiding(D1))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, PrefillRequest)
    assert sent.message.attempt == 1
    assert [peer.incarnation for peer in sent.message.candidates] == [D2, D1]


def test_the_first_token_is_not_given_out_twice(bench: Bench) -> None:
    tried_again(bench)
    assert indexes(bench.tokens(P, token(0, attempt=1))) == []
    assert indexes(bench.tokens(D2, token(1, attempt=1))) == [1]
    last = bench.tokens(D2, token(2, attempt=1, last=True))
    assert (indexes(last), ends(last)) == ([2], [None])
    assert bench.nothing_left()


def test_a_first_token_that_had_not_come_is_given_out(bench: Bench) -> None:
    bench = Bench()
    bench.submit(route(P, D1, D2))
    tried_again(bench)
    assert indexes(bench.tokens(P, token(0, attempt=1))) == [0]


def test_another_answer_than_the_one_that_began_ends_the_request(bench: Bench) -> None:
    """It may overtake: then nothing of it is given out before the first token is known to be the same."""
    tried_again(bench)
    assert indexes(bench.tokens(D2, token(1, attempt=1))) == []
    effects = bench.tokens(P, token(0, attempt=1).model_copy(update={"token_id": 7}))
    assert [effect for effect in effects if isinstance(effect, Tokens)] == []
    assert ends(effects) == [HandOverFailed]
    assert aborted(effects) == {P, D1, D2}
    assert bench.nothing_left()


def test_tokens_and_failures_of_the_first_attempt_are_nobodys(bench: Bench) -> None:
    tried_again(bench)
    assert aborted(bench.tokens(D1, token(1))) == {D1}
    assert bench.failed(P, FAILED) == []


def test_a_worker_that_does_both_may_take_it_over(bench: Bench) -> None:
    bench.failed(D1, FAILED)
    bench.fate.again("r", route(ALONE))
    assert indexes(bench.tokens(ALONE, token(0, attempt=1))) == []
    last = bench.tokens(ALONE, token(1, attempt=1, last=True))
    assert (indexes(last), ends(last)) == ([1], [None])
    assert bench.nothing_left()


def test_it_is_tried_again_once(bench: Bench) -> None:
    tried_again(bench)
    effects = bench.failed(D2, FAILED, attempt=1)
    assert (again(effects), ends(effects)) == ([], [HandOverFailed])
    assert bench.nothing_left()


def test_once_a_worker_generates_its_failure_is_the_end(bench: Bench) -> None:
    bench.started(D1)
    assert ends(bench.failed(D1, FAILED)) == [HandOverFailed]


def test_a_local_request_has_no_hand_over_to_try_again(bench: Bench) -> None:
    bench = Bench()
    bench.submit(route(ALONE))
    assert ends(bench.failed(ALONE, FAILED)) == [HandOverFailed]


def test_where_there_is_no_other_way_the_request_ends(bench: Bench) -> None:
    bench.failed(D1, FAILED)
    assert ends(bench.fate.give_up("r", NoWorkers("There is none."))) == [NoWorkers]
    assert bench.nothing_left()


def test_the_deadline_is_that_of_the_request(bench: Bench) -> None:
    tried_again(bench)
    assert len(ends(bench.fate.tick(TIMEOUT_S))) == 1
    assert bench.nothing_left()
