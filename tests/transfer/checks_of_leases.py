"""What a receiver checks of a lease, and of the blocks under it."""

from kvrelay.transfer.protocol.lease import Lease, _matches
from kvrelay.transfer.protocol.leases import Leases
from tests.transfer import test_conversion as conversion
from tests.transfer import test_first_logprobs as first_logprobs
from tests.transfer import test_held_blocks as held_blocks
from tests.transfer import test_lease as lease
from tests.transfer import test_receiver as receiver
from tests.transfer import test_receiver_doubts as receiver_doubts
from tests.transfer import test_repair as repair
from tests.transfer.cut import cut

CHECKS_OF_LEASES = [
    *cut(
        Lease.objection,
        ("not _matches(header, layout)", receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted),
        (
            "header.layers.stop > layout.num_layers or ",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
        ),
        (
            " or header.first_block + header.num_blocks > self.num_sent",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
        ),
        ("header.first_block < self.num_held", lease.test_blocks_that_were_there_already_are_not_written_again),
        (
            "any(self.accepted[layer] & header.block_mask for layer in header.layers)",
            receiver.test_a_second_piece_for_the_same_block_is_dropped,
            "False",
        ),
        (
            "any(self.accepted[layer] & header.block_mask for layer in header.layers)",
            lease.test_a_piece_of_several_layers_is_judged_and_marked_in_each_of_them,
            "bool(self.accepted[header.layer] & header.block_mask)",
        ),
    ),
    *cut(
        _matches,
        ("header.head_start, ", receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted, "0, "),
        (
            "header.num_heads, ",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
            "layout.num_kv_heads, ",
        ),
        (
            "header.row_bytes, ",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
            "layout.row_bytes, ",
        ),
        (
            "header.block_size, ",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
            "layout.block_size, ",
        ),
        ("header.dtype)", receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted, "layout.dtype)"),
    ),
    *cut(
        Lease.fault_of,
        (
            "len(commit.first_token_ids) != self.offer.num_samples",
            receiver.test_a_commit_without_one_token_for_each_sample_fails_visibly,
        ),
        (
            "len(commit.first_logprobs) != num_logprobs",
            first_logprobs.test_a_commit_without_the_logprobs_asked_for_fails_visibly,
        ),
    ),
    *cut(
        Lease.is_whole,
        (
            "return all(mask == everything for mask in self.landed)",
            receiver.test_one_missing_block_of_one_layer_is_enough_to_wait,
            "return True",
        ),
        ("all(", receiver.test_one_missing_block_of_one_layer_is_enough_to_wait, "any("),
    ),
    *cut(
        Lease.land,
        (" & self.accepted[layer]", receiver.test_a_piece_that_was_never_accepted_does_not_land, ""),
    ),
    *cut(
        Lease.ask_again,
        (
            " or any(self.asked[layer] & mask for layer, mask in masks)",
            receiver.test_blocks_stay_revoked_until_the_sender_lets_go,
        ),
        ("len(self.repairs) + len(runs) > MAX_REPAIRS or ", repair.test_too_many_damaged_pieces_end_the_attempt),
        ("self.accepted[layer] &= ~mask", repair.test_a_damaged_piece_is_asked_for_once_and_then_lands, "pass"),
    ),
    *cut(
        Lease.may_be_written,
        ("not self.is_committed or ", receiver.test_draining_refuses_what_waits_and_what_comes_and_lets_leases_run),
        (" or self.num_repaired < len(self.repairs)", repair.test_nothing_is_adopted_while_the_sender_may_still_write),
    ),
    *cut(
        Lease.commit,
        (
            "max(self.num_repaired, news[0])",
            repair.test_an_older_commit_that_comes_late_takes_nothing_back,
            "news[0]",
        ),
        ("if stalled and", receiver.test_one_missing_block_of_one_layer_is_enough_to_wait, "if"),
        (" and not self.may_be_written", repair.test_nothing_more_is_asked_for_before_the_sender_has_answered),
        (
            "news == (self.num_repaired, self.num_shown) and ",
            repair.test_what_waits_behind_other_pieces_of_its_sender_is_not_missing,
        ),
        (
            " and now - self.committed_at >= _PATIENCE_S",
            repair.test_what_is_missing_when_nothing_more_comes_is_asked_for,
        ),
        (
            "[: MAX_REPAIRS - len(self.repairs)]",
            lease.test_of_very_many_missing_blocks_as_many_are_asked_for_as_a_message_holds,
            "",
        ),
    ),
    *cut(
        Lease._missing,
        (" & ~asked", repair.test_what_was_asked_for_in_vain_does_not_keep_the_rest_from_being_asked_for, ""),
    ),
    *cut(
        Lease.__post_init__,
        (
            "(1 << self.num_held) - 1",
            held_blocks.test_what_was_handed_over_is_held_for_the_next_prompt_that_begins_like_it,
            "0",
        ),
    ),
    *cut(
        Leases.find,
        (
            " if lease_id.incarnation == self._incarnation else None",
            receiver.test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted,
        ),
    ),
    *cut(
        Leases.shareable,
        (" - num_found % step", conversion.test_what_the_receiver_holds_is_not_sent_in_whole_blocks_of_either, ""),
    ),
    *cut(
        Leases.end,
        (
            "sender_done or not (lease.one_sided and lease.may_be_written)",
            receiver.test_blocks_stay_revoked_until_the_sender_lets_go,
            "True",
        ),
        (
            " and lease.may_be_written",
            receiver.test_a_commit_says_that_nothing_more_is_written_so_its_blocks_are_free_at_once,
        ),
        ("lease.one_sided and ", receiver.test_a_commit_without_one_token_for_each_sample_fails_visibly),
        ("sender_done or ", receiver.test_the_senders_abort_and_release_free_everything_in_either_order),
        (
            "self._blocks.revoke(lease.block_ids[lease.held_blocks :])",
            held_blocks.test_held_blocks_are_released_and_never_revoked_where_senders_write_by_themselves,
            "self._blocks.revoke(lease.block_ids)",
        ),
    ),
    *cut(
        Leases.confirm,
        ("lease_id != revoked.lease.lease_id or ", receiver_doubts.test_only_the_lease_that_is_let_go_is_freed),
        (" or sender != revoked.lease.sender", receiver.test_blocks_stay_revoked_until_the_sender_lets_go),
    ),
    *cut(
        Leases.adopt,
        (
            "self._blocks.publish(lease.block_ids[fresh], lease.block_hashes[fresh])",
            held_blocks.test_what_was_handed_over_is_held_for_the_next_prompt_that_begins_like_it,
            "pass",
        ),
    ),
    *cut(
        Leases.grant,
        ("self._next_counter += 1", receiver.test_uncommitted_leases_hold_at_most_their_share, "pass"),
    ),
]
