"""What a sender does not take at its word: what comes too late, too early, twice, or from somebody else."""

import pytest

from kvrelay.messages import (
    Abort,
    BlockRun,
    KVAck,
    KVCommit,
    KVOffer,
    KVReleased,
    KVRepair,
    LeaseId,
    RefusalReason,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Dropped, Failed, FirstTokenDue, HandedOver
from kvrelay.transfer.protocol.sender import KVSender
from tests.transfer.nouns import LAYOUT, LEASE_S, MARGIN_S, messages, new_sender, pieces
from tests.transfer.test_sender import (
    ABOUT,
    D0,
    D1,
    KEY,
    LEASE,
    NUM_BLOCKS,
    P,
    grant,
    granted,
    kinds,
    offered,
    refusal,
    reject,
)


@pytest.fixture
def sender() -> KVSender:
    return new_sender(P)


def test_the_commit_waits_for_the_last_piece(sender: KVSender) -> None:
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert not messages(sender.next_pieces(LAYOUT.block_bytes, now=0.0), KVCommit)


def test_an_ack_of_another_or_before_the_commit_ends_nothing(sender: KVSender) -> None:
    granted(sender)
    early = KVAck(source=D0, target=P, **ABOUT, lease_id=LEASE)
    assert sender.on_message(D0, early, now=0.0) == []
    sender.commit(KEY, (5,), now=0.0)
    sender.next_pieces(2**20, now=0.0)
    assert sender.on_message(D1, early.model_copy(update={"source": D1}), now=0.0) == []
    assert sender.counters["late_ack"] == 2
    assert sender.on_message(D0, early, now=0.0) == [HandedOver(KEY)]


def test_what_comes_after_the_deadline_comes_too_late_even_without_a_tick(sender: KVSender) -> None:
    offered(sender)
    assert kinds(sender.on_message(D0, grant(), now=LEASE_S - MARGIN_S)) == [Abort, Failed, KVReleased]
    granted(sender)
    assert kinds(sender.commit(KEY, (5,), now=LEASE_S - MARGIN_S)) == [Abort, KVReleased, Failed]


def test_the_first_tokens_are_those_that_were_told_first(sender: KVSender) -> None:
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert sender.commit(KEY, (6,), now=0.0) == []
    assert messages(sender.next_pieces(2**20, now=0.0), KVCommit)[0].first_token_ids == (5,)


def test_a_refusal_after_the_grant_changes_nothing(sender: KVSender) -> None:
    granted(sender)
    assert sender.on_message(D0, refusal(D0, RefusalReason.QUEUE_FULL), now=0.0) == []
    assert sender.counters["late_refusal"] == 1
    assert sender.commit(KEY, (5,), now=0.0) == [FirstTokenDue(KEY)]


def test_a_reject_of_a_candidate_that_was_not_asked_changes_nothing(sender: KVSender) -> None:
    offered(sender)
    assert sender.on_message(D1, reject(RejectReason.EXPIRED, None, source=D1), now=0.0) == []
    assert sender.on_message(D0, grant(), now=0.0) == []
    assert sender.commit(KEY, (5,), now=0.0) == [FirstTokenDue(KEY)]


def test_nobody_is_told_that_anothers_lease_is_over(sender: KVSender) -> None:
    granted(sender)
    assert sender.on_message(D1, reject(RejectReason.EXPIRED, LeaseId(D0, 8), source=D1), now=0.0) == []


def test_a_grant_in_blocks_of_a_size_that_does_not_fit_is_given_back(sender: KVSender) -> None:
    offered(sender)
    odd = grant(num_blocks=2).model_copy(update={"block_size": 3})
    assert kinds(sender.on_message(D0, odd, now=0.0)) == [KVReleased, KVOffer]


def test_blocks_of_another_size_are_not_named_as_places_to_write_to(sender: KVSender) -> None:
    offered(sender)
    sender.on_message(D0, grant(num_blocks=2).model_copy(update={"block_size": 4, "one_sided": True}), now=0.0)
    sender.advance(KEY, 0, 4)
    assert [piece.target_block_ids for piece in pieces(sender.next_pieces(2**20, now=0.0))] == [()]


def test_what_is_read_is_what_was_there_when_the_first_layer_was_written(sender: KVSender) -> None:
    sequence = offered(sender)
    sender.advance(KEY, 0, 2)
    sequence.block_table[:] = [0, 0, 0]
    sender.advance(KEY, 0, 4)
    sender.on_message(D0, grant(), now=0.0)
    assert [piece.block_ids for piece in pieces(sender.next_pieces(2**20, now=0.0))] == [(7, 3)]


def test_what_was_asked_for_again_under_a_lease_that_ended_is_forgotten(sender: KVSender) -> None:
    granted(sender)
    for layer in range(LAYOUT.num_layers):
        sender.advance(KEY, layer, 4)
    sender.next_pieces(2**20, now=0.0)
    again = KVRepair(source=D0, target=P, **ABOUT, lease_id=LEASE, runs=(BlockRun(1, 0, 1),))
    sender.on_message(D0, again, now=0.0)
    sender.on_message(D0, reject(RejectReason.EXPIRED), now=0.0)
    sender.on_message(D1, grant(LeaseId(D1, 1)), now=0.0)
    sender.commit(KEY, (5,), now=0.0)
    sent = sender.next_pieces(2**20, now=0.0)
    assert [(piece.header.layers, piece.header.num_blocks) for piece in pieces(sent)] == [(range(2), 3)]
    assert [message.num_repaired for message in messages(sent, KVCommit)] == [0]


def test_the_loss_of_another_receiver_changes_nothing(sender: KVSender) -> None:
    granted(sender)
    assert sender.on_peer_lost(D1, now=0.0) == []
    assert sender.commit(KEY, (5,), now=0.0) == [FirstTokenDue(KEY)]


def test_a_commit_that_is_due_is_something_to_send(sender: KVSender) -> None:
    offered(sender)
    sender.on_message(D0, grant(held=NUM_BLOCKS), now=0.0)
    assert not sender.has_pending
    sender.commit(KEY, (5,), now=0.0)
    assert sender.has_pending
    assert messages(sender.next_pieces(0, now=0.0), KVCommit)
    assert not sender.has_pending


def test_an_offer_is_rejected_without_a_lease_or_for_an_incarnation_that_is_gone(sender: KVSender) -> None:
    offered(sender)
    stale = reject(RejectReason.STALE, None, source=99).model_copy(update={"meant_for": D0})
    assert kinds(sender.on_message(99, stale, now=0.0)) == [KVOffer]
    assert kinds(sender.on_message(D1, reject(RejectReason.ABORTED, None, source=D1), now=0.0)) == [Dropped]
