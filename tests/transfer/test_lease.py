"""One lease by itself: which pieces fit, and what is missing."""

from kvrelay.messages import MAX_REPAIRS, KVOffer, LeaseId
from kvrelay.transfer.protocol.lease import Lease, Place, Unfit
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import SamplingParams
from tests.transfer.nouns import FINGERPRINT, GATEWAY, LAYOUT, LEASE_S

LEASE_ID = LeaseId(50, 1)


def new_lease(held_blocks: int = 0, num_tokens: int = 5) -> Lease:
    offer = KVOffer(
        source=1,
        target=50,
        request_id="r",
        attempt=1,
        prompt_token_ids=tuple(range(num_tokens)),
        params=SamplingParams(max_tokens=4),
        gateway=GATEWAY,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        lease_s=LEASE_S,
    )
    return Lease(
        LEASE_ID,
        offer,
        tuple(range(7, 7 + LAYOUT.num_blocks(num_tokens))),
        LAYOUT.block_size,
        until=LEASE_S,
        held_blocks=held_blocks,
    )


def piece(layer: int, first: int, count: int) -> PieceHeader:
    return PieceHeader(LEASE_ID, 1, layer, first, count, 0, 1, 2, "float16", count * LAYOUT.block_bytes)


def test_blocks_that_were_there_already_are_not_written_again() -> None:
    lease = new_lease(held_blocks=2)
    assert lease.objection(piece(0, 1, 2)) is Unfit.HELD_BLOCK
    assert lease.objection(piece(0, 2, 1)) is None
    assert lease.accept(piece(0, 2, 1)) == Place((9,), is_end=True)


def test_a_piece_of_several_layers_is_judged_and_marked_in_each_of_them() -> None:
    lease = new_lease()
    both = piece(0, 0, 2)._replace(num_layers=2, payload_bytes=4 * LAYOUT.block_bytes)
    assert lease.objection(both._replace(layer=1)) is Unfit.OUT_OF_RANGE
    lease.accept(piece(1, 1, 1))
    assert lease.objection(both) is Unfit.DUPLICATE
    fresh = new_lease()
    assert fresh.objection(both) is None
    assert fresh.accept(both) == Place((7, 8))
    assert fresh.accepted == [0b11, 0b11]
    assert fresh.landed == [0, 0]
    fresh.land(both, 0.0)
    assert fresh.landed == [0b11, 0b11]


def test_it_is_whole_when_every_layer_has_what_was_not_held() -> None:
    lease = new_lease(held_blocks=2)
    for layer in range(LAYOUT.num_layers):
        assert not lease.is_whole
        lease.accept(piece(layer, 2, 1))
        lease.land(piece(layer, 2, 1), 0.0)
    assert lease.is_whole


def test_a_prompt_that_was_there_already_is_whole_from_the_start() -> None:
    assert new_lease(held_blocks=3).is_whole
    assert not new_lease().is_whole


def test_the_grant_is_the_same_however_often_it_is_asked_for() -> None:
    lease = new_lease(held_blocks=1)
    assert lease.grant(50) == lease.grant(50)
    assert (lease.grant(50).held_blocks, lease.grant(50).block_ids) == (1, (7, 8, 9))


def test_of_very_many_missing_blocks_as_many_are_asked_for_as_a_message_holds() -> None:
    lease = new_lease(num_tokens=4 * MAX_REPAIRS)
    for block in range(0, 2 * MAX_REPAIRS, 2):
        lease.accept(piece(0, block, 1))
        lease.land(piece(0, block, 1), now=0.0)
    lease.first_token_ids = (9,)
    lease.commit(0, num_shown=5, now=0.0)
    lease.commit(0, num_shown=5, now=1.0)
    assert len(lease.repairs) == MAX_REPAIRS
