"""Takes one check out of a function while it runs, and tells whether a test notices.

A cut names the check by its own words in the source. So a list of cuts follows the code: when the words are not there
any more, or there twice, the list itself fails.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import CodeType, FunctionType

import pytest

from tests.transfer import (
    test_faults,
    test_receiver,
    test_receiver_doubts,
    test_repair,
    test_sender,
    test_sender_doubts,
)
from tests.transfer.nouns import new_sender
from tests.transfer.world import World

Test = Callable[..., None]
Maker = Callable[[], object]

# What tests ask for by the name of a parameter, by the module of the test.
MAKERS: dict[tuple[str, str], Maker] = {
    (test_receiver.__name__, "bench"): test_receiver.Bench,
    (test_receiver.__name__, "one_sided"): partial(test_receiver.Bench, one_sided=True),
    (test_receiver_doubts.__name__, "bench"): test_receiver.Bench,
    (test_receiver_doubts.__name__, "one_sided"): partial(test_receiver.Bench, one_sided=True),
    (test_repair.__name__, "receiving"): test_repair.Receiving,
    (test_repair.__name__, "sender"): test_repair.granted_sender,
    (test_sender.__name__, "sender"): partial(new_sender, test_sender.P),
    (test_sender_doubts.__name__, "sender"): partial(new_sender, test_sender.P),
    (test_faults.__name__, "world"): partial(World, one_sided=True),
}


@dataclass(frozen=True)
class Cut:
    """`words` of `where` say a check; with `instead` in their place there is none, and `proof` fails."""

    where: FunctionType
    words: str
    proof: Test
    instead: str

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"{self.where.__qualname__}: {self.words}"

    def code(self) -> CodeType:
        """The function's code without the check.

        Raises:
            ValueError: the source does not hold the words exactly once.
        """
        source = textwrap.dedent(inspect.getsource(self.where))
        if source.count(self.words) != 1:
            raise ValueError(
                f"{self.where.__qualname__} says {self.words!r} {source.count(self.words)} times, not once."
            )
        made: dict[str, object] = {}
        module = sys.modules[self.where.__module__]
        text = source.replace(self.words, self.instead)
        exec(compile(text, f"<{self.where.__qualname__} without a check>", "exec"), vars(module), made)
        return function_of(made[self.where.__name__]).__code__


def function_of(member: object) -> FunctionType:
    """The function behind a method, property or static method.

    Raises:
        TypeError: there is none.
    """
    found = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))  # type: ignore[arg-type]
    if not isinstance(found, FunctionType):
        raise TypeError(f"{member!r} is no function.")
    return found


def cut(where: object, *checks: tuple[str, Test] | tuple[str, Test, str]) -> list[Cut]:
    """Cuts in one function. What stands instead need not be said of a condition: "" of a part of one, else False."""
    return [Cut(function_of(where), check[0], check[1], _instead(*check)) for check in checks]


def _instead(words: str, _: Test, instead: str | None = None) -> str:
    if instead is not None:
        return instead
    is_part = words.startswith((" and ", " or ", " if ")) or words.endswith((" and ", " or "))
    return "" if is_part else "False"


def call(test: Test) -> None:
    """Runs a test as often as it has parameters, with what it asks for.

    Raises:
        BaseException: whatever the test raises.
    """
    for given in _parameters(test):
        wanted = [name for name in inspect.signature(test).parameters if name not in given]
        test(**given, **{name: MAKERS[test.__module__, name]() for name in wanted})


def _parameters(test: Test) -> Iterator[dict[str, object]]:
    if hasattr(test, "hypothesis"):  # draws what it wants by itself
        yield {}
        return
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    for chosen in product(*(mark.args[1] for mark in marks)):
        given: dict[str, object] = {}
        for mark, value in zip(marks, chosen, strict=True):
            names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else list(mark.args[0])
            given |= zip(names, value if len(names) > 1 else (value,), strict=True)
        yield given


def fails(test: Test) -> bool:
    """True if the test fails now, in whatever way."""
    with suppress(Exception, pytest.fail.Exception):
        call(test)
        return False
    return True
