"""Keeps child processes running: notices deaths, says so, starts again with backoff, and ends all of them in time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.children import Child, ChildSpec, Death
from kvrelay.restart import RestartPolicy

TERMINATE_S = 3.0
HEAD_START_S = 0.2


@dataclass(slots=True)
class _Place:
    """One child's place: who is in it now, and when the next one starts if nobody is."""

    spec: ChildSpec
    child: Child | None = None
    start_at: float = 0.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Supervisor:
    """Starts every child and keeps it running for as long as `step` is called.

    Belongs to one thread: the kernel kills the children of a thread that ends, not only those of a process.
    """

    def __init__(self, specs: Sequence[ChildSpec], relay: Callable[[str], None]) -> None:
        self._places = [_Place(spec) for spec in specs]
        self._relay = relay

    def step(self) -> list[Death]:
        """Starts whoever is due and gives the deaths since the last call. To be called often."""
        deaths = [death for place in self._places if (death := self._bury(place)) is not None]
        for place in self._places:
            if place.child is None and time.monotonic() >= place.start_at:
                place.child = Child(place.spec, self._relay)
                place.policy.started(time.monotonic())
        return deaths

    def pid(self, name: str) -> int | None:
        """The process number of a child, None while it is dead."""
        child = self._place(name).child
        return None if child is None else child.pid

    def restart_in_s(self, name: str) -> float:
        """Seconds until a dead child is started again; 0 for a running one."""
        place = self._place(name)
        return 0.0 if place.child else max(place.start_at - time.monotonic(), 0.0)

    def stop(self) -> None:
        """Ends every child: SIGTERM, and SIGKILL for those still there after three seconds.

        The first is told a moment before the others, so that it does not take their ends for faults.
        """
        children = [place.child for place in self._places if place.child is not None]
        for child in children[:1]:
            child.terminate()
            child.wait(HEAD_START_S)
        for child in children[1:]:
            child.terminate()
        deadline = time.monotonic() + TERMINATE_S
        for child in children:
            if not child.wait(deadline - time.monotonic()):
                self._relay(f"{child.spec.name} did not end within {TERMINATE_S:.0f} s and is killed")
            child.kill()

    def _place(self, name: str) -> _Place:
        return next(place for place in self._places if place.spec.name == name)

    def _bury(self, place: _Place) -> Death | None:
        death = place.child.poll() if place.child is not None else None
        if death is not None:
            place.child = None
            place.start_at = place.policy.died(time.monotonic())
        return death
