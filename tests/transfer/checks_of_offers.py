"""What a receiver takes at all, and what it remembers of what is over."""

from kvrelay.transfer.protocol.admission import Admission
from kvrelay.transfer.protocol.history import History
from kvrelay.transfer.protocol.memory import Remembered
from kvrelay.transfer.protocol.offers import Offers
from tests.transfer import test_memory as memory
from tests.transfer import test_receiver as receiver
from tests.transfer import test_receiver_doubts as receiver_doubts
from tests.transfer.cut import cut

CHECKS_OF_OFFERS = [
    *cut(
        History.answer_offer,
        (
            "ended is None or ended.reason is None",
            receiver.test_an_abort_ahead_of_its_offer_does_not_answer_it_with_the_lease_of_the_attempt_before,
            "True",
        ),
    ),
    *cut(
        History.answer_commit,
        (
            "ended.attempt != commit.attempt",
            receiver_doubts.test_a_commit_of_an_attempt_that_never_came_is_not_answered_for_the_one_before,
        ),
        ("not ended.told", receiver.test_a_commit_after_the_lease_ended_fails_at_the_gateway_once, "True"),
        ("not ended.told", receiver.test_a_commit_after_the_lease_ended_fails_at_the_gateway_once),
    ),
    *cut(
        History._acknowledge_again,
        (
            "ended.lease_id != commit.lease_id",
            receiver.test_a_commit_under_another_lease_or_of_another_sender_changes_nothing,
        ),
    ),
    *cut(
        Remembered.forget_old,
        ("until > now and ", receiver.test_the_same_commit_gets_the_same_ack_until_it_is_forgotten),
        (" and len(self._entries) <= self._max_entries", memory.test_it_keeps_the_newest_when_full),
    ),
    *cut(
        Offers.objection,
        ("len(self._waiting) >= self._max_queue", receiver.test_a_full_queue_is_refused),
        ("self._draining", receiver.test_draining_refuses_what_waits_and_what_comes_and_lets_leases_run),
    ),
    *cut(
        Admission._incompatible,
        ("offer.fingerprint != self.fingerprint", receiver.test_what_can_never_be_taken_is_refused_with_a_sentence),
        (
            "fault := self.layout.why_not_from(offer.layout)",
            receiver.test_what_can_never_be_taken_is_refused_with_a_sentence,
            "fault := ''",
        ),
        ("offer.num_samples != 1", receiver.test_what_can_never_be_taken_is_refused_with_a_sentence),
        ("offer.lease_s > self.max_lease_s", receiver.test_what_can_never_be_taken_is_refused_with_a_sentence),
    ),
    *cut(
        Admission._never_fits,
        ("num_tokens > self.max_model_len", receiver.test_what_can_never_be_taken_is_refused_with_a_sentence),
        ("needed > self.num_blocks", receiver.test_a_prompt_that_leaves_no_block_for_its_first_token_never_fits),
    ),
]
