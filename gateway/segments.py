"""Pieces of a prompt: text, which is encoded, and special tokens, which are ids."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: text, or exactly one special token."""

    text: str
    special: bool = False


def text_of(segments: Sequence[Segment]) -> str:
    """The prompt as one text, in which special tokens can no longer be told from typed ones."""
    return "".join(segment.text for segment in segments)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the texts, the longest where several begin; of none, it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def split(text: str, pattern: re.Pattern[str]) -> Iterator[Segment]:
    """Cuts text at everything that `pattern` finds; the finds become special segments."""
    end = 0
    for found in pattern.finditer(text):
        if found.start() > end:
            yield Segment(text[end : found.start()])
        yield Segment(found[0], special=True)
        end = found.end()
    if end < len(text):
        yield Segment(text[end:])
