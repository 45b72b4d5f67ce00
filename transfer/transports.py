"""All transports of one worker as one: each pair uses the best that both have and that works between them."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from kvrelay.device_memory import DeviceBytes
from kvrelay.errors import WireError
from kvrelay.mailbox import MemoryShared, PeerExited
from kvrelay.messages import Peer
from kvrelay.transport import Arrived, Pollable, Transport
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)


class Transports:
    """What of it reaches a peer is settled when the two meet, before the first offer, and told in the log."""

    def __init__(self, writing: Sequence[Transport], carrying: Sequence[Transport]) -> None:
        """Both best first: `writing` tell of pieces that are in the peer's memory already, `carrying` bring payload."""
        self._writing = tuple(writing)
        self._carrying = tuple(carrying)
        self._all = (*writing, *carrying)
        self._own = Counter[str]()
        self._usable: dict[Incarnation, list[Transport]] = {}
        self._unsettled: dict[Incarnation, str] = {}  # names
        self._taken_by: dict[Incarnation, str] = {}  # the transport of the newest piece

    @property
    def endpoints(self) -> dict[str, str]:
        """Of each, best first."""
        return dict(chain.from_iterable(each.endpoints.items() for each in self._all))

    @property
    def counters(self) -> Counter[str]:
        """Of all together."""
        return sum((each.counters for each in self._all), self._own)

    def sockets(self) -> list[Pollable]:
        """Of all."""
        return [socket for each in self._all for socket in each.sockets()]

    def blocked(self) -> list[Pollable]:
        """Of all."""
        return [socket for each in self._all for socket in each.blocked()]

    def connect(self, peer: Peer) -> None:
        """Tries each; a second call does nothing.

        Raises:
            WireError: none reaches the peer.
        """
        if peer.incarnation in self._usable:
            return
        usable, faults = [], []
        for each in self._all:
            try:
                each.connect(peer)
                usable.append(each)
            except WireError as error:
                faults.append(str(error))
        if not usable:
            raise WireError(f"No transport reaches {peer.name}. {' '.join(faults)}")
        self._usable[peer.incarnation] = usable
        self._unsettled[peer.incarnation] = peer.name

    def ready(self, incarnation: Incarnation) -> bool:
        """True when every transport knows whether it reaches the peer.

        Raises:
            WireError: none does, or not any more.
        """
        usable = self._usable.get(incarnation, [])
        for each in list(usable):
            try:
                if not each.ready(incarnation):
                    return False
            except WireError as error:
                log.warning("%s", error)
                usable.remove(each)
                each.forget(incarnation)
        if not usable:
            raise WireError(f"No transport reaches {self._unsettled.get(incarnation, 'a peer')} any more.")
        self._settle(incarnation, usable[0])
        return True

    def agreed(self, incarnation: Incarnation) -> str:
        """The one that took the last piece for a peer; before the first, the best there is; none for a stranger."""
        usable = self._usable.get(incarnation, [])
        return self._taken_by.get(incarnation) or next((_name(each) for each in usable), "")

    def forget(self, incarnation: Incarnation) -> None:
        """Closes every connection to a process that is gone."""
        self._usable.pop(incarnation, None)
        self._unsettled.pop(incarnation, None)
        self._taken_by.pop(incarnation, None)
        for each in self._all:
            each.forget(incarnation)

    def send(self, peer: Peer, header: bytes, payload: bytes | DeviceBytes | None) -> bool:
        """By the best transport for such a piece; False if it would block.

        Raises:
            WireError: there is none that reaches the peer.
        """
        usable = self._usable.get(peer.incarnation, [])
        for each in self._writing if payload is None else self._carrying:
            if each in usable:
                self._taken_by[peer.incarnation] = _name(each)
                return each.send(peer, header, payload)
        raise WireError(f"No transport is left for a piece to {peer.name}.")

    def receive(self, max_bytes: int) -> list[Arrived]:
        """From all, until the pieces of one exceed `max_bytes`."""
        return [piece for each in self._all for piece in each.receive(max_bytes)]

    def news(self) -> list[MemoryShared | PeerExited]:
        """Of all."""
        return [news for each in self._all for news in each.news()]

    def close(self) -> None:
        """Closes all."""
        for each in self._all:
            each.close()

    def _settle(self, incarnation: Incarnation, best: Transport) -> None:
        if (name := self._unsettled.pop(incarnation, None)) is not None:
            transport = _name(best)
            self._own[f"{transport}_agreed"] += 1
            log.info("KV goes to %s over %s.", name, transport)


def _name(transport: Transport) -> str:
    return next(iter(transport.endpoints))
