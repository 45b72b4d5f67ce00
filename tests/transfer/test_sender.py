"""The sender's rules, one by one."""

import pytest

from kvrelay.messages import (
    Abort,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    LeaseId,
    RefusalReason,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Action, Dropped, Failed, FirstTokenDue, HandedOver, Send
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import RequestKey, Sequence
from tests.transfer.nouns import (
    LAYOUT,
    LEASE_S,
    MARGIN_S,
    RESEND_S,
    messages,
    new_peer,
    new_sender,
    new_sequence,
    of,
    only,
    pieces,
)

P, D0, D1 = 1, 50, 51
KEY = RequestKey("r", 1)
CANDIDATES = (new_peer(D0, "d0"), new_peer(D1, "d1"))
LEASE = LeaseId(D0, 1)
NUM_BLOCKS = 3
ABOUT = {"request_id": "r", "attempt": 1}


@pytest.fixture
def sender() -> KVSender:
    return new_sender(P)


def offered(sender: KVSender) -> Sequence:
    sequence = new_sequence(KEY, 5, block_table=[7, 3, 9])
    offer = only(sender.offer(sequence, CANDIDATES, 1, now=0.0), Send)
    assert offer.peer == CANDIDATES[0]
    assert isinstance(offer.message, KVOffer)
    return sequence


def grant(lease: LeaseId = LEASE, num_blocks: int = NUM_BLOCKS, held: int = 0) -> KVGrant:
    blocks = tuple(range(num_blocks))
    return KVGrant(
        source=lease.incarnation,
        target=P,
        **ABOUT,
        lease_id=lease,
        block_ids=blocks,
        block_size=LAYOUT.block_size,
        held_blocks=held,
    )


def refusal(source: int, reason: RefusalReason, sentence: str = "No.") -> KVRefusal:
    return KVRefusal(source=source, target=P, **ABOUT, reason=reason, message=sentence)


def reject(reason: RejectReason, lease: LeaseId | None = LEASE, source: int = D0) -> KVReject:
    return KVReject(source=source, target=P, **ABOUT, reason=reason, lease_id=lease)


def granted(sender: KVSender) -> None:
    offered(sender)
    assert sender.on_message(D0, grant(), now=0.0) == []


def committed(sender: KVSender) -> None:
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert isinstance(of(sender.next_pieces(2**20, now=0.0), Send)[-1].message, KVCommit)


def kinds(actions: list[Action]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def test_the_offer_names_everything_the_receiver_needs(sender: KVSender) -> None:
    sequence = new_sequence(KEY, 5)
    offer = messages(sender.offer(sequence, CANDIDATES, 2, now=0.0), KVOffer)[0]
    assert (offer.source, offer.target, offer.key, offer.gateway) == (P, D0, KEY, sequence.gateway)
    assert (list(offer.prompt_token_ids), offer.num_samples, offer.layout) == (sequence.token_ids, 2, LAYOUT)
    assert offer.lease_s == LEASE_S


def test_the_same_offer_twice_does_nothing(sender: KVSender) -> None:
    sequence = offered(sender)
    assert sender.offer(sequence, CANDIDATES, 1, now=1.0) == []


def test_no_candidates_or_too_few_first_tokens_are_our_own_fault_and_said_so(sender: KVSender) -> None:
    with pytest.raises(ValueError, match="without a single decode candidate"):
        sender.offer(new_sequence(KEY, 5), (), 1, now=0.0)
    granted(sender)
    with pytest.raises(ValueError, match="1 samples and 2 first tokens"):
        sender.commit(KEY, (1, 2), now=0.0)


def test_a_lease_shorter_than_the_margin_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="raise --lease-s"):
        KVSender(incarnation=1, layout=LAYOUT, fingerprint="x", lease_s=1.0)


def test_full_blocks_leave_layer_by_layer_and_the_partial_one_with_the_commit(sender: KVSender) -> None:
    granted(sender)
    sender.advance(KEY, 0, 3)
    first = pieces(sender.next_pieces(2**20, now=0.0))
    assert [(piece.header.layer, piece.header.first_block, piece.block_ids) for piece in first] == [(0, 0, (7,))]
    sender.advance(KEY, 0, 5)
    sender.advance(KEY, 1, 5)
    second = pieces(sender.next_pieces(2**20, now=0.0))
    assert [(piece.header.layer, piece.block_ids) for piece in second] == [(0, (3,)), (1, (7, 3))]
    assert not sender.has_pending
    assert only(sender.commit(KEY, (5,), now=0.0), FirstTokenDue).key == KEY
    last = sender.next_pieces(2**20, now=0.0)
    assert [(piece.header.layers, piece.block_ids) for piece in pieces(last)] == [(range(2), (9,))]
    assert kinds(last)[-1] is KVCommit
    assert messages(last, KVCommit)[0].lease_id == LEASE
    assert sender.next_pieces(2**20, now=0.0) == []


def test_nothing_leaves_before_the_grant(sender: KVSender) -> None:
    offered(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert not sender.has_pending
    assert sender.next_pieces(2**20, now=0.0) == []
    assert only(sender.on_message(D0, grant(), now=0.0), FirstTokenDue).key == KEY
    assert sender.has_pending
    assert sender.pending_bytes == NUM_BLOCKS * LAYOUT.num_layers * LAYOUT.block_bytes


def test_blocks_that_the_receiver_holds_are_not_sent(sender: KVSender) -> None:
    offered(sender)
    sender.on_message(D0, grant(held=2), now=0.0)
    sender.commit(KEY, (5,), now=0.0)
    sent = pieces(sender.next_pieces(2**20, now=0.0))
    assert [(piece.header.first_block, piece.block_ids, piece.target_block_ids) for piece in sent] == [
        (2, (9,), (2,)),
    ]


def test_a_prompt_held_whole_needs_only_the_commit(sender: KVSender) -> None:
    offered(sender)
    sender.on_message(D0, grant(held=3), now=0.0)
    sender.commit(KEY, (5,), now=0.0)
    assert kinds(sender.next_pieces(1, now=0.0)) == [KVCommit]


@pytest.mark.parametrize(("max_bytes", "blocks"), [(0, []), (1, [1]), (16, [1]), (40, [2]), (64, [3, 1])])
def test_next_pieces_keeps_to_its_limit(sender: KVSender, max_bytes: int, blocks: list[int]) -> None:
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert [piece.header.num_blocks for piece in pieces(sender.next_pieces(max_bytes, now=0.0))] == blocks


def test_a_piece_is_never_larger_than_its_limit_but_at_least_one_block() -> None:
    for max_piece_bytes, expected in ((1, [1, 1, 1]), (32, [2, 1]), (1000, [3])):
        sender = new_sender(P, max_piece_bytes=max_piece_bytes)
        granted(sender)
        sender.commit(KEY, (5,), now=0.0)
        sent = pieces(sender.next_pieces(2**20, now=0.0))
        assert [piece.header.num_blocks for piece in sent if piece.header.layer == 0] == expected


@pytest.mark.parametrize(
    ("max_piece_bytes", "expected"),
    [
        (16 * 5, [(range(1), 0, 3), (range(1, 2), 0, 3)]),
        (16 * 6, [(range(2), 0, 3)]),
        (16 * 2, [(range(1), 0, 2), (range(1), 2, 1), (range(1, 2), 0, 2), (range(1, 2), 2, 1)]),
    ],
)
def test_layers_that_have_the_same_blocks_to_send_go_together_if_they_fit(
    max_piece_bytes: int, expected: list[tuple[range, int, int]]
) -> None:
    sender = new_sender(P, max_piece_bytes=max_piece_bytes)
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    sent = pieces(sender.next_pieces(2**20, now=0.0))
    assert [(piece.header.layers, piece.header.first_block, piece.header.num_blocks) for piece in sent] == expected
    assert all(len(piece.block_ids) == piece.header.num_blocks for piece in sent)
    assert sum(piece.header.payload_bytes for piece in sent) == NUM_BLOCKS * LAYOUT.num_layers * LAYOUT.block_bytes


def test_several_layers_count_as_all_of_their_blocks(sender: KVSender) -> None:
    granted(sender)
    for layer in range(LAYOUT.num_layers):
        sender.advance(KEY, layer, 2)
    other = new_sequence(RequestKey("other", 1), 5, block_table=[1, 2, 3])
    sender.offer(other, CANDIDATES, 1, now=0.0)
    about = {"request_id": "other", "attempt": 1}
    sender.on_message(D0, grant(LeaseId(D0, 2)).model_copy(update=about), now=0.0)
    sender.advance(other.key, 0, 2)
    assert [piece.header.layers for piece in pieces(sender.next_pieces(32, now=0.0))] == [range(2)]
    assert [piece.header.lease_id.counter for piece in pieces(sender.next_pieces(32, now=0.0))] == [2]


def test_layers_of_which_one_is_further_go_apart(sender: KVSender) -> None:
    granted(sender)
    sender.advance(KEY, 0, 4)
    sender.advance(KEY, 1, 2)
    sent = pieces(sender.next_pieces(2**20, now=0.0))
    assert [(piece.header.layers, piece.header.num_blocks) for piece in sent] == [(range(1), 2), (range(1, 2), 1)]


def test_an_ack_ends_it_and_a_second_one_is_only_counted(sender: KVSender) -> None:
    committed(sender)
    ack = KVAck(source=D0, target=P, **ABOUT, lease_id=LEASE)
    assert sender.on_message(D0, ack.model_copy(update={"lease_id": LeaseId(D0, 2)}), now=0.0) == []
    assert only(sender.on_message(D0, ack, now=0.0), HandedOver).key == KEY
    assert sender.on_message(D0, ack, now=0.0) == []
    assert sender.counters["late_ack"] == 2
    assert sender.next_deadline() is None


def test_offers_are_repeated_ever_more_slowly_until_answered(sender: KVSender) -> None:
    offered(sender)
    times = []
    while (deadline := sender.next_deadline()) is not None and deadline < LEASE_S - MARGIN_S:
        assert kinds(sender.tick(deadline)) == [KVOffer]
        times.append(deadline)
    assert times == [RESEND_S * factor for factor in (1, 3, 7, 15)]
    sender.on_message(D0, grant(), now=8.0)
    assert sender.tick(8.5) == []


def test_commits_are_repeated_until_answered(sender: KVSender) -> None:
    committed(sender)
    assert kinds(sender.tick(RESEND_S)) == [KVCommit]
    assert sender.tick(RESEND_S) == []


def test_the_same_grant_again_changes_nothing(sender: KVSender) -> None:
    committed(sender)
    assert sender.on_message(D0, grant(), now=0.0) == []
    assert sender.next_pieces(2**20, now=0.0) == []
    assert sender.counters["repeated_grant"] == 1


def test_a_refused_offer_goes_to_the_next_candidate(sender: KVSender) -> None:
    offered(sender)
    offer = only(sender.on_message(D0, refusal(D0, RefusalReason.QUEUE_FULL), now=1.0), Send)
    assert offer.peer == CANDIDATES[1]
    assert sender.on_message(D0, refusal(D0, RefusalReason.QUEUE_FULL), now=1.0) == []
    assert sender.on_message(D1, grant(LeaseId(D1, 4)), now=1.0) == []


@pytest.mark.parametrize(
    ("reasons", "code"),
    [
        ((RefusalReason.NEVER_FITS, RefusalReason.NEVER_FITS), "context_length_exceeded"),
        ((RefusalReason.NEVER_FITS, RefusalReason.QUEUE_FULL), "overloaded"),
        ((RefusalReason.DRAINING, RefusalReason.QUEUE_FULL), "overloaded"),
        ((RefusalReason.DRAINING, RefusalReason.NEVER_FITS), "no_workers"),
        ((RefusalReason.INCOMPATIBLE, RefusalReason.DRAINING), "no_workers"),
    ],
)
def test_when_all_refuse_the_request_fails_with_the_code_that_helps_most(
    sender: KVSender, reasons: tuple[RefusalReason, RefusalReason], code: str
) -> None:
    offered(sender)
    sender.on_message(D0, refusal(D0, reasons[0], "First."), now=1.0)
    failed = only(sender.on_message(D1, refusal(D1, reasons[1], "Second."), now=1.0), Failed)
    assert (failed.key, failed.code) == (KEY, code)
    assert "First. Second." in failed.message


def test_each_process_is_asked_once_even_if_named_twice(sender: KVSender) -> None:
    sender.offer(new_sequence(KEY, 5), (CANDIDATES[0], CANDIDATES[0]), 1, now=0.0)
    assert kinds(sender.on_message(D0, refusal(D0, RefusalReason.DRAINING), now=0.0)) == [Failed]


def test_a_silent_candidate_is_told_and_the_request_fails_at_the_deadline(sender: KVSender) -> None:
    offered(sender)
    actions = sender.tick(LEASE_S - MARGIN_S)
    assert kinds(actions) == [Abort, Failed]
    assert of(actions, Failed)[0].code == "overloaded"
    assert messages(actions, Abort)[0].target == D0


def test_a_lease_not_used_by_the_deadline_is_let_go(sender: KVSender) -> None:
    granted(sender)
    assert kinds(sender.tick(LEASE_S - MARGIN_S)) == [Abort, KVReleased, Failed]


def test_nothing_leaves_after_the_deadline_even_without_a_tick(sender: KVSender) -> None:
    granted(sender)
    sender.commit(KEY, (5,), now=0.0)
    assert kinds(sender.next_pieces(2**20, now=LEASE_S - MARGIN_S)) == [Abort, KVReleased, Failed]


def test_a_commit_without_an_answer_is_dropped_never_failed_and_never_aborted(sender: KVSender) -> None:
    committed(sender)
    assert sender.tick(LEASE_S) == [Dropped(KEY)]


@pytest.mark.parametrize("reason", [RejectReason.EXPIRED, RejectReason.UNKNOWN, RejectReason.CORRUPT])
def test_a_rejected_commit_is_dropped_and_its_lease_confirmed(sender: KVSender, reason: RejectReason) -> None:
    committed(sender)
    assert kinds(sender.on_message(D0, reject(reason), now=1.0)) == [KVReleased, Dropped]


@pytest.mark.parametrize("reason", [RejectReason.EXPIRED, RejectReason.UNKNOWN])
def test_a_lease_that_ended_early_sends_the_attempt_to_the_next_candidate(
    sender: KVSender, reason: RejectReason
) -> None:
    granted(sender)
    sender.advance(KEY, 0, 4)
    sender.next_pieces(2**20, now=0.0)
    assert kinds(sender.on_message(D0, reject(reason), now=1.0)) == [KVReleased, KVOffer]
    sender.on_message(D1, grant(LeaseId(D1, 9)), now=1.0)
    again = pieces(sender.next_pieces(2**20, now=1.0))
    assert [(piece.header.lease_id, piece.block_ids) for piece in again] == [(LeaseId(D1, 9), (7, 3))]


@pytest.mark.parametrize("reason", [RejectReason.ABORTED, RejectReason.CORRUPT])
def test_what_the_receiver_tells_the_gateway_itself_is_dropped_here(sender: KVSender, reason: RejectReason) -> None:
    granted(sender)
    assert kinds(sender.on_message(D0, reject(reason), now=1.0)) == [KVReleased, Dropped]


def test_a_reject_about_another_lease_is_confirmed_and_changes_nothing(sender: KVSender) -> None:
    granted(sender)
    assert kinds(sender.on_message(D0, reject(RejectReason.EXPIRED, LeaseId(D0, 8)), now=1.0)) == [KVReleased]
    assert kinds(sender.on_message(D0, reject(RejectReason.EXPIRED, None), now=1.0)) == []
    assert sender.commit(KEY, (5,), now=1.0) == [FirstTokenDue(KEY)]


def test_a_lease_that_is_still_written_to_is_not_confirmed_whichever_attempt_a_reject_names(sender: KVSender) -> None:
    granted(sender)
    other = reject(RejectReason.ABORTED).model_copy(update={"attempt": 2})
    assert sender.on_message(D0, other, now=0.0) == []
    sender.advance(KEY, 0, 4)
    assert pieces(sender.next_pieces(2**20, now=0.0))


def test_the_first_token_is_due_once_however_often_the_attempt_moves(sender: KVSender) -> None:
    granted(sender)
    assert sender.commit(KEY, (5,), now=0.0) == [FirstTokenDue(KEY)]
    sender.on_peer_lost(D0, now=0.0)
    assert sender.on_message(D1, grant(LeaseId(D1, 1)), now=0.0) == []
    assert sender.commit(KEY, (5,), now=0.0) == []


def test_a_grant_for_an_attempt_that_is_over_is_given_back(sender: KVSender) -> None:
    offered(sender)
    sender.abort(KEY, now=0.0)
    released = messages(sender.on_message(D0, grant(), now=1.0), KVReleased)
    assert [message.lease_id for message in released] == [LEASE]


def test_a_second_lease_is_given_back_and_the_first_kept(sender: KVSender) -> None:
    granted(sender)
    released = messages(sender.on_message(D0, grant(LeaseId(D0, 2)), now=0.0), KVReleased)
    assert [message.lease_id for message in released] == [LeaseId(D0, 2)]
    sender.commit(KEY, (5,), now=0.0)
    assert messages(sender.next_pieces(2**20, now=0.0), KVCommit)[0].lease_id == LEASE


def test_a_grant_of_a_candidate_that_was_left_is_given_back_and_not_taken_for_the_new_ones(sender: KVSender) -> None:
    offered(sender)
    sender.on_peer_lost(D0, now=0.0)
    assert kinds(sender.on_message(D0, grant(), now=0.0)) == [KVReleased]
    sender.commit(KEY, (5,), now=0.0)
    assert not sender.has_pending
    assert sender.on_message(D1, grant(LeaseId(D1, 1)), now=0.0) == [FirstTokenDue(KEY)]


def test_a_grant_that_does_not_fit_the_prompt_is_given_back(sender: KVSender) -> None:
    offered(sender)
    assert kinds(sender.on_message(D0, grant(num_blocks=2), now=0.0)) == [KVReleased, KVOffer]
    assert kinds(sender.on_message(D1, grant(LeaseId(D1, 1), held=4), now=0.0)) == [KVReleased, Failed]


def test_messages_for_or_from_somebody_else_are_dropped_and_counted(sender: KVSender) -> None:
    offered(sender)
    assert sender.on_message(D0, grant().model_copy(update={"target": P + 1}), now=0.0) == []
    assert sender.on_message(D1, grant(), now=0.0) == []
    assert sender.on_message(D0, grant().model_copy(update={"lease_id": LeaseId(D1, 1)}), now=0.0) == []
    assert (sender.counters["foreign_message"], sender.counters["foreign_lease"]) == (2, 1)


def test_abort_covers_earlier_attempts_and_comes_before_the_offer_too(sender: KVSender) -> None:
    granted(sender)
    assert kinds(sender.abort(RequestKey("r", 2), now=0.0)) == [Abort, KVReleased, Dropped]
    assert sender.abort(RequestKey("r", 2), now=0.0) == []
    assert sender.offer(new_sequence(RequestKey("r", 2), 5), CANDIDATES, 1, now=1.0) == [Dropped(RequestKey("r", 2))]
    sender.abort(RequestKey("r", 1), now=1.0)
    assert sender.offer(new_sequence(RequestKey("r", 2), 5), CANDIDATES, 1, now=1.0) == [Dropped(RequestKey("r", 2))]
    assert kinds(sender.offer(new_sequence(RequestKey("r", 3), 5), CANDIDATES, 1, now=1.0)) == [KVOffer]


def test_the_loss_of_a_gateway_aborts_its_requests(sender: KVSender) -> None:
    sequence = new_sequence(KEY, 5, gateway=900)
    sender.offer(sequence, CANDIDATES, 1, now=0.0)
    assert kinds(sender.on_peer_lost(900, now=0.0)) == [Abort, Dropped]


def test_after_the_commit_a_lost_receiver_changes_nothing_but_the_commit_is_repeated(sender: KVSender) -> None:
    committed(sender)
    assert sender.on_peer_lost(D0, now=0.0) == []
    assert kinds(sender.tick(RESEND_S)) == [KVCommit]


def test_a_layer_written_without_the_whole_prompt_reserved_is_our_own_fault_and_said_so(sender: KVSender) -> None:
    sender.offer(new_sequence(KEY, 5, block_table=[1]), CANDIDATES, 1, now=0.0)
    with pytest.raises(ValueError, match="1 of 3 blocks"):
        sender.advance(KEY, 0, 2)


def test_an_unknown_request_is_nobodys_business(sender: KVSender) -> None:
    sender.advance(KEY, 0, 4)
    assert sender.commit(KEY, (1,), now=0.0) == []
    assert sender.abort(KEY, now=0.0) == []
    assert sender.on_peer_lost(D0, now=0.0) == []
