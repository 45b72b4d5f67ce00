"""What happens in a request's life, when, and the latencies that follow from it."""

from collections import deque
from enum import StrEnum

MAX_ITLS = 4096


class Event(StrEnum):
    """Lifetime events, in the order in which they happen; exactly one of the last three ends a request."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PREFILL_BEGIN = "prefill_begin"
    PREFILL_END = "prefill_end"
    FIRST_TOKEN = "first_token"
    TRANSFER_BEGIN = "transfer_begin"
    TRANSFER_END = "transfer_end"
    DECODE_BEGIN = "decode_begin"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ends(self) -> bool:
        """True for the events after which nothing happens to the request any more."""
        return self in (Event.FINISHED, Event.FAILED, Event.CANCELLED)


class RequestTimeline:
    """When each event of one request happened, in seconds on one monotonic clock.

    All derived latencies are in seconds and None until they are known. The newest `MAX_ITLS` gaps between tokens are
    kept, so that memory does not grow with the length of the answer.
    """

    def __init__(self, now: float) -> None:
        """The request has just arrived."""
        self.stamps: dict[Event, float] = {Event.ARRIVED: now}
        self.num_tokens = 0
        self.itls_s: deque[float] = deque(maxlen=MAX_ITLS)
        self._last_token = now

    def stamp(self, event: Event, now: float) -> None:
        """Notes an event; of repeated ones the first counts, and nothing happens after the end.

        Raises:
            ValueError: the request has ended in another way already.
        """
        if self.ended is None:
            self.stamps.setdefault(event, now)
        elif event.ends and event != self.ended:
            raise ValueError(f"A request that has {self.ended} cannot become {event}.")

    def token(self, now: float) -> float | None:
        """Notes a token. Returns the gap since the one before it, or None for the first."""
        self.num_tokens += 1
        gap = now - self._last_token
        self._last_token = now
        if self.num_tokens == 1:
            self.stamp(Event.FIRST_TOKEN, now)
            return None
        self.itls_s.append(gap)
        return gap

    @property
    def ended(self) -> Event | None:
        """How the request ended."""
        return next((event for event in self.stamps if event.ends), None)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return self._between(Event.ARRIVED, self.stamps.get(Event.FIRST_TOKEN))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: the mean gap after the first token."""
        if self.num_tokens < 2:
            return None
        return (self._last_token - self.stamps[Event.FIRST_TOKEN]) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the end, whichever it was."""
        return self._between(Event.ARRIVED, self.stamps[self.ended] if self.ended else None)

    def between(self, start: Event, end: Event) -> float | None:
        """Seconds from one event to another, both of which may have happened at workers; None until both did."""
        return self._between(start, self.stamps.get(end)) if start in self.stamps else None

    def _between(self, start: Event, end: float | None) -> float | None:
        return None if end is None else end - self.stamps[start]
