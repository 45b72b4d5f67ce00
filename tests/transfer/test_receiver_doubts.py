"""What a receiver does not take at its word: what comes too late, twice or from somebody else; how much it takes."""

import pytest

from kvrelay.messages import KVGrant, LeaseId, RejectReason
from kvrelay.transfer.protocol.actions import Adopt, Failed, Send
from tests.transfer.nouns import GATEWAY, LAYOUT, LEASE_S, NUM_BLOCKS, messages, of
from tests.transfer.test_receiver import OTHER, Bench, D, P, piece, rejects


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def one_sided() -> Bench:
    return Bench(one_sided=True)


def test_the_same_offer_of_somebody_else_gets_no_grant(bench: Bench) -> None:
    bench.lease()
    assert bench.offer(source=OTHER) == []


def test_no_more_sequences_are_granted_than_there_is_room_for(bench: Bench) -> None:
    for name in "abc":
        bench.offer(name, num_tokens=2)
    assert len(messages(bench.receiver.grant(NUM_BLOCKS, 2, now=0.0), KVGrant)) == 2


def test_no_more_blocks_are_granted_than_there_is_room_for(bench: Bench) -> None:
    for name in "ab":
        bench.offer(name)
    assert len(messages(bench.receiver.grant(4, 9, now=0.0), KVGrant)) == 1


def test_a_piece_that_another_was_accepted_for_neither_lands_nor_is_asked_for_again(bench: Bench) -> None:
    lease = bench.lease()
    bench.commit(lease)
    for layer in range(LAYOUT.num_layers):
        assert bench.receiver.accept(P, piece(lease, layer, 0, 3)) is not None
        assert bench.receiver.landed(piece(lease, layer, 0, 3)._replace(sender=OTHER), now=0.0) == []
    assert bench.receiver.corrupt(piece(lease)._replace(sender=OTHER), now=0.0) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_verified_after_the_lease_ended_comes_too_late_even_without_a_tick(bench: Bench, damaged: bool) -> None:
    lease = bench.lease()
    bench.commit(lease)
    bench.land(piece(lease, 0, 0, 3))
    last = piece(lease, 1, 0, 3)
    assert bench.receiver.accept(P, last) is not None
    told = bench.receiver.corrupt if damaged else bench.receiver.landed
    assert [type(action) for action in told(last, LEASE_S)] == [Send, Failed]
    assert bench.state == (NUM_BLOCKS, 0, 0)


def test_a_commit_after_the_lease_ended_comes_too_late_even_without_a_tick(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    assert not of(bench.commit(lease, now=LEASE_S), Adopt)
    assert bench.state == (NUM_BLOCKS, 0, 0)


def test_an_end_that_was_told_with_the_commit_here_is_not_told_again(bench: Bench) -> None:
    lease = bench.lease()
    bench.commit(lease)
    assert len(of(bench.receiver.tick(LEASE_S), Failed)) == 1
    again = bench.commit(lease, now=LEASE_S)
    assert rejects(again) == [(RejectReason.EXPIRED, lease.lease_id)]
    assert not of(again, Failed)


def test_a_commit_of_an_attempt_that_never_came_is_not_answered_for_the_one_before(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    bench.commit(lease)
    unknown = lease.model_copy(update={"attempt": 2})
    assert rejects(bench.commit(unknown)) == [(RejectReason.UNKNOWN, lease.lease_id)]


def test_only_the_lease_that_is_let_go_is_freed(one_sided: Bench) -> None:
    lease = one_sided.lease()
    one_sided.receiver.tick(LEASE_S)
    other = lease.model_copy(update={"lease_id": LeaseId(D + 1, lease.lease_id.counter)})
    one_sided.release(other, now=LEASE_S)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)


def test_who_is_gone_is_no_writer_whichever_is_heard_of_first(bench: Bench) -> None:
    bench.receiver.on_memory_shared(P)
    for _ in range(2):
        bench.receiver.on_peer_exited(P, now=0.0)
        assert not bench.receiver._writers
        bench.receiver.on_memory_shared(P)
    assert not bench.receiver._writers


def test_a_sender_is_not_told_of_its_own_abort(bench: Bench) -> None:
    assert bench.abort_by_sender(bench.lease()) == []


def test_the_loss_of_a_gateway_ends_nobody_elses_leases(bench: Bench) -> None:
    bench.offer("mine")
    bench.offer("theirs", gateway=GATEWAY + 1)
    bench.grant()
    bench.receiver.on_peer_lost(GATEWAY, now=0.0)
    assert [lease.key.request_id for lease in bench.receiver._leases] == ["theirs"]
