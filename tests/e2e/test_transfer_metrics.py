"""Workers tell when prompts were computed and handed over, to whom, and by what."""

from pathlib import Path

from kvrelay.events import Event
from kvrelay.messages import RequestEvents
from tests.e2e.test_transports import OPTIONS, PROMPT
from tests.e2e.wire import prefill_request, wire_gateway
from tests.tiny_model import write_tiny_model


def test_a_hand_over_is_told_with_its_times_its_bytes_and_its_transport(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with wire_gateway(
        tmp_path, model, p={"role": "prefill", **OPTIONS}, d={"role": "decode", **OPTIONS, "transport": "zmq"}
    ) as gateway:
        p, d = gateway.hellos["p"], gateway.hellos["d"]
        gateway.send(p, prefill_request(p, (d,), "r", PROMPT, 8))
        told = [gateway.next(RequestEvents, "r") for _ in range(2)]
        status = gateway.status(p, lambda status: any(pair.num_handovers for pair in status.pairs))
        assert gateway.status(d, lambda status: status.ledger.leased == 0).pairs == ()
    ages_s = {events.source: events.ages_s for events in told}
    assert ages_s[p.source][Event.PREFILL_BEGIN] > ages_s[p.source][Event.PREFILL_END] >= 0
    assert ages_s[d.source][Event.TRANSFER_BEGIN] >= ages_s[d.source][Event.TRANSFER_END] == 0
    (pair,) = status.pairs
    assert (pair.receiver, pair.transport, pair.num_handovers, pair.num_grants) == (d.source, "zmq", 1, 1)
    assert pair.num_bytes == p.layout.num_blocks(len(PROMPT)) * p.layout.block_bytes * p.layout.num_layers
    assert pair.transfer_s > 0
    assert pair.grant_wait_s > 0
