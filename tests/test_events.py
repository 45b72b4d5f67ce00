"""The timeline of a request and the latencies derived from it."""

import pytest

from kvrelay.events import MAX_ITLS, Event, RequestTimeline


def test_latencies_follow_from_the_stamps() -> None:
    timeline = RequestTimeline(10.0)
    timeline.stamp(Event.ADMITTED, 10.5)
    assert (timeline.ttft_s, timeline.tpot_s, timeline.e2e_s) == (None, None, None)
    assert timeline.token(12.0) is None
    assert timeline.token(12.5) == pytest.approx(0.5)
    assert timeline.token(14.0) == pytest.approx(1.5)
    timeline.stamp(Event.FINISHED, 15.0)
    assert timeline.ttft_s == pytest.approx(2.0)
    assert timeline.tpot_s == pytest.approx(1.0)
    assert timeline.e2e_s == pytest.approx(5.0)
    assert list(timeline.itls_s) == pytest.approx([0.5, 1.5])


def test_one_token_has_no_time_per_output_token() -> None:
    timeline = RequestTimeline(0.0)
    timeline.token(1.0)
    assert timeline.tpot_s is None


def test_the_first_stamp_counts() -> None:
    timeline = RequestTimeline(0.0)
    timeline.stamp(Event.DECODE_BEGIN, 1.0)
    timeline.stamp(Event.DECODE_BEGIN, 2.0)
    assert timeline.stamps[Event.DECODE_BEGIN] == 1.0


def test_a_request_ends_once() -> None:
    timeline = RequestTimeline(0.0)
    timeline.stamp(Event.CANCELLED, 1.0)
    timeline.stamp(Event.CANCELLED, 2.0)
    timeline.stamp(Event.DECODE_BEGIN, 3.0)
    with pytest.raises(ValueError, match="cancelled cannot become finished"):
        timeline.stamp(Event.FINISHED, 2.0)
    assert timeline.e2e_s == 1.0
    assert Event.DECODE_BEGIN not in timeline.stamps


def test_the_gaps_that_are_kept_are_bounded() -> None:
    timeline = RequestTimeline(0.0)
    for index in range(MAX_ITLS + 10):
        timeline.token(float(index))
    assert len(timeline.itls_s) == MAX_ITLS
    assert timeline.num_tokens == MAX_ITLS + 10
