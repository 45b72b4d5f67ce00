"""One test for each kind of fault that others met in the hand-over, named after the fault."""

import pytest

from kvrelay.encoding import decode
from kvrelay.messages import (
    KVCommit,
    KVGrant,
    KVReject,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Adopt, Failed, Send
from kvrelay.transfer.protocol.piece import HEADER_BYTES, unpack
from kvrelay.types import RequestKey
from tests.transfer.network import Flight
from tests.transfer.nouns import LAYOUT, LEASE_S, NUM_BLOCKS, new_sequence, of
from tests.transfer.world import World


@pytest.fixture(params=[False, True], ids=["two_sided", "one_sided"])
def world(request: pytest.FixtureRequest) -> World:
    return World(one_sided=request.param)


IN_DIGEST = 8 * (HEADER_BYTES - 3)  # a bit of a piece, whether its payload flies with it or not


def deliver_only(world: World, *kinds: str) -> None:
    """Delivers what is of these kinds, in order, until none is left."""
    while (index := next((i for i, flight in enumerate(world.network) if flight.kind in kinds), None)) is not None:
        world.deliver(index)


def until_granted(world: World, num_tokens: int = 5) -> str:
    request_id = world.request(0, num_tokens, 0)
    assert request_id is not None
    deliver_only(world, "kv_offer")
    world.grant(0)
    deliver_only(world, "kv_grant")
    return request_id


def compute_all(world: World, index: int = 0) -> None:
    while any(job.steps for job in world.prefills[index].jobs.values()):
        world.compute(index)


def until_sent(world: World, num_tokens: int = 5) -> str:
    """Pieces and commit are on the network."""
    request_id = until_granted(world, num_tokens)
    compute_all(world)
    world.push(0, 2**20)
    return request_id


def free_blocks(world: World) -> tuple[int, int]:
    return world.prefills[0].blocks.num_free, world.decodes[0].blocks.num_free


EMPTY = (NUM_BLOCKS, NUM_BLOCKS)


# wrong text


def test_blocks_released_and_reused_are_not_read(world: World) -> None:
    """P frees only after the Ack or when nothing can be sent any more: the world compares every byte at adoption."""
    until_sent(world)
    assert free_blocks(world)[0] < NUM_BLOCKS
    deliver_only(world, "piece", "kv_commit")
    assert world.log["adopted"] == 1
    assert free_blocks(world)[0] < NUM_BLOCKS
    deliver_only(world, "kv_ack")
    assert free_blocks(world)[0] == NUM_BLOCKS


def test_two_hand_overs_never_share_a_slot(world: World) -> None:
    seen: set[object] = set()
    for _ in range(100):
        request_id = until_granted(world, num_tokens=2)
        lease_ids = set(world.decodes[0].grants)
        assert len(lease_ids - seen) == 1
        seen |= lease_ids
        world.abort(request_id)
        while world.network:
            world.deliver(0)
    world.settle()


def test_a_prompt_aborted_at_the_sender_is_never_generated_from(world: World) -> None:
    request_id = until_sent(world)
    world.abort(request_id)
    deliver_only(world, "abort")
    deliver_only(world, "piece", "kv_commit", "kv_released")
    assert world.log["adopted"] == 0
    world.settle()


def test_an_abort_in_the_middle_leaves_no_half_written_blocks_to_the_next_request(world: World) -> None:
    request_id = until_granted(world)
    world.compute(0)
    world.compute(0)
    world.push(0, 2**20)
    late = [flight for flight in world.network if flight.is_piece]
    world.abort(request_id)
    deliver_only(world, "abort", "kv_released")
    other = until_sent(world)
    world.network[:0] = late  # the aborted request's pieces come after the next one got the blocks
    world.settle()
    assert world.adopted[RequestKey(other, 1)] == 1
    assert world.decodes[0].receiver.counters["piece_stale_lease"] >= len(late)


def test_late_pieces_of_an_ended_lease_are_dropped(world: World) -> None:
    until_sent(world)
    world.wait(LEASE_S * 1.2)
    deliver_only(world, "piece")
    assert world.decodes[0].receiver.counters["piece_stale_lease"] == 2 * LAYOUT.num_layers
    world.settle()


def test_other_heads_than_the_receivers_are_refused_with_a_sentence(world: World) -> None:
    world.prefills[0].sender._layout = LAYOUT.model_copy(update={"num_kv_heads": 2})
    world.request(0, 3, 0)
    deliver_only(world, "kv_offer", "kv_refusal")
    assert world.log["ended: no_workers"] == 1


def test_a_piece_with_a_flipped_bit_is_sent_again(world: World) -> None:
    request_id = until_sent(world)
    world.network.flip(0, IN_DIGEST)
    deliver_only(world, "piece", "kv_commit")
    assert (world.log["adopted"], world.log["damaged pieces"]) == (0, 1)
    deliver_only(world, "kv_repair")
    world.push(0, 2**20)
    deliver_only(world, "piece", "kv_commit")
    assert world.adopted[RequestKey(request_id, 1)] == 1  # the world compares every byte
    deliver_only(world, "kv_ack")
    assert free_blocks(world)[0] == NUM_BLOCKS


def test_a_piece_that_is_lost_is_sent_again(world: World) -> None:
    request_id = until_sent(world)
    world.network.drop(0)
    world.settle()
    assert world.adopted[RequestKey(request_id, 1)] == 1
    assert world.log["asked again"] == 1


def test_a_network_that_flips_a_bit_each_time_fails_visibly(world: World) -> None:
    until_sent(world)
    world.network.flip(0, IN_DIGEST)
    deliver_only(world, "piece", "kv_commit", "kv_repair")
    world.push(0, 2**20)
    world.network.flip(0, IN_DIGEST)
    deliver_only(world, "piece")
    assert (world.log["adopted"], world.log["damaged pieces"]) == (0, 2)
    assert world.log["ended: hand_over_failed"] == 1
    deliver_only(world, "kv_reject")
    deliver_only(world, "kv_released")
    assert free_blocks(world) == EMPTY


def test_the_first_token_crosses_with_the_commit_and_is_not_sampled_again(world: World) -> None:
    request_id = until_sent(world)
    world.settle()
    assert world.adopted[RequestKey(request_id, 1)] == 1  # the world checks the token


# capacity


def test_blocks_reserved_for_a_request_aborted_before_its_kv_arrived_are_freed(world: World) -> None:
    world.abort(until_granted(world))
    assert free_blocks(world)[1] == NUM_BLOCKS - 3
    deliver_only(world, "abort", "kv_released", "kv_reject")
    deliver_only(world, "kv_released")
    assert free_blocks(world) == EMPTY


def test_a_refused_request_does_not_keep_the_senders_blocks(world: World) -> None:
    for decode_worker in world.decodes:
        decode_worker.receiver.drain()
    world.request(0, 5, 0)
    deliver_only(world, "kv_offer", "kv_refusal")
    assert world.log["ended: no_workers"] == 1
    assert free_blocks(world)[0] == NUM_BLOCKS


def test_refused_then_the_next_candidate(world: World) -> None:
    world.decodes[0].receiver.drain()
    request_id = world.request(0, 5, 0)
    world.settle()
    assert request_id is not None
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_the_client_goes_away_and_both_sides_are_free_at_once(world: World) -> None:
    world.abort(until_sent(world))
    deliver_only(world, "abort", "kv_released", "kv_reject")
    deliver_only(world, "kv_released")
    assert free_blocks(world) == EMPTY
    world.settle()


def test_what_a_dead_sender_was_promised_is_free_at_once(world: World) -> None:
    until_granted(world)
    world.restart_prefill(0)
    assert free_blocks(world)[1] == NUM_BLOCKS
    world.settle()


def test_what_a_dead_receiver_was_offered_goes_to_the_next_candidate(world: World) -> None:
    request_id = until_granted(world)
    world.restart_decode(0, noticed=True)
    world.settle()
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_a_full_receiver_lets_wait_and_never_loops(world: World) -> None:
    for _ in range(4):
        world.request(0, 5, 0)
    deliver_only(world, "kv_offer")
    for _ in range(50):
        world.grant(0)
    receiver = world.decodes[0].receiver
    assert (receiver.num_leases, receiver.num_waiting) == (2, 2)
    assert len([flight for flight in world.network if flight.kind == "kv_grant"]) == 2
    world.settle()
    assert world.log["ended: finished"] == 4


def test_everybody_waits_for_the_next_and_still_nobody_is_stuck(world: World) -> None:
    """Chunked prefill on two senders towards two receivers with room for one prompt each."""
    for number in range(4):
        assert world.request(number % 2, 16, number // 2) is not None
    world.settle()
    assert world.log["ended: finished"] == 4


def test_a_long_prefill_that_has_not_begun_holds_no_room_here(world: World) -> None:
    """Nothing is offered before the scheduler says so, and a grant not used in time is free again."""
    until_granted(world, num_tokens=16)
    world.wait(LEASE_S * 1.2)
    world.network.clear()
    while world.decodes[0].blocks.num_free < NUM_BLOCKS and world.now < 1000:
        world.wait(1.0)
        deliver_only(world, "kv_reject", "kv_released")
    assert free_blocks(world) == EMPTY
    assert world.log["ended: hand_over_failed"] == 1


# hang or crash


def test_the_metadata_of_a_restarted_sender_does_not_crash_the_receiver(world: World) -> None:
    until_sent(world)
    old = list(world.network)
    world.restart_prefill(0)
    assert world.request(0, 5, 0) is not None
    world.network += old
    world.settle()
    assert world.log["adopted"] == 1


def test_a_restarted_receiver_rejects_what_was_meant_for_the_old_one(world: World) -> None:
    request_id = until_granted(world)
    compute_all(world)
    world.restart_decode(0, noticed=False)
    world.push(0, 2**20)
    deliver_only(world, "piece", "kv_commit", "kv_reject")
    assert world.decodes[0].receiver.counters["rejected_stale"] == 1
    assert free_blocks(world)[0] == NUM_BLOCKS
    assert world.adopted[RequestKey(request_id, 1)] == 0
    world.settle()


def test_an_offer_to_a_restarted_receiver_goes_to_the_next_candidate_not_one_too_far(world: World) -> None:
    request_id = world.request(0, 5, 0)
    world.restart_decode(0, noticed=False)
    deliver_only(world, "kv_offer")
    repeated = world.network[0].frame
    deliver_only(world, "kv_reject", "kv_offer")
    incarnation = world.decodes[0].incarnation
    world.network.append(Flight(incarnation, world.prefills[0].incarnation, repeated, "kv_reject", world.now))
    world.settle()
    assert request_id is not None
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_a_lost_piece_ends_in_an_error_and_not_in_a_wait_for_ever(world: World) -> None:
    until_sent(world)
    world.network.drop(0)
    deliver_only(world, "piece", "kv_commit")
    assert len(world.open) == 1
    world.wait(LEASE_S * 1.2)
    assert world.log["ended: hand_over_failed"] == 1
    world.settle()


def test_a_lost_sender_with_a_commit_but_not_all_pieces_is_told_by_the_receiver() -> None:
    world = World(one_sided=False)
    until_sent(world)
    world.network.drop(0)
    deliver_only(world, "piece", "kv_commit")
    world.break_connection(0, 0, sender_notices=False)
    assert world.log["ended: worker_lost"] == 1
    world.settle()


def test_a_silent_receiver_ends_in_an_error_and_not_in_a_wait_for_ever(world: World) -> None:
    world.request(0, 5, 0)
    for _ in range(12):
        world.network.clear()
        world.wait(1.0)
    assert world.log["ended: overloaded"] == 1
    assert free_blocks(world)[0] == NUM_BLOCKS
    world.settle()


def test_a_prompt_longer_than_one_chunk_and_one_piece_finishes(world: World) -> None:
    request_id = until_granted(world, num_tokens=16)
    while world.network or world.prefills[0].jobs:
        world.compute(0)
        world.push(0, 1)
        deliver_only(world, "piece", "kv_commit", "kv_ack")
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_a_commit_that_overtakes_its_payload_waits_for_it(world: World) -> None:
    request_id = until_sent(world)
    deliver_only(world, "kv_commit")
    assert world.log["adopted"] == 0
    deliver_only(world, "piece")
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_a_repeated_commit_after_the_sequence_finished_gets_its_ack(world: World) -> None:
    until_sent(world)
    deliver_only(world, "piece", "kv_commit")
    world.finish(0)
    world.network.clear()  # the Ack is lost
    world.wait(1.0)
    deliver_only(world, "kv_commit", "kv_ack")
    assert world.log["handed over"] == 1
    world.settle()


def test_a_repeated_attempt_that_ends_at_its_first_token_leaves_nothing_of_the_one_before(world: World) -> None:
    request_id = until_sent(world)
    world.network.clear()  # the gateway's Abort of the first attempt is lost
    world.retry(request_id, 0, 3, 0)
    world.network.clear()
    world.prefills[0].mayfly = True
    compute_all(world)
    assert free_blocks(world)[0] == NUM_BLOCKS
    world.settle()


def test_a_late_grant_never_aborts_what_already_runs(world: World) -> None:
    until_sent(world)
    deliver_only(world, "piece", "kv_commit", "kv_ack")
    lease_id, (grant, peer) = next(iter(world.decodes[0].grants.items()))
    sender = world.prefills[0].sender
    world.prefills[0].do(sender.on_message(world.decodes[0].incarnation, grant, world.now))
    assert (lease_id, peer) == (grant.lease_id, world.prefills[0].incarnation)
    deliver_only(world, "kv_released", "abort")
    assert len(world.decodes[0].running) == 1
    world.settle()


# the hand-off


def test_a_sequence_that_ends_at_its_first_token_keeps_nobody_waiting(world: World) -> None:
    until_granted(world)
    world.prefills[0].mayfly = True
    compute_all(world)
    deliver_only(world, "abort", "kv_released")
    assert free_blocks(world) == EMPTY
    world.settle()


def test_several_samples_are_refused_with_a_sentence_and_do_not_hang(world: World) -> None:
    prefill = world.prefills[0]
    sequence = new_sequence(RequestKey("n2", 1), 3, [0, 1])
    offer = prefill.sender.offer(sequence, (world.decodes[0].peer,), 2, world.now)[0]
    assert isinstance(offer, Send)
    answer = world.decodes[0].receiver.on_message(prefill.incarnation, offer.message, world.now)[0]  # type: ignore[arg-type]
    assert isinstance(answer, Send)
    failed = prefill.sender.on_message(world.decodes[0].incarnation, answer.message, world.now)  # type: ignore[arg-type]
    assert "n > 1 is not supported yet" in of(failed, Failed)[0].message


def test_a_drained_receiver_finishes_what_it_granted(world: World) -> None:
    request_id = until_granted(world)
    world.decodes[0].receiver.drain()
    world.settle()
    assert world.adopted[RequestKey(request_id, 1)] == 1


def test_what_a_receiver_remembers_is_bounded_however_many_requests_come(world: World) -> None:
    receiver = world.decodes[0].receiver
    receiver._history._ended._max_entries = 100
    for number in range(1_000):
        receiver.abort(RequestKey(f"x{number}", 1), world.now)
    assert len(receiver._history._ended) == 100
    receiver.tick(world.now + LEASE_S)
    assert len(receiver._history._ended) == 0


def test_a_commit_that_nobody_remembers_is_rejected_and_not_adopted(world: World) -> None:
    until_sent(world)
    commit = next(decode(flight.frame) for flight in world.network if flight.kind == "kv_commit")
    assert isinstance(commit, KVCommit)
    other = commit.model_copy(update={"request_id": "never heard of"})
    actions = world.decodes[0].receiver.on_message(world.prefills[0].incarnation, other, world.now)
    assert not of(actions, Adopt)
    reject = of(actions, Send)[0].message
    assert isinstance(reject, KVReject)
    assert reject.reason is RejectReason.UNKNOWN


def test_pieces_name_their_lease_and_sender_in_every_header(world: World) -> None:
    until_sent(world)
    grants: list[KVGrant] = [grant for grant, _ in world.decodes[0].grants.values()]
    for flight in [flight for flight in world.network if flight.is_piece]:
        header = unpack(flight.frame[:HEADER_BYTES])
        assert (header.lease_id, header.sender) == (grants[0].lease_id, world.prefills[0].incarnation)
