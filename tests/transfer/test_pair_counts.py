"""What a sender counts of its hand-overs to each receiver."""

import pytest

from kvrelay.messages import (
    MAX_PAIRS,
    BlockRun,
    KVAck,
    KVRefusal,
    KVRepair,
    PairStatus,
    RefusalReason,
    RejectReason,
)
from kvrelay.transfer.protocol.pairs import Pairs
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import RequestKey
from tests.transfer.nouns import LAYOUT, new_peer, new_sender, new_sequence
from tests.transfer.test_sender import D0, D1, KEY, LEASE, NUM_BLOCKS, P, grant, reject

BYTES = NUM_BLOCKS * LAYOUT.num_layers * LAYOUT.block_bytes
ABOUT = {"target": P, "request_id": "r", "attempt": 1}


@pytest.fixture
def sender() -> KVSender:
    """It asked D0 at 0 s."""
    sender = new_sender(P)
    sender.offer(new_sequence(KEY, 5, block_table=[7, 3, 9]), (new_peer(D0), new_peer(D1, "d1")), 1, now=0.0)
    return sender


def the_pair(sender: KVSender) -> PairStatus:
    (pair,) = sender.pairs.status
    return pair


def test_a_hand_over_counts_its_bytes_and_its_seconds(sender: KVSender) -> None:
    assert sender.pairs.status == ()
    sender.on_message(D0, grant(), now=0.5)
    sender.commit(KEY, (5,), now=1.0)
    sender.next_pieces(2**20, now=1.5)
    sender.on_message(D0, KVAck(source=D0, **ABOUT, lease_id=LEASE), now=1.75)
    assert the_pair(sender) == PairStatus(
        receiver=D0, num_handovers=1, num_bytes=BYTES, num_grants=1, grant_wait_s=0.5, transfer_s=0.25
    )


def test_what_is_held_counts_as_nothing_sent(sender: KVSender) -> None:
    sender.on_message(D0, grant(held=2), now=0.0)
    sender.commit(KEY, (5,), now=0.0)
    sender.next_pieces(2**20, now=0.0)
    assert the_pair(sender).num_bytes == BYTES // 3


def test_a_refusal_is_the_pairs_and_the_next_one_waits_from_its_own_offer(sender: KVSender) -> None:
    refusal = KVRefusal(source=D0, **ABOUT, reason=RefusalReason.QUEUE_FULL, message="Full.")
    sender.on_message(D0, refusal, now=2.0)
    sender.on_message(D1, grant(LEASE._replace(incarnation=D1)), now=2.25)
    assert sender.pairs.status == (
        PairStatus(receiver=D0, num_refusals=1),
        PairStatus(receiver=D1, num_grants=1, grant_wait_s=0.25),
    )


def test_repairs_and_wrong_digests_are_counted_once_however_often_they_are_told(sender: KVSender) -> None:
    sender.on_message(D0, grant(), now=0.0)
    sender.commit(KEY, (5,), now=0.0)
    sender.next_pieces(2**20, now=0.0)
    runs = (BlockRun(0, 0, 1), BlockRun(1, 0, 2))
    for _ in range(2):
        sender.on_message(D0, KVRepair(source=D0, **ABOUT, lease_id=LEASE, runs=runs, num_damaged=1), now=0.0)
    sender.next_pieces(2**20, now=0.0)
    sender.on_message(D0, reject(RejectReason.CORRUPT), now=0.0)
    pair = the_pair(sender)
    assert (pair.num_repairs, pair.num_damaged, pair.num_bytes) == (2, 2, BYTES + 3 * LAYOUT.block_bytes)


def test_the_pairs_that_were_used_last_are_kept() -> None:
    pairs = Pairs()
    for receiver in range(MAX_PAIRS + 1):
        pairs.of(receiver).num_bytes += 1
        pairs.of(0)
    assert [pair.receiver for pair in pairs.status][-2:] == [MAX_PAIRS, 0]
    assert len(pairs.status) == MAX_PAIRS


def test_an_attempt_that_ends_before_anything_went_counts_nothing(sender: KVSender) -> None:
    sender.abort(RequestKey("r", 1), now=1.0)
    assert sender.pairs.status == ()
