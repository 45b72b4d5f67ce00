"""Finds stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Watches the text of one sample for stop strings, which may span any number of pieces.

    The first stop string to be complete wins, the longest if several are complete with the same character, so that
    the result does not depend on how the text was cut. The text before it is given out, the stop string is not. What
    may be its beginning is held back: less than the longest stop string. Each character costs O(1) per stop string
    (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in stop if text]
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text. Gives the text that is safe to emit, and whether a stop string was found by now."""
        if self._matched:
            return "", True
        if not self._patterns:
            return text, False
        self._held += text
        found = self._scan(text)
        return self._end(found) if found else (self._release(), False)

    def flush(self) -> str:
        """Gives what was held back, when no more text comes. Nothing after a match."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str) -> tuple[int, int] | None:
        """Finds where the stop string begins and ends, counted from the end of the text, if there is one."""
        for index, character in enumerate(text):
            complete = [pattern.length for pattern in self._patterns if pattern.advance(character)]
            if complete:
                after = len(text) - index - 1
                return after + max(complete), after
        return None

    def _end(self, found: tuple[int, int]) -> tuple[str, bool]:
        emitted = self._held[: len(self._held) - found[0]]
        self._held, self._matched = "", True
        return emitted, True

    def _release(self) -> str:
        safe = len(self._held) - max(pattern.state for pattern in self._patterns)
        emitted, self._held = self._held[:safe], self._held[safe:]
        return emitted


class _Pattern:
    """One stop string. `state` is how many of its characters the text ends with."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = _borders(text)
        self.length = len(text)
        self.state = 0

    def advance(self, character: str) -> bool:
        """Takes the next character; true if it completes the stop string."""
        while self.state and self._text[self.state] != character:
            self.state = self._borders[self.state]
        self.state += self._text[self.state] == character
        return self.state == self.length


def _borders(text: str) -> list[int]:
    """For each length of prefix, the longest proper prefix of it that is also its suffix."""
    borders = [0] * (len(text) + 1)
    for length in range(2, len(text) + 1):
        candidate = borders[length - 1]
        while candidate and text[candidate] != text[length - 1]:
            candidate = borders[candidate]
        borders[length] = candidate + (text[candidate] == text[length - 1])
    return borders
