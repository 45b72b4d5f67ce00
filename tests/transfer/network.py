"""What is on its way between the processes of a world, and what a bad network does to it.

Every fault falls on whatever flies: a control message, which is one frame, or a piece, which is a header and payload.
"""

from dataclasses import dataclass, replace

from kvrelay.encoding import encode
from kvrelay.messages import (
    AnyMessage,
)

PIECE = "piece"


@dataclass
class Flight:
    """Something on the network. `to` is an endpoint's name, or the incarnation of a process that must be there.

    `kind` is the message's, or "piece", whatever has become of the frame. It arrives by itself from `due` on.
    """

    source: int
    to: str | int
    frame: bytes
    kind: str
    sent_at: float
    due: float = 0.0

    @property
    def is_piece(self) -> bool:
        """KV, not a control message."""
        return self.kind == PIECE


class Network(list[Flight]):
    """All that flies, in the order in which it will arrive. `is_gentle` until something happens to any of it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gentle = True

    def say(self, source: int, to: str | int, message: AnyMessage, now: float) -> None:
        """A control message goes out."""
        self.put(Flight(source, to, encode(message), message.kind, now))

    def put(self, flight: Flight) -> None:
        """It will arrive behind all others."""
        self.append(flight)

    def take_due(self, now: float) -> list[Flight]:
        """What arrives now, in order."""
        due = [flight for flight in self if flight.due <= now]
        self[:] = [flight for flight in self if flight.due > now]
        return due

    # faults

    def drop(self, index: int) -> None:
        """It does not arrive."""
        self.is_gentle = False
        self.pop(index)

    def flip(self, index: int, bit: int) -> None:
        """One bit of it changes; `bit` may be any number."""
        flight = self._spoil(index)
        flipped = bytearray(flight.frame)
        if flipped:
            flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8
        flight.frame = bytes(flipped)

    def truncate(self, index: int, length: int) -> None:
        """Only its beginning arrives, of a length less than it has; `length` may be any number."""
        flight = self._spoil(index)
        flight.frame = flight.frame[: length % max(1, len(flight.frame))]

    def repeat(self, index: int, due: float) -> None:
        """It arrives once more, from `due` on."""
        self.is_gentle = False
        self.append(replace(self[index], due=due))

    def delay(self, index: int, due: float) -> None:
        """It does not arrive before `due`, and others do."""
        self._spoil(index).due = due

    def move(self, index: int, place: int) -> None:
        """It arrives before those that stand at `place` now, or behind them."""
        self.is_gentle = False
        self.insert(place, self.pop(index))

    def _spoil(self, index: int) -> Flight:
        self.is_gentle = False
        flight = self[index] = replace(self[index])  # what was repeated stays as it is
        return flight
