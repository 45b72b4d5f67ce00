"""Outputs are kept until acknowledged, aborted or expired, and never without bound."""

import pytest

from kvrelay.messages import TokenOutput
from kvrelay.outputs import OutputStore
from kvrelay.types import FinishReason, RequestKey, TokenLogprobs

KEY = RequestKey("r", 1)
STOP = FinishReason.STOP


def token(
    index: int,
    reason: FinishReason | None = None,
    *,
    key: RequestKey = KEY,
    sample: int = 0,
    token_id: int | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id=key.request_id,
        attempt=key.attempt,
        sample=sample,
        index=index,
        token_id=100 + index if token_id is None else token_id,
        finish_reason=reason,
    )


def finished(store: OutputStore, name: str, now: float) -> RequestKey:
    key = RequestKey(name, 0)
    store.add(token(0, STOP, key=key), now)
    return key


def test_tokens_come_back_from_any_index_with_the_reason_on_the_last() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    sent = [token(0), token(1), token(2, STOP)]
    for output in sent:
        store.add(output, now=0.0)
    assert [store.resend(KEY, 0, index) for index in range(5)] == [sent, sent[1:], sent[2:], [], []]


def test_the_first_token_tells_again_what_was_cached() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    sent = [token(0).model_copy(update={"cached_tokens": 16}), token(1)]
    for output in [*sent, token(0)]:
        store.add(output, now=0.0)
    assert store.resend(KEY, 0, 0) == sent


def test_logprobs_are_told_again_with_their_tokens() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    sent = [token(index).model_copy(update={"logprobs": TokenLogprobs(-float(index), ())}) for index in range(3)]
    for output in sent:
        store.add(output, now=0.0)
    assert [store.resend(KEY, 0, index) for index in (0, 2)] == [sent, sent[2:]]


def test_unknown_is_not_the_same_as_nothing_yet() -> None:
    """An unknown request id must not be answered as if it were done."""
    store = OutputStore(keep_s=10, max_requests=4)
    assert store.resend(KEY, 0, 0) is None
    store.open(KEY, num_samples=2)
    assert store.resend(KEY, 1, 0) == []
    assert store.resend(KEY, 2, 0) is None
    assert store.resend(RequestKey("r", 0), 0, 0) is None


def test_opening_again_loses_nothing() -> None:
    store = OutputStore(keep_s=10, max_requests=1)
    store.add(token(0), now=0.0)
    store.open(KEY, num_samples=1)
    assert store.resend(KEY, 0, 0) == [token(0)]


def test_a_token_that_is_kept_already_changes_nothing() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    for output in (token(0), token(1), token(1, STOP, token_id=5), token(0, token_id=6)):
        store.add(output, now=0.0)
    assert store.resend(KEY, 0, 0) == [token(0), token(1)]
    assert store.expire(now=100.0) == 0


def test_a_gap_is_refused() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    store.add(token(0), now=0.0)
    with pytest.raises(ValueError, match="Token 2 of sample 0 of r came after 1 tokens"):
        store.add(token(2), now=0.0)


def test_samples_are_kept_apart() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    first, second = token(0, sample=0), token(0, sample=1, token_id=7)
    store.add(first, now=0.0)
    store.add(second, now=0.0)
    assert (store.resend(KEY, 0, 0), store.resend(KEY, 1, 0), len(store)) == ([first], [second], 1)


def test_an_acknowledged_attempt_is_forgotten_and_no_other() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    for attempt in range(3):
        store.open(RequestKey("r", attempt), num_samples=1)
    store.ack(KEY)
    store.ack(RequestKey("nobody", 0))
    assert [store.resend(RequestKey("r", attempt), 0, 0) for attempt in range(3)] == [[], None, []]


def test_an_abort_forgets_every_attempt_up_to_it() -> None:
    store = OutputStore(keep_s=10, max_requests=5)
    for key in (*(RequestKey("r", attempt) for attempt in range(3)), RequestKey("q", 0)):
        store.open(key, num_samples=1)
    store.abort(KEY)
    assert [store.resend(RequestKey("r", attempt), 0, 0) for attempt in range(3)] == [None, None, []]
    assert store.resend(RequestKey("q", 0), 0, 0) == []


def test_outputs_expire_some_time_after_the_last_sample_ended() -> None:
    store = OutputStore(keep_s=10, max_requests=4)
    store.open(KEY, num_samples=2)
    store.add(token(0, STOP, sample=0), now=0.0)
    assert store.expire(now=50.0) == 0  # the other sample still runs
    store.add(token(0, STOP, sample=1), now=50.0)
    assert (store.expire(now=59.9), store.expire(now=60.0), len(store)) == (0, 1, 0)


def test_the_store_is_bounded_and_displaces_finished_requests_first() -> None:
    store = OutputStore(keep_s=10, max_requests=3)
    store.open(KEY, num_samples=1)
    old, new = finished(store, "old", now=1.0), finished(store, "new", now=2.0)
    store.open(RequestKey("next", 0), num_samples=1)
    assert store.resend(old, 0, 0) is None
    assert store.resend(KEY, 0, 0) == []
    assert store.resend(new, 0, 0) == [token(0, STOP, key=new)]
    for name in ("x", "y", "z"):
        store.open(RequestKey(name, 0), num_samples=1)
    assert (len(store), store.resend(KEY, 0, 0)) == (3, None)


def test_later_tokens_of_a_displaced_request_are_not_kept() -> None:
    store = OutputStore(keep_s=10, max_requests=1)
    store.add(token(0), now=0.0)
    store.open(RequestKey("next", 0), num_samples=1)
    store.add(token(1), now=0.0)
    assert store.resend(KEY, 0, 0) is None


@pytest.mark.parametrize(("keep_s", "max_requests"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_store_that_keeps_nothing_is_refused(keep_s: float, max_requests: int) -> None:
    with pytest.raises(ValueError, match="must be kept"):
        OutputStore(keep_s, max_requests)
