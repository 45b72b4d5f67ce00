"""What a receiver checks of messages and pieces, and what it does in time."""

from kvrelay.transfer.protocol.receiver import KVReceiver
from tests.transfer import test_conversion as conversion
from tests.transfer import test_faults as faults
from tests.transfer import test_receiver as receiver
from tests.transfer import test_receiver_doubts as receiver_doubts
from tests.transfer import test_repair as repair
from tests.transfer.cut import cut

CHECKS_OF_RECEIVER = [
    *cut(
        KVReceiver.on_message,
        ("message.source != peer", receiver.test_a_message_that_names_another_source_is_dropped),
        ("self._gone.get(peer)", receiver.test_an_offer_of_a_sender_whose_exit_was_observed_is_not_taken),
        ("message.target not in (0, self.incarnation)", receiver.test_messages_for_another_incarnation_are_stale),
        (
            "actions = self._end_overdue(now)",
            receiver_doubts.test_a_commit_after_the_lease_ended_comes_too_late_even_without_a_tick,
            "actions = []",
        ),
    ),
    *cut(
        KVReceiver._on_stale,
        (
            "not isinstance(message, KVOffer | KVCommit)",
            receiver.test_messages_for_another_incarnation_are_stale,
            "True",
        ),
    ),
    *cut(
        KVReceiver._on_offer,
        (
            "known is not None and offer.attempt < known",
            receiver.test_a_higher_attempt_supersedes_a_lower_one_wherever_it_stands,
        ),
        ("known == offer.attempt", receiver.test_the_same_offer_gets_the_same_grant),
        (
            "if known is not None:",
            receiver.test_a_higher_attempt_supersedes_a_lower_one_wherever_it_stands,
            "if False:",
        ),
    ),
    *cut(
        KVReceiver._on_known_offer,
        (" if lease.sender == peer else []", receiver_doubts.test_the_same_offer_of_somebody_else_gets_no_grant),
    ),
    *cut(
        KVReceiver._enqueue,
        (
            "if refusal := self._offers.objection(offer):",
            receiver.test_what_can_never_be_taken_is_refused_with_a_sentence,
            "if refusal := None:",
        ),
    ),
    *cut(
        KVReceiver._on_commit,
        (
            " or lease.lease_id != commit.lease_id",
            receiver.test_a_commit_under_another_lease_or_of_another_sender_changes_nothing,
        ),
        (
            " or lease.key != commit.key",
            receiver.test_a_commit_under_another_lease_or_of_another_sender_changes_nothing,
        ),
        ("lease.sender != peer", receiver.test_a_commit_under_another_lease_or_of_another_sender_changes_nothing),
        ("self._ask_to_repair(lease) + ", repair.test_nothing_is_adopted_while_the_sender_may_still_write, ""),
    ),
    *cut(
        KVReceiver._on_late_commit,
        (
            "newest is not None and commit.attempt < newest",
            receiver.test_a_commit_of_an_older_attempt_is_told_that_it_was_aborted,
        ),
    ),
    *cut(
        KVReceiver._on_released,
        (" or lease.sender != peer", receiver.test_a_sender_that_lets_go_frees_its_lease),
        (" or lease.is_committed", receiver.test_letting_go_after_the_commit_changes_nothing),
        (
            "sender_done=True",
            receiver.test_the_senders_abort_and_release_free_everything_in_either_order,
            "sender_done=False",
        ),
    ),
    *cut(
        KVReceiver.accept,
        ("lease.sender != peer or ", receiver.test_a_piece_from_another_connection_is_dropped),
        (" or header.sender != peer", receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted),
        (
            "(objection := lease.objection(header)) is not None",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
        ),
    ),
    *cut(
        KVReceiver.landed,
        (
            " or lease.sender != header.sender",
            receiver_doubts.test_a_piece_that_another_was_accepted_for_neither_lands_nor_is_asked_for_again,
        ),
        (
            "actions = self._end_overdue(now)",
            receiver_doubts.test_what_is_verified_after_the_lease_ended_comes_too_late_even_without_a_tick,
            "actions = []",
        ),
    ),
    *cut(
        KVReceiver.corrupt,
        (
            " or lease.sender != header.sender",
            receiver_doubts.test_a_piece_that_another_was_accepted_for_neither_lands_nor_is_asked_for_again,
        ),
        (
            "actions = self._end_overdue(now)",
            receiver_doubts.test_what_is_verified_after_the_lease_ended_comes_too_late_even_without_a_tick,
            "actions = []",
        ),
        (
            "return actions + self._fail(lease, RejectReason.CORRUPT, sentence, now)",
            receiver.test_blocks_stay_revoked_until_the_sender_lets_go,
            "return actions",
        ),
    ),
    *cut(
        KVReceiver.grant,
        (
            "count > min(max_blocks, self._blocks.num_free) or ",
            receiver.test_an_offer_waits_for_the_schedulers_room_and_is_then_granted,
        ),
        (
            "min(max_blocks, self._blocks.num_free)",
            receiver.test_an_offer_waits_for_the_schedulers_room_and_is_then_granted,
            "self._blocks.num_free",
        ),
        (
            "min(max_blocks, self._blocks.num_free)",
            receiver.test_blocks_that_are_not_free_are_not_granted_whatever_room_is_said_to_be_there,
            "max_blocks",
        ),
        (" or not fits", receiver.test_first_come_first_served_and_none_is_passed_over),
        ("max_sequences > 0 and ", receiver.test_an_offer_waits_for_the_schedulers_room_and_is_then_granted),
        (
            "max_sequences - 1",
            receiver_doubts.test_no_more_sequences_are_granted_than_there_is_room_for,
            "max_sequences",
        ),
        (
            "max_blocks - lease.num_taken",
            receiver_doubts.test_no_more_blocks_are_granted_than_there_is_room_for,
            "max_blocks",
        ),
        (
            "actions = self._end_overdue(now)",
            receiver.test_an_offer_whose_sender_has_given_up_leaves_the_queue,
            "actions = []",
        ),
        ("not len(self._leases) or ", receiver.test_one_prompt_larger_than_the_share_comes_in_when_it_is_alone),
    ),
    *cut(
        KVReceiver._may_write,
        ("offer.source in self._writers and ", receiver.test_a_commit_without_one_token_for_each_sample_fails_visibly),
        (
            " and offer.layout == self._layout",
            conversion.test_every_token_arrives_where_it_should_and_zeros_follow_the_last,
        ),
    ),
    *cut(
        KVReceiver.on_memory_shared,
        (
            "not self._gone.get(incarnation)",
            receiver_doubts.test_who_is_gone_is_no_writer_whichever_is_heard_of_first,
            "True",
        ),
    ),
    *cut(
        KVReceiver.on_peer_exited,
        ("self._leases.confirm_all(incarnation)", receiver.test_revoked_blocks_are_freed_by_the_senders_exit, "pass"),
        (
            "self._writers.discard(incarnation)",
            receiver_doubts.test_who_is_gone_is_no_writer_whichever_is_heard_of_first,
            "pass",
        ),
        (
            "self._gone.put(incarnation, True, now)",
            receiver.test_an_offer_of_a_sender_whose_exit_was_observed_is_not_taken,
            "pass",
        ),
    ),
    *cut(
        KVReceiver.on_peer_lost,
        (
            "waiting.offer.source == incarnation",
            receiver.test_the_loss_of_a_sender_ends_its_offers_and_leases_and_nobody_elses,
        ),
        ("lease.sender == incarnation", receiver.test_the_loss_of_a_sender_ends_its_offers_and_leases_and_nobody_elses),
        (" + self._abort_gateway(incarnation, now)", receiver.test_the_loss_of_a_gateway_aborts_its_requests, ""),
    ),
    *cut(
        KVReceiver._end_of_lost_sender,
        (
            "not lease.is_committed",
            faults.test_a_lost_sender_with_a_commit_but_not_all_pieces_is_told_by_the_receiver,
            "True",
        ),
        ("not lease.is_committed", receiver.test_the_loss_of_a_sender_ends_its_offers_and_leases_and_nobody_elses),
    ),
    *cut(
        KVReceiver.tick,
        ("revoked.ask_at <= now", receiver.test_blocks_stay_revoked_until_the_sender_lets_go),
        (
            "self._history.forget_old(now)",
            receiver.test_the_same_commit_gets_the_same_ack_until_it_is_forgotten,
            "pass",
        ),
    ),
    *cut(
        KVReceiver._adopt_if_whole,
        ("lease.may_be_written or ", receiver.test_draining_refuses_what_waits_and_what_comes_and_lets_leases_run),
        (" or not lease.is_whole", receiver.test_one_missing_block_of_one_layer_is_enough_to_wait),
        (
            "self._history.note(lease, None, now)",
            receiver.test_a_higher_attempt_supersedes_a_lower_one_wherever_it_stands,
            "pass",
        ),
    ),
    *cut(
        KVReceiver._abort,
        (
            "newest is not None and newest > key.attempt",
            receiver.test_an_abort_of_an_earlier_attempt_leaves_the_newer_one_alone,
        ),
        (
            "self._history.note_aborted(key, lease_id, now)",
            receiver.test_an_abort_ahead_of_its_offer_does_not_answer_it_with_the_lease_of_the_attempt_before,
            "pass",
        ),
        (
            " if lease.key == key else None",
            receiver.test_an_abort_ahead_of_its_offer_does_not_answer_it_with_the_lease_of_the_attempt_before,
        ),
        (
            "actions = [DropSequence(key)]",
            receiver.test_a_higher_attempt_supersedes_a_lower_one_wherever_it_stands,
            "pass",
        ),
    ),
    *cut(
        KVReceiver._end_overdue,
        ("self._offers.remove(waiting)", receiver.test_an_offer_whose_sender_has_given_up_leaves_the_queue, "pass"),
        ("lease.until <= now", receiver.test_a_lease_that_expires_before_the_commit_is_the_senders_to_tell),
    ),
    *cut(
        KVReceiver._expire,
        ("lease.is_committed", receiver.test_a_commit_says_that_nothing_more_is_written_so_its_blocks_are_free_at_once),
        ("lease.is_committed", receiver.test_a_lease_that_expires_before_the_commit_is_the_senders_to_tell, "True"),
    ),
    *cut(
        KVReceiver._end,
        (
            "self._history.note(lease, reason, now, told=told)",
            receiver.test_a_sender_that_lets_go_frees_its_lease,
            "pass",
        ),
    ),
    *cut(
        KVReceiver._fail,
        ("told=True", receiver_doubts.test_an_end_that_was_told_with_the_commit_here_is_not_told_again, "told=False"),
    ),
    *cut(
        KVReceiver._tell_aborted,
        ("told_by == offer.source", receiver_doubts.test_a_sender_is_not_told_of_its_own_abort),
    ),
    *cut(
        KVReceiver._abort_gateway,
        (
            "lease.offer.gateway == incarnation",
            receiver_doubts.test_the_loss_of_a_gateway_ends_nobody_elses_leases,
            "True",
        ),
    ),
]
