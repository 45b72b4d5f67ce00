"""Offers that wait for room: a bounded queue, first come first served."""

from dataclasses import dataclass, field

from kvrelay.messages import KVOffer, RefusalReason
from kvrelay.transfer.protocol.admission import Admission, Refusal


@dataclass(frozen=True, slots=True)
class Waiting:
    """An offer in the queue; when `until` comes, its sender has given up. `block_hashes` are filled in when needed."""

    offer: KVOffer
    until: float
    block_hashes: list[bytes] = field(default_factory=list)


class Offers:
    """At most `max_queue` offers, one for each request."""

    def __init__(self, admission: Admission, max_queue: int) -> None:
        self._admission = admission
        self._max_queue = max_queue
        self._draining = False
        self._waiting: dict[str, Waiting] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, request_id: str) -> Waiting:
        return self._waiting[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def all(self) -> list[Waiting]:
        """First come first."""
        return list(self._waiting.values())

    @property
    def first(self) -> Waiting | None:
        """The one whose turn it is."""
        return next(iter(self._waiting.values()), None)

    def objection(self, offer: KVOffer) -> Refusal | None:
        """Why the offer may not even wait, or None."""
        if refusal := self._admission.objection(offer):
            return refusal
        if self._draining:
            return RefusalReason.DRAINING, "The decode worker is leaving and takes nothing new."
        if len(self._waiting) >= self._max_queue:
            return RefusalReason.QUEUE_FULL, f"{self._max_queue} hand-overs wait already; try again later."
        return None

    def add(self, offer: KVOffer, now: float) -> None:
        """Last in the queue."""
        self._waiting[offer.request_id] = Waiting(offer, until=now + offer.lease_s)

    def remove(self, waiting: Waiting) -> None:
        """Takes one out."""
        del self._waiting[waiting.offer.request_id]

    def overdue(self, now: float) -> list[Waiting]:
        """Those whose sender has given up by now."""
        return [waiting for waiting in self._waiting.values() if waiting.until <= now]

    def close(self) -> list[Waiting]:
        """Takes nothing more; gives what waited."""
        self._draining = True
        waiting = self.all
        self._waiting.clear()
        return waiting
