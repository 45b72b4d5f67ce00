"""Valid frames, a little changed: bytes anywhere, or values of a message that is still JSON."""

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

MANY = 20_000  # of anything: long enough that time or memory which grows too fast is noticed

# What a field might hold that it should not.
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 2**70, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "0", "\0", "\ud800", "\U0001f600", "x" * MANY, [], {}, [[]], {"": 0}, [0] * MANY, [{}] * MANY, ["x"] * MANY),
    functools.reduce(lambda inner, _: [inner], range(400), list[Any]()),
    {f"f{number}": number for number in range(MANY)},
]


@st.composite
def changed_bytes(draw: st.DrawFn, frame: bytes) -> bytes:
    """One stretch of the frame is another (of the same length or not), gone, or there twice."""
    begin = draw(st.integers(0, len(frame)))
    end = draw(st.integers(begin, min(len(frame), begin + 16)))
    size = end - begin
    put = draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=16) | st.just(frame[begin:end] * 2))
    return frame[:begin] + put + frame[end:]


@st.composite
def changed_json(draw: st.DrawFn, frame: bytes) -> bytes:
    """One value is another, gone, under another name, or there many times."""
    value = json.loads(frame)
    *parents, last = draw(st.sampled_from(list(_paths(value))))
    inside = functools.reduce(operator.getitem, parents, value)
    match draw(st.integers(0, 3)):
        case 0:
            inside[last] = draw(st.sampled_from(ODD_VALUES))
        case 1:
            inside.pop(last)
        case 2 if isinstance(inside, dict):
            inside[draw(st.text(max_size=3) | st.just("x" * MANY))] = inside.pop(last)
        case _:
            inside[last] = [inside[last]] * MANY
    return json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")


def _paths(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Of every value below this one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from _paths(inner, *path, name)
