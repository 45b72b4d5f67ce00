"""Keeps the special tokens that a chat template writes apart from those that a user types.

Both end up in one rendered string, so they are told apart by characters that cannot be typed: lone surrogates, which
no valid text contains and which no template can trim, split or change by accident. Special tokens in the template's
own literals are replaced by one such *mark* each before it is compiled; after rendering, marks are special tokens and
everything else is text.

Some templates assemble special tokens of pieces (`'<|' + role + '|>'`), which no literal shows. For those, special
tokens are looked for in the rendered text as well, and the user's strings are *guarded* meanwhile: every character
with which a special token begins or ends is replaced by a stand-in of its own, and so is every character of a string
that could be the inside of one. No special token can then begin or end in what a user wrote, or be completed by it.
"""

from collections.abc import Collection, Iterator
from typing import Any

from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.gateway.segments import Segment, any_of, split

_FIRST_MARK = 0xD800
_FIRST_GUARD = 0xDC00
_LAST_GUARD = 0xDFFF
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatMarks:
    """The marks and guards of one template. They are fixed once the template is compiled."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        self._special = any_of(special_tokens)
        self._marks: dict[str, str] = {}
        self._insides = "\0".join(special_tokens)
        self._guards = _guards(self._insides)
        self._unguards = {guard: character for character, guard in self._guards.items()}
        edges = {ord(token[at]) for token in special_tokens for at in (0, -1)}
        self._edge_guards = {edge: self._guards[edge] for edge in edges if edge in self._guards}

    def mark(self, literal: str) -> str:
        """Replaces the special tokens in a text of the template's own by marks."""
        return self._special.sub(lambda found: self._mark(found[0]), literal)

    def guard(self, value: Any, key: str | None = None) -> Any:
        """Guards all strings of a JSON value, except the roles of the API: templates assemble tokens of them."""
        if isinstance(value, str):
            return value if key == "role" and value in _ROLES else self._guard_text(value)
        if isinstance(value, dict):
            return {name: self.guard(item, name) for name, item in value.items()}
        return [self.guard(item) for item in value] if isinstance(value, list) else value

    def split(self, rendered: str, *, assembled: bool) -> list[Segment]:
        """Cuts a rendered chat into text and special tokens. `assembled` looks for tokens made of pieces too."""
        tokens = {mark: token for token, mark in self._marks.items()}
        pieces = split(rendered, any_of(tokens))
        found = [Segment(tokens[piece.text], special=True) if piece.special else piece for piece in pieces]
        return list(self._split_assembled(found)) if assembled else found

    def _split_assembled(self, pieces: list[Segment]) -> Iterator[Segment]:
        for piece in pieces:
            for part in [piece] if piece.special else split(piece.text, self._special):
                yield part if part.special else Segment(part.text.translate(self._unguards))

    def _guard_text(self, text: str) -> str:
        return text.translate(self._guards if text.strip() in self._insides else self._edge_guards)

    def _mark(self, token: str) -> str:
        mark = _FIRST_MARK + len(self._marks)
        if token not in self._marks and mark >= _FIRST_GUARD:
            raise ModelError(
                "The model's chat template writes more than 1,024 different special tokens, which is not supported."
            )
        return self._marks.setdefault(token, chr(mark))


def _guards(texts: str) -> dict[int, int]:
    # White space stays, for templates trim it.
    characters = sorted(character for character in set(texts) if not character.isspace())
    if len(characters) > _LAST_GUARD - _FIRST_GUARD + 1:
        raise ModelError(
            f"The model's special tokens are written with {len(characters)} different characters; "
            "at most 1,024 are supported."
        )
    return {ord(character): _FIRST_GUARD + rank for rank, character in enumerate(characters)}


def check_input(value: Any) -> None:
    """Raises InvalidRequest unless a value is plain JSON of valid Unicode, which marks cannot occur in."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_input(name)
            check_input(item)
    elif isinstance(value, list):
        for item in value:
            check_input(item)
    elif value is not None and not isinstance(value, int | float):
        raise InvalidRequest(f"The messages contain a {type(value).__name__}; send JSON values only.", param="messages")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The messages contain {text[error.start]!a}, half of a surrogate pair; send whole Unicode characters.",
            param="messages",
        ) from error
