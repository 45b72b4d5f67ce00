"""The sending end of the hand-over: offers a prompt's KV, pushes it layer by layer under a lease, and commits.

    offer()              KVGrant             commit(), last piece sent        KVAck
  ───────────▶ OFFERED ───────────▶ GRANTED ──────────────────────────▶ COMMITTED ───▶ HandedOver
                 │ ▲ ▲                │ │           (KVCommit goes)        │
         refused │ │ │  lease ended   │ │                                  │ deadline, KVReject, abort
                 └─┘ └────────────────┘ │                                  └──────▶ Dropped
          (the next candidate is asked) │
                 │                      │
                 ├──────────────────────┴─ deadline, no candidate left ───────────▶ Failed
                 └──────────────────────── abort, KVReject(aborted, corrupt) ─────▶ Dropped

A lease ends early when its receiver is lost or says KVReject(expired, stale or unknown). KVRepair asks for some pieces
once more; if the Commit was sent, it is sent again behind them.

Until the KVCommit is sent the attempt is the sender's to move or to fail. From then on it never declares failure: the
receiver may have begun to decode. One deadline, counted from the first Offer, covers all candidates; it lies a margin
before the receiver's, whose lease starts later. Every lease that ends without a commit is answered KVReleased, and so
is every lease that somebody believes this sender holds and it does not: that names one lease only, so it can never hit
an attempt that lives elsewhere. Each attempt that was offered ends in exactly one HandedOver, Failed or Dropped.
"""

import math
from collections import Counter, deque

from kvrelay.messages import (
    Abort,
    KVAck,
    KVGrant,
    KVRefusal,
    KVReject,
    KVReleased,
    KVRepair,
    LeaseId,
    Peer,
    RefusalReason,
    RejectReason,
)
from kvrelay.transfer.protocol.actions import Action, Dropped, Failed, FirstTokenDue, HandedOver, Send
from kvrelay.transfer.protocol.handover import Handover, Phase
from kvrelay.transfer.protocol.memory import Remembered
from kvrelay.transfer.protocol.pairs import Pairs
from kvrelay.transfer.protocol.refusals import fault_of_deadline, fault_of_grant, fault_of_refusals
from kvrelay.types import KVLayout, RequestKey, Sequence

# Offers carry whole prompts: the pause between repeats doubles up to this many times `resend_s`.
_MAX_BACKOFF = 8


class KVSender:
    """All hand-overs that leave this process.

    `counters` says what was dropped or repeated, and how often, `pairs` what was sent to whom.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        layout: KVLayout,
        fingerprint: str,
        lease_s: float,
        margin_s: float = 1.0,
        resend_s: float = 0.5,
        max_piece_bytes: int = 2**20,
        max_remembered: int = 2**16,
    ) -> None:
        """Knows of no request yet. All `*_s` are seconds.

        Raises:
            ValueError: a lease that is not longer than the margin.
        """
        if lease_s <= margin_s:
            raise ValueError(f"A lease of {lease_s} s must be longer than the margin of {margin_s} s; raise --lease-s.")
        self.incarnation = incarnation
        self.counters: Counter[str] = Counter()
        self.pairs = Pairs()
        self._layout = layout
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._margin_s = margin_s
        self._resend_s = resend_s
        self._max_piece_blocks = max(1, max_piece_bytes // layout.block_bytes)
        self._handovers: dict[RequestKey, Handover] = {}  # oldest first
        self._aborted: Remembered[str, int] = Remembered(lease_s, max_remembered)
        self._peers: Remembered[int, Peer] = Remembered(math.inf, max_remembered)  # every process that was offered to

    # what the worker tells

    def offer(self, sequence: Sequence, candidates: tuple[Peer, ...], num_samples: int, now: float) -> list[Action]:
        """Asks the first candidate for room; the same attempt a second time does nothing.

        An attempt that was aborted before it came is Dropped at once.

        Raises:
            ValueError: no candidates.
        """
        if not candidates:
            raise ValueError(f"{sequence.key} came without a single decode candidate; the gateway names at least one.")
        if self._newest_aborted(sequence.key) >= sequence.key.attempt:
            self.counters["offer_after_abort"] += 1
            return [Dropped(sequence.key)]
        if sequence.key in self._handovers:
            return []
        num_blocks = self._layout.num_blocks(sequence.num_prompt_tokens)
        unasked = deque({peer.incarnation: peer for peer in candidates}.values())  # each process is asked once
        handover = Handover(
            sequence,
            num_samples,
            num_blocks,
            peer=unasked.popleft(),
            candidates=unasked,
            deadline=now + self._lease_s - self._margin_s,
            written=[0] * self._layout.num_layers,
            sent=[0] * self._layout.num_layers,
            asked_at=now,
        )
        self._handovers[sequence.key] = handover
        for peer in candidates:
            self._peers.put(peer.incarnation, peer, now)
        return [self._say_again(handover, now)]

    def advance(self, key: RequestKey, layer: int, num_tokens: int) -> None:
        """The KV of the first `num_tokens` prompt tokens is written in this layer: its full blocks may go."""
        if handover := self._handovers.get(key):
            handover.note_written(layer, num_tokens // self._layout.block_size)

    def found(self, key: RequestKey, num_tokens: int) -> None:
        """The KV of the first `num_tokens` prompt tokens was there before the prompt came, in every layer."""
        for layer in range(self._layout.num_layers):
            self.advance(key, layer, num_tokens)

    def commit(self, key: RequestKey, first_token_ids: tuple[int, ...], now: float) -> list[Action]:
        """The whole prompt is computed in every layer: the partly filled block may go, then the KVCommit.

        Raises:
            ValueError: not one first token for each sample.
        """
        actions = self._end_overdue(now)
        handover = self._handovers.get(key)
        if handover is None or handover.first_token_ids:
            return actions
        if len(first_token_ids) != handover.num_samples:
            raise ValueError(f"{key} has {handover.num_samples} samples and {len(first_token_ids)} first tokens.")
        for layer in range(self._layout.num_layers):
            handover.note_written(layer, handover.num_blocks)
        handover.first_token_ids = first_token_ids
        return actions + self._first_token(handover)

    def abort(self, key: RequestKey, now: float) -> list[Action]:
        """Ends every attempt up to this one, known or not yet: Abort to the receiver, and KVReleased for a lease."""
        self._aborted.put(key.request_id, max(key.attempt, self._newest_aborted(key)), now)
        hit = [handover for handover in self._handovers.values() if key.covers(handover.key)]
        return [action for handover in hit for action in self._abort(handover, "aborted")]

    def on_peer_lost(self, incarnation: int, now: float) -> list[Action]:
        """A process is gone. A receiver's uncommitted lease counts as released; a gateway's requests are aborted.

        After a KVCommit nothing changes: the receiver may live, with only the connection broken, so the Commit is
        repeated until its deadline, and whoever notices a death aborts.
        """
        actions: list[Action] = []
        for handover in list(self._handovers.values()):
            if handover.sequence.gateway == incarnation:
                actions += self._abort(handover, "its gateway is gone")
            elif handover.peer.incarnation == incarnation and handover.phase is not Phase.COMMITTED:
                handover.refusals.append((None, f"{handover.peer.name} was lost."))
                actions += self._let_go(handover, "connection lost") + self._ask_next(handover, now)
        return actions

    # what comes over the wire

    def on_message(
        self, peer: int, message: KVGrant | KVRefusal | KVRepair | KVAck | KVReject, now: float
    ) -> list[Action]:
        """An answer from a receiver; `peer` is the incarnation at the other end of the connection."""
        if message.source != peer or message.target != self.incarnation:
            return self._ignore("foreign_message")
        actions = self._end_overdue(now)
        handover = self._handovers.get(message.key)
        match message:
            case KVGrant():
                return actions + self._on_grant(peer, handover, message, now)
            case KVRefusal():
                return actions + self._on_refusal(peer, handover, message, now)
            case KVRepair():
                return actions + self._on_repair(peer, handover, message)
            case KVAck():
                return actions + self._on_ack(peer, handover, message, now)
            case KVReject():
                return actions + self._on_reject(peer, handover, message, now)

    def _on_grant(self, peer: int, handover: Handover | None, grant: KVGrant, now: float) -> list[Action]:
        if grant.lease_id.incarnation != peer:
            return self._ignore("foreign_lease")
        if handover is not None and handover.grant is not None and handover.grant.lease_id == grant.lease_id:
            return self._ignore("repeated_grant")
        if handover is None or handover.peer.incarnation != peer or handover.phase is not Phase.OFFERED:
            self.counters["late_grant"] += 1
            return self._release(peer, grant.lease_id)
        if fault := fault_of_grant(handover, grant, self._layout):
            self.counters["malformed_grant"] += 1
            handover.refusals.append((RefusalReason.INCOMPATIBLE, fault))
            return self._release(peer, grant.lease_id) + self._ask_next(handover, now)
        handover.hold(grant, self._layout.block_size)
        pair = self.pairs.of(peer)
        pair.num_grants += 1
        pair.grant_wait_s += now - handover.asked_at
        return self._first_token(handover)

    def _on_refusal(self, peer: int, handover: Handover | None, refusal: KVRefusal, now: float) -> list[Action]:
        if handover is None or handover.peer.incarnation != peer or handover.phase is not Phase.OFFERED:
            return self._ignore("late_refusal")
        handover.refusals.append((refusal.reason, refusal.message))
        self.pairs.of(peer).num_refusals += 1
        return self._ask_next(handover, now)

    def _on_repair(self, peer: int, handover: Handover | None, repair: KVRepair) -> list[Action]:
        if handover is None or not self._holds(handover, peer, repair.lease_id):
            return self._ignore("late_repair")
        num_asked = handover.num_asked
        if not handover.repair(repair.runs):
            return self._ignore("malformed_repair")
        pair = self.pairs.of(peer)
        pair.num_repairs += handover.num_asked - num_asked
        pair.num_damaged += max(0, repair.num_damaged - handover.num_damaged)
        handover.num_damaged = max(handover.num_damaged, repair.num_damaged)
        return []

    def _on_ack(self, peer: int, handover: Handover | None, ack: KVAck, now: float) -> list[Action]:
        if handover is None or handover.phase is not Phase.COMMITTED or not self._holds(handover, peer, ack.lease_id):
            return self._ignore("late_ack")
        del self._handovers[handover.key]
        pair = self.pairs.of(peer)
        pair.num_handovers += 1
        pair.transfer_s += now - min(handover.begun_at, now)
        return [HandedOver(handover.key)]

    def _on_reject(self, peer: int, handover: Handover | None, reject: KVReject, now: float) -> list[Action]:
        """Ends what the reject is about, and confirms that nothing more is written under its lease, if that is so."""
        if handover is not None and self._is_about(handover, peer, reject):
            actions = self._end_rejected(handover, reject, now)
        else:
            actions = self._ignore("late_reject")
        lease_id = reject.lease_id
        if lease_id is None or lease_id.incarnation != peer or self._is_held(lease_id):
            return actions
        return self._release(peer, lease_id) + actions

    def _end_rejected(self, handover: Handover, reject: KVReject, now: float) -> list[Action]:
        if reject.reason is RejectReason.CORRUPT:
            self.pairs.of(handover.peer.incarnation).num_damaged += 1
        if handover.phase is Phase.COMMITTED or reject.reason in (RejectReason.ABORTED, RejectReason.CORRUPT):
            return [self._drop(handover)]
        handover.refusals.append((None, f"{handover.peer.name} let the hand-over go: {reject.reason}."))
        return self._ask_next(handover, now)

    def _is_held(self, lease_id: LeaseId) -> bool:
        """True while any attempt may write under the lease, also one that the message at hand does not name."""
        return any(item.grant is not None and item.grant.lease_id == lease_id for item in self._handovers.values())

    def _is_about(self, handover: Handover, peer: int, reject: KVReject) -> bool:
        if reject.reason is RejectReason.STALE:
            return reject.meant_for == handover.peer.incarnation
        if handover.phase is Phase.OFFERED:
            return handover.peer.incarnation == peer
        return reject.lease_id is not None and self._holds(handover, peer, reject.lease_id)

    # what goes out by itself

    @property
    def has_pending(self) -> bool:
        """True if `next_pieces` has something to send."""
        return any(handover.num_unsent_blocks or handover.is_through for handover in self._handovers.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes of payload that are written and granted, but not sent."""
        return sum(item.num_unsent_blocks for item in self._handovers.values()) * self._layout.block_bytes

    def next_pieces(self, max_bytes: int, now: float) -> list[Action]:
        """Pieces worth at most `max_bytes` of payload (but at least one), oldest attempt first, and due commits."""
        actions = self._end_overdue(now)
        budget = max_bytes // self._layout.block_bytes or min(1, max_bytes)
        for handover in self._handovers.values():
            while budget > 0 and handover.num_unsent_blocks:
                piece = handover.next_piece(self.incarnation, self._layout, min(budget, self._max_piece_blocks))
                if piece is None:
                    break
                budget -= piece.header.num_layers * piece.header.num_blocks
                handover.begun_at = min(handover.begun_at, now)
                self.pairs.of(handover.peer.incarnation).num_bytes += piece.header.payload_bytes
                actions.append(piece)
            if handover.is_through:
                handover.phase, handover.num_sends, handover.commit_again = Phase.COMMITTED, 0, False
                actions.append(self._say_again(handover, now))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Ends what is overdue and repeats every Offer and Commit that waits for its answer."""
        actions = self._end_overdue(now)
        self._aborted.forget_old(now)
        for handover in self._handovers.values():
            if handover.phase is not Phase.GRANTED and handover.resend_at <= now:
                self.counters["resent"] += 1
                actions.append(self._say_again(handover, now))
        return actions

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, in the caller's monotonic seconds; None if there is nothing to wait for."""
        return min(
            (
                item.deadline if item.phase is Phase.GRANTED else min(item.deadline, item.resend_at)
                for item in self._handovers.values()
            ),
            default=None,
        )

    def _say_again(self, handover: Handover, now: float) -> Send:
        handover.resend_at = now + self._resend_s * min(2**handover.num_sends, _MAX_BACKOFF)
        handover.num_sends += 1
        if handover.phase is Phase.COMMITTED and handover.grant is not None:
            return Send(handover.peer, handover.commit(self.incarnation, handover.grant))
        return Send(handover.peer, handover.offer(self.incarnation, self._fingerprint, self._layout, self._lease_s))

    def _first_token(self, handover: Handover) -> list[Action]:
        if handover.first_token_told or handover.phase is not Phase.GRANTED or not handover.first_token_ids:
            return []
        handover.first_token_told = True
        return [FirstTokenDue(handover.key)]

    # ends

    def _ask_next(self, handover: Handover, now: float) -> list[Action]:
        handover.phase, handover.grant, handover.num_sends = Phase.OFFERED, None, 0
        if not handover.candidates:
            return [self._fail(handover, *fault_of_refusals(handover))]
        handover.peer, handover.asked_at = handover.candidates.popleft(), now
        return [self._say_again(handover, now)]

    def _end_overdue(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for handover in [item for item in self._handovers.values() if item.deadline <= now]:
            if handover.phase is Phase.COMMITTED:
                self.counters["commit_unanswered"] += 1
                actions.append(self._drop(handover))
                continue
            actions += self._let_go(handover, "deadline passed")
            actions.append(self._fail(handover, *fault_of_deadline(handover, self._lease_s)))
        return actions

    def _abort(self, handover: Handover, reason: str) -> list[Action]:
        return [*self._let_go(handover, reason), self._drop(handover)]

    def _let_go(self, handover: Handover, reason: str) -> list[Action]:
        """What the receiver must hear when the attempt leaves it."""
        peer = handover.peer
        abort = Abort(
            source=self.incarnation,
            target=peer.incarnation,
            request_id=handover.key.request_id,
            attempt=handover.key.attempt,
            reason=reason,
        )
        actions: list[Action] = [Send(peer, abort)]
        if handover.grant is not None:
            actions += self._release(peer.incarnation, handover.grant.lease_id)
        return actions

    def _fail(self, handover: Handover, code: str, message: str) -> Failed:
        self._handovers.pop(handover.key, None)
        return Failed(handover.key, handover.sequence.gateway, code, message[:4096])

    def _drop(self, handover: Handover) -> Dropped:
        self._handovers.pop(handover.key, None)
        return Dropped(handover.key)

    def _newest_aborted(self, key: RequestKey) -> int:
        aborted = self._aborted.get(key.request_id)
        return -1 if aborted is None else aborted

    def _ignore(self, reason: str) -> list[Action]:
        self.counters[reason] += 1
        return []

    def _release(self, incarnation: int, lease_id: LeaseId) -> list[Action]:
        """Nothing more is written under this lease; the receiver may not even be ours any more, or never was."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return self._ignore("unknown_receiver")
        return [Send(peer, KVReleased(source=self.incarnation, target=incarnation, lease_id=lease_id))]

    @staticmethod
    def _holds(handover: Handover, peer: int, lease_id: LeaseId) -> bool:
        held = handover.grant is not None and handover.grant.lease_id == lease_id
        return held and handover.peer.incarnation == peer
