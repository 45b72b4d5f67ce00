"""Shows a stream of text in a terminal: lines break between words, and what is typed meanwhile stays out of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len

try:
    import termios
except ImportError:  # a system without POSIX terminals
    termios = None  # type: ignore[assignment]

_LOCAL_FLAGS = 3  # index into what tcgetattr gives
_TAB = "    "


class WordWrap:
    """Breaks a stream into lines of `width` cells at most, between words where it can.

    A word is held back until its end is known, and the space before it until it is clear that it stays.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap = ""
        self._word = ""

    def __call__(self, text: str) -> str:
        """What to show now, after `text` came; a newline lets go of everything held back."""
        return "".join(map(self._take, text.replace("\t", _TAB)))

    def _take(self, character: str) -> str:
        if character == "\n":
            shown = self._place() + "\n"
            self._column, self._gap = 0, ""
            return shown
        if character == " ":
            shown = self._place()
            self._gap += character
            return shown
        if cell_len(character) > 1:  # wide scripts have no spaces; a line may break before each of their characters
            return self._place() + self._begin(character)
        self._word += character
        return ""

    def _begin(self, character: str) -> str:
        self._word = character
        return self._place()

    def _place(self) -> str:
        word, gap, self._word = self._word, self._gap, ""
        if not word:
            return ""
        self._gap, size = "", cell_len(word)
        if self._column and self._column + len(gap) + size > self._width:
            self._column, gap = 0, "\n"
        else:
            self._column += len(gap)
        self._column += size
        if self._column > self._width:  # the terminal itself breaks a word that is longer than a line
            self._column %= self._width
        return gap + word


@contextmanager
def unechoed() -> Iterator[None]:
    """Hides what is typed until the end of the block; it stays in the terminal's queue for whoever reads next."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):  # no terminal: nothing is echoed
        yield
        return
    silent = [*before[:_LOCAL_FLAGS], before[_LOCAL_FLAGS] & ~termios.ECHO, *before[_LOCAL_FLAGS + 1 :]]
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
