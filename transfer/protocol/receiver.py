"""The receiving end of the hand-over: takes offers in turn, grants blocks, checks pieces, and adopts sequences.

  KVOffer            grant()              Commit here, every block landed
 ─────────▶ WAITING ─────────▶ LEASED ───────────────────────────────────▶ ADOPTED ──┐
               │                  │ lease expired, KVReleased, sender lost           │ one maximum
               │ abort, drain,    │ wrong digest again, abort                        │ lease later
               │ too old          ▼                                                  ▼
               └──────────────▶ ENDED (aborted, expired, corrupt) ──────────────▶ forgotten

A request is in one of these states with its newest attempt; older attempts are answered `aborted`, a newer one ends
the older. ADOPTED and ENDED answer what comes late: the same Commit gets the same Ack, anything else its KVReject.

Who tells the gateway: a Commit proves that the sender will not fail the attempt nor move it, so from the Commit on
every end is told here. Before it, an end is the sender's to tell, since the attempt may live on elsewhere; only a
digest that is wrong a second time is told here at once, because the sender then drops the attempt.

A piece whose digest is wrong is asked for once more, and so is what has not come although the sender says, again and
again, that it sent everything. Until it answers, it may write under the lease as before its Commit.
"""

import math
from collections import Counter

from kvrelay.blocks import BlockManager
from kvrelay.errors import HandOverFailed, WorkerLost
from kvrelay.messages import (
    Abort,
    BlockRun,
    KVCommit,
    KVOffer,
    KVReleased,
    LeaseId,
    RefusalReason,
    RejectReason,
)
from kvrelay.prefixes import Prefixes
from kvrelay.transfer.protocol.actions import Action, Adopt, DropSequence, Failed, Send
from kvrelay.transfer.protocol.admission import Admission
from kvrelay.transfer.protocol.answers import Answers
from kvrelay.transfer.protocol.history import History
from kvrelay.transfer.protocol.lease import Lease, Place
from kvrelay.transfer.protocol.leases import Leases
from kvrelay.transfer.protocol.memory import Remembered
from kvrelay.transfer.protocol.offers import Offers
from kvrelay.transfer.protocol.piece import PieceHeader
from kvrelay.types import KVLayout, RequestKey

# Pause between two requests to let go of a revoked lease.
_ASK_S = 1.0


class KVReceiver:
    """All hand-overs that arrive in this process. `counters` says what was dropped or refused, and how often."""

    def __init__(
        self,
        *,
        incarnation: int,
        layout: KVLayout,
        fingerprint: str,
        blocks: BlockManager,
        max_model_len: int,
        max_queue: int,
        max_lease_s: float,
        uncommitted_share: float = 0.3,
        max_remembered: int = 2**16,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Starts with nothing granted. `uncommitted_share` is the part of all blocks that open leases may hold.

        `prefixes` of the same blocks says what need not be sent; without them that is nothing.
        """
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self._layout = layout
        self._blocks = blocks
        self._prefixes = prefixes or Prefixes(blocks)
        self._answers = Answers(incarnation, self.counters)
        self._max_uncommitted = int(uncommitted_share * blocks.num_blocks)
        admission = Admission(layout, fingerprint, blocks.num_blocks, max_model_len, max_lease_s)
        self._offers = Offers(admission, max_queue)
        self._leases = Leases(incarnation, blocks)
        self._history = History(self._answers, self.counters, max_lease_s, max_remembered)
        self._num_shown: Counter[int] = Counter()  # pieces, by sender
        self._writers: set[int] = set()  # senders that can write into our memory by themselves
        self._gone: Remembered[int, bool] = Remembered(math.inf, max_remembered)  # senders whose exit was observed

    @property
    def num_waiting(self) -> int:
        """Offers in the queue."""
        return len(self._offers)

    @property
    def num_leases(self) -> int:
        """Leases that are neither adopted nor ended."""
        return len(self._leases)

    @property
    def num_revoked(self) -> int:
        """Leases that ended and whose sender may still write."""
        return len(self._leases.revoked)

    # what comes over the wire

    def on_message(self, peer: int, message: KVOffer | KVCommit | KVReleased | Abort, now: float) -> list[Action]:
        """Something a sender says; `peer` is the incarnation at the other end of the connection."""
        if message.source != peer:
            return self._ignore("foreign_message")
        if self._gone.get(peer):  # a lease granted to it now would stay revoked for ever
            return self._ignore("message_of_the_dead")
        if message.target not in (0, self.incarnation):
            return self._on_stale(peer, message)
        actions = self._end_overdue(now)
        match message:
            case KVOffer():
                return actions + self._on_offer(peer, message, now)
            case KVCommit():
                return actions + self._on_commit(peer, message, now)
            case KVReleased():
                return actions + self._on_released(peer, message, now)
            case Abort():
                return actions + self._abort(message.key, now, told_by=peer)

    def _on_stale(self, peer: int, message: KVOffer | KVCommit | KVReleased | Abort) -> list[Action]:
        self.counters["stale_message"] += 1
        if not isinstance(message, KVOffer | KVCommit):
            return []
        lease_id = message.lease_id if isinstance(message, KVCommit) else None
        return [self._answers.reject(peer, message.key, RejectReason.STALE, lease_id, meant_for=message.target)]

    def _on_offer(self, peer: int, offer: KVOffer, now: float) -> list[Action]:
        known = self._newest_attempt(offer.request_id)
        if known is not None and offer.attempt < known:
            return [self._answers.reject(peer, offer.key, RejectReason.ABORTED)]
        if known == offer.attempt:
            return self._on_known_offer(peer, offer)
        actions: list[Action] = []
        if known is not None:
            actions = self._abort(RequestKey(offer.request_id, offer.attempt - 1), now, told_by=None)
        return actions + self._enqueue(peer, offer, now)

    def _on_known_offer(self, peer: int, offer: KVOffer) -> list[Action]:
        self.counters["repeated_offer"] += 1
        lease = self._leases.of_request(offer.request_id)
        if lease is None:
            return self._history.answer_offer(peer, offer)
        return [Send(peer, lease.grant(self.incarnation))] if lease.sender == peer else []

    def _enqueue(self, peer: int, offer: KVOffer, now: float) -> list[Action]:
        if refusal := self._offers.objection(offer):
            return [self._answers.refuse(peer, offer.key, *refusal)]
        self._history.forget(offer.request_id)
        self._offers.add(offer, now)
        return []

    def _on_commit(self, peer: int, commit: KVCommit, now: float) -> list[Action]:
        lease = self._leases.of_request(commit.request_id)
        if lease is None or lease.lease_id != commit.lease_id or lease.key != commit.key:
            return self._on_late_commit(peer, commit, now)
        if lease.sender != peer:
            return self._ignore("foreign_message")
        if fault := lease.fault_of(commit):
            return self._fail(lease, RejectReason.CORRUPT, fault, now)
        if lease.is_committed:
            self.counters["repeated_commit"] += 1
        lease.note_first_tokens(commit)
        lease.commit(commit.num_repaired, self._num_shown[peer], now)
        return self._ask_to_repair(lease) + self._adopt_if_whole(lease, now)

    def _ask_to_repair(self, lease: Lease) -> list[Action]:
        """Says again what the sender has not answered."""
        return [Send(lease.sender, lease.repair(self.incarnation))] if lease.num_repaired < len(lease.repairs) else []

    def _on_late_commit(self, peer: int, commit: KVCommit, now: float) -> list[Action]:
        newest = self._newest_attempt(commit.request_id)
        if newest is not None and commit.attempt < newest:
            return [self._answers.reject(peer, commit.key, RejectReason.ABORTED, commit.lease_id)]
        return self._history.answer_commit(peer, commit, now)

    def _on_released(self, peer: int, message: KVReleased, now: float) -> list[Action]:
        if self._leases.confirm(message.lease_id, peer):
            return []
        lease = self._leases.find(message.lease_id)
        if lease is None or lease.sender != peer or lease.is_committed:
            return self._ignore("late_release")
        self._end(lease, RejectReason.EXPIRED, now, sender_done=True)
        return []

    # what comes on the data sockets

    def accept(self, peer: int, header: PieceHeader) -> Place | None:
        """Where the payload goes, or None: the piece must not be written.

        Where the payload passes through the worker, it checks the digest before it writes; then it calls `landed` or
        `corrupt`.
        """
        self._num_shown[peer] += 1
        lease = self._leases.find(header.lease_id)
        if lease is None:
            self.counters["piece_stale_lease"] += 1
            return None
        if lease.sender != peer or header.sender != peer:
            self.counters["piece_other_sender"] += 1
            return None
        if (objection := lease.objection(header)) is not None:
            self.counters[f"piece_{objection}"] += 1
            return None
        return lease.accept(header)

    def landed(self, header: PieceHeader, now: float) -> list[Action]:
        """An accepted piece is verified and written; the last one of a committed hand-over makes a sequence."""
        actions = self._end_overdue(now)
        lease = self._leases.find(header.lease_id)
        if lease is None or lease.sender != header.sender:
            self.counters["piece_stale_lease"] += 1
            return actions
        lease.land(header, now)
        return actions + self._adopt_if_whole(lease, now)

    def corrupt(self, header: PieceHeader, now: float) -> list[Action]:
        """An accepted piece has the wrong digest: it must come again, and if it did, the attempt fails visibly."""
        self.counters["piece_corrupt"] += 1
        actions = self._end_overdue(now)
        lease = self._leases.find(header.lease_id)
        if lease is None or lease.sender != header.sender:
            return actions
        runs = [BlockRun(layer, header.first_block, header.num_blocks) for layer in header.layers]
        if lease.ask_again(runs):
            lease.num_damaged += 1
            return actions + self._ask_to_repair(lease)
        sentence = f"Layer {header.layer} of the prompt's KV arrived damaged at the decode worker more than once."
        return actions + self._fail(lease, RejectReason.CORRUPT, sentence, now)

    # what the worker tells

    def grant(self, max_blocks: int, max_sequences: int, now: float) -> list[Action]:
        """Grants waiting offers, first come first served, into the room the scheduler has; none is passed over."""
        actions = self._end_overdue(now)
        while max_sequences > 0 and (waiting := self._offers.first):
            offer = waiting.offer
            hashes = self._prefixes.extend(waiting.block_hashes, offer.prompt_token_ids, offer.cache_salt)
            shared = self._blocks.find(self._leases.shareable(offer, hashes))
            count = self._layout.num_blocks(len(offer.prompt_token_ids)) - shared.num_in_use
            fits = not len(self._leases) or self._leases.num_blocks + count <= self._max_uncommitted
            if count > min(max_blocks, self._blocks.num_free) or not fits:
                break
            self._offers.remove(waiting)
            lease = self._leases.grant(offer, hashes, now, one_sided=self._may_write(offer))
            if lease.held_blocks:
                self.counters["held_blocks"] += lease.held_blocks
            actions.append(Send(lease.sender, lease.grant(self.incarnation)))
            max_blocks, max_sequences = max_blocks - lease.num_taken, max_sequences - 1
        return actions

    def _may_write(self, offer: KVOffer) -> bool:
        """True if the sender can write into our blocks by itself, and its blocks are like ours."""
        return offer.source in self._writers and offer.layout == self._layout

    def abort(self, key: RequestKey, now: float) -> list[Action]:
        """The gateway ends every attempt up to this one; valid before it is known, remembered for one lease."""
        return self._end_overdue(now) + self._abort(key, now, told_by=None)

    def on_memory_shared(self, incarnation: int) -> None:
        """From now on the sender can write into our blocks by itself; leases granted from here on say that it may."""
        if not self._gone.get(incarnation):
            self._writers.add(incarnation)

    def on_peer_exited(self, incarnation: int, now: float) -> list[Action]:
        """A process that could write into our blocks is seen to be gone: nothing it was granted is revoked any more."""
        actions = self.on_peer_lost(incarnation, now)
        self._leases.confirm_all(incarnation)
        self._writers.discard(incarnation)
        self._gone.put(incarnation, True, now)
        return actions

    def on_peer_lost(self, incarnation: int, now: float) -> list[Action]:
        """The connection with a process is lost: a sender's offers and leases end, a gateway's requests are aborted.

        That is no proof of its exit: blocks that a sender may write to by itself are revoked, not free.
        """
        actions = self._end_overdue(now)
        del self._num_shown[incarnation]
        for waiting in self._offers.all:
            if waiting.offer.source == incarnation:
                self._offers.remove(waiting)
        for lease in self._leases:
            if lease.sender == incarnation:
                actions += self._end_of_lost_sender(lease, now)
        return actions + self._abort_gateway(incarnation, now)

    def drain(self) -> list[Action]:
        """Takes nothing new from now on and refuses what waits; leases run to their end."""
        sentence = "The decode worker is leaving and takes nothing new."
        waiting = [item.offer for item in self._offers.close()]
        return [self._answers.refuse(offer.source, offer.key, RefusalReason.DRAINING, sentence) for offer in waiting]

    def tick(self, now: float) -> list[Action]:
        """Ends what is overdue, forgets what is old, and asks again for revoked leases."""
        actions = self._end_overdue(now)
        self._history.forget_old(now)
        for revoked in self._leases.revoked:
            if revoked.ask_at <= now:
                revoked.ask_at = now + _ASK_S
                lease = revoked.lease
                actions.append(self._answers.reject(lease.sender, lease.key, revoked.reason, lease.lease_id))
        return actions

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, in the caller's monotonic seconds; None if there is nothing to wait for."""
        times = [waiting.until for waiting in self._offers.all] + [lease.until for lease in self._leases]
        times += [revoked.ask_at for revoked in self._leases.revoked]
        return min(times, default=None)

    # ends

    def _adopt_if_whole(self, lease: Lease, now: float) -> list[Action]:
        if lease.may_be_written or not lease.is_whole:
            return []
        self._leases.adopt(lease)
        self._history.note(lease, None, now)
        adopt = Adopt(lease.sequence(), lease.sender, min(lease.begun_at, now))
        return [adopt, self._answers.ack(lease.sender, lease.key, lease.lease_id)]

    def _abort(self, key: RequestKey, now: float, told_by: int | None) -> list[Action]:
        """`told_by` is the sender that wants it; None when the sender has to be told."""
        newest = self._newest_attempt(key.request_id)
        if newest is not None and newest > key.attempt:
            return []
        actions: list[Action] = []
        lease_id = None
        if key.request_id in self._offers:
            waiting = self._offers[key.request_id]
            self._offers.remove(waiting)
            actions = self._tell_aborted(waiting.offer, None, told_by)
        elif lease := self._leases.of_request(key.request_id):
            lease_id = lease.lease_id if lease.key == key else None  # an older attempt's lease is no answer to this one
            self._end(lease, RejectReason.ABORTED, now)
            actions = self._tell_aborted(lease.offer, lease.lease_id, told_by)
        else:
            ended = self._history.of(key.request_id)
            if ended is None or ended.reason is None:
                actions = [DropSequence(key)]
        self._history.note_aborted(key, lease_id, now)
        return actions

    def _tell_aborted(self, offer: KVOffer, lease_id: LeaseId | None, told_by: int | None) -> list[Action]:
        if told_by == offer.source:
            return []
        return [self._answers.reject(offer.source, offer.key, RejectReason.ABORTED, lease_id)]

    def _abort_gateway(self, incarnation: int, now: float) -> list[Action]:
        keys = [item.offer.key for item in self._offers.all if item.offer.gateway == incarnation]
        keys += [lease.key for lease in self._leases if lease.offer.gateway == incarnation]
        return [action for key in keys for action in self._abort(key, now, told_by=None)]

    def _end_overdue(self, now: float) -> list[Action]:
        for waiting in self._offers.overdue(now):
            self.counters["offer_expired"] += 1
            self._offers.remove(waiting)
        overdue = [lease for lease in self._leases if lease.until <= now]
        return [action for lease in overdue for action in self._expire(lease, now)]

    def _expire(self, lease: Lease, now: float) -> list[Action]:
        self.counters["lease_expired"] += 1
        if lease.is_committed:
            sentence = f"Not all of the prompt's KV arrived within the lease of {lease.offer.lease_s} s."
            return self._fail(lease, RejectReason.EXPIRED, sentence, now)
        self._end(lease, RejectReason.EXPIRED, now)
        return [self._answers.reject(lease.sender, lease.key, RejectReason.EXPIRED, lease.lease_id)]

    def _end_of_lost_sender(self, lease: Lease, now: float) -> list[Action]:
        self._end(lease, RejectReason.EXPIRED, now, told=lease.is_committed)
        if not lease.is_committed:
            return []
        sentence = "The prefill worker was lost before all of the prompt's KV had arrived."
        return [Failed(lease.key, lease.offer.gateway, WorkerLost.code, sentence)]

    def _fail(self, lease: Lease, reason: RejectReason, sentence: str, now: float) -> list[Action]:
        """Ends the lease and tells both sides."""
        self._end(lease, reason, now, told=True)
        return [
            self._answers.reject(lease.sender, lease.key, reason, lease.lease_id),
            Failed(lease.key, lease.offer.gateway, HandOverFailed.code, sentence),
        ]

    def _end(
        self, lease: Lease, reason: RejectReason, now: float, *, sender_done: bool = False, told: bool = False
    ) -> None:
        self._leases.end(lease, reason, now + _ASK_S, sender_done=sender_done)
        self._history.note(lease, reason, now, told=told)

    def _newest_attempt(self, request_id: str) -> int | None:
        if request_id in self._offers:
            return self._offers[request_id].offer.attempt
        if lease := self._leases.of_request(request_id):
            return lease.key.attempt
        return ended.attempt if (ended := self._history.of(request_id)) else None

    def _ignore(self, reason: str) -> list[Action]:
        self.counters[reason] += 1
        return []
