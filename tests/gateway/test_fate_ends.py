"""The fate of requests, fault by fault: deaths, failures, clients that leave, deadlines."""

import pytest

from kvrelay.errors import ClientGone, DeadlineExceeded, Draining, RequestError, WorkerLost
from kvrelay.gateway.fate import Send
from kvrelay.messages import DecodeStarted
from tests.gateway.bench import ALONE, D1, D2, RESEND_S, TIMEOUT_S, Bench, P, aborted, ends
from tests.gateway.nouns import route, token


@pytest.fixture
def bench() -> Bench:
    return Bench()


# deaths


@pytest.mark.parametrize("first_token", [False, True])
def test_the_prefill_worker_dies_before_decode_start(bench: Bench, first_token: bool) -> None:
    bench.submit(route(P, D1, D2))
    if first_token:
        bench.tokens(P, token(0))
    effects = bench.fate.on_worker_lost(P)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == {D1, D2}
    assert bench.nothing_left()


def test_the_prefill_worker_dies_after_decode_start(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.started(D1)
    assert bench.fate.on_worker_lost(P) == []
    assert ends(bench.tokens(D1, token(1, last=True))) == [None]


def test_the_holder_dies(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.tokens(P, token(0))
    bench.started(D1)
    effects = bench.fate.on_worker_lost(D1)
    assert ends(effects) == [WorkerLost]
    assert P in aborted(effects)
    assert D1 not in aborted(effects)
    assert bench.nothing_left()


def test_a_candidate_dies_while_the_prompt_is_computed(bench: Bench) -> None:
    """The prefill worker moves on to the next."""
    bench.submit(route(P, D1, D2))
    assert bench.fate.on_worker_lost(D1) == []
    assert bench.router.own(D2).sequences == 1
    bench.tokens(P, token(0))
    bench.started(D2)
    assert ends(bench.tokens(D2, token(1, last=True))) == [None]
    assert bench.nothing_left()


def test_every_candidate_dies(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.fate.on_worker_lost(D1)
    effects = bench.fate.on_worker_lost(D2)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == {P}


def test_a_candidate_dies_after_the_first_token(bench: Bench) -> None:
    """The KV may have been committed to it, and the prefill worker declares no failure after that."""
    bench.submit(route(P, D1, D2))
    bench.tokens(P, token(0))
    effects = bench.fate.on_worker_lost(D1)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == {P, D2}


def test_the_death_of_a_candidate_is_noticed_before_the_first_token_that_it_took_with_it(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.fate.on_worker_lost(D1)
    bench.tokens(P, token(0), now=1.0)
    assert bench.fate.tick(1.0 + RESEND_S - 0.1) == []
    effects = bench.fate.tick(1.0 + RESEND_S)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == {P, D2}


def test_a_candidate_that_was_only_slow_may_still_decode(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.submit(route(P, D1, D2), request_id="s")
    bench.fate.on_worker_lost(D1)
    assert len(bench.fate) == 1
    message = DecodeStarted(source=D1, request_id="s", attempt=0)
    assert bench.fate.on_message(D1, message, 1.0) == []
    assert ends(bench.fate.on_worker_lost(D1)) == [WorkerLost]


def test_a_local_worker_dies(bench: Bench) -> None:
    bench.submit(route(ALONE))
    effects = bench.fate.on_worker_lost(ALONE)
    assert ends(effects) == [WorkerLost]
    assert aborted(effects) == set()
    assert bench.nothing_left()


def test_the_death_of_a_stranger_changes_nothing(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert bench.fate.on_worker_lost(D2) == []


# failures, cancellation, deadlines


def test_the_prefill_leg_fails_and_the_decode_leg_does_not_wait(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    effects = bench.failed(P)
    assert ends(effects) == [RequestError]
    assert aborted(effects) == {D1, D2}
    assert bench.nothing_left()


def test_a_decode_worker_gives_up(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.started(D1)
    effects = bench.failed(D1)
    assert ends(effects) == [RequestError]
    assert aborted(effects) == {P, D2}


def test_a_late_failure_of_the_prefill_worker_is_ignored(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.started(D1)
    assert bench.failed(P) == []
    assert bench.fate.counters["unowned_failures"] == 1


def test_a_failure_of_nothing_is_counted(bench: Bench) -> None:
    assert bench.failed(P) == []
    assert bench.fate.counters["unowned_failures"] == 1


def test_the_client_goes_away_and_everybody_stops(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    effects = bench.fate.client_gone("r", "The client left.")
    assert ends(effects) == [ClientGone]
    assert aborted(effects) == {P, D1, D2}
    assert bench.fate.client_gone("r", "The client left.") == []
    assert aborted(bench.tokens(P, token(0))) == {P}, "a late token is answered with Abort"


def test_a_stop_string_ends_the_request_at_the_workers(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.tokens(P, token(0))
    bench.started(D1)
    effects = bench.fate.stop("r")
    assert ends(effects) == [None]
    assert aborted(effects) == {P, D1}
    assert bench.fate.stop("r") == []


def test_a_deadline_ends_a_request_that_nobody_answers(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert bench.fate.tick(TIMEOUT_S - 1) == []
    effects = bench.fate.tick(TIMEOUT_S)
    assert ends(effects) == [DeadlineExceeded]
    assert aborted(effects) == {P, D1}


def test_a_worker_that_cannot_be_reached(bench: Bench) -> None:
    (sent,) = bench.submit(route(P, D1))
    assert isinstance(sent, Send)
    effects = bench.fate.on_unsent(sent)
    assert ends(effects) == [WorkerLost]
    assert P not in aborted(effects)
    assert bench.fate.on_unsent(sent) == []


def test_an_abort_that_cannot_be_sent_is_no_failure(bench: Bench) -> None:
    bench.submit(route(P, D1))
    (abort, *_) = bench.fate.client_gone("r", "The client left.")
    assert isinstance(abort, Send)
    assert bench.fate.on_unsent(abort) == []


def test_the_gateway_shuts_down(bench: Bench) -> None:
    bench.submit(route(P, D1))
    bench.submit(route(ALONE), request_id="s")
    effects = bench.fate.shut_down()
    assert ends(effects) == [Draining, Draining]
    assert aborted(effects) == {P, D1, ALONE}
    assert bench.nothing_left()


def test_a_request_id_is_used_once_at_a_time(bench: Bench) -> None:
    bench.submit(route(P, D1))
    with pytest.raises(ValueError, match="in use"):
        bench.submit(route(P, D1))


def test_prompt_tokens_are_counted_until_the_first_token(bench: Bench) -> None:
    bench.submit(route(P, D1))
    assert bench.router.own(P).prompt_tokens == 3
    bench.tokens(P, token(0))
    assert bench.router.own(P).prompt_tokens == 0
    assert bench.router.own(D1).sequences == 1
