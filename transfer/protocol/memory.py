"""A memory that forgets: bounded in time and in number."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Keeps each value for `keep_s` seconds after it was last put, and at most `max_entries`, the newest."""

    def __init__(self, keep_s: float, max_entries: int) -> None:
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._entries: dict[Key, tuple[float, Value]] = {}  # in the order of their times: all keep equally long

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, value: Value, now: float) -> None:
        """Remembers the value from now on, in place of an older one."""
        self._entries.pop(key, None)
        self._entries[key] = (now + self._keep_s, value)
        self.forget_old(now)

    def get(self, key: Key) -> Value | None:
        """What is remembered, or None."""
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def forget(self, key: Key) -> None:
        """Drops one entry, if it is there."""
        self._entries.pop(key, None)

    def forget_old(self, now: float) -> None:
        """Drops what is over time or over number."""
        while self._entries:
            oldest, (until, _) = next(iter(self._entries.items()))
            if until > now and len(self._entries) <= self._max_entries:
                return
            del self._entries[oldest]
