"""The messages with which a receiver of KV answers."""

from collections import Counter

from kvrelay.messages import KVAck, KVRefusal, KVReject, LeaseId, RefusalReason, RejectReason
from kvrelay.transfer.protocol.actions import Send
from kvrelay.types import RequestKey


class Answers:
    """Builds answers in the receiver's name and counts those that say no."""

    def __init__(self, incarnation: int, counters: Counter[str]) -> None:
        self._incarnation = incarnation
        self._counters = counters

    def ack(self, peer: int, key: RequestKey, lease_id: LeaseId) -> Send:
        """The KV arrived whole and intact."""
        message = KVAck(
            source=self._incarnation, target=peer, request_id=key.request_id, attempt=key.attempt, lease_id=lease_id
        )
        return Send(peer, message)

    def refuse(self, peer: int, key: RequestKey, reason: RefusalReason, sentence: str) -> Send:
        """The offer is not taken."""
        self._counters[f"refused_{reason}"] += 1
        message = KVRefusal(
            source=self._incarnation,
            target=peer,
            request_id=key.request_id,
            attempt=key.attempt,
            reason=reason,
            message=sentence,
        )
        return Send(peer, message)

    def reject(
        self,
        peer: int,
        key: RequestKey,
        reason: RejectReason,
        lease_id: LeaseId | None = None,
        meant_for: int | None = None,
    ) -> Send:
        """The attempt or the lease is over here."""
        self._counters[f"rejected_{reason}"] += 1
        message = KVReject(
            source=self._incarnation,
            target=peer,
            request_id=key.request_id,
            attempt=key.attempt,
            reason=reason,
            lease_id=lease_id,
            meant_for=meant_for,
        )
        return Send(peer, message)
