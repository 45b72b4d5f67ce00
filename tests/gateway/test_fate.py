"""The fate of requests, fault by fault."""

import pytest

from kvrelay.errors import ClientGone, DeadlineExceeded, Draining, HandOverFailed, RequestError, WorkerLost
from kvrelay.gateway.fate import MAX_RESENDS, Effect, End, Fate, Send, Tokens
from kvrelay.gateway.flight import Submission
from kvrelay.gateway.router import Route, Router
from kvrelay.messages import (
    Abort,
    DecodeStarted,
    GenerateRequest,
    OutputAck,
    PrefillRequest,
    RequestFailed,
    Resend,
    StepOutput,
    TokenOutput,
)
from kvrelay.types import RequestKey, SamplingParams
from tests.gateway.nouns import GATEWAY, route, token

P, D1, D2, ALONE = 10, 21, 22, 30
RESEND_S, TIMEOUT_S = 5.0, 600.0


class Bench:
    """A Fate with shorthands for what may happen to it."""

    def __init__(self) -> None:
        self.router = Router()
        self.fate = Fate(GATEWAY, self.router, resend_s=RESEND_S, request_timeout_s=TIMEOUT_S)

    def submit(
        self, where: Route, *, request_id: str = "r", max_tokens: int = 10, num_samples: int = 1
    ) -> list[Effect]:
        submission = Submission(request_id, (1, 2, 3), SamplingParams(max_tokens=max_tokens), num_samples)
        return self.fate.submit(submission, where, 0.0)

    def tokens(self, worker: int, *outputs: TokenOutput, now: float = 1.0) -> list[Effect]:
        return self.fate.on_message(worker, StepOutput(source=worker, outputs=outputs), now)

    def started(self, worker: int, *, attempt: int = 0, now: float = 1.0) -> list[Effect]:
        return self.fate.on_message(worker, DecodeStarted(source=worker, request_id="r", attempt=attempt), now)

    def failed(self, worker: int, code: str = "hand_over_failed") -> list[Effect]:
        message = RequestFailed(source=worker, request_id="r", attempt=0, code=code, message="It broke.")
        return self.fate.on_message(worker, message, 1.0)

    def nothing_left(self) -> bool:
        return len(self.fate) == 0 and self.router.idle


@pytest.fixture
def bench() -> Bench:
    return Bench()


def aborted(effects: list[Effect]) -> set[int]:
    return {effect.peer for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Abort)}


def resends(effects: list[Effect]) -> list[tuple[int, int]]:
    return [
        (effect.peer, effect.message.from_index)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Resend)
    ]


def indexes(effects: list[Effect]) -> list[int]:
    return [output.index for effect in effects if isinstance(effect, Tokens) for output in effect.outputs]


def ends(effects: list[Effect]) -> list[type[RequestError] | None]:
    errors = [effect.error for effect in effects if isinstance(effect, End)]
    return [None if error is None else type(error) for error in errors]


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
    assert ends(effects) == [HandOverFailed]
    assert aborted(effects) == {D1, D2}
    assert bench.nothing_left()


def test_a_decode_worker_gives_up(bench: Bench) -> None:
    bench.submit(route(P, D1, D2))
    bench.started(D1)
    effects = bench.failed(D1)
    assert ends(effects) == [HandOverFailed]
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
