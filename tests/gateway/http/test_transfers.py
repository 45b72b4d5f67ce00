"""What workers tell of hand-overs, as `/metrics` and `/cluster` show it."""

from kvrelay.events import Event
from kvrelay.messages import PairStatus, RequestEvents
from kvrelay.types import FinishReason
from tests.gateway.http.running import Gateway

COMPLETIONS = "/v1/completions"


def test_the_phases_of_a_request_are_measured(gateway: Gateway) -> None:
    """Each worker counts by its own clock, back from when it speaks."""
    prefill, decode = gateway.pair()
    client = gateway.client().post(COMPLETIONS, {"prompt": "x"})
    request = prefill.expect_prompt()
    about = {"request_id": request.request_id, "attempt": request.attempt}
    ages_s = {Event.PREFILL_BEGIN: 3.0, Event.PREFILL_END: 1.0}
    prefill.say(RequestEvents(source=prefill.incarnation, **about, ages_s=ages_s))
    prefill.send_tokens(request, [65])
    ages_s = {Event.TRANSFER_BEGIN: 2.0, Event.TRANSFER_END: 0.5}
    decode.say(RequestEvents(source=decode.incarnation, **about, ages_s=ages_s))
    decode.start_decode(request)
    decode.send_tokens(request, [66], start=1, finish=FinishReason.LENGTH)
    assert client.json()["choices"][0]["text"] == "AB"
    for phase, low, high in (("prefill", 1.9, 2.1), ("transfer", 1.4, 1.6)):
        assert gateway.metric(f'kvrelay_phase_seconds_count{{phase="{phase}"}}') == 1
        assert low < gateway.metric(f'kvrelay_phase_seconds_sum{{phase="{phase}"}}') < high
    assert gateway.metric('kvrelay_phase_seconds_sum{phase="hand_over"}') > 0.4


def test_events_of_a_request_that_is_nobodys_are_ignored(gateway: Gateway) -> None:
    prefill, _ = gateway.pair()
    ages_s = {Event.PREFILL_BEGIN: 3.0, Event.PREFILL_END: 1.0}
    prefill.say(RequestEvents(source=prefill.incarnation, request_id="gone", attempt=0, ages_s=ages_s))
    prefill.say(prefill.status())
    while gateway.metric('kvrelay_kv_blocks{role="prefill",state="leased",worker="prefill-1"}') == 0:
        prefill.listen(0.01)
    assert gateway.metric('kvrelay_phase_seconds_count{phase="prefill"}') == 0


def test_hand_overs_are_counted_by_pair_and_transport(gateway: Gateway) -> None:
    prefill, decode = gateway.pair()
    pairs = (
        PairStatus(receiver=decode.incarnation, transport="shm", num_bytes=4096, grant_wait_s=0.5, num_damaged=2),
        PairStatus(receiver=99, transport="zmq", num_refusals=3),
    )
    prefill.say(prefill.status().model_copy(update={"pairs": pairs}))
    known = f'receiver="{decode.hello.name}",sender="{prefill.hello.name}",transport="shm"'
    while gateway.metric(f"kvrelay_transfer_bytes_total{{{known}}}") == 0:
        prefill.listen(0.01)
    assert gateway.metric(f"kvrelay_transfer_bytes_total{{{known}}}") == 4096
    assert gateway.metric(f"kvrelay_grant_wait_seconds_total{{{known}}}") == 0.5
    assert gateway.metric(f"kvrelay_digest_failures_total{{{known}}}") == 2
    gone = f'receiver="{99:016x}",sender="{prefill.hello.name}",transport="zmq"'
    assert gateway.metric(f"kvrelay_refusals_total{{{gone}}}") == 3
    (shown,) = [worker["pairs"] for worker in gateway.cluster()["workers"] if worker["pairs"]]
    assert [(pair["receiver_name"], pair["transport"]) for pair in shown] == [(decode.hello.name, "shm"), ("", "zmq")]
