"""Thousands of hand-overs over a network in which every kind of message and frame meets every kind of fault.

The world checks each of them: every token and every byte of KV that is adopted, and every block at the end.
"""

import pytest

from tests.transfer.injector import FAULTS, KINDS, Report, inject
from tests.transfer.network import Flight, Network

SIDES = pytest.mark.parametrize("one_sided", [False, True], ids=["two_sided", "one_sided"])


def check(report: Report, num_handovers: int) -> None:
    """Everything was tried, and most of it went well nevertheless."""
    missed = [(kind, fault) for kind in KINDS for fault in FAULTS if not report.injected[kind, fault]]
    assert not missed, f"never injected: {missed}"
    assert {kind for kind, _ in report.injected} == set(KINDS)
    assert report.num_requests == num_handovers
    assert report.log["ended: gateway's deadline"] == 0, "a request was left to the gateway's clock"
    assert report.log["adopted"] > 0.7 * num_handovers, f"endings: {report.log}"
    assert report.log["ended: hand_over_failed"] < 0.1 * num_handovers, f"endings: {report.log}"


@SIDES
def test_hundreds_of_hand_overs_survive_every_fault(one_sided: bool) -> None:
    check(inject(600, 0, one_sided=one_sided), 600)


@pytest.mark.soak
@SIDES
def test_thousands_of_hand_overs_survive_every_fault(one_sided: bool) -> None:
    check(inject(5_000, 10_000, one_sided=one_sided), 5_000)


def flights(*kinds: str) -> Network:
    network = Network()
    for kind in kinds:
        network.put(Flight(1, "d0", kind.encode(), kind, sent_at=0.0))
    return network


def test_each_fault_does_what_it_is_called() -> None:
    network = flights("a", "bb", "c", "d")
    network.drop(0)
    network.flip(0, 9)
    network.truncate(1, 0)
    network.move(2, 0)
    network.repeat(0, due=2.0)
    network.delay(0, due=1.0)
    assert not network.is_gentle
    assert [flight.frame for flight in network.take_due(0.5)] == [b"b`", b""]
    assert [flight.frame for flight in network.take_due(1.5)] == [b"d"]
    assert [flight.frame for flight in network.take_due(2.0)] == [b"d"]
    assert not network


def test_what_is_spoiled_after_it_was_repeated_still_comes_once_as_it_was() -> None:
    network = flights("a")
    network.repeat(0, due=0.0)
    network.truncate(0, 0)
    assert [flight.frame for flight in network] == [b"", b"a"]
