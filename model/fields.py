"""Typed look-ups in a model's configuration, so that a damaged one is refused with the name of the field."""

from collections.abc import Mapping
from typing import Any

from kvrelay.errors import ModelError


class Fields:
    """Named values of one configuration. Every look-up raises ModelError if the value is missing or of another type.

    A value of None counts as missing, as Hugging Face writes it.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def get(self, name: str) -> Any:
        """The raw value, None if missing."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """A token id or a list of them; none if missing."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.wrong(name, value, "a token id or a list of token ids")
        return frozenset(ids)

    def section(self, name: str) -> "Fields | None":
        """A nested object; None if missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(f"{self.source}: {name}", value)

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        """The error for a value that cannot be used."""
        return ModelError(
            f"{self.source} is damaged or not supported: {name} is {value!r}, but {expected} was expected; "
            "get the model again or choose another."
        )

    def _present(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source} lacks {name}, which is needed to build the network; get the model again.")
        return value
