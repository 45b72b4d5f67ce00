"""When a dead child is started again. Has no clock of its own: tests and the supervisor tell it the time."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
HEALTHY_LIFE_S = 60.0


@dataclass(slots=True)
class RestartPolicy:
    """Waits 0.5 s after the first death, twice as long after each further one, at most 30 s.

    A child that lived for a minute was healthy: its next death counts as the first.
    """

    _started_at: float = 0.0
    _next_delay_s: float = FIRST_DELAY_S

    def started(self, now: float) -> None:
        """The child was started."""
        self._started_at = now

    def died(self, now: float) -> float:
        """The child died; gives the time at which to start it again."""
        if now - self._started_at >= HEALTHY_LIFE_S:
            self._next_delay_s = FIRST_DELAY_S
        delay_s = self._next_delay_s
        self._next_delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return now + delay_s
