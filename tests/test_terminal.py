"""Breaking a stream between words, and a real terminal that does not echo."""

import os
import pty
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.terminal import WordWrap, unechoed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three\n", "one two\nthree\n"),
        ("one two  \n  x = 1\n", "one two\n  x = 1\n"),
        ("exactly te\n", "exactly te\n"),
        ("exactly ten\n", "exactly\nten\n"),
        ("ten cells! x\n", "ten cells!\nx\n"),
        ("abcdefghijklm no\n", "abcdefghijklm no\n"),  # the terminal itself breaks the long word
        ("a\tb\n\n", "a    b\n\n"),
        ("你好你好你好\n", "你好你好你\n好\n"),
    ],
)
def test_lines_break_between_words_at_ten_cells(text: str, shown: str) -> None:
    assert WordWrap(10)(text) == shown
    assert "".join(map(WordWrap(10), text)) == shown


def test_a_word_is_shown_as_soon_as_it_is_whole() -> None:
    wrap = WordWrap(80)
    assert [wrap(piece) for piece in ("Par", "is", " is", " the", ".\n")] == ["", "", "Paris", " is", " the.\n"]


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=8)), st.integers(8, 12))
def test_nothing_is_lost_and_no_line_is_too_long(words: list[str], width: int) -> None:
    shown = WordWrap(width)(f"{' '.join(words)}\n")
    assert shown.split() == words
    assert all(len(line) <= width for line in shown.splitlines())


def test_what_is_typed_meanwhile_is_not_echoed_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with unechoed():
            os.write(ours, b"typed\n")
            assert stdin.readline() == "typed\n"
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
        os.write(ours, b"seen\n")
        assert os.read(ours, 100).startswith(b"seen")
    os.close(ours)


def test_without_a_terminal_nothing_is_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with unechoed():
            pass
