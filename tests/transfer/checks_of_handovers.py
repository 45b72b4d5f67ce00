"""What a sender keeps to in one hand-over, and what it checks of a grant."""

from kvrelay.transfer.protocol.handover import Handover
from kvrelay.transfer.protocol.refusals import fault_of_grant
from tests.transfer import test_conversion as conversion
from tests.transfer import test_repair as repair
from tests.transfer import test_sender as sender
from tests.transfer import test_sender_doubts as sender_doubts
from tests.transfer.cut import cut

CHECKS_OF_HANDOVERS = [
    *cut(
        Handover.num_unsent_blocks,
        ("self.phase is Phase.OFFERED", sender.test_nothing_leaves_before_the_grant),
    ),
    *cut(
        Handover.is_through,
        (" and min(self.sent) == self.num_blocks", sender_doubts.test_the_commit_waits_for_the_last_piece),
        (" and not self.repairs", repair.test_a_commit_that_is_repeated_meanwhile_does_not_say_that_it_was_done),
    ),
    *cut(
        Handover.note_written,
        (
            "len(self.block_ids) != self.num_blocks",
            sender.test_a_layer_written_without_the_whole_prompt_reserved_is_our_own_fault_and_said_so,
        ),
        (
            "not self.block_ids",
            sender_doubts.test_what_is_read_is_what_was_there_when_the_first_layer_was_written,
            "True",
        ),
    ),
    *cut(
        Handover.hold,
        (
            "[grant.held_blocks * grant.block_size // block_size] * len(self.sent)",
            sender.test_blocks_that_the_receiver_holds_are_not_sent,
            "list(self.sent)",
        ),
        (
            "[grant.held_blocks * grant.block_size // block_size] * len(self.sent)",
            sender.test_blocks_that_the_receiver_holds_are_not_sent,
            "[0] * len(self.sent)",
        ),
        (
            "self.repairs.clear()",
            sender_doubts.test_what_was_asked_for_again_under_a_lease_that_ended_is_forgotten,
            "pass",
        ),
        (
            "self.num_asked, self.num_damaged, self.commit_again = 0, 0, False",
            sender_doubts.test_what_was_asked_for_again_under_a_lease_that_ended_is_forgotten,
            "pass",
        ),
    ),
    *cut(
        Handover.repair,
        ("run.layer >= len(self.sent) or ", repair.test_blocks_that_the_prompt_does_not_have_are_not_sent),
        (
            " or run.first_block + run.num_blocks > self.num_blocks",
            repair.test_blocks_that_the_prompt_does_not_have_are_not_sent,
        ),
        ("runs[self.num_asked :]", repair.test_the_same_question_is_answered_once, "runs"),
        (
            "min(run.num_blocks, self.sent[run.layer] - run.first_block)",
            repair.test_what_was_never_sent_is_not_sent_twice,
            "run.num_blocks",
        ),
        (
            "self.commit_again = self.commit_again or (bool(news) and self.phase is Phase.COMMITTED)",
            repair.test_after_the_commit_it_goes_again_and_the_commit_behind_it,
            "pass",
        ),
    ),
    *cut(
        Handover.commit,
        (" if not self.repairs else 0", repair.test_a_commit_that_is_repeated_meanwhile_does_not_say_that_it_was_done),
    ),
    *cut(
        Handover._piece,
        (
            " if grant.block_size == layout.block_size else ()",
            sender_doubts.test_blocks_of_another_size_are_not_named_as_places_to_write_to,
        ),
    ),
    *cut(
        fault_of_grant,
        (
            "len(grant.block_ids) == theirs.num_blocks(num_tokens) and ",
            sender.test_a_grant_that_does_not_fit_the_prompt_is_given_back,
        ),
        (
            " and grant.held_blocks <= len(grant.block_ids)",
            sender.test_a_grant_that_does_not_fit_the_prompt_is_given_back,
        ),
        (
            "not theirs.why_not_from(layout) and ",
            sender_doubts.test_a_grant_in_blocks_of_a_size_that_does_not_fit_is_given_back,
        ),
        (
            " and grant.held_blocks * grant.block_size % layout.block_size == 0",
            conversion.test_a_grant_in_blocks_that_do_not_fit_is_turned_down,
        ),
    ),
]
