"""Blocks that the receiver holds already: shared, never written, never sent, and published only when they are right."""

import pytest

from kvrelay.blocks import BlockManager
from kvrelay.messages import KVCommit, KVGrant, KVOffer, KVReleased
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.protocol.actions import Action, Adopt, Failed
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.transfer.protocol.receiver import KVReceiver
from kvrelay.types import RequestKey, SamplingParams, Sequence
from tests.transfer.nouns import (
    FINGERPRINT,
    GATEWAY,
    LAYOUT,
    LEASE_S,
    messages,
    new_peer,
    new_receiver,
    new_sender,
    new_sequence,
    of,
    pieces,
)

P, D = 1, 50


class Bench:
    """A receiver with a prefix cache, and a sender whose prompts all begin alike; blocks hold 2 tokens."""

    def __init__(self, num_blocks: int = 20, *, one_sided: bool = False) -> None:
        self.blocks = BlockManager(num_blocks, LAYOUT.block_size)
        prefixes = Prefixes(self.blocks, FINGERPRINT)
        self.receiver: KVReceiver = new_receiver(D, self.blocks, prefixes=prefixes)
        if one_sided:
            self.receiver.on_memory_shared(P)

    def offer(self, request_id: str, num_tokens: int, *, salt: str = "") -> list[Action]:
        offer = KVOffer(
            source=P,
            target=D,
            request_id=request_id,
            attempt=1,
            prompt_token_ids=tuple(range(num_tokens)),
            params=SamplingParams(max_tokens=4),
            cache_salt=salt,
            gateway=GATEWAY,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            lease_s=LEASE_S,
        )
        self.receiver.on_message(P, offer, 0.0)
        return self.receiver.grant(20, 9, 0.0)

    def lease(self, request_id: str, num_tokens: int, *, salt: str = "") -> KVGrant:
        return messages(self.offer(request_id, num_tokens, salt=salt), KVGrant)[0]

    def land(self, lease: KVGrant) -> None:
        """Everything that is not held arrives."""
        count = len(lease.block_ids) - lease.held_blocks
        for layer in range(LAYOUT.num_layers if count else 0):
            header = piece(lease, layer, lease.held_blocks, count)
            place = self.receiver.accept(P, header)
            assert place is not None
            assert place.block_ids == lease.block_ids[lease.held_blocks :]
            self.receiver.landed(header, 0.0)

    def commit(self, lease: KVGrant) -> Sequence:
        commit = KVCommit(
            source=P,
            target=D,
            request_id=lease.request_id,
            attempt=1,
            lease_id=lease.lease_id,
            first_token_ids=(9,),
            cached_tokens=2,
        )
        return of(self.receiver.on_message(P, commit, 0.0), Adopt)[0].sequence

    def hand_over(self, request_id: str, num_tokens: int, *, salt: str = "") -> Sequence:
        lease = self.lease(request_id, num_tokens, salt=salt)
        self.land(lease)
        return self.commit(lease)

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Free, cached, leased and revoked blocks."""
        ledger = self.blocks.ledger
        assert ledger.conserved
        return ledger.free, ledger.cached, ledger.leased, ledger.revoked


def piece(lease: KVGrant, layer: int, first: int, count: int) -> PieceHeader:
    return PieceHeader(lease.lease_id, P, layer, first, count, 0, 1, 2, "float16", count * LAYOUT.block_bytes)


def test_what_was_handed_over_is_held_for_the_next_prompt_that_begins_like_it() -> None:
    bench = Bench()
    first = bench.hand_over("first", 5)
    second = bench.lease("second", 7)
    assert (second.held_blocks, list(second.block_ids[:2])) == (2, first.block_table[:2])
    bench.land(second)
    sequence = bench.commit(second)
    assert sequence.block_table == list(second.block_ids)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (7, 2)  # the latter is the sender's to tell
    assert bench.state == (20 - 5, 0, 5, 0)
    for adopted in (first, sequence):
        bench.blocks.release(adopted.block_table)
    assert bench.state == (17, 3, 0, 0)


def test_a_prompt_that_is_held_as_a_whole_needs_no_piece() -> None:
    bench = Bench()
    bench.hand_over("first", 6)
    lease = bench.lease("second", 6)
    assert (lease.held_blocks, len(lease.block_ids)) == (3, 3)
    assert bench.commit(lease).block_table == list(lease.block_ids)


def test_held_blocks_are_pinned_until_the_end_of_the_lease() -> None:
    """Prefix hits while the block is being evicted."""
    bench = Bench()
    bench.blocks.release(bench.hand_over("first", 6).block_table)
    lease = bench.lease("second", 7)
    assert bench.state == (16, 0, 4, 0)
    with pytest.raises(ValueError, match="are free"):
        bench.blocks.allocate(17)
    bench.receiver.abort(RequestKey("second", 1), 0.0)
    assert bench.state == (17, 3, 0, 0)
    assert bench.lease("third", 7).block_ids[:3] == lease.block_ids[:3]


def test_another_salt_holds_nothing() -> None:
    bench = Bench()
    bench.hand_over("first", 6, salt="mine")
    assert bench.lease("second", 6).held_blocks == 0
    assert bench.lease("third", 6, salt="mine").held_blocks == 3


@pytest.mark.parametrize("end", ["damaged", "aborted", "released", "expired"])
def test_blocks_are_not_found_before_their_kv_is_whole_and_verified(end: str) -> None:
    """Abort during transfer left another request's blocks half written."""
    bench = Bench()
    bench.blocks.release(bench.hand_over("first", 2).block_table)
    lease = bench.lease("second", 6)
    assert bench.lease("meanwhile", 6).held_blocks == lease.held_blocks == 1
    header = piece(lease, 0, 1, 2)
    assert bench.receiver.accept(P, header) is not None
    bench.receiver.landed(header, 0.0)
    match end:
        case "damaged":
            header = piece(lease, 1, 1, 2)
            assert bench.receiver.accept(P, header) is not None
            assert not of(bench.receiver.corrupt(header, 0.0), Failed)
            assert bench.receiver.accept(P, header) is not None
            assert of(bench.receiver.corrupt(header, 0.0), Failed)
        case "aborted":
            bench.receiver.abort(lease.key, 0.0)
        case "released":
            bench.receiver.on_message(P, KVReleased(source=P, target=D, lease_id=lease.lease_id), 0.0)
        case "expired":
            bench.receiver.tick(LEASE_S + 1)
    assert bench.lease("third", 6).held_blocks == 1


def test_held_blocks_are_released_and_never_revoked_where_senders_write_by_themselves() -> None:
    bench = Bench(one_sided=True)
    bench.blocks.release(bench.hand_over("first", 4).block_table)
    lease = bench.lease("second", 7)
    bench.receiver.abort(lease.key, 0.0)
    assert bench.state == (16, 2, 0, 2)
    bench.receiver.on_message(P, KVReleased(source=P, target=D, lease_id=lease.lease_id), 0.0)
    assert bench.state == (18, 2, 0, 0)


def test_a_grant_takes_only_what_nobody_has_yet() -> None:
    bench = Bench(num_blocks=10)  # 3 of them for uncommitted leases
    bench.hand_over("first", 8)
    leases = [bench.lease("second", 9), bench.lease("third", 10)]
    assert [lease.held_blocks for lease in leases] == [4, 4]
    assert bench.receiver._leases.num_blocks == 2
    assert bench.offer("fourth", 12) == []  # two more would be four
    assert bench.state == (4, 0, 6, 0)


def test_cached_blocks_are_not_counted_twice_as_held_and_as_free() -> None:
    bench = Bench(num_blocks=8)
    bench.blocks.release(bench.hand_over("first", 8).block_table)
    outside = bench.blocks.allocate(4)
    assert bench.offer("second", 10) == []
    bench.blocks.release(outside[:1])
    assert len(messages(bench.receiver.grant(20, 9, 0.0), KVGrant)) == 1


def test_a_sender_sends_what_it_found_at_once_and_not_what_the_receiver_holds() -> None:
    sender = new_sender(P)
    sequence = new_sequence(RequestKey("r", 1), 9, block_table=[4, 3, 2, 1, 0])
    sequence.num_computed_tokens = sequence.num_cached_tokens = 6
    sequence.cache_salt = "mine"
    offer = messages(sender.offer(sequence, (new_peer(D),), 1, 0.0), KVOffer)[0]
    assert offer.cache_salt == "mine"
    sender.found(sequence.key, 6)
    bench = Bench()
    bench.hand_over("first", 2)
    grant = bench.lease("r", 9).model_copy(update={"held_blocks": 1})
    sender.on_message(D, grant, 0.0)
    sent = [
        (item.header.layers, item.header.first_block, item.block_ids) for item in pieces(sender.next_pieces(999, 0))
    ]
    assert sent == [(range(2), 1, (3, 2))]
    sender.commit(sequence.key, (7,), 0.0)
    rest = sender.next_pieces(999, 0)
    assert [(item.header.layers, item.header.first_block, item.block_ids) for item in pieces(rest)] == [
        (range(2), 3, (1, 0)),
    ]
    assert messages(rest, KVCommit)[0].cached_tokens == 6
