"""What a receiver remembers of attempts that are over, so that whatever comes late gets the same answer."""

from collections import Counter
from dataclasses import dataclass, replace

from kvrelay.errors import HandOverFailed
from kvrelay.messages import KVCommit, KVOffer, LeaseId, RejectReason
from kvrelay.transfer.protocol.actions import Action, Failed
from kvrelay.transfer.protocol.answers import Answers
from kvrelay.transfer.protocol.lease import Lease
from kvrelay.transfer.protocol.memory import Remembered
from kvrelay.types import RequestKey


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `reason` None: it was adopted."""

    attempt: int
    reason: RejectReason | None
    lease_id: LeaseId | None = None
    gateway: int = 0
    told: bool = False  # the gateway knows


class History:
    """The newest attempt of each request that is over here, for one maximum lease."""

    def __init__(self, answers: Answers, counters: Counter[str], keep_s: float, max_entries: int) -> None:
        """Remembers nothing yet. Late messages are counted in `counters`."""
        self._answers = answers
        self._counters = counters
        self._ended: Remembered[str, Ended] = Remembered(keep_s, max_entries)

    def of(self, request_id: str) -> Ended | None:
        """How the request's newest attempt ended, if it did."""
        return self._ended.get(request_id)

    def note(self, lease: Lease, reason: RejectReason | None, now: float, *, told: bool = False) -> None:
        """A lease is over; `told` if its gateway hears of it now."""
        ended = Ended(lease.key.attempt, reason, lease.lease_id, lease.offer.gateway, told)
        self._ended.put(lease.key.request_id, ended, now)

    def note_aborted(self, key: RequestKey, lease_id: LeaseId | None, now: float) -> None:
        """Every attempt up to this one is over, because the gateway or the sender said so."""
        self._ended.put(key.request_id, Ended(key.attempt, RejectReason.ABORTED, lease_id, told=True), now)

    def forget(self, request_id: str) -> None:
        """A newer attempt begins."""
        self._ended.forget(request_id)

    def forget_old(self, now: float) -> None:
        """What is older than one maximum lease."""
        self._ended.forget_old(now)

    def answer_offer(self, peer: int, offer: KVOffer) -> list[Action]:
        """To an Offer of the attempt that is over; none if it was adopted: the Ack says more."""
        ended = self._ended.get(offer.request_id)
        if ended is None or ended.reason is None:
            return []
        return [self._answers.reject(peer, offer.key, ended.reason, ended.lease_id)]

    def answer_commit(self, peer: int, commit: KVCommit, now: float) -> list[Action]:
        """To a Commit whose lease is not live: as before, or why there is none; the gateway hears of it once."""
        ended = self._ended.get(commit.request_id)
        if ended is None or ended.attempt != commit.attempt:
            return [self._answers.reject(peer, commit.key, RejectReason.UNKNOWN, commit.lease_id)]
        if ended.reason is None:
            return self._acknowledge_again(peer, commit, ended)
        actions: list[Action] = [self._answers.reject(peer, commit.key, ended.reason, commit.lease_id)]
        if not ended.told:
            self._ended.put(commit.request_id, replace(ended, told=True), now)
            sentence = "The prompt was handed over after the decode worker's lease had ended."
            actions.append(Failed(commit.key, ended.gateway, HandOverFailed.code, sentence))
        return actions

    def _acknowledge_again(self, peer: int, commit: KVCommit, ended: Ended) -> list[Action]:
        if ended.lease_id != commit.lease_id:
            return [self._answers.reject(peer, commit.key, RejectReason.UNKNOWN, commit.lease_id)]
        self._counters["repeated_commit"] += 1
        return [self._answers.ack(peer, commit.key, commit.lease_id)]
