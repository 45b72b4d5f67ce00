"""The receiver's rules, one by one."""

import pytest

from kvrelay.blocks import BlockManager
from kvrelay.messages import (
    Abort,
    KVAck,
    KVCommit,
    KVGrant,
    KVOffer,
    KVRefusal,
    KVReject,
    KVReleased,
    LeaseId,
    RefusalReason,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Action, Adopt, DropSequence, Failed, Send
from kvrelay.transfer.protocol.lease import Place
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import RequestKey, SamplingParams
from tests.transfer.nouns import (
    FINGERPRINT,
    GATEWAY,
    LAYOUT,
    LEASE_S,
    NUM_BLOCKS,
    messages,
    new_receiver,
    of,
    only,
)

P, OTHER, D = 1, 2, 50
FAILED = "hand_over_failed"


class Bench:
    """A receiver and what one sender says to it."""

    def __init__(self, *, one_sided: bool = False) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, LAYOUT.block_size)
        self.receiver = new_receiver(D, self.blocks)
        if one_sided:
            self.receiver.on_memory_shared(P)

    def offer(
        self, request_id: str = "r", attempt: int = 1, num_tokens: int = 5, now: float = 0.0, **changes: object
    ) -> list[Action]:
        offer = KVOffer(
            source=P,
            target=D,
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=tuple(range(num_tokens)),
            params=SamplingParams(max_tokens=4),
            gateway=GATEWAY,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            lease_s=LEASE_S,
        ).model_copy(update=changes)
        return self.receiver.on_message(offer.source, offer, now)

    def grant(self, now: float = 0.0) -> list[Action]:
        return self.receiver.grant(NUM_BLOCKS, 100, now)

    def lease(self, request_id: str = "r", attempt: int = 1, num_tokens: int = 5) -> KVGrant:
        self.offer(request_id, attempt, num_tokens)
        return messages(self.grant(), KVGrant)[0]

    def commit(self, lease: KVGrant, now: float = 0.0, tokens: tuple[int, ...] = (9,), source: int = P) -> list[Action]:
        commit = KVCommit(
            source=source,
            target=D,
            request_id=lease.request_id,
            attempt=lease.attempt,
            lease_id=lease.lease_id,
            first_token_ids=tokens,
        )
        return self.receiver.on_message(source, commit, now)

    def release(self, lease: KVGrant, now: float = 0.0, source: int = P) -> list[Action]:
        return self.receiver.on_message(source, KVReleased(source=source, target=D, lease_id=lease.lease_id), now)

    def abort_by_sender(self, lease: KVGrant, now: float = 0.0) -> list[Action]:
        abort = Abort(source=P, target=D, request_id=lease.request_id, attempt=lease.attempt)
        return self.receiver.on_message(P, abort, now)

    def land(self, header: PieceHeader, now: float = 0.0) -> list[Action]:
        assert self.receiver.accept(P, header) is not None
        return self.receiver.landed(header, now)

    def land_all(self, lease: KVGrant, now: float = 0.0) -> list[Action]:
        return [
            action
            for layer in range(LAYOUT.num_layers)
            for action in self.land(piece(lease, layer, 0, len(lease.block_ids)), now)
        ]

    @property
    def state(self) -> tuple[int, int, int]:
        """Free, leased and revoked blocks."""
        ledger = self.blocks.ledger
        assert ledger.conserved
        return ledger.free, ledger.leased, ledger.revoked


def piece(lease: KVGrant, layer: int = 0, first: int = 0, count: int = 1) -> PieceHeader:
    return PieceHeader(lease.lease_id, P, layer, first, count, 0, 1, 2, "float16", count * LAYOUT.block_bytes)


def rejects(actions: list[Action]) -> list[tuple[RejectReason, LeaseId | None]]:
    return [(message.reason, message.lease_id) for message in messages(actions, KVReject)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def one_sided() -> Bench:
    return Bench(one_sided=True)


# offers


def test_an_offer_waits_for_the_schedulers_room_and_is_then_granted(bench: Bench) -> None:
    assert bench.offer() == []
    assert bench.receiver.grant(2, 5, now=0.0) == []
    assert bench.receiver.grant(5, 0, now=0.0) == []
    grant = only(bench.receiver.grant(3, 1, now=0.0), Send)
    assert grant.peer == P
    assert isinstance(grant.message, KVGrant)
    assert (grant.message.lease_id, len(grant.message.block_ids)) == (LeaseId(D, 1), 3)
    assert bench.state == (NUM_BLOCKS - 3, 3, 0)


def test_the_same_offer_gets_the_same_grant(bench: Bench) -> None:
    lease = bench.lease()
    assert messages(bench.offer(), KVGrant) == [lease]
    assert bench.receiver.num_leases == 1


def test_a_repeated_offer_waits_once(bench: Bench) -> None:
    bench.offer()
    assert bench.offer() == []
    assert bench.receiver.num_waiting == 1


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"fingerprint": "huge"}, RefusalReason.INCOMPATIBLE, "serves model huge and the receiver tiny"),
        (
            {"layout": LAYOUT.model_copy(update={"dtype": "bfloat16"})},
            RefusalReason.INCOMPATIBLE,
            "blocks of 2 tokens, bfloat16, the receiver's 2 layers, 1 KV heads of 2, blocks of 2 tokens, float16",
        ),
        (
            {"layout": LAYOUT.model_copy(update={"dtype": "int8"})},
            RefusalReason.INCOMPATIBLE,
            "tokens, float16; start both with the same --dtype and --kv-cache-dtype.",
        ),
        ({"num_samples": 2}, RefusalReason.INCOMPATIBLE, "n > 1 is not supported yet"),
        ({"lease_s": LEASE_S + 1}, RefusalReason.INCOMPATIBLE, "give both the same --lease-s"),
        ({"num_tokens": 31}, RefusalReason.NEVER_FITS, "31 tokens, the context only 30"),
    ],
)
def test_what_can_never_be_taken_is_refused_with_a_sentence(
    bench: Bench, changes: dict[str, object], reason: RefusalReason, sentence: str
) -> None:
    refusal = messages(bench.offer(**changes), KVRefusal)[0]  # type: ignore[arg-type]
    assert refusal.reason is reason
    assert sentence in refusal.message
    assert bench.receiver.num_waiting == 0


def test_a_prompt_that_leaves_no_block_for_its_first_token_never_fits() -> None:
    receiver = new_receiver(D, BlockManager(3, 2), max_model_len=100)
    bench = Bench()
    bench.receiver = receiver
    assert bench.offer("fits", num_tokens=5) == []
    assert messages(bench.offer("never", num_tokens=6), KVRefusal)[0].reason is RefusalReason.NEVER_FITS


def test_a_full_queue_is_refused(bench: Bench) -> None:
    for number in range(4):
        assert bench.offer(f"r{number}") == []
    assert messages(bench.offer("one too many"), KVRefusal)[0].reason is RefusalReason.QUEUE_FULL


def test_draining_refuses_what_waits_and_what_comes_and_lets_leases_run(bench: Bench) -> None:
    lease = bench.lease()
    bench.offer("waiting")
    assert messages(bench.receiver.drain(), KVRefusal)[0].reason is RefusalReason.DRAINING
    assert messages(bench.offer("late"), KVRefusal)[0].reason is RefusalReason.DRAINING
    bench.land_all(lease)
    assert of(bench.commit(lease), Adopt)


def test_first_come_first_served_and_none_is_passed_over(bench: Bench) -> None:
    bench.offer("large", num_tokens=12)
    bench.offer("small", num_tokens=1)
    assert bench.receiver.grant(5, 9, now=0.0) == []
    assert [grant.request_id for grant in messages(bench.grant(), KVGrant)] == ["large"]


def test_uncommitted_leases_hold_at_most_their_share(bench: Bench) -> None:
    for number in range(4):
        bench.offer(f"r{number}", num_tokens=4)  # 2 blocks each, 6 is 30 % of 20
    assert len(messages(bench.grant(), KVGrant)) == 3
    assert bench.receiver._leases.num_blocks == 6


def test_blocks_that_are_not_free_are_not_granted_whatever_room_is_said_to_be_there(bench: Bench) -> None:
    bench.blocks.allocate(NUM_BLOCKS - 2)
    bench.offer()
    assert bench.grant() == []
    assert bench.receiver.num_waiting == 1


def test_one_prompt_larger_than_the_share_comes_in_when_it_is_alone(bench: Bench) -> None:
    small = bench.lease("small", num_tokens=1)
    bench.offer("large", num_tokens=20)
    bench.offer("next", num_tokens=1)
    assert bench.grant() == []
    bench.land_all(small)
    bench.commit(small)
    assert [grant.request_id for grant in messages(bench.grant(), KVGrant)] == ["large"]
    assert bench.grant() == []


def test_an_offer_whose_sender_has_given_up_leaves_the_queue(bench: Bench) -> None:
    bench.offer()
    assert bench.receiver.next_deadline() == LEASE_S
    assert bench.receiver.grant(NUM_BLOCKS, 9, now=LEASE_S) == []
    assert (bench.receiver.num_waiting, bench.receiver.counters["offer_expired"]) == (0, 1)


def test_a_higher_attempt_supersedes_a_lower_one_wherever_it_stands(bench: Bench) -> None:
    bench.offer(attempt=1)
    assert rejects(bench.offer(attempt=2)) == [(RejectReason.ABORTED, None)]
    lease = messages(bench.grant(), KVGrant)[0]
    assert rejects(bench.offer(attempt=3)) == [(RejectReason.ABORTED, lease.lease_id)]
    third = messages(bench.grant(), KVGrant)[0]
    bench.land_all(third)
    bench.commit(third)
    assert of(bench.offer(attempt=4), DropSequence) == [DropSequence(RequestKey("r", 3))]
    assert rejects(bench.offer(attempt=2)) == [(RejectReason.ABORTED, None)]


# pieces and commits


def test_the_sequence_is_adopted_with_everything_decoding_needs(bench: Bench) -> None:
    lease = bench.lease()
    assert bench.land_all(lease) == []
    actions = bench.commit(lease)
    adopt, ack = actions
    assert isinstance(adopt, Adopt)
    assert messages([ack], KVAck)[0].lease_id == lease.lease_id
    sequence = adopt.sequence
    assert (sequence.key, sequence.sample, sequence.gateway, adopt.peer) == (RequestKey("r", 1), 0, GATEWAY, P)
    assert sequence.token_ids == [0, 1, 2, 3, 4, 9]
    assert (sequence.num_prompt_tokens, sequence.num_computed_tokens) == (5, 5)
    assert sequence.block_table == list(lease.block_ids)
    assert bench.state == (NUM_BLOCKS - 3, 3, 0)
    assert bench.receiver._leases.num_blocks == 0


def test_one_missing_block_of_one_layer_is_enough_to_wait(bench: Bench) -> None:
    lease = bench.lease()
    bench.land(piece(lease, 0, 0, 3))
    bench.land(piece(lease, 1, 0, 1))
    bench.land(piece(lease, 1, 2, 1))
    assert bench.commit(lease) == []
    assert of(bench.land(piece(lease, 1, 1, 1)), Adopt)


def test_an_accepted_piece_counts_only_when_it_landed(bench: Bench) -> None:
    lease = bench.lease()
    bench.land(piece(lease, 0, 0, 3))
    assert bench.receiver.accept(P, piece(lease, 1, 0, 3)) is not None
    assert bench.commit(lease) == []


def test_a_piece_that_was_never_accepted_does_not_land(bench: Bench) -> None:
    lease = bench.lease()
    bench.commit(lease)
    for layer in range(2):
        assert bench.receiver.landed(piece(lease, layer, 0, 3), now=0.0) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_id": LeaseId(D, 99)}, "piece_stale_lease"),
        ({"lease_id": LeaseId(D + 1, 1)}, "piece_stale_lease"),
        ({"sender": OTHER}, "piece_other_sender"),
        ({"layer": 2}, "piece_out_of_range"),
        ({"first_block": 3}, "piece_out_of_range"),
        ({"num_blocks": 4, "payload_bytes": 64}, "piece_out_of_range"),
        ({"block_size": 1}, "piece_wrong_layout"),
        ({"dtype": "bfloat16"}, "piece_wrong_layout"),
        ({"num_heads": 2}, "piece_wrong_layout"),
        ({"head_start": 1}, "piece_wrong_layout"),
        ({"payload_bytes": 32}, "piece_wrong_layout"),
        ({"num_heads": 2, "payload_bytes": 32}, "piece_wrong_layout"),
        ({"block_size": 1, "payload_bytes": 8}, "piece_wrong_layout"),
    ],
)
def test_a_piece_that_does_not_fit_its_lease_is_dropped_and_counted(
    bench: Bench, change: dict[str, object], reason: str
) -> None:
    lease = bench.lease()
    assert bench.receiver.accept(P, piece(lease)._replace(**change)) is None  # type: ignore[arg-type]
    assert bench.receiver.counters == {reason: 1}


def test_a_piece_from_another_connection_is_dropped(bench: Bench) -> None:
    lease = bench.lease()
    assert bench.receiver.accept(OTHER, piece(lease)) is None
    assert bench.receiver.accept(OTHER, piece(lease)._replace(sender=OTHER)) is None
    assert bench.receiver.counters == {"piece_other_sender": 2}


def test_a_second_piece_for_the_same_block_is_dropped(bench: Bench) -> None:
    lease = bench.lease()
    bench.land(piece(lease, 0, 0, 2))
    assert bench.receiver.accept(P, piece(lease, 0, 1, 2)) is None
    assert bench.receiver.accept(P, piece(lease, 0, 2, 1)) == Place(lease.block_ids[2:], is_end=True)
    assert bench.receiver.counters["piece_duplicate"] == 1


def test_the_same_commit_gets_the_same_ack_until_it_is_forgotten(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    sequence = of(bench.commit(lease), Adopt)[0].sequence
    bench.blocks.release(sequence.block_table)  # it finished
    again = bench.commit(lease, now=LEASE_S - 1)
    assert not of(again, Adopt)
    assert messages(again, KVAck)[0].lease_id == lease.lease_id
    bench.receiver.tick(LEASE_S)
    assert rejects(bench.commit(lease, now=LEASE_S)) == [(RejectReason.UNKNOWN, lease.lease_id)]


def test_a_commit_under_another_lease_or_of_another_sender_changes_nothing(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    wrong = lease.model_copy(update={"lease_id": LeaseId(D, 99)})
    assert rejects(bench.commit(wrong)) == [(RejectReason.UNKNOWN, wrong.lease_id)]
    assert rejects(bench.commit(lease.model_copy(update={"attempt": 2}))) == [(RejectReason.UNKNOWN, lease.lease_id)]
    assert bench.commit(lease, source=OTHER) == []
    assert of(bench.commit(lease), Adopt)
    assert rejects(bench.commit(wrong)) == [(RejectReason.UNKNOWN, wrong.lease_id)]


def test_a_commit_of_an_older_attempt_is_told_that_it_was_aborted(bench: Bench) -> None:
    lease = bench.lease()
    bench.offer(attempt=2)
    assert rejects(bench.commit(lease)) == [(RejectReason.ABORTED, lease.lease_id)]


def test_a_commit_without_one_token_for_each_sample_fails_visibly(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    actions = bench.commit(lease, tokens=(1, 2))
    assert of(actions, Failed)[0].code == FAILED
    assert bench.state == (NUM_BLOCKS, 0, 0)


def test_messages_for_another_incarnation_are_stale(bench: Bench) -> None:
    assert messages(bench.offer(target=D + 1), KVReject)[0].meant_for == D + 1
    commit = KVCommit(source=P, target=49, request_id="r", attempt=1, lease_id=LeaseId(49, 1), first_token_ids=(1,))
    assert rejects(bench.receiver.on_message(P, commit, now=0.0)) == [(RejectReason.STALE, LeaseId(49, 1))]
    assert bench.receiver.on_message(P, Abort(source=P, target=49, request_id="r", attempt=1), now=0.0) == []
    assert bench.receiver.counters["stale_message"] == 3
    assert bench.offer() == []


def test_a_message_that_names_another_source_is_dropped(bench: Bench) -> None:
    abort = Abort(source=OTHER, target=D, request_id="r", attempt=1)
    assert bench.receiver.on_message(P, abort, now=0.0) == []
    assert bench.receiver.counters == {"foreign_message": 1}


# ends


def test_the_gateways_abort_ends_a_waiting_offer_and_a_lease_and_tells_the_sender(bench: Bench) -> None:
    bench.offer()
    assert rejects(bench.receiver.abort(RequestKey("r", 1), now=0.0)) == [(RejectReason.ABORTED, None)]
    lease = bench.lease("s")
    assert rejects(bench.receiver.abort(RequestKey("s", 1), now=0.0)) == [(RejectReason.ABORTED, lease.lease_id)]
    assert bench.state == (NUM_BLOCKS, 0, 0)
    assert bench.receiver.num_waiting == 0


def test_an_abort_of_an_earlier_attempt_leaves_the_newer_one_alone(bench: Bench) -> None:
    bench.lease(attempt=2)
    assert bench.receiver.abort(RequestKey("r", 1), now=0.0) == []
    assert bench.receiver.num_leases == 1


def test_an_abort_ahead_of_its_offer_does_not_answer_it_with_the_lease_of_the_attempt_before(bench: Bench) -> None:
    lease = bench.lease(attempt=1)
    assert rejects(bench.receiver.abort(RequestKey("r", 2), now=0.0)) == [(RejectReason.ABORTED, lease.lease_id)]
    assert rejects(bench.offer(attempt=2)) == [(RejectReason.ABORTED, None)]


def test_an_abort_of_an_adopted_sequence_drops_it_even_when_it_was_forgotten(bench: Bench) -> None:
    lease = bench.lease()
    bench.land_all(lease)
    bench.commit(lease)
    bench.receiver.tick(2 * LEASE_S)
    assert bench.receiver.abort(RequestKey("r", 1), now=2 * LEASE_S) == [DropSequence(RequestKey("r", 1))]
    assert bench.receiver.abort(RequestKey("r", 1), now=2 * LEASE_S) == []


def test_a_sender_that_lets_go_frees_its_lease(bench: Bench) -> None:
    lease = bench.lease()
    assert bench.release(lease, source=OTHER) == []
    assert bench.state == (NUM_BLOCKS - 3, 3, 0)
    assert bench.release(lease) == []
    assert bench.release(lease) == []
    assert bench.state == (NUM_BLOCKS, 0, 0)
    assert rejects(bench.offer()) == [(RejectReason.EXPIRED, lease.lease_id)]


def test_letting_go_after_the_commit_changes_nothing(bench: Bench) -> None:
    lease = bench.lease()
    bench.commit(lease)
    bench.release(lease)
    assert of(bench.land_all(lease), Adopt)
    bench.release(lease)
    assert bench.state == (NUM_BLOCKS - 3, 3, 0)


def test_a_lease_that_expires_before_the_commit_is_the_senders_to_tell(bench: Bench) -> None:
    lease = bench.lease()
    assert bench.receiver.next_deadline() == LEASE_S
    actions = bench.receiver.tick(LEASE_S)
    assert rejects(actions) == [(RejectReason.EXPIRED, lease.lease_id)]
    assert not of(actions, Failed)
    assert bench.state == (NUM_BLOCKS, 0, 0)


def test_a_commit_after_the_lease_ended_fails_at_the_gateway_once(bench: Bench) -> None:
    lease = bench.lease()
    bench.receiver.tick(LEASE_S)
    actions = bench.commit(lease, now=LEASE_S)
    assert rejects(actions) == [(RejectReason.EXPIRED, lease.lease_id)]
    assert (of(actions, Failed)[0].code, of(actions, Failed)[0].gateway) == (FAILED, GATEWAY)
    assert not of(bench.commit(lease, now=LEASE_S), Failed)


def test_the_loss_of_a_sender_ends_its_offers_and_leases_and_nobody_elses(bench: Bench) -> None:
    bench.lease("leased")
    bench.offer("waiting")
    bench.offer("of another", source=OTHER)
    assert bench.receiver.on_peer_lost(P, now=0.0) == []
    assert (bench.receiver.num_waiting, bench.receiver.num_leases) == (1, 0)
    assert bench.state == (NUM_BLOCKS, 0, 0)


def test_the_loss_of_a_gateway_aborts_its_requests(bench: Bench) -> None:
    bench.lease("leased")
    bench.offer("waiting")
    assert len(rejects(bench.receiver.on_peer_lost(GATEWAY, now=0.0))) == 2
    assert bench.state == (NUM_BLOCKS, 0, 0)


# where senders write by themselves


@pytest.mark.parametrize("how", ["expiry", "abort", "digest"])
def test_blocks_stay_revoked_until_the_sender_lets_go(one_sided: Bench, how: str) -> None:
    lease = one_sided.lease()
    if how == "expiry":
        one_sided.receiver.tick(LEASE_S)
    elif how == "abort":
        one_sided.receiver.abort(RequestKey("r", 1), now=LEASE_S)
    else:
        for _ in range(2):
            one_sided.receiver.corrupt(piece(lease), now=LEASE_S - 1)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)
    asked = one_sided.receiver.tick(LEASE_S + 1)
    assert [lease_id for _, lease_id in rejects(asked)] == [lease.lease_id]
    assert one_sided.receiver.tick(LEASE_S + 1) == []
    one_sided.release(lease, now=LEASE_S + 1, source=OTHER)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)
    one_sided.release(lease, now=LEASE_S + 1)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)
    assert one_sided.receiver.next_deadline() is None


def test_revoked_blocks_are_freed_by_the_senders_exit(one_sided: Bench) -> None:
    one_sided.lease()
    one_sided.receiver.tick(LEASE_S)
    one_sided.receiver.on_peer_exited(OTHER, now=LEASE_S)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)
    one_sided.receiver.on_peer_exited(P, now=LEASE_S)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)


def test_a_lost_connection_is_no_exit_so_blocks_stay_revoked(one_sided: Bench) -> None:
    lease = one_sided.lease()
    one_sided.receiver.on_peer_lost(P, now=0.0)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)
    one_sided.release(lease)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)


def test_an_offer_of_a_sender_whose_exit_was_observed_is_not_taken(one_sided: Bench) -> None:
    one_sided.receiver.on_peer_exited(P, now=0.0)
    one_sided.receiver.on_memory_shared(P)  # said before the exit, heard after it
    assert one_sided.offer() == []
    assert one_sided.receiver.num_waiting == 0


def test_only_who_shares_the_memory_when_it_is_granted_may_write_under_a_lease(bench: Bench) -> None:
    before = bench.lease("before")
    bench.receiver.on_memory_shared(P)
    after = bench.lease("after")
    assert (before.one_sided, after.one_sided) == (False, True)
    again = only(bench.offer("before"), Send).message
    assert again == before  # the same offer gets the same grant, whatever happened since
    bench.receiver.tick(LEASE_S)
    assert bench.state == (NUM_BLOCKS - 3, 0, 3)


def test_a_commit_says_that_nothing_more_is_written_so_its_blocks_are_free_at_once(one_sided: Bench) -> None:
    lease = one_sided.lease()
    one_sided.commit(lease)
    assert of(one_sided.receiver.tick(LEASE_S), Failed)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)


def test_the_senders_abort_and_release_free_everything_in_either_order(one_sided: Bench) -> None:
    lease = one_sided.lease("r")
    one_sided.abort_by_sender(lease)
    assert one_sided.state == (NUM_BLOCKS - 3, 0, 3)
    one_sided.release(lease)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)
    lease = one_sided.lease("s")
    one_sided.release(lease)
    one_sided.abort_by_sender(lease)
    assert one_sided.state == (NUM_BLOCKS, 0, 0)
