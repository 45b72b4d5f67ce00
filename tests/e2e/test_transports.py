"""Real workers hand KV over by each transport, and by the best that both of a pair have, and tell what that took."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.events import Event
from kvrelay.messages import PairStatus, RequestEvents, RequestFailed, WorkerStatus
from kvrelay.types import Incarnation
from tests.e2e.wire import WireGateway, prefill_request, wire_gateway
from tests.tiny_model import write_tiny_model

OPTIONS = {"dtype": "float32", "kv_memory": "8M", "threads": 1, "lease_s": 5.0}
PROMPT = tuple(range(43))
ANOTHER = tuple(range(100, 143))
A_THIRD = tuple(range(150, 193))
DECODERS = ("auto", "shm", "zmq", "ucx")  # by name and by `--transport`
USED = ("shm", "shm", "zmq", "ucx")  # by each of them and a worker that has all
WORKERS = ("p", "forced", *DECODERS)


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[WireGateway]:
    """With a prefill worker that has every transport, one that is told to use shared memory, and the decode workers."""
    model = write_tiny_model(folder / "tiny")
    prefill: dict[str, object] = {"role": "prefill", **OPTIONS, "max_batch_tokens": 16}
    roles: dict[str, dict[str, object]] = {"p": prefill, "forced": {**prefill, "transport": "shm"}}
    roles |= {name: {"role": "decode", **OPTIONS, "transport": name} for name in DECODERS}
    with wire_gateway(folder, model, **roles) as gateway:
        yield gateway


def hand_over(gateway: WireGateway, sender: str, receiver: str, prompt: tuple[int, ...]) -> list[int]:
    """The tokens that the receiver gives after a hand-over."""
    p, d = gateway.hellos[sender], gateway.hellos[receiver]
    request_id = f"{sender}-{receiver}"
    gateway.send(p, prefill_request(p, (d,), request_id, prompt, 8))
    return gateway.tokens(request_id, 8)


def counters(gateway: WireGateway) -> dict[str, Counter[str]]:
    """What every worker says that it has counted, when all are idle."""
    for name in WORKERS:
        gateway.status(gateway.hellos[name], lambda status: status.ledger.leased == status.ledger.revoked == 0)
    gateway.statuses.clear()
    return {name: Counter(gateway.status(gateway.hellos[name], lambda _: True).counters) for name in WORKERS}


def told(status: WorkerStatus, receiver: Incarnation) -> PairStatus:
    """What a sender tells of a receiver."""
    return next((pair for pair in status.pairs if pair.receiver == receiver), PairStatus(receiver=receiver))


def kv_bytes(gateway: WireGateway, prompt: tuple[int, ...]) -> int:
    """Of whole blocks, as they travel."""
    layout = gateway.hellos["p"].layout
    return layout.num_blocks(len(prompt)) * layout.block_bytes * layout.num_layers


def test_each_pair_uses_the_best_that_both_have(gateway: WireGateway) -> None:
    for name in DECODERS:
        endpoints = list(gateway.hellos[name].data_endpoints)
        assert endpoints == (["shm", "zmq", "ucx"] if name == "auto" else [name])
    before = counters(gateway)
    tokens = [hand_over(gateway, "p", name, PROMPT) for name in DECODERS]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    after = counters(gateway)
    received = {name: after[name] - before[name] for name in DECODERS}
    for name, used in zip(DECODERS, USED, strict=True):
        assert [received[name][f"{unused}_pieces_received"] for unused in {*USED} - {used}] == [0, 0]
    assert [after["p"][f"{name}_agreed"] for name in ("shm", "zmq", "ucx")] == [2, 1, 1]
    num_bytes = [received[name][f"{used}_bytes_received"] for name, used in zip(DECODERS, USED, strict=True)]
    assert num_bytes == [kv_bytes(gateway, PROMPT)] * len(DECODERS)


def test_one_that_is_forced_is_used_from_the_first_hand_over_on(gateway: WireGateway) -> None:
    before = counters(gateway)["auto"]
    hand_over(gateway, "forced", "auto", ANOTHER)
    assert (counters(gateway)["auto"] - before)["shm_bytes_received"] == kv_bytes(gateway, ANOTHER)


def test_a_pair_without_a_common_transport_ends_in_an_error(gateway: WireGateway, folder: Path) -> None:
    p, d = gateway.hellos["forced"], gateway.hellos["zmq"]
    gateway.send(p, prefill_request(p, (d,), "apart", PROMPT, 8))
    assert gateway.next(RequestFailed, "apart").code == "worker_lost"
    assert "No transport reaches zmq. zmq does not share memory." in (folder / "forced.log").read_text()


def test_a_hand_over_is_told_with_its_times_its_bytes_and_its_transport(gateway: WireGateway) -> None:
    p, d = gateway.hellos["p"], gateway.hellos["zmq"]
    before = told(gateway.status(p, lambda _: True), d.source)
    gateway.send(p, prefill_request(p, (d,), "told", A_THIRD, 8))
    events = [gateway.next(RequestEvents, "told") for _ in range(2)]
    status = gateway.status(p, lambda status: told(status, d.source).num_handovers > before.num_handovers)
    assert gateway.status(d, lambda status: status.ledger.leased == 0).pairs == ()
    ages_s = {each.source: each.ages_s for each in events}
    assert ages_s[p.source][Event.PREFILL_BEGIN] > ages_s[p.source][Event.PREFILL_END] >= 0
    assert ages_s[d.source][Event.TRANSFER_BEGIN] >= ages_s[d.source][Event.TRANSFER_END] == 0
    after = told(status, d.source)
    assert (after.transport, after.num_handovers, after.num_grants) == (
        "zmq",
        before.num_handovers + 1,
        before.num_grants + 1,
    )
    assert after.num_bytes - before.num_bytes == kv_bytes(gateway, A_THIRD)
    assert after.transfer_s > before.transfer_s
    assert after.grant_wait_s > before.grant_wait_s
