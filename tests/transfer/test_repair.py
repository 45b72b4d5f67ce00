"""What arrives damaged, or not at all, is sent once more: the rules of either end."""

import pytest

from kvrelay.messages import (
    MAX_REPAIRS,
    BlockRun,
    KVCommit,
    KVGrant,
    KVReject,
    KVRepair,
    LeaseId,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Action, Adopt, Failed, Send
from kvrelay.transfer.protocol.lease import runs_of
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.transfer.protocol.sender import KVSender
from kvrelay.types import RequestKey
from tests.transfer.nouns import LAYOUT, LEASE_S, NUM_BLOCKS, RESEND_S, messages, new_peer, new_sender, of, pieces
from tests.transfer.nouns import new_sequence as sequence_of
from tests.transfer.test_receiver import Bench, P, piece

D = 50
KEY = RequestKey("r", 1)
LEASE = LeaseId(D, 1)


def runs(actions: list[Action]) -> list[tuple[BlockRun, ...]]:
    return [message.runs for message in messages(actions, KVRepair)]


class Receiving(Bench):
    """A receiver that has granted three blocks to a sender that says how much it has repaired."""

    def __init__(self, *, one_sided: bool = False) -> None:
        super().__init__(one_sided=one_sided)
        self.granted = self.lease()

    def arrives_damaged(self, header: PieceHeader) -> list[Action]:
        assert self.receiver.accept(P, header) is not None
        return self.receiver.corrupt(header, 0.0)

    def commits(self, num_repaired: int = 0, now: float = 0.0) -> list[Action]:
        commit = KVCommit(
            source=P,
            target=D,
            request_id="r",
            attempt=1,
            lease_id=self.granted.lease_id,
            first_token_ids=(9,),
            num_repaired=num_repaired,
        )
        return self.receiver.on_message(P, commit, now)

    def land_rest(self, *but: tuple[int, int]) -> None:
        """Every block of every layer lands, but these (layer, block)."""
        for layer in range(LAYOUT.num_layers):
            for block in range(3):
                if (layer, block) not in but:
                    self.land(piece(self.granted, layer, block, 1))


@pytest.fixture
def receiving() -> Receiving:
    return Receiving()


# the receiver


def test_a_damaged_piece_is_asked_for_once_and_then_lands(receiving: Receiving) -> None:
    damaged = piece(receiving.granted, 1, 0, 2)
    assert runs(receiving.arrives_damaged(damaged)) == [(BlockRun(1, 0, 2),)]
    receiving.land_rest((1, 0), (1, 1))
    receiving.land(damaged)
    assert of(receiving.commits(num_repaired=1), Adopt)


def test_a_piece_that_is_damaged_twice_ends_the_attempt_for_both_sides(receiving: Receiving) -> None:
    damaged = piece(receiving.granted, 1, 0, 2)
    receiving.arrives_damaged(damaged)
    ended = receiving.arrives_damaged(damaged)
    assert messages(ended, KVReject)[0].reason is RejectReason.CORRUPT
    assert "damaged at the decode worker more than once" in of(ended, Failed)[0].message
    assert receiving.state == (NUM_BLOCKS, 0, 0)


def test_damage_in_another_part_of_the_piece_that_was_sent_again_counts_too(receiving: Receiving) -> None:
    receiving.arrives_damaged(piece(receiving.granted, 1, 0, 2))
    receiving.land(piece(receiving.granted, 1, 0, 1))
    assert of(receiving.arrives_damaged(piece(receiving.granted, 1, 1, 2)), Failed)


def test_nothing_is_adopted_while_the_sender_may_still_write(receiving: Receiving) -> None:
    """What was thought damaged came after all: its second copy is on its way."""
    receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1))
    receiving.land_rest()
    unaware = receiving.commits(num_repaired=0)
    assert not of(unaware, Adopt)
    assert runs(unaware) == [(BlockRun(0, 0, 1),)], "the question was lost, so it is asked again"
    assert of(receiving.commits(num_repaired=1), Adopt)


def test_an_older_commit_that_comes_late_takes_nothing_back(receiving: Receiving) -> None:
    receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1))
    receiving.commits(num_repaired=1)
    receiving.commits(num_repaired=0)
    receiving.land_rest((0, 0))
    assert of(receiving.land(piece(receiving.granted, 0, 0, 1)), Adopt)


@pytest.mark.parametrize("answered", [False, True])
def test_blocks_are_revoked_if_the_lease_ends_before_the_sender_has_answered(answered: bool) -> None:
    receiving = Receiving(one_sided=True)
    receiving.commits()
    receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1))
    if answered:
        receiving.commits(num_repaired=1)
    receiving.receiver.tick(LEASE_S)
    assert receiving.state == ((NUM_BLOCKS, 0, 0) if answered else (NUM_BLOCKS - 3, 0, 3))


def test_what_is_missing_when_nothing_more_comes_is_asked_for(receiving: Receiving) -> None:
    receiving.land_rest((0, 0), (0, 2), (1, 1))
    assert runs(receiving.commits(now=0.0)) == [], "it may be on its way"
    receiving.land(piece(receiving.granted, 0, 2, 1))
    assert runs(receiving.commits(now=0.5)) == [], "it is coming"
    assert runs(receiving.commits(now=0.6)) == [], "both Commits may have been read at once"
    assert runs(receiving.commits(now=1.0)) == [(BlockRun(0, 0, 1), BlockRun(1, 1, 1))]
    receiving.land(piece(receiving.granted, 0, 0, 1))
    receiving.land(piece(receiving.granted, 1, 1, 1))
    assert of(receiving.commits(num_repaired=2), Adopt)


def test_what_waits_behind_other_pieces_of_its_sender_is_not_missing(receiving: Receiving) -> None:
    other = receiving.lease("other")
    receiving.commits(now=0.0)
    for count in range(3):
        receiving.land(piece(other, 0, count, 1))
        assert runs(receiving.commits(now=1.0 + count)) == []
    assert runs(receiving.commits(now=4.0)) != []


def test_each_missing_block_is_asked_for_once(receiving: Receiving) -> None:
    receiving.land_rest((0, 0))
    asked = [runs(receiving.commits(num_repaired=number // 2, now=float(number))) for number in range(5)]
    assert asked == [[], [(BlockRun(0, 0, 1),)], [], [], []]
    expired = receiving.receiver.tick(LEASE_S)
    assert "Not all of the prompt's KV arrived" in of(expired, Failed)[0].message


def test_nothing_more_is_asked_for_before_the_sender_has_answered(receiving: Receiving) -> None:
    receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1))
    for second in range(3):
        assert runs(receiving.commits(now=float(second))) == [(BlockRun(0, 0, 1),)]


def test_what_was_asked_for_in_vain_does_not_keep_the_rest_from_being_asked_for(receiving: Receiving) -> None:
    receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1))
    receiving.land_rest((0, 0), (1, 1))
    receiving.commits(num_repaired=1)
    assert runs(receiving.commits(num_repaired=1, now=1.0)) == [(BlockRun(0, 0, 1), BlockRun(1, 1, 1))]


def test_held_blocks_are_never_asked_for() -> None:
    receiving = Receiving()
    receiving.receiver._leases.of_request("r").landed[0] |= 1  # type: ignore[union-attr]
    receiving.commits()
    assert runs(receiving.commits(now=1.0)) == [(BlockRun(0, 1, 2), BlockRun(1, 0, 3))]


def test_too_many_damaged_pieces_end_the_attempt(receiving: Receiving) -> None:
    lease = receiving.receiver._leases.of_request("r")
    assert lease is not None
    lease.repairs += [BlockRun(0, 0, 1)] * MAX_REPAIRS
    assert of(receiving.arrives_damaged(piece(receiving.granted, 0, 0, 1)), Failed)


def test_runs_of_a_mask() -> None:
    assert runs_of(0) == []
    assert runs_of(0b1) == [(0, 1)]
    assert runs_of(0b1101110) == [(1, 3), (5, 2)]
    for mask in range(2**10):
        assert sum(((1 << count) - 1) << begin for begin, count in runs_of(mask)) == mask


# the sender


def granted_sender() -> KVSender:
    """Its prompt of three blocks, of which two are computed in both layers, is granted."""
    sender = new_sender(P)
    sender.offer(sequence_of(KEY, 5, block_table=[7, 3, 9]), (new_peer(D),), 1, now=0.0)
    about = {"source": D, "target": P, "request_id": "r", "attempt": 1}
    sender.on_message(D, KVGrant(**about, lease_id=LEASE, block_ids=(0, 1, 2), block_size=LAYOUT.block_size), now=0.0)
    sender.advance(KEY, 0, 4)
    sender.advance(KEY, 1, 4)
    return sender


@pytest.fixture
def sender() -> KVSender:
    return granted_sender()


def asks(sender: KVSender, *again: BlockRun, lease_id: LeaseId = LEASE) -> None:
    repair = KVRepair(source=D, target=P, request_id="r", attempt=1, lease_id=lease_id, runs=again)
    assert sender.on_message(D, repair, now=0.0) == []


def push(sender: KVSender, max_bytes: int = 2**20) -> list[Action]:
    return sender.next_pieces(max_bytes, now=0.0)


def sent(actions: list[Action]) -> list[tuple[int, int, int]]:
    headers = [item.header for item in pieces(actions)]
    return [(layer, header.first_block, header.num_blocks) for header in headers for layer in header.layers]


def commits(actions: list[Action]) -> list[int]:
    return [message.num_repaired for message in messages(actions, KVCommit)]


def test_what_is_asked_for_goes_before_the_rest_and_the_commit_says_so(sender: KVSender) -> None:
    push(sender)
    asks(sender, BlockRun(1, 0, 1))
    assert sender.pending_bytes == LAYOUT.block_bytes
    sender.commit(KEY, (5,), now=0.0)
    actions = push(sender)
    assert sent(actions) == [(1, 0, 1), (0, 2, 1), (1, 2, 1)]
    assert commits(actions) == [1]


def test_after_the_commit_it_goes_again_and_the_commit_behind_it(sender: KVSender) -> None:
    sender.commit(KEY, (5,), now=0.0)
    assert commits(push(sender)) == [0]
    assert not sender.has_pending
    asks(sender, BlockRun(0, 1, 2))
    assert sender.has_pending
    actions = push(sender)
    assert sent(actions) == [(0, 1, 2)]
    assert isinstance(actions[-1], Send)
    assert commits(actions) == [1]
    assert not sender.has_pending


def test_the_same_question_is_answered_once(sender: KVSender) -> None:
    sender.commit(KEY, (5,), now=0.0)
    push(sender)
    asks(sender, BlockRun(0, 1, 2))
    asks(sender, BlockRun(0, 1, 2))
    push(sender)
    asks(sender, BlockRun(0, 1, 2), BlockRun(1, 0, 1))
    actions = push(sender)
    assert (sent(actions), commits(actions)) == ([(1, 0, 1)], [2])
    assert sender.pairs.of(D).num_repairs == 2


def test_a_commit_that_is_repeated_meanwhile_does_not_say_that_it_was_done(sender: KVSender) -> None:
    sender.commit(KEY, (5,), now=0.0)
    push(sender)
    asks(sender, BlockRun(0, 0, 2))
    assert commits(sender.tick(RESEND_S)) == [0]
    assert commits(push(sender, LAYOUT.block_bytes)) == []
    actions = push(sender)
    assert (sent(actions), commits(actions)) == ([(0, 1, 1)], [1])


def test_what_was_never_sent_is_not_sent_twice(sender: KVSender) -> None:
    """A damaged header may name blocks whose turn comes yet."""
    push(sender)
    asks(sender, BlockRun(0, 2, 1), BlockRun(1, 1, 2))
    sender.commit(KEY, (5,), now=0.0)
    actions = push(sender)
    assert sent(actions) == [(1, 1, 1), (0, 2, 1), (1, 2, 1)]
    assert commits(actions) == [2]


@pytest.mark.parametrize("run", [BlockRun(2, 0, 1), BlockRun(0, 1, 3), BlockRun(0, 2**40, 1)])
def test_blocks_that_the_prompt_does_not_have_are_not_sent(sender: KVSender, run: BlockRun) -> None:
    push(sender)
    asks(sender, run)
    assert not sender.has_pending
    assert sender.counters["malformed_repair"] == 1


def test_a_question_about_another_lease_is_ignored(sender: KVSender) -> None:
    push(sender)
    asks(sender, BlockRun(0, 0, 1), lease_id=LeaseId(D, 2))
    assert not sender.has_pending
    assert sender.counters["late_repair"] == 1
