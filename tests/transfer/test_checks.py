"""Each check of the hand-over is there for a reason: without it, the test that is named beside it fails."""

import pytest

from tests.transfer.checks_of_handovers import CHECKS_OF_HANDOVERS
from tests.transfer.checks_of_kv import CHECKS_OF_KV
from tests.transfer.checks_of_leases import CHECKS_OF_LEASES
from tests.transfer.checks_of_offers import CHECKS_OF_OFFERS
from tests.transfer.checks_of_receiver import CHECKS_OF_RECEIVER
from tests.transfer.checks_of_sender import CHECKS_OF_SENDER
from tests.transfer.cut import Cut, call, cut, fails

CHECKS = [
    *CHECKS_OF_LEASES,
    *CHECKS_OF_RECEIVER,
    *CHECKS_OF_OFFERS,
    *CHECKS_OF_SENDER,
    *CHECKS_OF_HANDOVERS,
    *CHECKS_OF_KV,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.name} - {check.proof.__name__}")
def test_without_the_check_its_test_fails(check: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    call(check.proof)
    with monkeypatch.context() as patch:
        patch.setattr(check.where, "__code__", check.code())
        assert fails(check.proof)


def test_no_check_is_named_twice() -> None:
    assert len({(check.name, check.instead) for check in CHECKS}) == len(CHECKS)


def test_words_that_are_not_in_the_source_are_no_check() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        cut(Cut.code, ("no such words", test_no_check_is_named_twice))[0].code()
