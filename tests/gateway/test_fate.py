"""The fate of requests while all goes well, and of their tokens when some are lost, repeated or impossible."""

import pytest

from kvrelay.errors import RequestError, WorkerLost
from kvrelay.gateway.fate import MAX_RESENDS, Send, Tokens
from kvrelay.messages import Abort, GenerateRequest, OutputAck, PrefillRequest, TokenOutput
from kvrelay.types import RequestKey, TokenLogprobs
from tests.gateway.bench import ALONE, D1, D2, RESEND_S, Bench, P, aborted, ends, indexes, resends
from tests.gateway.nouns import GATEWAY, route, token, top_logprobs


@pytest.fixture
def bench() -> Bench:
    return Bench()


# the good road


def test_a_request_goes_to_its_prefill_worker_with_all_candidates(bench: Bench) -> None:
    (effect,) = bench.submit(route(P, D1, D2))
    assert isinstance(effect, Send)
    assert effect.peer == P
    assert isinstance(effect.message, PrefillRequest)
    assert [peer.incarnation for peer in effect.message.candidates] == [D1, D2]
    assert (effect.message.source, effect.message.target, effect.message.attempt) == (GATEWAY, P, 0)


def test_a_local_request_goes_to_one_worker(bench: Bench) -> None:
    (effect,) = bench.submit(route(ALONE))
    assert isinstance(effect, Send)
    assert isinstance(effect.message, GenerateRequest)


def test_tokens_of_both_pools_reach_the_client_and_the_last_is_acknowledged(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert indexes(bench.tokens(P, token(0))) == [0]
    assert bench.started(D1) == []
    assert indexes(bench.tokens(D1, token(1))) == [1]
    last = bench.tokens(D1, token(2, last=True))
    assert indexes(last) == [2]
    assert ends(last) == [None]
    (acknowledged,) = [effect for effect in last if isinstance(effect, Send)]
    assert acknowledged.peer == D1
    assert isinstance(acknowledged.message, OutputAck)
    assert bench.nothing_left()


def test_a_hand_over_that_nobody_speaks_of_any_more_is_asked_after(bench: Bench) -> None:
    """Its commit may be lost with a connection; then no worker ever says that the request failed."""
    bench.submit(route(P, D1))
    assert resends(bench.fate.tick(500.0)) == []  # a prompt may wait for long before its first token
    bench.tokens(P, token(0), now=500.0)
    assert resends(bench.fate.tick(500.0 + RESEND_S)) == [(P, 0)]
    bench.tokens(P, token(0), now=506.0)  # it is still at it
    assert resends(bench.fate.tick(506.0 + RESEND_S)) == [(P, 0)]
    effects = bench.failed(P, "unknown_request")
    assert len(ends(effects)) == 1
    assert aborted(effects) == {D1}
    assert bench.nothing_left()


def test_the_first_token_is_end_of_sequence(bench: Bench) -> None:
    """Elsewhere nothing was sent then, and the other side waited 480 s."""
    bench.submit(route(P, D1))
    effects = bench.tokens(P, token(0, last=True))
    assert indexes(effects) == [0]
    assert ends(effects) == [None]
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == [P]
    assert bench.nothing_left()


def test_the_second_token_overtakes_the_first_without_a_question(bench: Bench) -> None:
    """They come from two workers over two connections."""
    bench.submit(route(P, D1))
    assert bench.tokens(D1, token(1)) == []
    assert indexes(bench.tokens(P, token(0))) == [0, 1]
    assert resends(bench.fate.tick(1.1)) == []


def test_samples_are_ordered_each_by_itself(bench: Bench) -> None:
    bench.submit(route(P, D1), num_samples=2)
    bench.tokens(P, token(0), token(0, sample=1))
    assert ends(bench.tokens(D1, token(1, last=True))) == []
    effects = bench.tokens(D1, token(1, sample=1, last=True))
    assert ends(effects) == [None]


# tokens lost, repeated, impossible


def test_repeated_tokens_are_dropped_and_counted(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    assert bench.tokens(P, token(0)) == []
    assert indexes(bench.tokens(D1, token(1), token(1), token(0))) == [1]
    assert bench.fate.counters["repeated_tokens"] == 3


def test_a_gap_is_asked_for_and_filled_in_order(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    assert bench.tokens(D1, token(3), token(2)) == []
    assert resends(bench.fate.tick(1.05)) == [(D1, 1)]
    assert resends(bench.fate.tick(1.1)) == [], "asked once, not at every tick"
    assert indexes(bench.tokens(D1, token(1), token(2), token(3), token(4))) == [1, 2, 3, 4]


def test_a_lost_first_token_is_asked_for_at_the_decode_worker(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.started(D1)
    bench.fate.on_worker_lost(P)
    bench.tokens(D1, token(1))
    assert resends(bench.fate.tick(1.1)) == [(D1, 0)]
    assert indexes(bench.tokens(D1, token(0), token(1))) == [0, 1]


def test_silence_after_decode_start_is_asked_about(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.started(D1, now=1.0)
    assert bench.fate.tick(5.9) == []
    assert resends(bench.fate.tick(6.0)) == [(D1, 0)]


def test_a_slow_worker_that_still_has_the_request_is_waited_for(bench: Bench) -> None:
    """A preempted sequence makes no token for long; that its worker repeats the newest one shows that all is well."""
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.started(D1)
    for turn in range(1, 20):
        assert resends(bench.fate.tick(1.0 + 5 * turn)) == [(D1, 0)]
        bench.tokens(D1, token(0), now=1.0 + 5 * turn)
    assert len(bench.fate) == 1


def test_a_worker_that_answers_no_question_loses_the_request(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.started(D1)
    for turn in range(MAX_RESENDS):
        assert resends(bench.fate.tick(6.0 + 5 * turn)) == [(D1, 0)]
    effects = bench.fate.tick(6.0 + 5 * MAX_RESENDS)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == {P, D1}


def test_a_gap_that_is_never_filled_ends_the_request(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.tokens(D1, token(2))
    seen: list[type[RequestError] | None] = []
    for turn in range(MAX_RESENDS + 1):
        bench.tokens(D1, token(0), token(2), now=1.0 + 5 * turn)
        seen += ends(bench.fate.tick(1.0 + 5 * turn))
    assert seen == [WorkerLost]


def test_a_local_request_is_not_asked_about_while_its_prompt_waits(bench: Bench) -> None:
    bench.submit(route(ALONE))
    assert bench.fate.tick(500.0) == []
    bench.tokens(ALONE, token(0), now=500.0)
    assert resends(bench.fate.tick(505.0)) == [(ALONE, 0)]


@pytest.mark.parametrize("bad", [token(10), token(1, sample=1)])
def test_tokens_that_cannot_be_are_dropped(bench: Bench, bad: TokenOutput) -> None:
    bench.submit(route(P, D1))
    assert bench.tokens(D1, bad) == []
    assert bench.fate.counters["impossible_tokens"] == 1


@pytest.mark.parametrize("bad", [token(0, cached=3), token(1, cached=1)])
def test_cached_tokens_larger_than_the_prompt_are_not_believed(bench: Bench, bad: TokenOutput) -> None:
    """cached_tokens larger than prompt_tokens; or told twice."""
    bench.submit(route(P, D1))
    assert bench.tokens(D1, bad) == []
    assert bench.fate.counters["impossible_tokens"] == 1
    assert indexes(bench.tokens(P, token(0, cached=2))) == [0]


@pytest.mark.parametrize(("asked", "told"), [(None, top_logprobs(0)), (2, None), (2, top_logprobs(3))])
def test_logprobs_come_as_they_were_asked_for_or_not_at_all(
    bench: Bench, asked: int | None, told: TokenLogprobs | None
) -> None:
    bench.submit(route(P, D1), logprobs=asked)
    assert bench.tokens(P, token(0).model_copy(update={"logprobs": told})) == []
    assert bench.fate.counters["impossible_tokens"] == 1
    right = None if asked is None else top_logprobs(asked)
    assert indexes(bench.tokens(P, token(0).model_copy(update={"logprobs": right}))) == [0]


def test_a_prefill_worker_makes_one_token_only(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert bench.tokens(P, token(1)) == []
    assert bench.fate.counters["impossible_tokens"] == 1


@pytest.mark.parametrize("stranger", [token(0, request_id="unknown"), token(0, attempt=7)])
def test_tokens_that_the_gateway_does_not_own_are_answered_with_abort(bench: Bench, stranger: TokenOutput) -> None:
    bench.submit(route(P, D1))
    (effect,) = bench.tokens(P, stranger, stranger)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Abort)
    assert effect.message.key == stranger.key
    assert bench.fate.counters["unowned_tokens"] == 2


def test_one_message_with_tokens_of_several_requests(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.submit(route(P, D1), request_id="s")
    effects = bench.tokens(D1, token(0), token(0, request_id="s"), token(0, request_id="gone"))
    assert [type(effect) for effect in effects] == [Tokens, Tokens, Send]


def test_a_second_worker_that_decodes_is_stopped(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.started(D1)
    assert aborted(bench.started(D2)) == {D2}
    assert aborted(bench.tokens(D2, token(1))) == {D2}
    assert indexes(bench.tokens(P, token(0))) == [0]


def test_decode_start_of_an_unknown_attempt_is_answered_with_abort(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert aborted(bench.started(D1, attempt=3)) == {D1}
    assert bench.fate.owns(RequestKey("r", 0))
