"""What a sender counts of its hand-overs, for each receiver."""

from collections import OrderedDict
from dataclasses import asdict, dataclass

from kvrelay.messages import MAX_PAIRS, PairStatus


@dataclass(slots=True)
class Pair:
    """See PairStatus."""

    num_handovers: int = 0
    num_bytes: int = 0
    num_grants: int = 0
    num_refusals: int = 0
    num_repairs: int = 0
    num_damaged: int = 0
    transfer_s: float = 0.0
    grant_wait_s: float = 0.0


class Pairs:
    """Those that were used last, as many as a heartbeat tells of."""

    def __init__(self) -> None:
        """None yet."""
        self._pairs: OrderedDict[int, Pair] = OrderedDict()

    def of(self, receiver: int) -> Pair:
        """To count something for a receiver."""
        pair = self._pairs.setdefault(receiver, Pair())
        self._pairs.move_to_end(receiver)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return pair

    @property
    def status(self) -> tuple[PairStatus, ...]:
        """For the heartbeat."""
        return tuple(PairStatus(receiver=receiver, **asdict(pair)) for receiver, pair in self._pairs.items())
