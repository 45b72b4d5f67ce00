"""Stop strings are found wherever the text is cut, and nothing of them gets out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.gateway.stop import StopMatcher

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=4)


def feed(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    results = [matcher.push(piece) for piece in pieces]
    return "".join(text for text, _ in results) + matcher.flush(), any(matched for _, matched in results)


def naive(stop: list[str], text: str) -> tuple[str, bool]:
    """The plain twin: grow the text by a character and look whether it ends in a stop string."""
    for end in range(1, len(text) + 1):
        complete = [len(string) for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


@given(STOPS, st.lists(TEXT, max_size=8))
def test_any_cutting_gives_what_the_plain_twin_gives(stop: list[str], pieces: list[str]) -> None:
    assert feed(stop, pieces) == naive(stop, "".join(pieces))


@given(STOPS, st.lists(TEXT, max_size=8))
def test_less_than_the_longest_stop_string_is_held_back(stop: list[str], pieces: list[str]) -> None:
    matcher, pushed, emitted = StopMatcher(stop), "", ""
    for piece in pieces:
        pushed += piece
        text, matched = matcher.push(piece)
        emitted += text
        if matched:
            return
        held = len(pushed) - len(emitted)
        assert pushed.startswith(emitted)
        assert held < max(map(len, stop))
        # Nothing is held that could not begin a stop string: later means a slower answer.
        assert held == 0 or any(string.startswith(pushed[-held:]) for string in stop)


def test_a_stop_string_over_three_pieces_is_found() -> None:
    assert feed(["###"], ["one #", "#", "# two"]) == ("one ", True)


def test_text_that_only_begins_like_a_stop_string_comes_out_in_the_end() -> None:
    assert feed(["</s>"], ["a </", "b </s"]) == ("a </b </s", False)


def test_a_stop_string_that_begins_inside_a_failed_one_is_found() -> None:
    assert feed(["aabaaac"], ["aabaaab", "aaac"]) == ("aaba", True)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert feed(["bcde", "cd"], ["abcde"]) == ("ab", True)


def test_the_longest_of_those_complete_at_once_wins() -> None:
    assert feed(["d", "bcd"], ["ab", "cd"]) == ("a", True)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", [[], [""]])
def test_without_stop_strings_text_passes_through(stop: list[str]) -> None:
    assert feed(stop, ["a", "b"]) == ("ab", False)
