"""What a sender checks of messages and of what its worker says, and what it does in time."""

from kvrelay.transfer.protocol.sender import KVSender
from tests.transfer import test_faults as faults
from tests.transfer import test_repair as repair
from tests.transfer import test_sender as sender
from tests.transfer import test_sender_doubts as sender_doubts
from tests.transfer.cut import cut

CHECKS_OF_SENDER = [
    *cut(
        KVSender.offer,
        (" - self._margin_s", sender.test_a_silent_candidate_is_told_and_the_request_fails_at_the_deadline, ""),
        (
            "self._newest_aborted(sequence.key) >= sequence.key.attempt",
            sender.test_abort_covers_earlier_attempts_and_comes_before_the_offer_too,
        ),
        ("sequence.key in self._handovers", sender.test_the_same_offer_twice_does_nothing),
        (
            "{peer.incarnation: peer for peer in candidates}.values()",
            sender.test_each_process_is_asked_once_even_if_named_twice,
            "candidates",
        ),
    ),
    *cut(
        KVSender.__init__,
        ("lease_s <= margin_s", sender.test_a_lease_shorter_than_the_margin_is_refused_at_start),
    ),
    *cut(
        KVSender.commit,
        (
            "len(first_token_ids) != handover.num_samples",
            sender.test_no_candidates_or_too_few_first_tokens_are_our_own_fault_and_said_so,
        ),
        (" or handover.first_token_ids", sender_doubts.test_the_first_tokens_are_those_that_were_told_first),
        (
            "actions = self._end_overdue(now)",
            sender_doubts.test_what_comes_after_the_deadline_comes_too_late_even_without_a_tick,
            "actions = []",
        ),
    ),
    *cut(
        KVSender.abort,
        (
            "max(key.attempt, self._newest_aborted(key))",
            sender.test_abort_covers_earlier_attempts_and_comes_before_the_offer_too,
            "key.attempt",
        ),
        (
            "key.covers(handover.key)",
            sender.test_abort_covers_earlier_attempts_and_comes_before_the_offer_too,
            "key == handover.key",
        ),
    ),
    *cut(
        KVSender.on_peer_lost,
        (
            "handover.peer.incarnation == incarnation",
            sender_doubts.test_the_loss_of_another_receiver_changes_nothing,
            "True",
        ),
        ("handover.sequence.gateway == incarnation", sender.test_the_loss_of_a_gateway_aborts_its_requests),
        (
            " and handover.phase is not Phase.COMMITTED",
            sender.test_after_the_commit_a_lost_receiver_changes_nothing_but_the_commit_is_repeated,
        ),
    ),
    *cut(
        KVSender.on_message,
        ("message.source != peer or ", sender.test_messages_for_or_from_somebody_else_are_dropped_and_counted),
        (
            " or message.target != self.incarnation",
            sender.test_messages_for_or_from_somebody_else_are_dropped_and_counted,
        ),
        (
            "actions = self._end_overdue(now)",
            sender_doubts.test_what_comes_after_the_deadline_comes_too_late_even_without_a_tick,
            "actions = []",
        ),
    ),
    *cut(
        KVSender._on_grant,
        ("grant.lease_id.incarnation != peer", sender.test_messages_for_or_from_somebody_else_are_dropped_and_counted),
        (
            "handover is not None and handover.grant is not None and handover.grant.lease_id == grant.lease_id",
            sender.test_the_same_grant_again_changes_nothing,
        ),
        (
            " or handover.peer.incarnation != peer",
            sender.test_a_grant_of_a_candidate_that_was_left_is_given_back_and_not_taken_for_the_new_ones,
        ),
        (" or handover.phase is not Phase.OFFERED", sender.test_a_second_lease_is_given_back_and_the_first_kept),
        (
            "+= 1\n        return self._release(peer, grant.lease_id)",
            sender.test_a_grant_for_an_attempt_that_is_over_is_given_back,
            "+= 1\n        return []",
        ),
        (
            "fault := fault_of_grant(handover, grant, self._layout)",
            sender.test_a_grant_that_does_not_fit_the_prompt_is_given_back,
            "fault := ''",
        ),
    ),
    *cut(
        KVSender._on_refusal,
        (" or handover.peer.incarnation != peer", sender.test_a_refused_offer_goes_to_the_next_candidate),
        (" or handover.phase is not Phase.OFFERED", sender_doubts.test_a_refusal_after_the_grant_changes_nothing),
    ),
    *cut(
        KVSender._on_repair,
        (" or not self._holds(handover, peer, repair.lease_id)", repair.test_a_question_about_another_lease_is_ignored),
        (
            "not handover.repair(repair.runs)",
            repair.test_blocks_that_the_prompt_does_not_have_are_not_sent,
            "handover.repair(repair.runs) and False",
        ),
    ),
    *cut(
        KVSender._on_ack,
        (
            " or handover.phase is not Phase.COMMITTED",
            sender_doubts.test_an_ack_of_another_or_before_the_commit_ends_nothing,
        ),
        (
            " or not self._holds(handover, peer, ack.lease_id)",
            sender.test_an_ack_ends_it_and_a_second_one_is_only_counted,
        ),
    ),
    *cut(
        KVSender._on_reject,
        (
            " and self._is_about(handover, peer, reject)",
            sender.test_a_reject_about_another_lease_is_confirmed_and_changes_nothing,
        ),
        (" or lease_id.incarnation != peer", sender_doubts.test_nobody_is_told_that_anothers_lease_is_over),
        (
            " or self._is_held(lease_id)",
            sender.test_a_lease_that_is_still_written_to_is_not_confirmed_whichever_attempt_a_reject_names,
        ),
        (
            "return self._release(peer, lease_id) + actions",
            sender.test_a_rejected_commit_is_dropped_and_its_lease_confirmed,
            "return actions",
        ),
    ),
    *cut(
        KVSender._end_rejected,
        ("handover.phase is Phase.COMMITTED or ", sender.test_a_rejected_commit_is_dropped_and_its_lease_confirmed),
        (
            " or reject.reason in (RejectReason.ABORTED, RejectReason.CORRUPT)",
            sender.test_what_the_receiver_tells_the_gateway_itself_is_dropped_here,
        ),
    ),
    *cut(
        KVSender.has_pending,
        (" or handover.is_through", sender_doubts.test_a_commit_that_is_due_is_something_to_send),
    ),
    *cut(
        KVSender._is_about,
        (
            "reject.reason is RejectReason.STALE",
            sender_doubts.test_an_offer_is_rejected_without_a_lease_or_for_an_incarnation_that_is_gone,
        ),
        (
            "handover.phase is Phase.OFFERED",
            sender_doubts.test_an_offer_is_rejected_without_a_lease_or_for_an_incarnation_that_is_gone,
        ),
        (
            "reject.meant_for == handover.peer.incarnation",
            faults.test_an_offer_to_a_restarted_receiver_goes_to_the_next_candidate_not_one_too_far,
            "True",
        ),
        (
            "handover.peer.incarnation == peer",
            sender_doubts.test_a_reject_of_a_candidate_that_was_not_asked_changes_nothing,
            "True",
        ),
        (
            "reject.lease_id is not None and self._holds(handover, peer, reject.lease_id)",
            sender.test_a_reject_about_another_lease_is_confirmed_and_changes_nothing,
            "True",
        ),
    ),
    *cut(
        KVSender._holds,
        (
            " and handover.peer.incarnation == peer",
            sender_doubts.test_an_ack_of_another_or_before_the_commit_ends_nothing,
        ),
        (" and handover.grant.lease_id == lease_id", sender.test_an_ack_ends_it_and_a_second_one_is_only_counted),
    ),
    *cut(
        KVSender.next_pieces,
        (
            "actions = self._end_overdue(now)",
            sender.test_nothing_leaves_after_the_deadline_even_without_a_tick,
            "actions = []",
        ),
        (
            "budget -= piece.header.num_layers * piece.header.num_blocks",
            sender.test_next_pieces_keeps_to_its_limit,
            "pass",
        ),
        (
            "piece.header.num_layers * piece.header.num_blocks",
            sender.test_several_layers_count_as_all_of_their_blocks,
            "piece.header.num_blocks",
        ),
        (
            "min(budget, self._max_piece_blocks)",
            sender.test_a_piece_is_never_larger_than_its_limit_but_at_least_one_block,
            "budget",
        ),
    ),
    *cut(
        KVSender.tick,
        ("handover.resend_at <= now", sender.test_offers_are_repeated_ever_more_slowly_until_answered),
        (
            "actions = self._end_overdue(now)",
            sender.test_a_silent_candidate_is_told_and_the_request_fails_at_the_deadline,
            "actions = []",
        ),
    ),
    *cut(
        KVSender._first_token,
        ("handover.first_token_told or ", sender.test_the_first_token_is_due_once_however_often_the_attempt_moves),
        (" or handover.phase is not Phase.GRANTED", sender.test_nothing_leaves_before_the_grant),
    ),
    *cut(
        KVSender._end_overdue,
        ("item.deadline <= now", sender.test_a_silent_candidate_is_told_and_the_request_fails_at_the_deadline),
        (
            "handover.phase is Phase.COMMITTED",
            sender.test_a_commit_without_an_answer_is_dropped_never_failed_and_never_aborted,
        ),
        (
            'actions += self._let_go(handover, "deadline passed")',
            sender.test_a_silent_candidate_is_told_and_the_request_fails_at_the_deadline,
            "pass",
        ),
    ),
    *cut(
        KVSender._let_go,
        ("handover.grant is not None", sender.test_a_lease_not_used_by_the_deadline_is_let_go),
    ),
    *cut(
        KVSender._abort,
        (
            "*self._let_go(handover, reason), ",
            sender.test_abort_covers_earlier_attempts_and_comes_before_the_offer_too,
            "",
        ),
    ),
]
